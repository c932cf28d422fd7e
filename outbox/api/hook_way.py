"""The way of a hook's event to a daemon of another user: onto this user's disk first, then by the socket.

Where this user has no place of its own, the event lies in a passing folder until the daemon has it.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from outbox.api.client import LocalClient
from outbox.api.forwarding import forward
from outbox.api.reach import place_of
from outbox.errors import OutboxError, Unavailable
from outbox.store.directory import StateDirectory

_LEAST_S = 0.2


def put_and_hand_over(
    environ: Mapping[str, str], named: str | None, put: Callable[[str], str], end: float
) -> None:
    """Have `put(folder)` store a call, then give the daemon all that waits there of the agent it returns.

    `named` is what --state-dir says, `end` the monotonic second until which there is time. What the daemon
    cannot take stays for the next time. Raises what `put` raises, and Unavailable when it would be lost.
    """
    place = place_of(environ, named)
    if place.state is not None:
        agent = put(str(place.state))
        if place.socket is not None:
            with contextlib.suppress(OutboxError):  # it is on disk: the next call hands it over
                _hand_over(str(place.state), place.socket, agent, end)
        return
    assert place.socket is not None  # noqa: S101 - one of them is known
    with tempfile.TemporaryDirectory(prefix="outbox-hook-") as folder:
        if why := _hand_over(folder, place.socket, put(folder), end):
            raise Unavailable(f"{why}. This user has no folder of its own to keep it")


def _hand_over(folder: str, socket: Path, agent: str, end: float) -> str:
    """Why something is left; "" when all is gone."""
    state = StateDirectory(folder)
    path = Path(state.outbox_path(agent))
    done = forward(state, path, LocalClient(socket), max(_LEAST_S, end - time.monotonic()))
    return str(done.why or "time was over").rstrip(".") if done.left else ""
