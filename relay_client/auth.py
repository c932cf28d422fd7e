"""Where a token is read: a setting, a file, or nowhere. Thread-safe; a token is never shown.

Tokens that are asked for (minting.py) come from elsewhere; these sources only read.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from pathlib import Path
from typing import Protocol

_VISIBLE = re.compile(r"[\x21-\x7e]+")
_MAX_FILE_BYTES = 64 * 1024
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class TokenUnavailable(Exception):
    """There is no usable token now; the message says why, without the token. Waiting events stay.

    `stops`: asking again is of no use before a setting or a file changes. `of_agent`: it concerns the one
    agent, not whoever gives out tokens. `retry_after_ms`: whoever gives them out asked to wait so long.
    """

    def __init__(
        self, message: str, *, stops: bool = False, of_agent: bool = False, retry_after_ms: int | None = None
    ) -> None:
        super().__init__(message)
        self.stops = stops
        self.of_agent = of_agent
        self.retry_after_ms = retry_after_ms


class TokenSource(Protocol):
    """Gives the token to send with, None for a relay that wants none."""

    def token(self) -> str | None:
        """The token to use now.

        Raises:
            TokenUnavailable: there is none that can be used.
        """

    def refresh(self) -> bool:
        """Look again at once, whatever was remembered; True when the token is another one now."""

    def describe(self) -> str:
        """Where it comes from, for status and log."""

    def fingerprint(self) -> str:
        """A name of the token that does not tell it; raises as `token` does."""


def fingerprint(token: str | None) -> str:
    """Eight hex digits that stand for `token` in evidence and logs; "none" without one."""
    if token is None:
        return "none"
    return hashlib.blake2b(token.encode("utf-8", "surrogatepass"), digest_size=4).hexdigest()


class NoToken:
    """The source for a relay that asks for no token."""

    def token(self) -> None:
        """None: no `Authorization` is sent."""
        return

    def refresh(self) -> bool:
        """There is nothing that could change."""
        return False

    def describe(self) -> str:
        """Where it comes from, for status and log."""
        return "no token"

    def fingerprint(self) -> str:
        """The same for every relay without tokens."""
        return fingerprint(None)


class StaticToken:
    """A token given as a setting; it changes only with the configuration."""

    def __init__(self, token: str) -> None:
        self._token = token

    def token(self) -> str:
        """The token, without white space around it.

        Raises:
            TokenUnavailable: it is empty, or has what no header can carry.
        """
        return checked(self._token, "the configured token")

    def refresh(self) -> bool:
        """A setting does not change by itself."""
        return False

    def describe(self) -> str:
        """Where it comes from, for status and log."""
        return "the configured token"

    def fingerprint(self) -> str:
        """Eight hex digits; raises as `token` does."""
        return fingerprint(self.token())


class TokenFile:
    """A file that holds the token and nothing else, read again whenever it changes."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._seen: tuple[int, ...] | None = None
        self._token: str | None = None
        self._reason = ""

    def token(self) -> str:
        """The token in the file as it is now.

        Raises:
            TokenUnavailable: the file is missing, unreadable or empty, or holds no token.
        """
        with self._lock:
            if self._seen is None or self._seen != self._look():
                self._read()
            if self._token is None:
                raise TokenUnavailable(self._reason)
            return self._token

    def refresh(self) -> bool:
        """Read the file now, changed or not; True when there is a token and it is another one."""
        with self._lock:
            before = self._token
            self._read()
            return self._token is not None and self._token != before

    def describe(self) -> str:
        """Where it comes from, for status and log."""
        return f"file {self._path}"

    def fingerprint(self) -> str:
        """Eight hex digits; raises as `token` does."""
        return fingerprint(self.token())

    def _look(self) -> tuple[int, ...] | None:
        try:
            return _identity(self._path.stat())
        except OSError:
            return None

    def _read(self) -> None:
        self._token, self._seen = None, None
        try:
            self._seen, content = _content(self._path)
            self._token = checked(content.removeprefix(_BYTE_ORDER_MARK).decode("latin-1"), self.describe())
        except OSError as error:
            self._reason = f"{self.describe()}: {(error.strerror or str(error)).lower()}"
        except TokenUnavailable as unusable:
            self._reason = str(unusable)


def _content(path: Path) -> tuple[tuple[int, ...], bytes]:
    """What the file holds, and how it looked before it was read: a change meanwhile is seen the next time."""
    # Without O_NONBLOCK, opening a pipe that nobody writes to would never return.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise TokenUnavailable(f"file {path}: is no regular file")
        content = os.read(descriptor, _MAX_FILE_BYTES + 1)
    finally:
        os.close(descriptor)
    if len(content) > _MAX_FILE_BYTES:
        raise TokenUnavailable(f"file {path}: is too large for a token")
    return _identity(status), content


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_mtime_ns, status.st_ctime_ns, status.st_ino, status.st_dev, status.st_size


def checked(text: str, source: str) -> str:
    """`text` without white space around it, where a header can carry it (RFC 6750 2.1).

    Raises:
        TokenUnavailable: it is empty, or has what no header can carry; `source` is named, the text is not.
    """
    token = text.strip()
    if not token:
        raise TokenUnavailable(f"{source}: is empty")
    if not _VISIBLE.fullmatch(token):
        raise TokenUnavailable(f"{source}: holds white space or characters outside visible ASCII")
    return token
