"""What a person reads of a daemon of another user: made from its answers alone, without the files."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from outbox.api.client import LocalClient
from outbox.api.letters import letter_from, listed_from
from outbox.cli.by_socket import act_on_dead, agents_of, event_of, listed_pages
from outbox.cli.output import age, clean, count, emit_json, local_time, number, say, table, terminal_width
from outbox.errors import UsageError
from outbox.store.dead import Choice
from outbox.store.inspect import DeadLetter
from outbox.store.records import Listed

_HEADERS = ("agent", "waiting", "oldest", "in flight", "delivered", "dead", "state")
_RIGHT = ("waiting", "oldest", "in flight", "delivered", "dead")
_REFUSED = 4
_TIMES = ("occurredAt", "acceptedAt", "failedAt", "at")


def status(client: LocalClient, *, as_json: bool, now_ms: int) -> int:
    """`outbox status`."""
    told = client.value("GET", "/v1/status")
    if as_json:
        emit_json(told)
        return 0
    relay, daemon = told["relay"], told["daemon"] or {}
    say(
        clean(f"relay   {relay['url']}   {_gate(relay, now_ms)}"),
        clean(f"daemon  pid {daemon.get('pid')}, {daemon.get('version')}, of another user"),
    )
    rows = [_row(agent) for agent in told["agents"]]
    say(*(table(rows, _HEADERS, right=_RIGHT, width=terminal_width(sys.stdout)) if rows else ()))
    dead = sum(agent["dead"] or 0 for agent in told["agents"])
    if dead:
        say(f"{count(dead, 'dead letter')}: outbox dead list")
    return 0


def _gate(relay: Mapping[str, Any], now_ms: int) -> str:
    if relay["gate"] != "closed":
        return "works" if relay["gate"] == "open" else "not tried yet"
    since = relay["since"] or now_ms
    return f"closed since {local_time(since, now_ms)}, {str(relay['reason']).replace('_', ' ')}"


def _row(agent: Mapping[str, Any]) -> tuple[str, ...]:
    def shown(name: str) -> str:
        return "?" if agent[name] is None else number(agent[name])

    blocked = agent["blocked"]
    oldest = "" if agent["oldestAgeMs"] is None else age(agent["oldestAgeMs"])
    waits = "goes out" if agent["waiting"] else "nothing waits"
    state = f"waits: {blocked['reason'].replace('_', ' ')}" if blocked else waits
    counters = (shown("inFlight"), shown("delivered"), shown("dead"))
    return (agent["agent"], shown("waiting"), oldest, *counters, state)


def listed(
    client: LocalClient, agent: str | None, *, kind: str | None, state: str | None, most: int | None
) -> Iterator[tuple[str, list[Listed], bool]]:
    """The events of one agent, or of all: whose, a page, and whether there is more."""
    left = most
    for whose in agents_of(client) if agent is None else [agent]:
        for page, more in listed_pages(client, whose, kind=kind, state=state, most=left):
            left = None if left is None else left - len(page)
            yield whose, [listed_from(event) for event in page], more


def show(client: LocalClient, agent: str, which: str, *, dead: bool, as_json: bool, now_ms: int) -> int:
    """`outbox show`, `outbox dead show`."""
    found = event_of(client, agent, which, dead=dead)
    if as_json:
        say(json.dumps(found))
        return 0
    say(clean(f"{found['agent']}: event {number(found['seq'])} ({found['kind']}), {found['state']}."))
    for name, value in found.items():
        if name in {"agent", "seq", "kind", "state", "payload", "history"} or value in (None, ""):
            continue
        text = local_time(value, now_ms, seconds=True) if name in _TIMES else value
        say(clean(f"{name:<16} {text if isinstance(text, str | int) else json.dumps(text)}"))
    for entry in found.get("history", ()):
        say(clean(f"history          {json.dumps(entry)}"))
    if "payload" in found:
        say("payload", *(clean(line) for line in json.dumps(found["payload"], indent=2).splitlines()))
    return 0


def dead_letters(
    client: LocalClient, agent: str | None, choice: Choice
) -> Iterator[tuple[str, list[DeadLetter]]]:
    """The dead letters that are meant, agent by agent."""
    by_agent: dict[str, list[DeadLetter]] = {}
    for data in act_on_dead(client, "replay", agent, choice, dry=True)["results"]:
        by_agent.setdefault(data["agent"], []).append(letter_from(data))
    yield from by_agent.items()


def act(
    client: LocalClient, what: str, agent: str | None, choice: Choice, *, dry: bool, as_json: bool
) -> int:
    """`outbox dead replay` and `outbox dead discard`; 4 when one of them could not be."""
    told = act_on_dead(client, what, agent, choice, dry=dry)
    done = [one for one in told["results"] if "error" not in one]
    bad = [one for one in told["results"] if "error" in one]
    if as_json:
        say(*(json.dumps(one) for one in done))
        say(*(json.dumps(one) for one in bad), to=sys.stderr)
    elif dry:
        say(f"{count(len(done), 'dead letter')} would be meant. Nothing was changed.")
    else:
        word = "go again, behind what waits" if what == "replay" else "discarded"
        say(f"{count(len(done), 'dead letter')}: {word}.")
        say(*(clean(one["error"]["message"]) for one in bad), to=sys.stderr)
    return _REFUSED if bad else 0


def refuse(given: object, what: str) -> None:
    """Raise UsageError for what needs the files."""
    if given:
        raise UsageError(
            f"{what} needs the files, which belong to the user of the daemon. Nothing was changed. Do it as "
            "that user, with its state directory."
        )
