"""What the proxy says itself: its two tools, and the honest results of calls that got none. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outbox.capture.mcp_message import plain
from outbox.errors import UsageError
from outbox.json_text import elements, last_values, quoted
from outbox.measures import count, local_time, number
from outbox.outcome import State
from outbox.printable import printable
from outbox.record import Record, Remembered
from outbox.store.records import Found
from relay_client import Answer

STATUS_TOOL, RESULT_TOOL = "outbox_status", "outbox_result"
QUEUED_FIELD = "relay-outbox/queued"
STATE_FIELD = "relay-outbox/state"

OWN_TOOLS = {
    STATUS_TOOL: plain(
        {
            "name": STATUS_TOOL,
            "title": "Outbox status",
            "description": "How this agent's outbox stands: what waits for the relay, and why.",
            "inputSchema": {"type": "object", "properties": {}},
            "annotations": {"readOnlyHint": True, "openWorldHint": False},
        }
    ),
    RESULT_TOOL: plain(
        {
            "name": RESULT_TOOL,
            "title": "Result of a queued call",
            "description": "What became of a tool call that was queued: still waiting, its result, or why it "
            "was set aside.",
            "inputSchema": {
                "type": "object",
                "properties": {
                    "key": {"type": "string", "description": 'the key that "queued" told, or its seq'}
                },
                "required": ["key"],
            },
            "annotations": {"readOnlyHint": True, "openWorldHint": False},
        }
    ),
}


@dataclass(frozen=True, slots=True)
class Queued:
    """A call that is on disk. `ahead` counts the events of this agent that go before it."""

    tool: str
    agent: str
    key: str
    seq: int
    ahead: int
    duplicate_state: str = ""
    nobody_sends: bool = False


def queued(call: Queued, why: str) -> str:
    """The result of a call that waits: nothing in it pretends that the tool ran."""
    if call.duplicate_state:
        first = f"Known already: a call with this key is event {number(call.seq)}, {call.duplicate_state}."
    else:
        place = f"{count(call.ahead, 'event')} before it" if call.ahead else "the next to go"
        first = (
            f"Queued, not run yet: {why}. The call of {call.tool} is on disk as event {number(call.seq)} of "
            f"{call.agent} ({place}), and goes out by itself, in order."
        )
    lines = [first]
    if call.nobody_sends:
        lines.append("Nobody sends at the moment: it goes with the next `outbox serve` or `outbox flush`.")
    lines.append(
        f'There is no result yet. To look it up: {RESULT_TOOL} with the key "{call.key}", '
        f"or in a shell: outbox show {_word(call.agent)} {call.key}"
    )
    told = {"agent": call.agent, "idempotencyKey": call.key, "seq": call.seq, "ahead": call.ahead}
    return _result(lines, meta={QUEUED_FIELD: told})


def no_relay(health: Answer) -> str:
    """What `outbox_status` says of a relay that was just asked for its health in vain; "" of any other."""
    if health.status is None:
        first = f"The relay cannot be reached now: {health.detail.rstrip('.')}."
    elif health.status >= 500:
        first = f"The relay does not work now: it answers {health.status} when asked for its health."
    else:
        return ""
    return f"{first} Until it is back, calls that may wait are queued, and others do not run."


def not_run(tool: str, why: str) -> str:
    """The result of a call that ran nowhere and waits nowhere."""
    return _result(
        [
            f"{tool} did not run: {why}. Nothing is queued.",
            f"Its calls do not wait in the outbox. Try again later; {STATUS_TOOL} tells how things stand.",
        ],
        is_error=True,
    )


def refused(tool: str, why: str) -> str:
    """The result of a call that the relay does not want."""
    return _result(
        [f"{tool} did not run: the relay refused the call ({why}). Nothing is queued.",
         "The same call again would be refused again: change it, or have the relay's owner mend it."],
        is_error=True,
    )  # fmt: skip


def perhaps_run(tool: str, why: str, *, safe: bool) -> str:
    """The result of a call that was sent, and whose answer nobody has."""
    todo = (
        "It may safely be called again."
        if safe
        else "Check what it does before calling it again: a second call may do it twice. Nothing is queued."
    )
    return _result([f"{tool} may or may not have run: it was sent, and {why}.", todo], is_error=True)


def not_stored(tool: str, why: str, fault: str, *, perhaps: bool) -> str:
    """The result of a call that could have waited, were there room for it; `perhaps` it was run."""
    first = f"may or may not have run: it was sent, and {why}" if perhaps else f"did not run: {why}"
    return _result([f"{tool} {first}. It could not be queued either: {fault}"], is_error=True)


def no_input(tool: str) -> str:
    """The result of a call whose tool asks for input, for a client that cannot be asked in this way."""
    return _result(
        [f"{tool} was not done: it asks for input in a way that this client's revision of MCP has not."],
        is_error=True,
    )


def lines_result(lines: Sequence[str], *, is_error: bool = False) -> str:
    """A tool result of these lines."""
    return _result(lines, is_error=is_error)


def result_of(agent: str, found: Found | None, which: str, why: Sequence[str], now_ms: int) -> str:
    """What `outbox_result` answers: the state of a call, and its result when there is one."""
    if found is None:
        return _result(
            [f"No call {which!r} of {agent} is known: never queued, or its receipt is gone."],
            is_error=True, meta={STATE_FIELD: "unknown"},
        )  # fmt: skip
    record, meta = found.record, {STATE_FIELD: found.state}
    name = f"Event {number(record.seq)} of {agent}"
    if isinstance(record, Remembered):
        return _gone(name, record, meta, now_ms)
    if record.letter is not None:
        return _result(_dead(agent, name, record), is_error=True, meta=meta)
    state = "is on its way" if found.state == State.IN_FLIGHT else "waits; it has not run yet"
    return _result([f"{name} {state}.", *why], meta=meta)


def _word(agent: str) -> str:
    """An agent's name as a person would type it after a command."""
    word = shlex.quote(printable(agent))
    return f"-- {word}" if agent.startswith("-") else word


def _dead(agent: str, name: str, record: Record) -> list[str]:
    letter = record.letter
    assert letter is not None  # noqa: S101 - the caller looked
    said = " ".join(filter(None, (str(letter.status or ""), letter.code, letter.detail)))
    return [
        f"{name} is a dead letter: {letter.reason}" + (f" ({said})." if said else "."),
        f"It is kept, and stays so. To send it again: outbox dead replay {_word(agent)} {record.seq}",
    ]


def _gone(name: str, record: Remembered, meta: Mapping[str, Any], now_ms: int) -> str:
    at = local_time(record.at_ms, now_ms, seconds=True)
    if record.state == State.TOOL_ERROR:
        line = f"{name} went out at {at}: the tool ran and said no."
    elif record.state == State.DELIVERED:
        line = f"{name} was delivered at {at}."
    else:
        return _result([f"{name} was {record.state} at {at}; it did not run."], is_error=True, meta=meta)
    is_error = record.state == State.TOOL_ERROR
    kept = _kept(record.result)
    if kept is None:
        more = [] if record.result is None else ["The start of its result:", record.result]
        return _result([line, *more], is_error=is_error, meta=meta)
    blocks, structured = kept
    return _result([f"{line} Its result:"], blocks, is_error=is_error, structured=structured, meta=meta)


def _kept(result: str | None) -> tuple[list[str], str | None] | None:
    """The blocks and the structured content of a kept result; None when it was cut, and is no JSON now."""
    try:
        parts = last_values(result or "null")
        return elements(parts["content"]), parts.get("structuredContent")
    except (UsageError, KeyError):
        return None


def _result(
    lines: Sequence[str],
    blocks: Sequence[str] = (),
    *,
    is_error: bool = False,
    structured: str | None = None,
    meta: Mapping[str, Any] | None = None,
) -> str:
    """A tool result: a text of these lines, then blocks that are JSON texts already."""
    said = f'{{"type":"text","text":{quoted(chr(10).join(lines))}}}'
    parts = ['"resultType":"complete"', f'"content":[{",".join([said, *blocks])}]']
    parts.append(f'"isError":{plain(is_error)}')
    if structured is not None:
        parts.append(f'"structuredContent":{structured}')
    if meta:
        parts.append(f'"_meta":{plain(dict(meta))}')
    return f"{{{','.join(parts)}}}"
