"""Turns answers into settlements: what becomes of each event, what the gate is told, how the agent goes on.

The decisions themselves stand in verdict.py and policy.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from outbox.delivery.agent_wait import AgentWait, Held
from outbox.delivery.exchange import Cut
from outbox.delivery.gate import Permit
from outbox.delivery.grouping import Grouping
from outbox.delivery.parcel import Parcel
from outbox.delivery.shared import Again, AtGate, Delivery, Sleep, Turn
from outbox.delivery.tokens import NoTokenNow
from outbox.delivery.verdict import Effect, Step, Verdict, judge, judge_group
from outbox.delivery.witness import Witness
from outbox.errors import StoreError, StoreHeld
from outbox.outcome import Ack, Blocked, Bury, Reason, Release, Settlement, Trouble
from outbox.policy import MINUTE_MS, schedule_of
from outbox.store.file import OutboxFile
from outbox.store.row import Row
from outbox.store.sending import Claim, note_blocked, settle
from relay_client import Reading, Sort, fingerprint

_AFTER_CUT_MS = 1_000
WHOLE_ANSWERS = frozenset((Sort.REFUSED, Sort.TOO_LARGE, Sort.CONFLICT, Sort.UNCLEAR_BATCH, Sort.NO_ENDPOINT))


@dataclass(frozen=True, slots=True)
class Sending:
    """One request under way: whose, under which permit, and to which path its events belong."""

    box: OutboxFile
    permit: Permit
    path: str
    token: str | None
    unsafe: bool = False


class Settler:
    """Settles the claims of one agent."""

    def __init__(self, delivery: Delivery) -> None:
        """Nothing is known of the agent yet."""
        self._d = delivery
        self.wait = AgentWait(delivery)
        self.witness = Witness(delivery)
        self.counted_in_flush: set[int] = set()
        self._unwritten: tuple[Claim, list[Settlement], Blocked | None] | None = None

    @property
    def agent(self) -> str:
        """Whose claims these are; "" before the first turn."""
        return self.wait.agent

    def serve(self, agent: str) -> None:
        """Whose claims these are."""
        self.wait.agent = self.witness.agent = agent

    # Whole claims ------------------------------------------------------------------------------------------

    def each(self, sending: Sending, taken: Claim, readings: Sequence[Reading]) -> Turn:
        """Apply one answer to each event, one by one, in order."""
        settlements: list[Settlement] = []
        held: Held | None = None
        others = len(readings) > 1 and any(reading.sort is Sort.ACCEPTED for reading in readings)
        accepted = 0  # since the gate was told last: before anything else is judged it has to know
        for row, reading in zip(taken.rows, readings, strict=True):
            if reading.sort is Sort.ACCEPTED:
                accepted += 1
                settlements.append(self.acknowledge(row, reading))
                continue
            accepted = self._report_accepted(sending, accepted)
            settlement, stays = self._settle_one(sending, row, reading, others_accepted=others)
            settlements.append(settlement)
            held = held or stays
        self._report_accepted(sending, accepted)
        if others and held:
            self.witness.note(sending.path)
        return self.finish(sending.box, taken, settlements, held)

    def series(
        self, sending: Sending, taken: Claim, accepted: Sequence[Reading], last: Reading | Cut | None
    ) -> Turn:
        """Apply the answers to events that went one after another: the accepted ones, and what ended them.

        Those behind that did not go, and wait as they were.
        """
        through = len(accepted)
        settlements: list[Settlement] = [
            self.acknowledge(row, reading)
            for row, reading in zip(taken.rows[:through], accepted, strict=True)
        ]
        if through:
            self._report_accepted(sending, through)
            self.wait.end()
        if last is None:
            return self.finish(sending.box, taken, settlements, None)
        row = taken.rows[through]
        if isinstance(last, Cut):
            settlements.append(Release(row.seq, last.sent, row.attempts, None, row.progress))
            self._write(sending.box, taken, settlements)
            return self.after_cut()
        if through:  # it went as the head, when those before it had been accepted
            self.witness.note_sending(sending.path)
        settlement, held = self._settle_one(sending, row, last)
        return self.finish(sending.box, taken, [*settlements, settlement], held)

    def group(
        self, sending: Sending, taken: Claim, reading: Reading, parcel: Parcel, grouping: Grouping
    ) -> Turn:
        """Apply one answer to a whole group: nobody in it is blamed."""
        verdict = self.regroup(sending, reading, parcel, grouping, [row.seq for row in taken.rows])
        self.report(sending, verdict, reading)
        trouble = self.trouble(reading, verdict.hold, sending.path) if verdict.hold else None
        settlements: list[Settlement] = [
            Release(row.seq, verdict.sent, row.attempts, None if index else trouble, row.progress)
            for index, row in enumerate(taken.rows)
        ]
        stays = verdict.step is Step.RELEASE and bool(verdict.hold)
        held = Held(taken.rows[0], sending.token, reading, verdict) if stays else None
        return self.finish(sending.box, taken, settlements, held)

    def regroup(
        self, sending: Sending, reading: Reading, parcel: Parcel, grouping: Grouping, marks: Sequence[int]
    ) -> Verdict:
        """Judge a group's one answer, and learn how its members (seqs or indexes) travel next."""
        gate = self._d.gate
        if reading.sort is Sort.NO_ENDPOINT:
            gate.turn_batches_off(parcel.path)
            return Verdict(Step.RELEASE, Effect.AGENT, sent=False)
        verdict = self._own(judge_group(reading, works=self.witness.proves(reading, sending.path)))
        if verdict.step is Step.SPLIT:
            grouping.split(marks)
            if reading.sort is Sort.TOO_LARGE:
                gate.learn_bytes(parcel.path, len(parcel.body))
        elif verdict.step is Step.SINGLY:
            grouping.singly(marks)
            gate.unclear_batch(parcel.path)
        elif verdict.step is Step.HALVE:
            grouping.halve(len(marks))
        return verdict

    def cut(self, sending: Sending, taken: Claim, cut: Cut) -> Turn:
        """We ended the request: nothing changes, but a sent unsafe call has an unknown outcome."""
        now_ms = self._d.clock.wall_ms()
        settlements: list[Settlement] = []
        for row in taken.rows:
            if sending.unsafe and cut.sent:
                trouble = Trouble(
                    now_ms, "stopped", detail="cut off when the outbox stopped", path=sending.path
                )
                settlements.append(self.bury(row, Reason.OUTCOME_UNKNOWN, row.attempts, trouble))
            else:
                settlements.append(Release(row.seq, cut.sent, row.attempts, None, row.progress))
        self._write(sending.box, taken, settlements)
        return self.after_cut()

    def after_cut(self) -> Turn:
        """Most often all is about to end; where only no connection was free, it goes on soon."""
        return Sleep(self._d.clock.monotonic_ms() + _AFTER_CUT_MS)

    def unsent(self, box: OutboxFile, taken: Claim, reason: Reason, detail: str, path: str) -> Turn:
        """A dead letter without a request."""
        row = taken.rows[0]
        trouble = Trouble(self._d.clock.wall_ms(), str(reason), detail=detail, path=path)
        self._tell_dead(row, reason, trouble)
        bury = Bury(row.seq, reason, row.attempts, trouble, row.progress, sent=False)
        return self.finish(box, taken, [bury], None)

    def part_done(self, box: OutboxFile, taken: Claim, progress: str) -> Turn:
        """A part of the event is through: attempts and evidence begin anew for the next one."""
        self.witness.forget()
        release = Release(taken.rows[0].seq, sent=True, attempts=0, progress=progress)
        return self.finish(box, taken, [release], None)

    def finish(self, box: OutboxFile, taken: Claim, settlements: list[Settlement], held: Held | None) -> Turn:
        """Decide when this agent goes on, and write it all down."""
        if held is None:
            self.wait.end()
        else:
            self._hold(held)
        self._write(box, taken, settlements)
        return Sleep(self.wait.until_ms) if self.wait.until_ms else Again()

    def _hold(self, held: Held) -> None:
        if self.wait.after(held) and (blocked := self.wait.blocked):
            self._log("held", seq=held.row.seq, reason=blocked.reason, detail=blocked.detail)

    def wait_only(self, sending: Sending, row: Row, reading: Reading, verdict: Verdict) -> Turn:
        """Nothing was claimed: only the agent, or the gate, waits."""
        self._hold(Held(row, sending.token, reading, verdict))
        if not self.wait.until_ms:
            return AtGate(sending.path)
        note_blocked(sending.box, self.wait.blocked)
        return Sleep(self.wait.until_ms)

    def without_token(self, box: OutboxFile, permit: Permit, row: Row, none: NoTokenNow) -> Turn:
        """Nothing can be sent: the agent waits where the token is its own, else everybody at the gate."""
        if not self._d.tokens.one_per_agent:
            self._d.gate.refused_token = ""
            self._d.gate.close(permit, none.reason, str(none), next_ms=none.next_ms)
            return AtGate("")
        now_ms = self._d.clock.monotonic_ms()
        wait_ms = MINUTE_MS if none.next_ms is None else max(1, none.next_ms - now_ms)
        if self.wait.hold(none.reason, str(none), wait_ms):
            self._log("held", seq=row.seq, reason=none.reason, detail=str(none))
        note_blocked(box, self.wait.blocked)
        return Sleep(self.wait.until_ms)

    def _write(self, box: OutboxFile, taken: Claim, settlements: list[Settlement]) -> None:
        try:
            settle(box, taken, settlements, now_ms=self._d.clock.wall_ms(), blocked=self.wait.blocked)
        except StoreHeld:
            raise
        except StoreError:
            # What happened, happened: it is written later.
            self._unwritten = (taken, settlements, self.wait.blocked)
            raise

    def write_rest(self, box: OutboxFile) -> None:
        """Write the settlement that could not be written before (a full disk, a lock)."""
        if self._unwritten is not None:
            taken, settlements, blocked = self._unwritten
            with contextlib.suppress(StoreHeld):  # the claim is gone, with its file or to another sender
                settle(box, taken, settlements, now_ms=self._d.clock.wall_ms(), blocked=blocked)
            self._unwritten = None

    # One event ---------------------------------------------------------------------------------------------

    def judge(self, sending: Sending, reading: Reading, *, others_accepted: bool = False) -> Verdict:
        """The verdict on one event's own answer."""
        works = others_accepted or self.witness.proves(reading, sending.path)
        return self._own(judge(reading, unsafe=sending.unsafe, works=works))

    def _own(self, verdict: Verdict) -> Verdict:
        """A token that is this agent's alone holds nobody else."""
        if verdict.effect is Effect.TOKEN and self._d.tokens.one_per_agent:
            return dataclasses.replace(verdict, effect=Effect.AGENT)
        return verdict

    def _settle_one(
        self, sending: Sending, row: Row, reading: Reading, *, others_accepted: bool = False
    ) -> tuple[Settlement, Held | None]:
        """What becomes of an event by its own answer, of which the gate is told; and why it stays, if so."""
        verdict = self.judge(sending, reading, others_accepted=others_accepted)
        settlement, wait_ms = self._apply(row, reading, verdict, sending.path)
        self.report(sending, verdict, reading)
        stays = isinstance(settlement, Release)
        return settlement, Held(row, sending.token, reading, verdict, wait_ms) if stays else None

    def _apply(self, row: Row, reading: Reading, verdict: Verdict, path: str) -> tuple[Settlement, int]:
        """The settlement of one event, and the wait that the blame budget asks for."""
        if verdict.step is Step.ACK:
            return self.acknowledge(row, reading), 0
        trouble = self.trouble(reading, verdict.hold or str(verdict.reason), path)
        attempts = row.attempts + verdict.counts
        if self._d.flushing and verdict.counts:
            self.counted_in_flush.add(row.seq)
        reason = verdict.reason
        if reason is None or not (verdict.step is Step.BURY or self._is_over(row, verdict, attempts, path)):
            kept = trouble if verdict.sent else None
            return Release(row.seq, verdict.sent, attempts, kept, row.progress), 0
        wait_ms = 0 if self._is_final(reason, path) else self._d.gate.verdict_wait_ms(path, reason)
        if wait_ms:
            return Release(row.seq, verdict.sent, attempts, trouble, row.progress), wait_ms
        return self.bury(row, reason, attempts, trouble), 0

    def _is_over(self, row: Row, verdict: Verdict, attempts: int, path: str) -> bool:
        return verdict.counts and (attempts >= self.most_attempts(row) or self._d.gate.was_dead_end(path))

    def _is_final(self, reason: Reason, path: str) -> bool:
        """Whether the budget has no say: an unknown outcome cannot be tried again, a dead end is known."""
        return reason is Reason.OUTCOME_UNKNOWN or (
            reason is Reason.NO_ENDPOINT and self._d.gate.was_dead_end(path)
        )

    def most_attempts(self, row: Row) -> int:
        """How many attempts this event has."""
        return schedule_of(self._d.schedule, row.extra.get("retry")).max_attempts

    def acknowledge(self, row: Row, reading: Reading) -> Ack:
        """The relay has it."""
        self._log("delivered", level="debug", seq=row.seq, kind=row.kind, attempt=row.sends + 1)
        tool_error = reading.sort is Sort.TOOL_ERROR
        if tool_error:
            self._log("tool_error", level="warning", seq=row.seq, kind=row.kind, detail=reading.detail)
        return Ack(row.seq, reading.result, tool_error)

    def bury(
        self, row: Row, reason: Reason, attempts: int, trouble: Trouble, *, progress: str | None = None
    ) -> Bury:
        """Make a dead letter, and charge it to the path's budget."""
        path = trouble.path
        self._d.gate.spend(path)
        if reason is Reason.NO_ENDPOINT and path != self._d.routes.messages:
            self._d.gate.make_dead_end(path)
        self._tell_dead(row, reason, trouble)
        return Bury(row.seq, reason, attempts, trouble, progress or row.progress)

    def report(self, sending: Sending, verdict: Verdict, reading: Reading) -> None:
        """Tell the gate what the answer says of the relay."""
        gate, permit = self._d.gate, sending.permit
        match verdict.effect:
            case Effect.ACCEPTED:
                self._report_accepted(sending, 1)
            case Effect.WORKS:
                gate.works(permit)
            case Effect.CLOSE:
                spent = reading.sort in {Sort.FAILED, Sort.LOST} and gate.budget_spent(sending.path)
                gate.close(permit, "mass_rejection" if spent else verdict.hold, reading.detail)
            case Effect.HOLD_PATH:
                gate.hold_path(permit, verdict.hold, reading.detail)
            case Effect.TOKEN:
                gate.close(permit, "unauthorized", reading.detail)
                gate.refused_token = fingerprint(sending.token)
                if self._d.recover(self.agent, sending.token):
                    gate.retry_now()
            case Effect.AGENT:
                pass

    def _report_accepted(self, sending: Sending, events: int) -> int:
        """Tell the gate of events accepted one after the other; how many are left to tell: none."""
        if events:
            self._d.gate.accepted(sending.permit, self._d.tokens.evidence(self.agent), events)
            self._d.tokens.accepted(self.agent, fingerprint(sending.token))
        return 0

    def trouble(self, reading: Reading, reason: str, path: str) -> Trouble:
        """What is kept of an answer."""
        return Trouble(
            self._d.clock.wall_ms(),
            reason,
            reading.status,
            reading.code,
            reading.detail,
            reading.excerpt,
            path,
        )

    def _tell_dead(self, row: Row, reason: Reason, trouble: Trouble) -> None:
        self._log(
            "dead_letter",
            level="warning",
            seq=row.seq,
            kind=row.kind,
            reason=str(reason),
            status=trouble.status,
            detail=trouble.detail,
        )

    def _log(self, event: str, **fields: Any) -> None:
        self._d.log(event, {"agent": self.agent, **fields})
