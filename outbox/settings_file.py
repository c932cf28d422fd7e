"""The files of configuration: which one, its drop-ins, what stands in them. The meaning is settings.py's."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from outbox.errors import ConfigError
from outbox.printable import printable, quoted
from outbox.setting_types import WrittenFloat
from outbox.state_dir import expand_home

FILE_NAME = "relay-outbox/outbox.toml"
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def find_files(given: str | None, environ: Mapping[str, str]) -> tuple[Path, ...]:
    """The files of configuration in the order in which they apply: one file, and its drop-ins FILE.d/*.toml.

    The file is the given one (`--config`), else OUTBOX_CONFIG, else the first existing one of
    `default_files`. One that was named must exist: reading it says so if not. Hidden files are no drop-ins.

    Raises ConfigError when the folder of the drop-ins cannot be read.
    """
    named = given if given is not None else environ.get("OUTBOX_CONFIG", "").strip()
    if named or given is not None:
        file = Path(expand_home(named, environ))
    elif (found := next(filter(is_there, default_files(environ)), None)) is not None:
        file = found
    else:
        return ()
    return (file, *_drop_ins(Path(f"{file}.d")))


def default_files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Where a file is looked for when none is named; XDG has relative paths passed over."""
    if (xdg := Path(environ.get("XDG_CONFIG_HOME", ""))).is_absolute():
        yield xdg / FILE_NAME
    elif (home := Path(environ.get("HOME", ""))).is_absolute():
        yield home / ".config" / FILE_NAME
    yield Path("/etc") / FILE_NAME


def is_there(path: Path) -> bool:
    """Whether a file lies there that can be seen."""
    try:
        return path.is_file()
    except OSError:  # a home that this user may not look into
        return False


def _drop_ins(folder: Path) -> list[Path]:
    try:
        entries = sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise ConfigError(f"{printable(str(folder))} cannot be read: {error.strerror}") from error
    return [entry for entry in entries if entry.suffix == ".toml" and not entry.name.startswith(".")]


def read_file(path: Path) -> dict[str, Any]:
    """What stands in one TOML file, by dotted key ("relay.paths.messages"); a dot inside a name is in quotes.

    Raises ConfigError when it cannot be read or is no TOML; the message names the file and the line.
    """
    named = printable(str(path))
    try:
        text = path.read_bytes().decode("utf-8-sig")
        return dict(_flat(tomllib.loads(text, parse_float=WrittenFloat), ""))
    except OSError as error:
        raise ConfigError(f"{named} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{named} is not UTF-8 (byte {error.start + 1})") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{named} is not TOML: {printable(str(error))}") from error


def why_unreadable(path: str) -> str | None:
    """Why a file that a setting names cannot be read, or None when it can."""
    try:
        with Path(path).open("rb"):
            return None
    except OSError as error:
        return error.strerror or type(error).__name__


def _flat(table: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        key = above + (name if _BARE_KEY.fullmatch(name) else quoted(name))
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{key}.")
        elif not isinstance(value, dict):
            yield key, value
