"""All that is known of one event, as a value: it waits, is dead, or is gone and only remembered. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from outbox.errors import UsageError
from outbox.event import Accepted
from outbox.gap import GAP_KIND
from outbox.json_text import last_values, quoted
from outbox.wire_text import KEY, TIME, original_payload, wire_key


@dataclass(frozen=True, slots=True)
class Tries:
    """What a sender remembers of an event that did not go through at once; the texts are JSON."""

    sends: int = 0
    attempts: int = 0
    crashes: int = 0
    first_try_at_ms: int | None = None
    history: str = "[]"
    progress: str | None = None


@dataclass(frozen=True, slots=True)
class Letter:
    """Why an event is a dead letter, and what the relay answered."""

    reason: str
    failed_at_ms: int
    status: int | None = None
    code: str = ""
    detail: str = ""
    answer: str = ""
    path: str = ""


@dataclass(frozen=True, slots=True)
class Record:
    """One event with all that is known of it: it waits, or with a `letter` it is dead.

    `sound` is False for a text that is not what was stored.
    """

    event: Accepted
    seq: int
    accepted_at_ms: int
    tries: Tries = field(default_factory=Tries)
    letter: Letter | None = None
    sound: bool = True

    @property
    def is_gap(self) -> bool:
        """Whether it is no event, but tells the relay of events that are gone."""
        return self.event.kind == GAP_KIND


@dataclass(frozen=True, slots=True)
class Remembered:
    """What became of an event that is gone. `result` is the JSON text of a tool's result."""

    key: str
    seq: int
    kind: str
    digest: bytes
    state: str
    at_ms: int
    result: str | None = None


def payload_of(record: Record, agent: str) -> str:
    """The payload's own JSON text. Raises UsageError for a stored text that is damaged."""
    event = record.event
    if not record.sound:
        raise UsageError(f"The stored text of event {record.seq:,} of {agent!r} is damaged.")
    key = wire_key(event.key, agent, event.scoped)
    text = original_payload(
        event.kind, event.shape, event.wire_payload, key=key, occurred_at_ms=event.occurred_at_ms
    )
    return text.decode()


def event_fields(event: Accepted) -> dict[str, str]:
    """The fields that an event was given beside its payload, by their names in JSON, as JSON texts."""
    given = {
        "kind": quoted(event.kind),
        "mode": None if event.dedupe_key is None else quoted(event.mode),
        "dedupeKey": None if event.dedupe_key is None else quoted(event.dedupe_key),
        TIME: str(event.occurred_at_ms),
        KEY: quoted(event.key),
        "retry": event.retry,
        **(last_values(event.correlation) if event.correlation else {}),
        "traceparent": event.traceparent and quoted(event.traceparent),
        "tracestate": event.tracestate and quoted(event.tracestate),
    }
    return {name: text for name, text in given.items() if text is not None}
