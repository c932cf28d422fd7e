"""Starting a command, and ending as it ended: exec, wait statuses, signals."""

from __future__ import annotations

import errno
import os
import resource
import signal
from collections.abc import Collection, Mapping, Sequence

NOT_FOUND, NOT_EXECUTABLE = 127, 126  # as shells and env(1) have it (POSIX.1, 2.8.2)
_IGNORED_BY_PYTHON = (
    signal.SIGPIPE,
    signal.SIGXFSZ,
)  # by Python itself; not by a command


def spawn(argv: Sequence[str], environ: Mapping[str, str], mask: Collection[int]) -> int:
    """Start a command, found by PATH, with this signal mask; its process id.

    Safe while other threads run (posix_spawn(3)). It stays in our session and process group, with our
    terminal, streams and descriptors. A text without `#!` is run by sh, as execvp(3) does. Raises OSError.
    """
    try:
        return _spawn(argv, environ, mask)
    except OSError as error:
        if error.errno != errno.ENOEXEC:
            raise
        return _spawn(["/bin/sh", _found(argv[0], environ), *argv[1:]], environ, mask)


def _spawn(argv: Sequence[str], environ: Mapping[str, str], mask: Collection[int]) -> int:
    return os.posix_spawnp(argv[0], list(argv), environ, setsigmask=mask, setsigdef=_IGNORED_BY_PYTHON)


def _found(name: str, environ: Mapping[str, str]) -> str:
    if "/" in name:
        return name
    from shutil import which  # noqa: PLC0415 - a text without #! is rare

    return which(name, path=environ.get("PATH")) or name


def why_not_started(name: str, error: OSError) -> tuple[int, str]:
    """The exit status, and a sentence, for a command that could not be started."""
    if isinstance(error, FileNotFoundError):
        where = "there is no such file" if "/" in name else "it is in no folder of PATH"
        return NOT_FOUND, f"The command {name!r} cannot be found: {where}, or what its first line names."
    return NOT_EXECUTABLE, f"The command {name!r} cannot be run: {error.strerror}."


def end_like(wait_status: int) -> int:
    """End as the command ended: the exit status to return, or death by the same signal, without a core.

    Whoever waits for us sees what it would have seen of the command. 128 + N is returned where a signal
    cannot end us: PID 1 of a container is immune to its own.
    """
    if not os.WIFSIGNALED(wait_status):
        return os.WEXITSTATUS(wait_status)
    number = os.WTERMSIG(wait_status)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # the command's own core is not written over
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    return 128 + number


def status_in_words(wait_status: int) -> str:
    """How a command ended, for a message: "exit status 3", "SIGKILL"."""
    if os.WIFSIGNALED(wait_status):
        number = os.WTERMSIG(wait_status)
        try:
            return signal.Signals(number).name
        except ValueError:  # a real-time signal has a number only
            return f"signal {number}"
    return f"exit status {os.WEXITSTATUS(wait_status)}"
