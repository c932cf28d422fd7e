"""`outbox stop`: ask the daemon to stop, and wait until it is gone."""

from __future__ import annotations

import argparse

from outbox.api.client import LocalClient
from outbox.cli.arguments import seconds
from outbox.cli.output import clean, emit_json, say
from outbox.cli.where import settings_to_look, state_of
from outbox.errors import Unavailable
from outbox.store.directory import StateDirectory
from outbox.store.place import RunningDaemon, running_daemon

EXAMPLE = "outbox stop"

_LOOK_EVERY_S = 0.05
_ANSWER_WITHIN_S = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """How long to wait."""
    parser.add_argument(
        "--timeout", type=seconds, default=60.0, metavar="S", help="seconds to wait for its end (default: 60)"
    )


def run(args: argparse.Namespace) -> int:
    """Stop it; 0 when none runs (any more), 69 when it is still there at the deadline."""
    state = state_of(settings_to_look(args))
    daemon = running_daemon(state)
    if daemon is not None:
        _stop(state, args.timeout)
    if args.json:
        emit_json({"stopped": daemon is not None, "pid": (daemon.pid or None) if daemon else None})
    elif daemon is None:
        say(f"No daemon serves {clean(str(state.path))}; there is nothing to stop.")
    else:
        say(f"The daemon (pid {daemon.pid}) has stopped. What waits stays on disk for the next start.")
    return 0


def _stop(state: StateDirectory, timeout_s: float) -> None:
    """Ask, also one that is just starting and not yet listening, and wait until the lock is free."""
    from tenacity import RetryError, Retrying, retry_if_result, stop_after_delay, wait_fixed  # noqa: PLC0415

    leaving = _Leaving(state)
    until_gone = Retrying(
        retry=retry_if_result(bool), stop=stop_after_delay(timeout_s), wait=wait_fixed(_LOOK_EVERY_S)
    )
    try:
        until_gone(leaving.is_there)
    except RetryError:
        raise leaving.still_there(timeout_s) from None


class _Leaving:
    """A daemon on its way out."""

    def __init__(self, state: StateDirectory) -> None:
        self._state = state
        self._daemon: RunningDaemon | None = None
        self._asked = False

    def is_there(self) -> bool:
        """Whether it is still there; it is asked until it has heard. Another one in its place is not it."""
        now = running_daemon(self._state)
        if now is None or (self._daemon and self._daemon.pid and now.pid != self._daemon.pid):
            return False
        self._daemon = now
        self._asked = self._asked or _ask(now)
        return True

    def still_there(self, timeout_s: float) -> Unavailable:
        """The error when it did not go."""
        pid, socket = (self._daemon.pid, str(self._daemon.socket)) if self._daemon else (0, "")
        did = "was asked to stop and is still at work" if self._asked else f"does not answer at {socket!r}"
        todo = f" To end it: kill {pid}" if pid else ""
        return Unavailable(
            f"The daemon (pid {pid or 'unknown'}) {did} after {timeout_s:g} s. "
            f"What waits stays on disk.{todo}"
        )


def _ask(daemon: RunningDaemon) -> bool:
    try:
        status, _ = LocalClient(daemon.socket).post("/v1/stop", {}, _ANSWER_WITHIN_S)
    except Unavailable:
        return False
    return status < 300
