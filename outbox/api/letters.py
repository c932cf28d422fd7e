"""Events and dead letters as a person asks for them, at the command line and over the local HTTP.

What is known of one, as data; which dead letters are meant; and what becomes of those that are acted on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from outbox.api.outboxes import existing, for_each
from outbox.api.report import opened
from outbox.errors import OutboxError, StoreError, UsageError
from outbox.json_text import quoted
from outbox.measures import number
from outbox.outcome import State
from outbox.record import Record, Remembered, event_fields, payload_of
from outbox.record_line import joined, one_line
from outbox.store.dead import Choice, chosen, discard_each, replay_each
from outbox.store.directory import StateDirectory
from outbox.store.file import OutboxFile
from outbox.store.inspect import DeadLetter
from outbox.store.records import Found, Listed, find, listed
from outbox.store.wake import wake_daemon

STATES = {"waiting": State.WAITING, "in-flight": State.IN_FLIGHT}
"""What `list` may be asked for."""

_AT_ONCE = 200

# What waits -------------------------------------------------------------------------------------------------


def page_of(
    box: OutboxFile, *, kind: str | None, state: str | None, after: int, most: int
) -> tuple[list[Listed], bool]:
    """At most `most` of what waits or is in flight behind the seq `after`, and whether there is more."""
    events = listed(box, kind=kind, state=STATES[state] if state else None, after=after)
    page = list(islice(events, most))
    return page, next(events, None) is not None


def listed_data(agent: str, event: Listed) -> dict[str, object]:
    """An event that waits or is in flight, as data."""
    return {
        "agent": agent,
        "seq": event.seq,
        "state": str(State.IN_FLIGHT if event.in_flight else State.WAITING),
        "kind": event.kind,
        "idempotencyKey": event.key,
        "occurredAt": event.occurred_at_ms,
        "acceptedAt": event.accepted_at_ms,
        "attempts": event.attempts,
        "sends": event.sends,
        "bytes": event.size_bytes,
    }


def listed_from(data: Mapping[str, Any]) -> Listed:
    """The event that this data tells of. Pure."""
    return Listed(
        data["seq"], data["kind"], data["idempotencyKey"], data["occurredAt"], data["acceptedAt"],
        data["bytes"], data["sends"], data["attempts"], in_flight=data["state"] == State.IN_FLIGHT,
    )  # fmt: skip


# One event --------------------------------------------------------------------------------------------------


def shown(state: StateDirectory, agent: str, which: str, *, dead: bool = False) -> tuple[str, Found]:
    """The event with this number or key, and whose it is; with `dead` only a dead letter counts.

    Raises UsageError when it is not known.
    """
    with opened(state, existing(state, agent)) as box:
        found = find(box, which.replace(",", "") if _is_number(which) else which)
        if found is None or (dead and found.state != State.DEAD):
            raise UsageError(_unknown(agent, which, found), code="unknown_event")
        return box.agent, found


def _is_number(word: str) -> bool:
    digits = word.replace(",", "")  # messages write 10,234
    return digits.isascii() and digits.isdigit()


def _unknown(agent: str, which: str, found: Found | None) -> str:
    if found is not None:
        return f"Event {which!r} of {agent!r} is no dead letter; it is {found.state}. See: outbox show"
    return (
        f"No event {which!r} of {agent!r} is known. It was never accepted, or was delivered so long ago that "
        "its receipt is gone, or it was a dead letter that was replayed under a new number. "
        "See: outbox list, outbox dead list"
    )


def event_text(agent: str, found: Found) -> str:
    """All of it as one line of JSON in ASCII; the payload keeps its own text but for escapes and breaks."""
    record = found.record
    fields = {"agent": quoted(agent), "seq": str(record.seq), "state": quoted(found.state)}
    fields |= _receipt(record) if isinstance(record, Remembered) else _record(agent, record)
    return _ascii(joined(fields))


def _receipt(receipt: Remembered) -> dict[str, str]:
    return {
        "kind": quoted(receipt.kind),
        "idempotencyKey": quoted(receipt.key),
        "at": str(receipt.at_ms),
        "result": "null" if receipt.result is None else quoted(receipt.result),
    }


def _record(agent: str, record: Record) -> dict[str, str]:
    event, tries, letter = record.event, record.tries, record.letter
    fields = event_fields(event)
    fields["acceptedAt"] = str(record.accepted_at_ms)
    fields["payload"] = one_line(payload_of(record, agent)) if record.sound else "null"
    if event.replayed_from is not None:
        fields["replayedFrom"] = str(event.replayed_from)
    fields["attempts"], fields["sends"] = str(tries.attempts), str(tries.sends)
    fields["history"] = json.dumps([_named(entry) for entry in history_of(record)])
    if tries.progress is not None:
        fields["progress"] = tries.progress
    if letter is not None:
        texts = {"code": letter.code, "detail": letter.detail, "answer": letter.answer, "path": letter.path}
        fields["reason"] = quoted(letter.reason)
        fields["status"] = "null" if letter.status is None else str(letter.status)
        fields |= {name: quoted(text) for name, text in texts.items()}
        fields["failedAt"] = str(letter.failed_at_ms)
    return fields


def history_of(record: Record) -> list[dict[str, Any]]:
    """What went wrong so far, oldest first."""
    entries: list[dict[str, Any]] = json.loads(record.tries.history)
    return entries


def _named(entry: Mapping[str, Any]) -> dict[str, Any]:
    return {"at" if name == "at_ms" else name: value for name, value in entry.items()}


def _ascii(text: str) -> str:
    """JSON with everything beyond ASCII as escapes; such characters stand in strings only."""
    return text if text.isascii() else re.sub(r"[^\x00-\x7f]", lambda found: json.dumps(found[0])[1:-1], text)


# Dead letters -----------------------------------------------------------------------------------------------


def letter_data(agent: str, letter: DeadLetter) -> dict[str, object]:
    """A dead letter as data."""
    return {
        "agent": agent,
        "seq": letter.seq,
        "kind": letter.kind,
        "idempotencyKey": letter.key,
        "occurredAt": letter.occurred_at_ms,
        "reason": letter.reason,
        "status": letter.status,
        "detail": letter.detail,
        "attempts": letter.attempts,
        "failedAt": letter.failed_at_ms,
    }


def letter_from(data: Mapping[str, Any]) -> DeadLetter:
    """The dead letter that this data tells of. Pure."""
    return DeadLetter(
        data["seq"], data["kind"], data["idempotencyKey"], data["occurredAt"], data["reason"], data["status"],
        data["detail"], data["attempts"], data["failedAt"],
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Picked:
    """The dead letters of one agent that are meant."""

    agent: str
    path: Path
    letters: list[DeadLetter]


@dataclass(frozen=True, slots=True)
class Done:
    """What became of one: its new seq when it is replayed, and what the relay gets again; or why not."""

    agent: str
    letter: DeadLetter
    seq: int = 0
    key: str = ""
    note: str = ""
    error: OutboxError | None = None


Act = Callable[[OutboxFile, Sequence[DeadLetter]], list[Done]]


def picked(
    state: StateDirectory, agent: str | None, choice: Choice
) -> tuple[list[Picked], list[tuple[Path, StoreError]]]:
    """The dead letters that are meant, agent by agent, and the files that could not be read.

    Raises UsageError when one that is named by its number is not there.
    """
    found: list[Picked] = []

    def look(box: OutboxFile) -> None:
        letters = chosen(box, choice)
        missing = set(choice.seqs or ()) - {letter.seq for letter in letters}
        if missing:
            seqs = ", ".join(map(number, sorted(missing)))
            raise UsageError(
                f"There is no dead letter {seqs} of {box.agent!r} that fits. Nothing was changed. What there "
                "is: outbox dead list. What became of an event: outbox show",
                code="unknown_event",
            )
        if letters:
            found.append(Picked(box.agent, box.path, letters))

    return found, for_each(state, agent, look)


def do_each(state: StateDirectory, letters: Sequence[Picked], do: Act) -> Iterator[list[Done]]:
    """Act on them, some with each commit; the daemon is told of what it can send now.

    Once something was done, letters whose file fails are told with the StoreError; before that it is raised.
    """
    began = False
    for one in letters:
        start = 0
        try:
            with opened(state, one.path) as box:
                while some := one.letters[start : start + _AT_ONCE]:
                    done = do(box, some)
                    began, start = True, start + len(some)
                    yield done
        except StoreError as error:
            if not began:
                raise
            yield [Done(one.agent, letter, error=error) for letter in one.letters[start:]]
        wake_daemon(state.wake_socket, one.path.name)


def discarding(now_ms: int) -> Act:
    """Throw them away; the keys stay known."""

    def act(box: OutboxFile, letters: Sequence[DeadLetter]) -> list[Done]:
        results = discard_each(box, [letter.seq for letter in letters], now_ms)
        return [_done(box.agent, letter, result) for letter, result in zip(letters, results, strict=True)]

    return act


def replaying(now_ms: int) -> Act:
    """Put them behind what waits, as they were."""

    def act(box: OutboxFile, letters: Sequence[DeadLetter]) -> list[Done]:
        results = replay_each(box, [letter.seq for letter in letters], now_ms)
        return [_done(box.agent, letter, result) for letter, result in zip(letters, results, strict=True)]

    return act


def _done(agent: str, letter: DeadLetter, result: int | UsageError) -> Done:
    if isinstance(result, UsageError):
        return Done(agent, letter, error=result)
    return Done(agent, letter, result, letter.key)


def done_data(one: Done, *, replayed: bool) -> dict[str, object]:
    """What became of one dead letter, as data."""
    fields: dict[str, object] = {"agent": one.agent, "seq": one.letter.seq}
    if one.error is not None:
        return fields | {"error": {"code": one.error.code, "message": str(one.error)}}
    if replayed:
        return fields | {"newSeq": one.seq, "idempotencyKey": one.key}
    return fields | {"idempotencyKey": one.key, "state": "discarded"}
