"""A refresh token in a file, and the one that takes its place when a token endpoint rotates it.

A rotated token is on disk, power cut or not, before the access token that came with it is used: the old one
may be of no use any more.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from pathlib import Path

from relay_client.auth import TokenFile, TokenUnavailable, fingerprint
from relay_client.problem import parse_json


class RefreshTokenFile:
    """The file of the operator, rewritten at each rotation. Thread-safe.

    Where it cannot be (a mounted secret, a systemd credential), the rotated token goes to `beside`, with a
    name of the one in the file: as soon as the file holds another one, that one counts.
    """

    def __init__(self, path: str | os.PathLike[str], beside: Path) -> None:
        """Nothing is read yet."""
        self._path = Path(path)
        self._beside = beside
        self._file = TokenFile(path)
        self._mutex = threading.RLock()
        self._unsaved: str | None = None

    def token(self) -> str:
        """The refresh token to use next; one that could not be saved is saved first.

        Raises:
            TokenUnavailable: there is none, or it cannot be saved.
        """
        with self._mutex:
            if self._unsaved is not None:
                self.keep(self._unsaved)
            seed = self._file.token()
            return self._rotated_after(seed) or seed

    def keep(self, token: str) -> None:
        """Save a rotated token; returns when it is on disk. Raises TokenUnavailable when it cannot be."""
        with self._mutex:
            self._unsaved = token
            try:
                write_durably(Path(os.path.realpath(self._path)), token.encode() + b"\n")
            except OSError:
                self._keep_beside(token)
            else:
                with contextlib.suppress(OSError):
                    self._beside.unlink()
            self._unsaved = None

    def describe(self) -> str:
        """Where it lies."""
        return self._file.describe()

    def _keep_beside(self, token: str) -> None:
        record = json.dumps({"after": fingerprint(self._file.token()), "refreshToken": token})
        try:
            self._beside.parent.mkdir(mode=0o700, exist_ok=True)
            write_durably(self._beside, record.encode())
        except OSError as error:
            raise TokenUnavailable(
                f"the rotated refresh token can be saved neither in {self._path} nor in {self._beside}: "
                f"{(error.strerror or str(error)).lower()}; it is kept in memory until it can be"
            ) from error

    def _rotated_after(self, seed: str) -> str | None:
        try:
            record = parse_json(self._beside.read_bytes())
        except OSError:
            return None
        if not isinstance(record, dict) or record.get("after") != fingerprint(seed):
            return None
        token = record.get("refreshToken")
        return token if isinstance(token, str) else None


def write_durably(path: Path, content: bytes) -> None:
    """Replace a small file as a whole, mode 0600, so that a power cut leaves the old or the new one.

    Raises:
        OSError: the old one stays.
    """
    # One name for all: of a process that was killed here no more than one draft is ever left.
    draft = path.with_name(f".{path.name}.new")
    descriptor = os.open(draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            os.fchmod(descriptor, 0o600)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
