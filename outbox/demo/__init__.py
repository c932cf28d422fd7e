"""`outbox demo`: a recorded session goes through the outbox to the reference relay, an outage in the middle.

Only the command line stands above: the demo starts relay and daemon as processes, and uses the outbox as any
program does.
"""
