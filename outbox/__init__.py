"""Relay Outbox: events on disk once accepted, at the relay in order and once in effect."""

from outbox.errors import (
    ConfigError,
    OutboxError,
    StoreBusy,
    StoreClosed,
    StoreDamaged,
    StoreError,
    StoreFull,
    StoreHeld,
    StoreTooNew,
    Unavailable,
    UsageError,
)
from outbox.library import FlushResult, Outbox
from outbox.store.enqueue import Receipt
from outbox.store.inspect import OutboxStatus

__version__ = "0.1.0"

__all__ = [
    "ConfigError",
    "FlushResult",
    "Outbox",
    "OutboxError",
    "OutboxStatus",
    "Receipt",
    "StoreBusy",
    "StoreClosed",
    "StoreDamaged",
    "StoreError",
    "StoreFull",
    "StoreHeld",
    "StoreTooNew",
    "Unavailable",
    "UsageError",
    "__version__",
]
