"""Which signals a sidecar hands on to its command, and when it insists. Nothing is sent here."""

from __future__ import annotations

from signal import Signals, valid_signals

# What a fault of this program raises in itself; they are left to the kernel (as tini and dumb-init do).
_FAULTS = (
    *(Signals.SIGABRT, Signals.SIGBUS, Signals.SIGFPE, Signals.SIGILL),
    *(Signals.SIGSEGV, Signals.SIGSYS, Signals.SIGTRAP),
)
HEARD: frozenset[int] = frozenset(map(int, valid_signals())) - {*_FAULTS, Signals.SIGKILL, Signals.SIGSTOP}
KEYS = frozenset({Signals.SIGINT, Signals.SIGQUIT, Signals.SIGTSTP, Signals.SIGWINCH})
STOPPING = frozenset({Signals.SIGTERM, Signals.SIGHUP})

SI_KERNEL = 0x80  # sigaction(2): sent by the kernel; from a terminal, to a whole process group


def goes_on(number: int, code: int, *, same_group: bool) -> bool:
    """Whether a signal that came to the sidecar is sent to the command.

    `code` is its si_code. What the terminal sends (Ctrl-C, Ctrl-Z, a new window size, a hang-up) reaches
    every process of the group: a command in the same group has it already, and must not get it twice.
    """
    return number != Signals.SIGCHLD and not (code == SI_KERNEL and same_group)


def insistence(now_ms: int, kill_after_ms: int) -> tuple[tuple[int, int], ...]:
    """What follows a SIGTERM that the command outlives: (moment, signal), the first one first.

    SIGTERM once more after half of `kill_after_ms`, SIGKILL after all of it. 0 means that nothing follows.
    """
    if not kill_after_ms:
        return ()
    half_ms = now_ms + kill_after_ms // 2
    return (half_ms, Signals.SIGTERM), (now_ms + kill_after_ms, Signals.SIGKILL)
