"""How an outbox file is made: whole under another name, then given its own, so nobody opens half of one."""

from __future__ import annotations

import errno
import os
import time

import apsw

from outbox.bounds import Bounds
from outbox.errors import StoreBusy, StoreError, StoreFull
from outbox.event import Limits, uuid7
from outbox.store import schema, statements
from outbox.store.aside import is_being_replaced
from outbox.store.directory import StateDirectory, put_aside, sync_folder
from outbox.store.faults import store_error
from outbox.store.locks import lifecycle_byte, owners_lock
from outbox.store.rules import encode_rules

_LONGEST_WAIT_S = 5.0
_LOOK_AGAIN_S = 0.02


def create_outbox(state: StateDirectory, agent: str, limits: Limits, bounds: Bounds, now_ms: int) -> None:
    """Make an agent's outbox file (mode 0600). When this returns it survives a power cut.

    A file that stands there already, also one that another process made in the meantime, is left as it is; so
    is one that is just being replaced.
    Raises StoreFull or StoreError when it cannot be made.
    """
    path = state.outbox_file(agent)
    if os.path.lexists(path) or is_being_replaced(path):
        return
    stream = uuid7(now_ms, os.urandom(10))
    draft = f"{state.folder}/agents/.new-{stream}.sqlite"
    state.make_folders()  # they may have been removed since it was opened
    try:
        os.close(os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
        make_file(draft, agent, stream, encode_rules(limits, bounds), now_ms)
        sync_file(draft)
        _give_name(state, draft, path)
        sync_folder(f"{state.folder}/agents")
    except apsw.Error as error:
        raise store_error(error, path) from error
    except OSError as error:
        kind = StoreFull if error.errno in {errno.ENOSPC, errno.EDQUOT} else StoreError
        raise kind(
            f"The outbox file of {agent!r} cannot be made: {error.strerror}. Nothing was stored. "
            f"Make space below {state.folder!r}, or give its owner leave to write there."
        ) from error
    finally:
        for ending in ("", "-journal", "-wal", "-shm"):
            try:
                os.unlink(f"{draft}{ending}")  # noqa: PTH108 - the paths here are texts
            except OSError:
                continue


def make_file(draft: str | os.PathLike[str], agent: str, stream: str, rules: str, now_ms: int) -> None:
    """Fill an empty file, without a flush of its own: nobody knows it before it is flushed as a whole."""
    connection = apsw.Connection(os.fspath(draft), flags=apsw.SQLITE_OPEN_READWRITE)
    try:
        connection.pragma("synchronous", "OFF")
        connection.pragma("auto_vacuum", "INCREMENTAL")
        connection.execute("BEGIN")
        for step in (schema.CREATE, *schema.MIGRATIONS):
            connection.execute(step)
        connection.execute(statements.INSERT_OUTBOX, (agent, stream, now_ms, rules))
        connection.pragma("application_id", schema.APPLICATION_ID)
        connection.pragma("user_version", schema.VERSION)
        connection.execute("COMMIT")
        connection.pragma("journal_mode", "WAL")
    finally:
        connection.close()


def _give_name(state: StateDirectory, draft: str, path: str) -> None:
    """Link the draft to its name, unless another process was faster.

    A log that lies there without its file was another file's, and would be taken for this one's: it is put
    aside.
    """
    name = path.rpartition("/")[2]
    locks, byte = owners_lock(state.folder), lifecycle_byte(name)
    end = time.monotonic() + _LONGEST_WAIT_S
    while _orphans(path) and not os.path.lexists(path):
        if locks.wait_exclusive(byte, _LOOK_AGAIN_S):
            try:
                if not os.path.lexists(path):
                    put_aside(state, _orphans(path))  # whoever was removing the file is done by now
                _link(draft, path)
            finally:
                locks.release(byte)
            return
        if time.monotonic() > end:
            raise StoreBusy(f"The file {name} is in use by others. Nothing was stored; try again.")
    _link(draft, path)


def _orphans(path: str) -> list[str]:
    return [side for side in (f"{path}-wal", f"{path}-shm") if os.path.lexists(side)]


def _link(draft: str, path: str) -> None:
    try:
        os.link(draft, path)
    except FileExistsError:
        return


def sync_file(path: str | os.PathLike[str]) -> None:
    """Make what was written to the file survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
