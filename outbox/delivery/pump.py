"""The pump of one agent: claims its head run, sends it in one request, and settles what came back.

It holds what is only worth remembering while the process lives: the agent's own wait, group sizes, fences. What an
answer means stands in verdict.py, what is known of the relay in gate.py.
"""

from __future__ import annotations

import dataclasses
import random
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from outbox.bounds import Bounds
from outbox.delivery.clock import Clock
from outbox.delivery.gate import Gate, Permit, Wait
from outbox.delivery.grouping import Grouping, Size, take_run
from outbox.delivery.parcel import Form, Parcel, Routes, group, key_of, origin_of, single
from outbox.delivery.parts import ArchiveProgress, BatchProgress, open_batch, take_messages
from outbox.delivery.verdict import Effect, Evidence, Step, Verdict, evidence_wanted, judge, judge_group
from outbox.errors import StoreError, StoreHeld
from outbox.event import Limits
from outbox.outcome import Ack, Blocked, Bury, Reason, Release, Settlement, Trouble
from outbox.policy import Schedule, backoff_ms, schedule_of
from outbox.store.file import OutboxFile
from outbox.store.open_files import OpenFiles
from outbox.store.receipts import forget_old
from outbox.store.row import Row
from outbox.store.sending import Claim, claim, head, note_blocked, recover, settle
from outbox.wire_text import archive_chunks, message_keys
from relay_client import (
    Answer,
    Failure,
    Reading,
    RelayClient,
    Sort,
    TokenUnavailable,
    read_archive_chunk,
    read_batch,
    read_health,
    read_single,
    read_tool_call,
)


_TIDY_EVERY_MS = 60_000


class Tokens(Protocol):
    """Where the token comes from (relay_client.auth)."""

    def token(self) -> str | None:
        """The token to send now; raises TokenUnavailable."""

    def refresh(self) -> bool:
        """Look again; True when there is another token than before."""

    def fingerprint(self) -> str:
        """A name of the token that tells nothing of it."""


@dataclass(slots=True)
class Delivery:
    """What the pumps of a state directory share."""

    client: RelayClient
    tokens: Tokens
    gate: Gate
    files: OpenFiles
    routes: Routes
    schedule: Schedule
    size: Size
    clock: Clock
    rng: random.Random
    max_retry_after_ms: int = 3_600_000
    log: Callable[[str, dict[str, Any]], None] = lambda event, fields: None
    rules: tuple[Limits, Bounds] | None = None  # written into each outbox file for its producers
    flushing: bool = False
    deadline: float | None = None  # monotonic seconds: no request goes on beyond it


@dataclass(frozen=True, slots=True)
class Again:
    """There is more to do at once."""


@dataclass(frozen=True, slots=True)
class Sleep:
    """Nothing before this monotonic moment; None: nothing until something new is enqueued."""

    until_ms: int | None


@dataclass(frozen=True, slots=True)
class AtGate:
    """Waits for the gate ("" the relay, else a path)."""

    tag: str


Turn = Again | Sleep | AtGate


class Pump:
    """One agent's sender. `turn` is called by one thread at a time."""

    def __init__(self, path: Path, delivery: Delivery) -> None:
        """Nothing is opened yet."""
        self.path = path
        self.agent = ""
        self._d = delivery
        self._grouping = Grouping(delivery.size.items)
        self._part_grouping = Grouping(delivery.size.items)
        self._head_seq = 0
        self._marker: int | None = None  # accepted under this token when the head was sent last
        self._path_marker: int | None = None
        self._failures = 0
        self._until_ms = 0
        self._blocked: Blocked | None = None
        self._tried_in_flush: set[int] = set()
        self._is_sender = False
        self._lost_track = False
        self._cut_after_sending = False
        self._tidy_at_ms = 0
        self._unsettled: tuple[Claim, list[Settlement], Blocked | None] | None = None

    # The turn ----------------------------------------------------------------------------------------------

    def turn(self) -> Turn:
        """Do one thing: at most one request. Raises StoreError for trouble with the file."""
        with self._d.files.borrow(self.path) as box:
            self._enter(box)
            if box.one("SELECT paused_at_ms FROM outbox")[0] is not None:
                return Sleep(None)
            row = head(box)
            if row is None:
                self._rest(box)
                return Sleep(None)
            self._look_at(row)
            now = self._d.clock.monotonic_ms()
            if now < self._until_ms:
                return Sleep(self._until_ms)
            return self._send_head(box, row)

    def begin_flush(self) -> None:
        """A new flush may try each event once more, at once."""
        self._tried_in_flush.clear()
        if self._blocked is None or self._blocked.reason != "retry_after":
            self._until_ms = 0

    def forget_wait(self) -> None:
        """Do not wait any longer, whatever the reason was."""
        self._failures, self._until_ms = 0, 0

    def resign(self) -> None:
        """Give the sender's place back."""
        if self._is_sender:
            with self._d.files.borrow(self.path) as box:
                box.resign_sender()
            self._is_sender = False

    def lost_track(self) -> None:
        """A turn ended by a fault of ours: what it had claimed is taken over like a dead sender's."""
        self._lost_track = True

    def _enter(self, box: OutboxFile) -> None:
        """Become the sender, and take over what a dead one left in flight."""
        if not self._is_sender:
            self.agent = box.agent
            box.become_sender()
            self._is_sender = self._lost_track = True
            if self._d.rules is not None:
                box.set_rules(*self._d.rules)
        if self._unsettled is not None:
            taken, settlements, blocked = self._unsettled
            settle(box, taken, settlements, now_ms=self._d.clock.wall_ms(), blocked=blocked)
            self._unsettled = None
        if self._lost_track:
            for seq in recover(box, now_ms=self._d.clock.wall_ms()):
                self._log("dead_letter", level="warning", seq=seq, reason=str(Reason.OUTCOME_UNKNOWN))
            self._lost_track = False

    def _look_at(self, row: Row) -> None:
        if row.seq != self._head_seq:
            self._head_seq = row.seq
            self._marker = self._path_marker = None
            if self._blocked is None or self._blocked.reason != "retry_after":
                self._failures, self._until_ms = 0, 0

    def _rest(self, box: OutboxFile) -> None:
        """Nothing waits: forget what stood in the way, drop old receipts, give space back."""
        if self._blocked is not None or box.maybe("SELECT 1 FROM outbox WHERE blocked_reason IS NOT NULL"):
            note_blocked(box, None)
        self._blocked = None
        now = self._d.clock.monotonic_ms()
        if now >= self._tidy_at_ms:
            self._tidy_at_ms = now + _TIDY_EVERY_MS
            forget_old(box, box.bounds, self._d.clock.wall_ms())
            box.give_space_back()

    def _send_head(self, box: OutboxFile, row: Row) -> Turn:
        path = self._d.routes.path_of(row)
        if not row.sound:
            return self._bury_unsent(box, Reason.DAMAGED, "the stored text does not match its checksum")
        if path is None:
            return self._bury_unsent(
                box, Reason.UNKNOWN_KIND, f'kind "{row.kind}" is not known here; replay it after an upgrade'
            )
        if self._d.gate.is_dead_end(path):
            return self._bury_unsent(box, Reason.NO_ENDPOINT, f"the relay has no {path}", path=path)
        if self._d.gate.is_stuck(row.first_try_at_ms, self._token_name()):
            return self._bury_unsent(box, Reason.STUCK, self._blocked.detail if self._blocked else "")
        if self._d.flushing and row.seq in self._tried_in_flush:
            return Sleep(None)
        unsafe = self._d.routes.is_unsafe(row)
        if unsafe and (wait := self._d.gate.verdict_wait_ms(path, Reason.OUTCOME_UNKNOWN)):
            return self._hold(box, "mass_rejection", "the outcome of the calls before is unknown", wait)
        admitted = self._d.gate.admit(path, unsafe=unsafe)
        if isinstance(admitted, Wait):
            return AtGate(admitted.tag)
        try:
            return self._with_permit(box, admitted, row, path, unsafe=unsafe)
        finally:
            self._d.gate.finish(admitted)

    def _with_permit(
        self, box: OutboxFile, permit: Permit, row: Row, path: str, *, unsafe: bool
    ) -> Turn:
        try:
            token = self._d.tokens.token()
        except TokenUnavailable as error:
            self._d.gate.close(permit, "no_token", str(error))
            return AtGate("")
        if permit.ask_health:
            if self._healthy():
                self._d.gate.proven_by_health(permit)
                return Again()
            self._d.gate.close(permit, self._d.gate.relay.reason or "unreachable", "the relay does not answer health")
            return AtGate("")
        if unsafe and not self._d.gate.era_known and (turn := self._find_era(permit, token, path)):
            return turn
        if row.shape == "batch":
            return self._send_batch_part(box, permit, token)
        if row.shape == "archive":
            return self._send_chunk(box, permit, token, path)
        return self._send_run(box, permit, token, path, unsafe=unsafe)

    def _find_era(self, permit: Permit, token: str | None, path: str) -> Turn | None:
        """Ask for the tools before the first unsafe call, so that no such call finds out what is spoken."""
        request_id = str(uuid.uuid4())
        answer = self._d.client.discover_tools(token=token, request_id=request_id, deadline=self._d.deadline)
        if answer.failure is Failure.STOPPED:
            return Sleep(None)
        reading = self._read(Form.TOOL, 1, answer, request_id)
        if reading.sort is Sort.ACCEPTED:
            self._d.gate.era_known = True
            self._d.gate.works(permit)
            return None
        verdict = judge(reading, unsafe=False, works=self._evidence(reading, path))
        self._report(permit, verdict, reading, path)
        if verdict.effect in {Effect.AGENT, Effect.WORKS}:
            self._d.gate.hold_path(permit, verdict.hold or str(reading.sort), reading.detail)
        return AtGate(path)

    # One request -------------------------------------------------------------------------------------------

    def _send_run(
        self, box: OutboxFile, permit: Permit, token: str | None, path: str, *, unsafe: bool
    ) -> Turn:
        taken = claim(box, self._choose(path, permit), unsafe=unsafe, now_ms=self._d.clock.wall_ms())
        if taken is None:
            return Again()
        rows = list(taken.rows)
        if len(rows) > 1:
            parcel = group(self._d.routes, box.agent, box.stream, rows)
        else:
            parcel = single(self._d.routes, box.agent, box.stream, rows[0])
        reading = self._exchange(parcel, token)
        if reading is None:
            return self._stopped(box, taken, unsafe=unsafe)
        if len(rows) == 1:
            return self._settle_each(box, taken, permit, path, [reading], unsafe=unsafe, alone=True)
        if reading.sort is Sort.ITEMS:
            self._grouping.grow()
            return self._settle_each(box, taken, permit, path, list(reading.items), unsafe=False, alone=False)
        if reading.sort is Sort.ACCEPTED:
            self._grouping.grow()
            return self._settle_each(box, taken, permit, path, [reading] * len(rows), unsafe=False, alone=False)
        return self._settle_group(box, taken, permit, path, reading, parcel)

    def _choose(self, path: str, permit: Permit) -> Callable[[Iterator[Row]], list[Row]]:
        gate, routes = self._d.gate, self._d.routes
        alone = permit.probe or permit.path_probe or gate.budget_spent(path) or gate.batches_off(routes.batch)
        size = Size(
            1 if alone else min(self._grouping.items, self._d.size.items),
            gate.most_bytes(routes.batch, self._d.size.bytes),
        )
        return lambda rows: take_run(rows, size, self._grouping.fence(self._head_seq))

    def _exchange(self, parcel: Parcel, token: str | None) -> Reading | None:
        """Send one request and read its answer; None when we cut it off ourselves."""
        client = self._d.client
        self._marker = self._d.gate.accept_count(self._token_name()) if self._marker is None else self._marker
        if self._path_marker is None:
            self._path_marker = self._d.gate.other_path_count(parcel.path)
        request_id = str(uuid.uuid4())
        if parcel.form is Form.TOOL:
            answer = client.call_tool(
                parcel.body,
                tool=parcel.tool,
                token=token,
                key=parcel.key or "",
                origin=parcel.origin,
                request_id=request_id,
                deadline=self._d.deadline,
            )
        else:
            answer = client.post_event(
                parcel.path,
                parcel.body,
                token=token,
                key=parcel.key,
                origin=parcel.origin,
                deadline=self._d.deadline,
            )
        if answer.failure is Failure.STOPPED:
            self._cut_after_sending = answer.sent
            return None
        return self._read(parcel.form, parcel.count, answer, request_id)

    def _read(self, form: Form, count: int, answer: Answer, request_id: str) -> Reading:
        most, now_ms = self._d.max_retry_after_ms, self._d.clock.wall_ms()
        match form:
            case Form.GROUP:
                return read_batch(answer, count, now_ms=now_ms, max_retry_after_ms=most)
            case Form.ARCHIVE:
                return read_archive_chunk(answer, now_ms=now_ms, max_retry_after_ms=most)
            case Form.TOOL:
                return read_tool_call(answer, request_id, now_ms=now_ms, max_retry_after_ms=most)
            case _:
                return read_single(answer, now_ms=now_ms, max_retry_after_ms=most)

    # Settling ----------------------------------------------------------------------------------------------

    def _settle_each(
        self,
        box: OutboxFile,
        taken: Claim,
        permit: Permit,
        path: str,
        readings: list[Reading],
        *,
        unsafe: bool,
        alone: bool,
    ) -> Turn:
        """Apply one answer to each event, one by one, in order."""
        settlements: list[Settlement] = []
        held: tuple[Reading, Verdict, int] | None = None
        accepted_here = any(reading.sort is Sort.ACCEPTED for reading in readings)
        for row, reading in zip(taken.rows, readings, strict=True):
            works = (not alone and accepted_here) or self._evidence(reading, path)
            verdict = judge(reading, unsafe=unsafe, works=works)
            settlement, wait_ms = self._apply(box, row, reading, verdict, path)
            settlements.append(settlement)
            self._report(permit, verdict, reading, path)
            if isinstance(settlement, Release) and held is None:
                held = (reading, verdict, wait_ms)
        return self._finish(box, taken, settlements, held)

    def _apply(
        self, box: OutboxFile, row: Row, reading: Reading, verdict: Verdict, path: str
    ) -> tuple[Settlement, int]:
        """The settlement of one event, and the wait that the blame budget asks for."""
        if verdict.step is Step.ACK:
            self._log("delivered", level="debug", seq=row.seq, kind=row.kind, attempt=row.sends + 1)
            tool_error = reading.sort is Sort.TOOL_ERROR
            if tool_error:
                self._log("tool_error", seq=row.seq, kind=row.kind, detail=reading.detail)
            return Ack(row.seq, reading.result, tool_error), 0
        trouble = self._trouble(reading, verdict.hold or str(verdict.reason), path)
        attempts = row.attempts + verdict.counts
        schedule = schedule_of(self._d.schedule, row.extra.get("retry"))
        reason = verdict.reason
        due = verdict.step is Step.BURY or (
            verdict.counts and (attempts >= schedule.max_attempts or self._d.gate.was_dead_end(path))
        )
        if self._d.flushing and verdict.counts:
            self._tried_in_flush.add(row.seq)
        if not due or reason is None:
            sent = verdict.sent
            return Release(row.seq, sent, attempts, trouble if sent else None, row.progress), 0
        wait_ms = self._d.gate.verdict_wait_ms(path, reason)
        final = reason is Reason.OUTCOME_UNKNOWN or (
            reason is Reason.NO_ENDPOINT and self._d.gate.was_dead_end(path)
        )
        if wait_ms and not final:
            return Release(row.seq, sent=True, attempts=attempts, trouble=trouble, progress=row.progress), wait_ms
        return self._bury(row, reason, attempts, trouble, path), 0

    def _bury(self, row: Row, reason: Reason, attempts: int, trouble: Trouble, path: str) -> Bury:
        self._d.gate.spend(path, reason)
        if reason is Reason.NO_ENDPOINT and path != self._d.routes.messages:
            self._d.gate.make_dead_end(path)
        self._log(
            "dead_letter", level="warning", seq=row.seq, kind=row.kind, reason=str(reason), status=trouble.status,
            detail=trouble.detail,
        )  # fmt: skip
        return Bury(row.seq, reason, attempts, trouble, row.progress)

    def _settle_group(
        self, box: OutboxFile, taken: Claim, permit: Permit, path: str, reading: Reading, parcel: Parcel
    ) -> Turn:
        """Apply one answer to a whole group: nobody in it is blamed."""
        seqs = [row.seq for row in taken.rows]
        gate, batch_path = self._d.gate, self._d.routes.batch
        if reading.sort is Sort.NO_ENDPOINT:
            gate.turn_batches_off(batch_path)
            return self._finish(box, taken, [Release(row.seq, False, row.attempts) for row in taken.rows], None)
        verdict = judge_group(reading, works=self._evidence(reading, path))
        match verdict.step:
            case Step.SPLIT:
                self._grouping.split(seqs)
                if reading.sort is Sort.TOO_LARGE:
                    gate.learn_bytes(batch_path, len(parcel.body))
            case Step.SINGLY:
                self._grouping.singly(seqs)
                gate.unclear_batch(batch_path)
            case Step.HALVE:
                self._grouping.halve(len(seqs))
            case _:
                pass
        self._report(permit, verdict, reading, path)
        trouble = self._trouble(reading, verdict.hold, path) if verdict.hold else None
        settlements: list[Settlement] = [
            Release(row.seq, verdict.sent, row.attempts, None if index else trouble, row.progress)
            for index, row in enumerate(taken.rows)
        ]
        held = (reading, verdict, 0) if verdict.step is Step.RELEASE else None
        return self._finish(box, taken, settlements, held)

    def _finish(
        self,
        box: OutboxFile,
        taken: Claim,
        settlements: list[Settlement],
        held: tuple[Reading, Verdict, int] | None,
    ) -> Turn:
        """Write it down, and decide when this agent goes on."""
        now_ms = self._d.clock.wall_ms()
        blocked = self._next_wait(*held) if held else None
        if held is None:
            self._failures, self._until_ms = 0, 0
        self._blocked = blocked
        try:
            settle(box, taken, settlements, now_ms=now_ms, blocked=blocked)
        except StoreHeld:
            raise
        except StoreError:
            self._unsettled = (taken, settlements, blocked)  # written later: what happened, happened
            raise
        return Sleep(self._until_ms) if blocked and self._until_ms else Again()

    def _next_wait(self, reading: Reading, verdict: Verdict, verdict_wait_ms: int) -> Blocked | None:
        """The agent's own wait after an event that stays; None when only the gate decides."""
        clock = self._d.clock
        asked_ms = reading.retry_after_ms
        own = verdict.effect in {Effect.AGENT, Effect.WORKS} or verdict.counts
        mended = reading.sort is Sort.FORBIDDEN and self._d.tokens.refresh()
        if mended or (not own and asked_ms is None):
            self._until_ms = 0
            return None
        self._failures += 1
        wait_ms = backoff_ms(self._d.schedule, self._failures, self._d.rng.random())
        reason = verdict.hold or str(verdict.reason or "")
        detail = reading.detail
        if verdict_wait_ms:
            reason, wait_ms = "mass_rejection", min(max(verdict_wait_ms, 50), max(wait_ms, 1_000))
        if self._d.flushing:
            wait_ms = min(wait_ms, 150)
        if asked_ms is not None and asked_ms >= wait_ms:
            reason, wait_ms = "retry_after", asked_ms
        self._until_ms = clock.monotonic_ms() + wait_ms
        now_ms = clock.wall_ms()
        since_ms = self._blocked.since_ms if self._blocked else now_ms
        if self._blocked is None or self._blocked.reason != reason:
            self._log("held", agent_wide=True, seq=self._head_seq, reason=reason, detail=detail, retry_in_ms=wait_ms)
        return Blocked(reason, since_ms, now_ms + wait_ms, detail)

    def _report(self, permit: Permit, verdict: Verdict, reading: Reading, path: str) -> None:
        gate = self._d.gate
        match verdict.effect:
            case Effect.ACCEPTED:
                gate.accepted(permit, self._token_name(), path=path)
            case Effect.WORKS:
                gate.works(permit)
            case Effect.CLOSE:
                spent = reading.sort in {Sort.FAILED, Sort.LOST} and gate.budget_spent(path)
                reason = "mass_rejection" if spent else verdict.hold or str(reading.sort)
                gate.close(permit, reason, reading.detail)
            case Effect.HOLD_PATH:
                gate.hold_path(permit, verdict.hold, reading.detail)
            case Effect.TOKEN:
                gate.close(permit, "unauthorized", reading.detail)
                if self._d.tokens.refresh():
                    gate.retry_now()
            case Effect.AGENT:
                pass

    def _evidence(self, reading: Reading, path: str) -> bool:
        """Whether the relay provably works: it accepted another event since this one's last attempt, or (while
        the budget is whole) answers health."""
        wanted = evidence_wanted(reading)
        if wanted is Evidence.NONE:
            return False
        gate = self._d.gate
        if reading.sort is Sort.NO_ENDPOINT:
            proven = gate.other_path_count(path) > (self._path_marker or 0)
        else:
            proven = gate.accept_count(self._token_name()) > (self._marker or 0)
        self._marker = gate.accept_count(self._token_name())
        self._path_marker = gate.other_path_count(path)
        if proven or wanted is Evidence.ACCEPTANCE:
            return proven
        return not gate.verdict_wait_ms(path, Reason.EXHAUSTED) and self._healthy()

    def _healthy(self) -> bool:
        return self._d.gate.ask_health(lambda: read_health(self._d.client.health(deadline=self._d.deadline)))

    # Events of several requests ----------------------------------------------------------------------------

    def _send_batch_part(self, box: OutboxFile, permit: Permit, token: str | None) -> Turn:
        """Send the next messages of a batch event; a message that is refused alone does not stop the others."""
        taken = claim(box, lambda rows: [next(rows)], unsafe=False, now_ms=self._d.clock.wall_ms())
        if taken is None:
            return Again()
        row, routes, gate = taken.rows[0], self._d.routes, self._d.gate
        batch, progress = open_batch(row.wire_payload), BatchProgress.decode(row.progress)
        left = progress.left(len(batch.messages))
        if not left:
            return self._end_batch(box, taken, progress, routes.messages)
        alone = permit.probe or permit.path_probe or gate.batches_off(routes.batch)
        most = 1 if alone else min(self._part_grouping.items, self._d.size.items)
        run = take_messages(
            batch, left, most, gate.most_bytes(routes.batch, self._d.size.bytes),
            self._part_grouping.fence(left[0]),
        )  # fmt: skip
        origin = origin_of(box.agent, box.stream, row)
        if len(run) == 1:
            body = batch.messages[run[0]]
            parcel = Parcel(Form.SINGLE, routes.messages, body, message_keys([body])[0], origin)
        else:
            parcel = Parcel(Form.GROUP, routes.batch, batch.body(run), None, origin, count=len(run))
        reading = self._exchange(parcel, token)
        if reading is None:
            return self._stopped(box, taken, unsafe=False)
        return self._settle_part(box, taken, permit, progress, run, len(left), reading, parcel)

    def _settle_part(
        self,
        box: OutboxFile,
        taken: Claim,
        permit: Permit,
        progress: BatchProgress,
        run: list[int],
        left: int,
        reading: Reading,
        parcel: Parcel,
    ) -> Turn:
        row, routes, gate, grouping = taken.rows[0], self._d.routes, self._d.gate, self._part_grouping
        path = routes.messages
        items = list(reading.items) if reading.sort is Sort.ITEMS else [reading] * len(run)
        split = {Sort.REFUSED, Sort.TOO_LARGE, Sort.CONFLICT, Sort.UNCLEAR_BATCH, Sort.NO_ENDPOINT}
        if len(run) > 1 and reading.sort is not Sort.ITEMS and reading.sort is not Sort.ACCEPTED:
            verdict = judge_group(reading, works=self._evidence(reading, path))
            if reading.sort in split:
                if reading.sort is Sort.NO_ENDPOINT:
                    gate.turn_batches_off(routes.batch)
                elif reading.sort is Sort.UNCLEAR_BATCH:
                    gate.unclear_batch(routes.batch)
                    grouping.singly(run)
                else:
                    grouping.split(run)
                    if reading.sort is Sort.TOO_LARGE:
                        gate.learn_bytes(routes.batch, len(parcel.body))
                return self._finish(box, taken, [Release(row.seq, True, row.attempts, None, row.progress)], None)
            if verdict.step is Step.HALVE:
                grouping.halve(len(run))
                return self._finish(box, taken, [Release(row.seq, True, row.attempts, None, row.progress)], None)
            self._report(permit, verdict, reading, path)
            trouble = self._trouble(reading, verdict.hold, path)
            return self._finish(
                box, taken, [Release(row.seq, verdict.sent, row.attempts, trouble, row.progress)],
                (reading, verdict, 0),
            )  # fmt: skip
        held: tuple[Reading, Verdict, int] | None = None
        accepted_here = len(run) > 1 and any(item.sort is Sort.ACCEPTED for item in items)
        attempts, trouble_or_none = row.attempts, None
        for index, item in zip(run, items, strict=True):
            verdict = judge(item, unsafe=False, works=accepted_here or self._evidence(item, path))
            self._report(permit, verdict, item, path)
            if verdict.step is Step.ACK:
                progress.stored.add(index)
            elif verdict.step is Step.BURY:
                progress.refused[index] = f"{item.status or ''} {item.code or item.detail}".strip()
            elif held is None:
                held = (item, verdict, 0)
                attempts += verdict.counts
                trouble_or_none = self._trouble(item, verdict.hold, path)
        if held is None:
            grouping.grow()
            attempts = 0
            if left == len(run):
                return self._end_batch(box, taken, progress, path)
        elif attempts >= schedule_of(self._d.schedule, row.extra.get("retry")).max_attempts:
            wait_ms = gate.verdict_wait_ms(path, Reason.EXHAUSTED)
            if not wait_ms and trouble_or_none:
                bury = self._bury(row, Reason.EXHAUSTED, attempts, trouble_or_none, path)
                return self._finish(box, taken, [dataclasses.replace(bury, progress=progress.encode())], None)
            held = (held[0], held[1], wait_ms)
        settlement = Release(row.seq, True, attempts, trouble_or_none, progress.encode())
        return self._finish(box, taken, [settlement], held)

    def _end_batch(self, box: OutboxFile, taken: Claim, progress: BatchProgress, path: str) -> Turn:
        row = taken.rows[0]
        if not progress.refused:
            self._log("delivered", level="debug", seq=row.seq, kind=row.kind, attempt=row.sends + 1)
            return self._finish(box, taken, [Ack(row.seq)], None)
        total = len(progress.stored) + len(progress.refused)
        said = "; ".join(f"message {index}: {text}" for index, text in list(progress.refused.items())[:5])
        detail = f"{len(progress.refused)} of {total} messages were refused: {said}"
        trouble = Trouble(self._d.clock.wall_ms(), "rejected", detail=detail, path=path)
        wait_ms = self._d.gate.verdict_wait_ms(path, Reason.REJECTED)
        if wait_ms:
            reading = Reading(Sort.REFUSED, detail=detail)
            verdict = Verdict(Step.BURY, Effect.WORKS, Reason.REJECTED)
            release = Release(row.seq, True, row.attempts, trouble, progress.encode())
            return self._finish(box, taken, [release], (reading, verdict, wait_ms))
        bury = self._bury(row, Reason.REJECTED, row.attempts, trouble, path)
        return self._finish(box, taken, [dataclasses.replace(bury, progress=progress.encode())], None)

    def _send_chunk(self, box: OutboxFile, permit: Permit, token: str | None, path: str) -> Turn:
        """Send the next chunk of an archive; what is through is saved before the next one goes."""
        taken = claim(box, lambda rows: [next(rows)], unsafe=False, now_ms=self._d.clock.wall_ms())
        if taken is None:
            return Again()
        row = taken.rows[0]
        parts, progress = archive_chunks(row.wire_payload), ArchiveProgress.decode(row.progress)
        key = key_of(box.agent, row)
        body = parts.chunk(progress.chunks, progress.generation, key)
        parcel = Parcel(
            Form.ARCHIVE, path, body, f"{key}:{progress.chunks}", origin_of(box.agent, box.stream, row)
        )
        reading = self._exchange(parcel, token)
        if reading is None:
            return self._stopped(box, taken, unsafe=False)
        if reading.sort not in {Sort.ACCEPTED, Sort.DUPLICATE} or progress.chunks + 1 >= parts.total:
            return self._settle_each(box, taken, permit, path, [reading], unsafe=False, alone=True)
        generation = progress.generation if reading.generation is None else reading.generation
        saved = ArchiveProgress(progress.chunks + 1, generation).encode()
        self._d.gate.accepted(permit, self._token_name(), path=path)
        return self._finish(box, taken, [Release(row.seq, True, 0, None, saved)], None)

    # Small things ------------------------------------------------------------------------------------------

    def _stopped(self, box: OutboxFile, taken: Claim, *, unsafe: bool) -> Turn:
        """We cut the request off: nothing changes but for an unsafe call, whose outcome is unknown."""
        now_ms = self._d.clock.wall_ms()
        settlements: list[Settlement] = []
        for row in taken.rows:
            if unsafe and self._cut_after_sending:
                trouble = Trouble(now_ms, "stopped", detail="cut off when the outbox stopped")
                settlements.append(Bury(row.seq, Reason.OUTCOME_UNKNOWN, row.attempts, trouble, row.progress))
                self._log("dead_letter", level="warning", seq=row.seq, reason=str(Reason.OUTCOME_UNKNOWN))
            else:
                sent = self._cut_after_sending
                settlements.append(Release(row.seq, sent, row.attempts, None, row.progress))
        settle(box, taken, settlements, now_ms=now_ms, blocked=self._blocked)
        return Sleep(None)

    def _bury_unsent(self, box: OutboxFile, reason: Reason, detail: str, path: str = "") -> Turn:
        """A dead letter without a request."""
        now_ms = self._d.clock.wall_ms()
        taken = claim(box, lambda rows: [next(rows)], unsafe=False, now_ms=now_ms)
        if taken is None:
            return Again()
        row = taken.rows[0]
        self._log("dead_letter", level="warning", seq=row.seq, kind=row.kind, reason=str(reason), detail=detail)
        trouble = Trouble(now_ms, str(reason), detail=detail, path=path)
        bury = Bury(row.seq, reason, row.attempts, trouble, row.progress)
        return self._finish(box, taken, [bury], None)

    def _hold(self, box: OutboxFile, reason: str, detail: str, wait_ms: int) -> Turn:
        now_ms = self._d.clock.wall_ms()
        self._until_ms = self._d.clock.monotonic_ms() + wait_ms
        since_ms = self._blocked.since_ms if self._blocked else now_ms
        self._blocked = Blocked(reason, since_ms, now_ms + wait_ms, detail)
        note_blocked(box, self._blocked)
        return Sleep(self._until_ms)

    def _trouble(self, reading: Reading, reason: str, path: str) -> Trouble:
        return Trouble(
            self._d.clock.wall_ms(), reason, reading.status, reading.code, reading.detail, reading.excerpt, path
        )

    def _token_name(self) -> str:
        return self._d.tokens.fingerprint()

    def _log(self, event: str, **fields: Any) -> None:
        self._d.log(event, {"agent": self.agent, **fields})

