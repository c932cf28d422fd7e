"""A program that prints a token: run without a shell, with a limit of time and of output."""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Sequence

from relay_client.auth import TokenUnavailable, fingerprint
from relay_client.minting import Grant
from relay_client.token_answer import read_printed

_MOST_BYTES = 64 * 1024
_ENDS_WITHIN_S = 1.0


class TokenCommand:
    """Runs the program each time a token is wanted.

    It inherits the environment, gets nothing on stdin, and is ended with all it started after `timeout_s`.
    What it writes to stderr is thrown away: it might be the token.
    """

    one_per_agent = False
    is_kept = False

    def __init__(self, words: Sequence[str], *, timeout_s: float = 30.0) -> None:
        """Nothing is run yet."""
        self._words = tuple(words)
        self._timeout_s = timeout_s
        self._mutex = threading.Lock()
        self._running: set[subprocess.Popen[bytes]] = set()
        self._aborted = False

    def mint(self, agent: str, *, deadline: float | None) -> Grant:  # noqa: ARG002 - one token for all agents
        """Run it; raises TokenUnavailable."""
        until = min(time.monotonic() + self._timeout_s, math.inf if deadline is None else deadline)
        process = self._start()
        try:
            output = _output(process, until)
            status = 0 if output is None else process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            output = None
        finally:
            _end(process)
            _leave(process)
            self._forget_ended()
        if output is None:
            raise TokenUnavailable(f"{self.describe()}: took too long, and was ended")
        if len(output) > _MOST_BYTES:
            raise TokenUnavailable(f"{self.describe()}: prints more than {_MOST_BYTES:,} bytes")
        if status:
            raise TokenUnavailable(
                f"{self.describe()}: ended with status {status}; run it by hand to see why"
            )
        return read_printed(output, self.describe())

    def describe(self) -> str:
        """The program, without its arguments."""
        return f"command {self._words[0]}"

    def inputs(self) -> str:
        """Changes with the configured words only."""
        return fingerprint("\0".join(self._words))

    def abort(self) -> None:
        """End what runs, and run nothing more."""
        with self._mutex:
            self._aborted = True
            for process in self._running:
                _end(process)

    def close(self) -> None:
        """Nothing is open."""

    def _forget_ended(self) -> None:
        with self._mutex:
            self._running = {process for process in self._running if process.poll() is None}

    def _start(self) -> subprocess.Popen[bytes]:
        with self._mutex:
            if self._aborted:
                raise TokenUnavailable(f"{self.describe()}: is not run any more, since we stop")
            try:
                process = subprocess.Popen(  # noqa: S603 - the operator's own command, and no shell
                    self._words,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
            except (OSError, ValueError) as error:  # ValueError: words that no program can be given
                reason = (isinstance(error, OSError) and error.strerror) or str(error)
                raise TokenUnavailable(f"{self.describe()}: cannot be started: {reason.lower()}") from error
            self._running.add(process)
            return process


def _output(process: subprocess.Popen[bytes], until: float) -> bytes | None:
    """What it prints, to its end or a little beyond the limit; None when the time is over before."""
    assert process.stdout is not None  # noqa: S101 - it was asked for
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(output) <= _MOST_BYTES:
            left_s = until - time.monotonic()
            if left_s <= 0 or not selector.select(left_s):
                return None
            piece = os.read(process.stdout.fileno(), _MOST_BYTES)
            if not piece:
                break
            output += piece
    if len(output) > _MOST_BYTES:
        _end(process)
    return output


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it with all that it started; one that has been waited for is gone already.

    What has taken another user (sudo) cannot be ended by us.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)


def _leave(process: subprocess.Popen[bytes]) -> None:
    """Wait for its end, but not for one that could not be ended."""
    assert process.stdout is not None  # noqa: S101 - it was asked for
    process.stdout.close()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_ENDS_WITHIN_S)
