"""Relay Outbox: events on disk once accepted, at the relay in order and once in effect."""
