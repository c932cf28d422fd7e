"""Where a producer's events are stored: in the files, or at the socket of a daemon whose files they are not.

OUTBOX_SOCKET alone points to a daemon of another user. Beside a state directory that can be used it is not
needed: the files are quicker, and take events with no daemon running.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from outbox.state_dir import ALIAS, VARIABLE, expand_home, state_dir

SOCKET_VARIABLE = "OUTBOX_SOCKET"
_NAMING = (VARIABLE, ALIAS, "STATE_DIRECTORY")


class Place:
    """`state` is where this user may write; with `socket` the daemon there is the one that delivers."""

    def __init__(self, state: Path | None, socket: Path | None = None) -> None:
        """`state` is None where this user has no place of its own."""
        self.state = state
        self.socket = socket


def place_of(environ: Mapping[str, str], named: str | None = None) -> Place:
    """Where to store; `named` is what --state-dir says. Nothing is made.

    Raises ConfigError when neither a socket nor a state directory is known.
    """
    socket = environ.get(SOCKET_VARIABLE, "").strip()
    if not socket:
        return Place(_named(named, environ) or state_dir(None, environ))
    given = _named(named, environ)
    if given is None and any(environ.get(name, "").strip() for name in _NAMING):
        given = state_dir(None, environ)
    if given is not None and usable(given):
        return Place(given)
    return Place(_own(environ), Path(expand_home(socket, environ)).absolute())


def _named(named: str | None, environ: Mapping[str, str]) -> Path | None:
    return None if named is None else Path(expand_home(named, environ)).absolute()


def _own(environ: Mapping[str, str]) -> Path | None:
    """This user's own state directory, which no variable names: the default one."""
    from outbox.errors import ConfigError  # noqa: PLC0415 - once

    try:
        own = state_dir(None, {name: text for name, text in environ.items() if name not in _NAMING})
    except ConfigError:
        return None
    return own if usable(own) else None


def usable(state: Path) -> bool:
    """Whether this process may keep events there, or make the folder."""
    try:
        for folder in (state / "agents", state, *state.parents):
            if folder.exists():
                return os.access(folder, os.R_OK | os.W_OK | os.X_OK)
    except OSError:
        return False
    return False
