"""The token of the local HTTP over TCP: the one that is set, or one that is made once and kept."""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path

from outbox.errors import ConfigError
from outbox.store.directory import StateDirectory
from outbox.store.place import write_private


def http_token(state: StateDirectory, token: str | None, token_file: str | None) -> str:
    """The token of now: that of the setting, of the file, or of STATE/http-token (0600), made when missing.

    Raises ConfigError when the file that is set holds none, StoreError when none can be kept.
    """
    if token:
        return token
    if token_file:
        found = _read(Path(token_file))
        if not found:
            raise ConfigError(
                f"daemon.http_token_file: no token can be read from {token_file!r}. Nothing was started; "
                "what waits stays on disk. Write one there, or leave the setting out: then one is made."
            )
        return found
    own = state.path / "http-token"
    if found := _read(own):
        return found
    made = secrets.token_urlsafe(32)
    write_private(own, f"{made}\n")
    return made


def _read(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text("utf-8").strip()
    return ""
