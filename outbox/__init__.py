"""Relay Outbox: events on disk once accepted, at the relay in order and once in effect."""

from __future__ import annotations

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

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

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


# Loaded when they are asked for: a hook, for which `outbox.cli` is imported, needs only some of it.
_HOMES = {
    "FlushResult": "outbox.library",
    "Outbox": "outbox.library",
    "OutboxStatus": "outbox.store.inspect",
    "Receipt": "outbox.store.enqueue",
}


def __getattr__(name: str) -> Any:
    """One of the names in `_HOMES`."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module  # noqa: PLC0415 - as above

    value = globals()[name] = getattr(import_module(_HOMES[name]), name)
    return value
