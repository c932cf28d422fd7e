"""The controlling terminal, and what a command may leave behind in it."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
from collections.abc import Iterator

_STOPS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU}


class Terminal:
    """The controlling terminal, where there is one; else every act does nothing."""

    def __init__(self) -> None:
        """Remember its modes, and whether we are in its foreground."""
        self._fd: int | None = None
        self._modes: list[object] | None = None
        with contextlib.suppress(OSError):
            self._fd = os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_CLOEXEC)
        self._was_ours = self._is_ours()
        if self._fd is not None:
            with contextlib.suppress(termios.error):
                self._modes = termios.tcgetattr(self._fd)

    @property
    def is_there(self) -> bool:
        """Whether we have one."""
        return self._fd is not None

    def stop_as(self, number: int) -> None:
        """Stop as the command did, so that the shell that waits for us takes over; returns when continued.

        The kernel passes over it where nobody could continue us (an orphaned process group). Without a
        terminal nothing is done: there is no shell, and whoever stopped the command alone meant it alone.
        """
        if self._fd is None:
            return
        os.kill(os.getpid(), number)  # SIGSTOP takes effect here, the others when they are let through
        if number in _STOPS:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
            signal.pthread_sigmask(signal.SIG_BLOCK, {number})

    def mend(self) -> None:
        """After a command that was killed: the terminal is ours again, with the modes that it had before."""
        if self._fd is None:
            return
        with contextlib.suppress(OSError, termios.error), _unstoppable():
            if self._was_ours and not self._is_ours() and not _exists(os.tcgetpgrp(self._fd)):
                os.tcsetpgrp(self._fd, os.getpgrp())
            if self._modes is not None and self._is_ours():
                termios.tcsetattr(self._fd, termios.TCSADRAIN, self._modes)  # type: ignore[arg-type]

    def _is_ours(self) -> bool:
        try:
            return self._fd is not None and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:
            return False

    def close(self) -> None:
        """Give the descriptor back."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


@contextlib.contextmanager
def _unstoppable() -> Iterator[None]:
    """A group in the background may set a terminal while it does not hear SIGTTOU (tcsetattr(3p))."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exists(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
