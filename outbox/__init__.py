"""Relay Outbox: events on disk once accepted, at the relay in order and once in effect."""

from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
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


def __getattr__(name: str) -> Any:
    """`OutboxStatus` is loaded when it is asked for: whoever only enqueues does not pay for it."""
    if name != "OutboxStatus":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from outbox.store.inspect import OutboxStatus  # noqa: PLC0415 - see above

    return OutboxStatus
