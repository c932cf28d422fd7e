"""Runs the command, and is to it what a terminal and a shell would be without us: nothing in between.

The main thread hears all signals and waits for all children. They are blocked in it, and taken by
sigtimedwait(2), which tells where each came from; Linux offers a signal to a waiting main thread first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from outbox.sidecar.child import spawn
from outbox.sidecar.reaping import reap
from outbox.sidecar.signals import HEARD, KEYS, SI_KERNEL, STOPPING, goes_on, insistence
from outbox.sidecar.terminal import Terminal

_LONGEST_WAIT_S = 1.0  # should a signal have gone astray, this is how late we look


# Stopped or ignored by default: nothing must stand in the place of that.
_DEFAULTS = {signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU, signal.SIGCHLD, signal.SIGCONT}
_astray: deque[int] = deque()


def hold_signals() -> Collection[int]:
    """Signals wait until they are asked for, in this thread and those it starts; the mask before.

    One that comes to a thread which lets it through (`as_without_us`) while this one is not waiting is heard
    a little later, and kills nobody. Only SIGPIPE and SIGXFSZ, which Python ignores, are lost then: a handler
    for them would hand our own broken pipes on to the command.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, HEARD)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would leave nobody to wait for (wait(2))
    for number in HEARD - _DEFAULTS:
        if signal.getsignal(number) != signal.SIG_IGN:  # what is ignored stays so for the command
            signal.signal(number, lambda number, _frame: _astray.append(number))
    return before


def as_without_us(mask: Collection[int]) -> None:
    """Have this thread, and those it starts, block what was blocked before us: programs inherit it."""
    signal.pthread_sigmask(signal.SIG_SETMASK, {*mask, *_DEFAULTS} - {signal.SIGCHLD})


def nudge() -> None:
    """Make the main thread look around (from any thread)."""
    main = threading.main_thread().ident
    assert main is not None  # noqa: S101 - it runs
    signal.pthread_kill(main, signal.SIGURG)


def asked_to_end(timeout_s: float) -> bool:
    """Wait for so long, or until nudged; whether a signal came meanwhile that asks us to end."""
    heard = signal.sigtimedwait(HEARD, max(0.0, timeout_s))
    numbers = {*_astray, *([heard.si_signo] if heard is not None else [])}
    _astray.clear()
    return any(map(_asks_us, numbers & {*STOPPING, signal.SIGINT, signal.SIGQUIT}))


def _pending() -> Iterator[int]:
    while _astray:
        yield _astray.popleft()
    while (heard := signal.sigtimedwait(HEARD, 0)) is not None:
        yield heard.si_signo


def _asks_us(number: int) -> bool:
    """Whether a signal means us too: what we were started to ignore (nohup, `&`) is the command's alone."""
    return signal.getsignal(number) != signal.SIG_IGN


class Runner:
    """One command after the other, each in our process group. Signals are held (`hold_signals`)."""

    def __init__(
        self, environ: Mapping[str, str], mask: Collection[int], terminal: Terminal, kill_after_ms: int
    ) -> None:
        """Nothing is started yet. `mask` is the command's own signal mask."""
        self.pid = 0
        self.is_stopping = False  # whether we were asked to end
        self._environ = environ
        self._mask = mask
        self._terminal = terminal
        self._kill_after_ms = kill_after_ms
        self._to_come: list[tuple[int, int]] = []

    def start(self, argv: Sequence[str]) -> None:
        """Start a command; raises OSError."""
        self.pid = spawn(argv, self._environ, self._mask)
        self._to_come = []

    def wait(self, attend: Callable[[], int | None] = lambda: None) -> int:
        """Serve the command until it has ended; its wait status.

        `attend` is called whenever something happened, and says at which monotonic moment (ms) it wants to
        be called again.
        """
        while True:
            for status in reap(self.pid):
                if not os.WIFSTOPPED(status):
                    return self._ended(status)
                self._terminal.stop_as(os.WSTOPSIG(status))
            self._insist()
            heard = signal.sigtimedwait(HEARD, self._sleep_s(attend()))
            if heard is not None and heard.si_pid != os.getpid():
                self._hear(heard.si_signo, heard.si_code)
            while _astray:
                number = _astray.popleft()
                self._hear(number, SI_KERNEL if number in KEYS and self._terminal.is_there else 0)

    def _ended(self, status: int) -> int:
        came = set(_pending())  # before the end, for the command: none of them ends our last flush
        self.is_stopping |= any(map(_asks_us, came & STOPPING))
        if os.WIFSIGNALED(status):
            self._terminal.mend()
        return status

    def _hear(self, number: int, code: int) -> None:
        if not goes_on(number, code, same_group=self._is_with_us()):
            return
        if number in STOPPING and _asks_us(number):
            self.is_stopping = True
            if number == signal.SIGTERM and not self._to_come:
                self._to_come = list(insistence(_now_ms(), self._kill_after_ms))
        self._send(number)

    def _send(self, number: int) -> None:
        """It is our child until we have taken it: the id is nobody else's."""
        with contextlib.suppress(PermissionError):  # it has become another user's (sudo)
            os.kill(self.pid, number)

    def _is_with_us(self) -> bool:
        try:
            return os.getpgid(self.pid) == os.getpgrp()
        except ProcessLookupError:
            return True

    def _insist(self) -> None:
        while self._to_come and self._to_come[0][0] <= _now_ms():
            self._send(self._to_come.pop(0)[1])

    def _sleep_s(self, until_ms: int | None) -> float:
        moments = [self._to_come[0][0]] if self._to_come else []
        moments += [] if until_ms is None else [until_ms]
        wait_ms = min(moments, default=2**63) - _now_ms()
        return min(_LONGEST_WAIT_S, max(0.0, wait_ms / 1_000))


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
