"""The listening sockets of the local HTTP: a Unix socket of its user or a group, and TCP on loopback."""

from __future__ import annotations

import contextlib
import grp
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

from outbox.errors import ConfigError

_NOTHING = "Nothing was started; what waits stays on disk"


def bind_private(path: Path, group: str | None = None) -> socket.socket:
    """A listening Unix socket of mode 0600, with a group 0660; a dead one's leftover is replaced.

    Long paths work too (Linux). Raises ConfigError when something else lies there, or it cannot be made.
    """
    bound = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with _short_name(path) as name:
            _remove_leftover(path, name)
            old_mask = os.umask(0o177)
            try:
                bound.bind(name)
            finally:
                os.umask(old_mask)
            if group is not None:
                _give_to(group, path, name)
        bound.listen(256)
    except OSError as error:
        bound.close()
        raise _unusable(path, error.strerror or str(error)) from error
    except BaseException:
        bound.close()
        raise
    return bound


def _give_to(group: str, path: Path, name: str) -> None:
    try:
        number = int(group) if group.isascii() and group.isdigit() else grp.getgrnam(group).gr_gid
    except KeyError:
        raise ConfigError(
            f"daemon.socket_group: there is no group {group!r} on this host. {_NOTHING}. Make it "
            "(groupadd --system), or name another."
        ) from None
    os.chown(name, -1, number)
    Path(name).chmod(0o660)
    if not path.parent.stat().st_mode & 0o011:
        raise ConfigError(
            f"daemon.socket_group is {group!r}, but the socket {str(path)!r} lies in a folder that only its "
            f"user may enter. {_NOTHING}. Name another place with daemon.socket, such as "
            "/run/relay-outbox/outbox.sock."
        )


@contextlib.contextmanager
def _short_name(path: Path) -> Iterator[str]:
    """A name that fits into sockaddr_un (108 bytes, unix(7)), however deep the path lies."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


def _remove_leftover(path: Path, name: str) -> None:
    """Remove a socket that nobody listens at; raises ConfigError for whatever else lies there."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise _unusable(path, "something that is no socket lies there")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as asking:
        asking.settimeout(1.0)
        try:
            asking.connect(name)
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise _unusable(path, "another process listens there")


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"The local socket cannot be made at {str(path)!r}: {why}. {_NOTHING}. Name another place with "
        "daemon.socket or --socket."
    )


def bind_loopback(address: str, *, allow_remote: bool) -> socket.socket:
    """A listening TCP socket at "HOST:PORT" (port 0: a free one).

    Raises ConfigError when the host is not this one's loopback and `allow_remote` is false, or it is taken.
    """
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(
            host.strip("[]"), int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ConfigError(
            f"daemon.http: the host of {address!r} is not known: {error}. {_NOTHING}."
        ) from None
    family, _, _, _, place = found[0]
    if not allow_remote and not ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
        raise ConfigError(
            f"daemon.http is {address!r}, which others than this host can reach, and speaks no TLS. "
            f"{_NOTHING}. Name 127.0.0.1 or [::1], or set daemon.http_allow_remote = true if the network "
            "between is yours."
        )
    bound = socket.socket(family, socket.SOCK_STREAM)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(place)
        bound.listen(256)
    except OSError as error:
        bound.close()
        raise ConfigError(
            f"daemon.http: nobody can listen at {address!r}: {error.strerror}. {_NOTHING}. Name another port."
        ) from error
    return bound
