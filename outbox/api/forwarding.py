"""A user's way to a daemon of another: by its socket, and while that is away into an outbox of one's own.

What waits there is handed over in order before anything newer, with its keys, so that a repeat is recognised.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

from outbox.api.client import LocalClient, error_in
from outbox.errors import OutboxError, StoreError, StoreHeld, Unavailable, UsageError
from outbox.event import uuid7
from outbox.gap import GAP_KIND
from outbox.json_text import last_values, quoted, with_members
from outbox.library import Outbox
from outbox.outcome import Ack, Bury, Reason, Release, Settlement, Trouble
from outbox.record import Record, event_fields, payload_of
from outbox.record_line import joined, one_line
from outbox.store.directory import StateDirectory
from outbox.store.enqueue import Receipt
from outbox.store.file import OutboxFile, open_outbox
from outbox.store.inspect import read_waiting
from outbox.store.records import find
from outbox.store.row import Row
from outbox.store.sending import Claim, claim, head, recover, settle

_MOST_LINES = 500
_MOST_BYTES = 4 * 1024 * 1024
_HELD_WAIT_S = 0.05
_WITHIN_S = 60.0
_NOT_NOW = frozenset(("full", "busy", "closed", "store", "damaged", "too_new", "held", "unavailable"))


@dataclass(slots=True)
class Forwarded:
    """What became of an own outbox: receipts by key, how many the daemon refused, what is left and why."""

    receipts: dict[str, Receipt] = field(default_factory=dict)
    refused: dict[str, UsageError] = field(default_factory=dict)
    left: int = 0
    why: OutboxError | None = None


def events_path(agent: str) -> str:
    """Where events of an agent are posted."""
    return f"/v1/agents/{quote(agent, safe='')}/events"


def waits(state: StateDirectory, agent: str) -> bool:
    """Whether something of this agent waits in the own outbox; raises StoreError."""
    path = state.outbox_path(agent)
    if not os.path.lexists(path):
        return False
    with closing(open_outbox(state, path)) as box:
        return head(box) is not None


def forward(state: StateDirectory, path: Path, client: LocalClient, within_s: float) -> Forwarded:
    """Hand over what waits in this outbox, in order, until all is gone, the daemon is away, or time is over.

    One process forwards at a time; another waits for it. Raises StoreError when the file cannot be used.
    """
    end, done = time.monotonic() + within_s, Forwarded()
    if not os.path.lexists(path):
        return done
    with closing(open_outbox(state, path)) as box:
        if not _becomes_sender(box, end):
            done.why = StoreHeld("Another process forwards these events just now.")
        else:
            try:
                _forward(box, client, end, done)
            finally:
                box.resign_sender()
        done.left = read_waiting(box)
    return done


def _becomes_sender(box: OutboxFile, end: float) -> bool:
    while True:
        try:
            box.become_sender()
        except StoreHeld:
            if time.monotonic() >= end:
                return False
            time.sleep(_HELD_WAIT_S)
        else:
            return True


def _forward(box: OutboxFile, client: LocalClient, end: float, done: Forwarded) -> None:
    recover(box, now_ms=_now_ms())
    while done.why is None and (taken := claim(box, _run_of, unsafe=False, now_ms=_now_ms())):
        settlements: list[Settlement] = []
        try:
            settlements = list(_handed_over(box, taken, client, end, done))
        finally:
            settle(box, taken, settlements, now_ms=_now_ms())


def _run_of(rows: Iterator[Row]) -> list[Row]:
    run: list[Row] = []
    size = 0
    for row in rows:
        size += row.size_bytes
        if run and (len(run) >= _MOST_LINES or size > _MOST_BYTES):
            break
        run.append(row)
    return run


def _handed_over(
    box: OutboxFile, taken: Claim, client: LocalClient, end: float, done: Forwarded
) -> Iterator[Settlement]:
    """Post the rows of a claim; what the daemon took is ours no more, what it refused is a dead letter."""
    sound = [row for row in taken.rows if row.sound]
    for row in taken.rows:
        if not row.sound:
            trouble = Trouble(_now_ms(), "damaged", detail="the stored text does not match its checksum")
            yield Bury(row.seq, Reason.DAMAGED, row.attempts, trouble, sent=False)
    results: list[Receipt | OutboxError] = []
    path = events_path(box.agent)
    left_s = max(0.1, end - time.monotonic())
    try:
        results = _posted(client, box.agent, [_line(box, row) for row in sound], left_s) if sound else []
    except OutboxError as error:
        done.why = error
    for row, said in zip(sound, results, strict=False):
        if isinstance(said, Receipt):
            done.receipts[row.key] = said
            yield Ack(row.seq)
        elif said.code in _NOT_NOW:
            done.why = done.why or said
            yield Release(row.seq, sent=True, attempts=row.attempts)
            return
        else:
            done.refused[row.key] = UsageError(str(said), code=said.code)
            trouble = Trouble(_now_ms(), "rejected", 422, said.code, str(said), path=path)
            yield Bury(row.seq, Reason.REJECTED, row.attempts, trouble)
    if len(results) < len(sound):
        done.why = done.why or Unavailable("The daemon ended its answer before it had taken all.")


def _posted(
    client: LocalClient, agent: str, lines: Sequence[bytes], within_s: float
) -> list[Receipt | OutboxError]:
    """What became of each line; fewer when the daemon ended its answer. Raises as `post_lines`."""
    results = client.post_lines(events_path(agent), lines, within_s)
    try:
        return [refusal(result) or receipt_of(result) for result in results[: len(lines)]]
    except (AttributeError, KeyError, TypeError):
        raise Unavailable(
            "What the socket answers is no answer of a daemon. Whether the events were taken is not known; "
            "they go again with their keys. Check OUTBOX_SOCKET."
        ) from None


def _line(box: OutboxFile, row: Row) -> bytes:
    """The event as it was given, with the key and the time that it has."""
    if row.kind == GAP_KIND:  # it was given its words when it was claimed
        kind, payload = '"session-message"', row.wire_payload.decode()
        fields = {"kind": kind, "occurredAt": str(row.occurred_at_ms), "idempotencyKey": quoted(row.key)}
        return joined({**fields, "payload": payload}).encode()
    found = find(box, str(row.seq))
    if found is None or not isinstance(found.record, Record):
        raise StoreError(f"Event {row.seq:,} of {box.agent!r} is gone. Nothing else was changed.")
    record = found.record
    payload = one_line(payload_of(record, box.agent))
    return joined({**event_fields(record.event), "payload": payload}).encode()


def refusal(result: Mapping[str, Any]) -> OutboxError | None:
    """The error of one line's result."""
    told = result.get("error")
    if not isinstance(told, dict):
        return None
    code, message = str(told.get("code")), str(told.get("message"))
    if code in _NOT_NOW:
        status = {"full": 507, "busy": 503, "closed": 503, "unavailable": 503}.get(code, 500)
        error = error_in(status, {"code": code, "detail": message})
        error.code = code
        return error
    return UsageError(message, code=code)


def receipt_of(result: Mapping[str, Any]) -> Receipt:
    """The receipt of one line's result; raises KeyError or TypeError for what is none."""
    receipt = Receipt(result["seq"], result["idempotencyKey"], result["duplicate"], result["state"])
    if [type(value) for value in receipt] != [int, str, bool, str]:
        raise TypeError("values of other types")
    return receipt


class RemoteOutbox:
    """An agent's outbox at a daemon of another user; `kept` counts what waits in the own one instead."""

    def __init__(self, agent: str, client: LocalClient, own: Path | None) -> None:
        """Nothing is asked yet; `own` is this user's state directory."""
        self.agent = agent
        self.kept = 0
        self.why = ""
        self._client = client
        self._own = None if own is None else StateDirectory(own)

    def enqueue_many(self, events: Sequence[str | bytes]) -> list[Receipt | OutboxError]:
        """Store events, given as JSON texts; a receipt or an error for each of them, in order.

        They are on the daemon's disk when this returns, or, while it is away, on this user's own. Raises
        Unavailable when neither can be, StoreError.
        """
        stamped = [_stamped(event) for event in events]
        good = [event for event in stamped if isinstance(event, bytes)]
        stored = iter(self._store(good) if good else ())
        return [event if isinstance(event, UsageError) else next(stored) for event in stamped]

    def _store(self, events: Sequence[bytes]) -> list[Receipt | OutboxError]:
        if self._own is not None and waits(self._own, self.agent):
            return self._behind(self._own, events)
        try:
            told = _posted(self._client, self.agent, events, _WITHIN_S)
        except Unavailable as error:
            return self._keep(events, error)
        missing = len(events) - len(told)
        if missing:
            told += self._keep(events[-missing:], Unavailable("The daemon ended its answer too early."))
        return told

    def _behind(self, own: StateDirectory, events: Sequence[bytes]) -> list[Receipt | OutboxError]:
        """Put them behind what waits here, and hand over all of it."""
        results = self._put(own, events)
        done = forward(own, own.outbox_path(self.agent), self._client, _WITHIN_S)
        self.kept, self.why = done.left, str(done.why or "")
        return [_latest(result, done) for result in results]

    def _keep(self, events: Sequence[bytes], error: Unavailable) -> list[Receipt | OutboxError]:
        if self._own is None:
            raise error
        results = self._put(self._own, events)
        self.kept += sum(isinstance(result, Receipt) and not result.duplicate for result in results)
        self.why = str(error)
        return results

    def _put(self, own: StateDirectory, events: Sequence[bytes]) -> list[Receipt | OutboxError]:
        with Outbox.open(self.agent, state_dir=own.path) as outbox:
            return outbox.enqueue_many(events)


def _latest(result: Receipt | OutboxError, done: Forwarded) -> Receipt | OutboxError:
    if isinstance(result, OutboxError):
        return result
    key = result.idempotency_key
    return done.receipts.get(key) or done.refused.get(key) or result


def _stamped(event: str | bytes) -> bytes | UsageError:
    """The event with a key and a time of its own, so that it is the same one wherever it is stored."""
    try:
        text = event if isinstance(event, str) else event.decode("utf-8")
        given = last_values(text)
        now_ms = _now_ms()
        missing: dict[str, str | None] = {}
        if given.get("idempotencyKey", "null") == "null":
            missing["idempotencyKey"] = quoted(uuid7(now_ms, os.urandom(10)))
        if given.get("occurredAt", "null") == "null":
            missing["occurredAt"] = str(now_ms)
        return (with_members(text, missing) if missing else text).encode()
    except UnicodeDecodeError as error:
        return UsageError(f"not UTF-8 (byte {error.start + 1:,})", code="not_json")
    except UsageError as error:
        return error


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
