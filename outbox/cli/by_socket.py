"""Commands where the files belong to another user: they ask its daemon by the socket of OUTBOX_SOCKET."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from outbox.api.client import LocalClient
from outbox.api.forwarding import Forwarded, RemoteOutbox, forward
from outbox.api.reach import Place, place_of
from outbox.errors import UsageError
from outbox.measures import count
from outbox.store.dead import Choice
from outbox.store.directory import StateDirectory

_PAGE = 500


def daemon_of_another(args: argparse.Namespace) -> LocalClient | None:
    """A client of the daemon that OUTBOX_SOCKET names, where we have no files to look at; else None."""
    place = here(args)
    return None if place is None or place.socket is None else LocalClient(place.socket)


def here(args: argparse.Namespace) -> Place | None:
    """Where a command of this user works; None where a file of configuration says it."""
    if args.config is not None or not os.environ.get("OUTBOX_SOCKET", "").strip():
        return None
    return place_of(os.environ, args.state_dir)


# Events -----------------------------------------------------------------------------------------------------


def remote_outbox(agent: str, place: Place) -> RemoteOutbox:
    """The outbox of an agent at the daemon of another user."""
    assert place.socket is not None  # noqa: S101 - asked for such places only
    return RemoteOutbox(agent, LocalClient(place.socket), place.state)


def kept_note(outbox: RemoteOutbox, place: Place) -> str:
    """What a person should know of events that the daemon could not be given."""
    return (
        f"The daemon at {str(place.socket)!r} could not take all: {outbox.why} "
        f"{count(outbox.kept, 'event waits', 'events wait')} on disk below {str(place.state)!r}, and "
        "go to it in order before the next ones, or by: outbox flush"
    )


def forward_all(place: Place, agent: str | None, within_s: float) -> Forwarded:
    """Hand over what waits in this user's own outboxes, of one agent or of all."""
    whole = Forwarded()
    if place.state is None or place.socket is None:
        return whole
    own, client = StateDirectory(place.state), LocalClient(place.socket)
    for path in own.outbox_files() if agent is None else [own.outbox_path(agent)]:
        done = forward(own, path, client, within_s)
        whole.left += done.left
        whole.why = whole.why or done.why
        whole.receipts |= done.receipts
        whole.refused |= done.refused
    return whole


def flushed_there(socket: Path, agent: str | None, timeout_s: float) -> Any:
    """The daemon's report of a flush; None for an agent that it does not know, which has nothing to send."""
    try:
        asked = {"agent": agent, "timeoutS": timeout_s}
        return LocalClient(socket).value("POST", "/v1/flush", asked, timeout_s + 5)
    except UsageError as error:
        if error.code != "unknown_agent":
            raise
        return None


# Looking ----------------------------------------------------------------------------------------------------


def listed_pages(
    client: LocalClient, agent: str, *, kind: str | None, state: str | None, most: int | None
) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """What waits or is in flight of an agent, a page at a time, and whether there is more."""
    after, left = 0, most
    while left is None or left > 0:
        given: dict[str, Any] = {"after": after, "limit": _PAGE if left is None else min(left, _PAGE)}
        given |= {name: text for name, text in (("kind", kind), ("state", state)) if text is not None}
        path = f"/v1/agents/{quote(agent, safe='')}/events?{urlencode(given)}"
        answer = client.value("GET", path)
        page, more = answer["events"], bool(answer["more"])
        yield page, more
        if not page or not more:
            return
        after, left = page[-1]["seq"], None if left is None else left - len(page)


def agents_of(client: LocalClient) -> list[str]:
    """All agents that the daemon knows."""
    return [one["agent"] for one in client.value("GET", "/v1/status")["agents"]]


def event_of(client: LocalClient, agent: str, which: str, *, dead: bool) -> dict[str, Any]:
    """All that is known of one event."""
    below = "dead" if dead else "events"
    path = f"/v1/agents/{quote(agent, safe='')}/{below}/{quote(which.replace(',', ''), safe='')}"
    found: dict[str, Any] = client.value("GET", path)
    return found


def act_on_dead(
    client: LocalClient, act: str, agent: str | None, choice: Choice, *, dry: bool
) -> dict[str, Any]:
    """Replay or discard the dead letters that are meant; dry: which they are."""
    chosen = {
        "agent": agent,
        "seqs": choice.seqs,
        "reasons": choice.reasons,
        "kinds": choice.kinds,
        "failedBefore": choice.failed_before_ms,
        "failedAfter": choice.failed_after_ms,
    }
    given = {name: value for name, value in chosen.items() if value is not None}
    asked = {**(given or {"all": True}), "dryRun": dry}
    told: dict[str, Any] = client.value("POST", f"/v1/dead/{act}", asked, 60.0)
    return told
