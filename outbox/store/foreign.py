"""An outbox of another state directory, from a copy: it stays as it is, and nobody sends from it then."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import apsw

from outbox.errors import StoreBusy, StoreHeld
from outbox.store import schema
from outbox.store import statements as sql
from outbox.store.at_rest import copy_at_rest
from outbox.store.directory import StateDirectory, file_name
from outbox.store.faults import FAULTS, store_error
from outbox.store.file import OutboxFile, open_outbox
from outbox.store.locks import OwnersLock, lifecycle_byte, owners_lock, sender_byte
from outbox.store.place import RunningDaemon, running_daemon

_LONGEST_WAIT_S = 5.0


@contextmanager
def opened_copy(path: Path, folder: Path) -> Iterator[OutboxFile]:
    """The outbox at `path`, from a copy below `folder`; its sender's place is taken until the block ends.

    Raises StoreHeld while its sender or its daemon lives, StoreBusy while it is being written, and what
    `open_outbox` raises.
    """
    copies = StateDirectory(folder).create(allow_network_fs=True)
    copy = copies.agents / path.name
    with _nobody_sends(path):
        with _nobody_writes(path):
            copy_at_rest(path, copy)
        box = open_outbox(copies, _under_its_name(copy))
        try:
            yield box
        finally:
            box.close()
            for side in ("", "-wal", "-shm"):
                box.path.with_name(box.path.name + side).unlink(missing_ok=True)


def living_daemon(state: StateDirectory) -> RunningDaemon | None:
    """The daemon that serves another state directory; none can where nothing can be locked."""
    return running_daemon(state) if os.access(state.path / "owners.lock", os.W_OK) else None


@contextmanager
def _nobody_sends(path: Path) -> Iterator[None]:
    locks = _locks_of(path)
    if locks is None:
        yield
        return
    daemon = living_daemon(StateDirectory(path.parent.parent))
    if daemon is not None or not locks.try_exclusive(sender_byte(path.name)):
        who = f"the daemon (pid {daemon.pid})" if daemon and daemon.pid else "another process"
        raise StoreHeld(
            f"The events of {str(path)!r} are being delivered by {who}. Nothing was taken, since they would "
            f"be sent twice. Stop it (outbox stop --state-dir {path.parent.parent}), and import again."
        )
    try:
        yield
    finally:
        locks.release(sender_byte(path.name))


@contextmanager
def _nobody_writes(path: Path) -> Iterator[None]:
    locks, byte = _locks_of(path), lifecycle_byte(path.name)
    if locks is None:
        yield
        return
    if not locks.wait_exclusive(byte, _LONGEST_WAIT_S):
        raise StoreBusy(
            f"The file {str(path)!r} is being written all the time. Nothing was taken; try again."
        )
    try:
        yield
    finally:
        locks.release(byte)


def _locks_of(path: Path) -> OwnersLock | None:
    """The locks of the state directory that the file lies in; None where nobody can hold one.

    That is outside a state directory, and on a file system that is mounted read-only.
    """
    lock_file = path.parent.parent / "owners.lock"
    if path.parent.name != "agents" or not os.access(lock_file, os.W_OK):
        return None
    return owners_lock(path.parent.parent)


def _under_its_name(copy: Path) -> Path:
    """The copy under the name that its agent's file has; a file of a newer release is left to be refused."""
    try:
        with contextlib.closing(apsw.Connection(str(copy), flags=apsw.SQLITE_OPEN_READWRITE)) as db:
            if not 1 <= db.pragma("user_version") <= schema.VERSION:
                return copy
            agents = [str(row[0]) for row in db.execute(sql.READ_IDENTITY)]
    except FAULTS as error:
        raise store_error(error, copy) from error
    return copy.replace(copy.with_name(file_name(agents[0]))) if agents else copy
