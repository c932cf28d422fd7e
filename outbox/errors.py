"""The errors a person or a program can meet, by who can act on them.

OutboxError
├── UsageError          the caller: the event, the argument or the setting is wrong
├── ConfigError         the operator: a file or a variable of the configuration is wrong
├── Unavailable         the operator: a daemon or a relay is needed and not there
└── StoreError          the operator: the files
    ├── StoreBusy       another process holds the lock for longer than the wait allowed
    ├── StoreFull       a bound or the disk refuses more
    ├── StoreDamaged    the file cannot be read
    ├── StoreTooNew     the file was written by a newer release
    ├── StoreHeld       another process sends from it
    └── StoreClosed     used after close()

The relay's troubles are outcomes, not exceptions. Every message has three parts: what happened, what was
kept, what to do next. `code` is stable: it is also the label in logs and metrics.
"""

from __future__ import annotations


class OutboxError(Exception):
    """Anything this library raises on purpose."""

    code = "error"
    exit_status = 1


class UsageError(OutboxError):
    """The caller gave something that cannot be taken; nothing was stored."""

    exit_status = 2

    def __init__(self, message: str, *, code: str = "usage") -> None:
        super().__init__(message)
        self.code = code


class ConfigError(OutboxError):
    """A setting cannot be used; nothing was started or changed."""

    code = "config"
    exit_status = 2


class Unavailable(OutboxError):
    """A daemon or a relay that the command needs is not there."""

    code = "unavailable"
    exit_status = 69


class StoreError(OutboxError):
    """The files refuse; the operator can act."""

    code = "store"
    exit_status = 4


class StoreBusy(StoreError):
    """The file was locked by another process for the whole wait; nothing was stored."""

    code = "busy"


class StoreFull(StoreError):
    """A bound or the disk refuses more; nothing was stored, what waits is kept."""

    code = "full"


class StoreDamaged(StoreError):
    """The file cannot be read as an outbox."""

    code = "damaged"
    exit_status = 5


class StoreTooNew(StoreError):
    """The file was written by a newer release and is left untouched."""

    code = "too_new"
    exit_status = 5


class StoreHeld(StoreError):
    """Another process holds it."""

    code = "held"
    exit_status = 6


class StoreClosed(StoreError):
    """Used after `close()`."""

    code = "closed"
