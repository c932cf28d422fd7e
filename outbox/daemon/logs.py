"""How the daemon logs: one line an event on stderr, JSON under systemd, `event=… key=value` elsewhere.

No line carries a secret or a raw control character, so that what a relay answers cannot forge another line.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Mapping, MutableMapping
from typing import Any

import structlog

from outbox.printable import MASK, printable, quoted

_SECRET_KEYS = re.compile(r"(?:.*[_-])?(?:token|authorization|password|secret|cookie)", re.IGNORECASE)
_BARE_VALUE = re.compile(r'[^\s"\\]+')
_SHORTEST_SECRET_CHARS = 4
_MOST_SECRETS = 64  # tokens are renewed for as long as a daemon lives; the oldest are of no use to anybody

_LEVELS = {name.lower(): number for name, number in logging.getLevelNamesMapping().items()}

_secrets: dict[str, int] = {}  # the later one was told of, the larger its number
_tellings = itertools.count()
_telling = threading.Lock()
_least = logging.DEBUG


def configure(format: str, level: str) -> None:  # noqa: A002 - it is the setting's own name
    """Send all logs, also those of libraries, to stderr; may be called again when a reload changes something.

    `format` is "json", "lines", or "auto": JSON when stderr is no terminal and systemd gave us a journal
    ($JOURNAL_STREAM). `level` is "debug", "info", "warning" or "error".
    """
    global _least  # noqa: PLW0603 - what every event would say at "debug" must cost nothing
    _least = least = _LEVELS[level]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.format_exc_info,
            _mask_secrets,
            *(_json_line() if _is_json(format) else _readable_line()),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(least),
        logger_factory=_Stderr,
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(handlers=[_Libraries(logging.WARNING)], level=max(least, logging.WARNING), force=True)


def register_secret(text: str | None) -> None:
    """Have a text masked wherever it turns up in a log line from now on; the last 64 are remembered.

    A text of fewer than 4 characters is no secret, and would mask half of every line.
    """
    if text and len(text) >= _SHORTEST_SECRET_CHARS:
        with _telling:  # one that is known already stays all the while: others write lines
            _secrets[text] = next(_tellings)
            if len(_secrets) > _MOST_SECRETS:
                del _secrets[min(_secrets, key=_secrets.__getitem__)]


def log_line(event: str, fields: Mapping[str, Any]) -> None:
    """One line; `level` among the fields is its level (info by default)."""
    level = _LEVELS[fields.get("level", "info")]
    if level >= _least:
        own = {name: value for name, value in fields.items() if name != "level"}
        structlog.get_logger().log(level, event, **own)


def _is_json(format: str) -> bool:  # noqa: A002 - as above
    under_systemd = bool(os.environ.get("JOURNAL_STREAM")) and not sys.stderr.isatty()
    return format == "json" or (format == "auto" and under_systemd)


def _json_line() -> tuple[Any, ...]:
    return structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"), _to_json


def _readable_line() -> tuple[Any, ...]:
    return structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False, key="time"), _to_line


def _to_json(_logger: Any, _method: str, entry: MutableMapping[str, Any]) -> str:
    first = {name: entry.pop(name) for name in ("event", "time", "level") if name in entry}
    return json.dumps({**first, **entry})


def _to_line(_logger: Any, _method: str, entry: MutableMapping[str, Any]) -> str:
    start = f"{entry.pop('time')} {entry.pop('level')} event={_value(entry.pop('event'))}"
    return " ".join([start, *(f"{printable(name)}={_value(value)}" for name, value in entry.items())])


def _value(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return printable(text) if _BARE_VALUE.fullmatch(text) else quoted(text)


def _mask_secrets(_logger: Any, _method: str, entry: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    longest_first = sorted(_secrets, key=len, reverse=True)
    return {name: _masked(name, value, longest_first) for name, value in entry.items()}


def _masked(name: str, value: Any, secrets: list[str]) -> Any:
    """The value as JSON can have it, without secrets."""
    if value is None or isinstance(value, bool | int | float):
        return value if not _SECRET_KEYS.fullmatch(name) or value is None else MASK
    if _SECRET_KEYS.fullmatch(name):
        return MASK
    if isinstance(value, Mapping):
        return {str(inner): _masked(str(inner), item, secrets) for inner, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_masked("", item, secrets) for item in value]
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    for secret in secrets:
        text = text.replace(secret, MASK)
    return text


class _Stderr:
    """Writes to stderr as it is at that moment. A full disk or a closed pipe there stops no delivery."""

    def __init__(self, *_names: Any) -> None:
        """A logger of any name: all write to the same place."""

    def msg(self, line: str) -> None:
        """Write the line and its end in one go, so that lines of threads do not mix."""
        try:
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            pass

    debug = info = warning = error = critical = exception = msg


class _Libraries(logging.Handler):
    """Hands what libraries log to our own format, as `event=library`."""

    def emit(self, record: logging.LogRecord) -> None:
        """Log a record of the standard library's logging."""
        logger = structlog.get_logger()
        try:
            message = record.getMessage()
        except (TypeError, ValueError):
            message = str(record.msg)
        log = logger.error if record.levelno >= logging.ERROR else logger.warning
        log("library", name=record.name, message=message, exc_info=record.exc_info)
