"""The duties of an init: whoever loses its parent below us becomes our child, and is taken when it ends."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator

_PR_SET_CHILD_SUBREAPER = 36  # prctl(2)
_WNOTHREAD = 0x20000000  # waitpid(2): not the children of other threads, which these wait for themselves
_OPTIONS = os.WNOHANG | os.WUNTRACED | os.WCONTINUED | _WNOTHREAD


def adopt_orphans() -> None:
    """Become the one to whom orphans below us go, up to our end; PID 1 is that anyway."""
    if os.getpid() != 1:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def reap(command_pid: int) -> Iterator[int]:
    """Take every child that has ended; the wait statuses of the command: its stops, and its end.

    To be called by the main thread, to which orphans go.
    """
    while True:
        try:
            pid, status = os.waitpid(-1, _OPTIONS)
        except ChildProcessError:
            return
        if not pid:
            return
        if pid == command_pid and not os.WIFCONTINUED(status):
            yield status
