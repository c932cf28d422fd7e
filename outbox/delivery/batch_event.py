"""A batch event on its way: some of its messages in each request, until each is stored or refused."""

from __future__ import annotations

import dataclasses

from outbox.delivery.agent_wait import Held
from outbox.delivery.exchange import Cut, exchange
from outbox.delivery.grouping import Grouping
from outbox.delivery.parcel import Form, Parcel, origin_of
from outbox.delivery.parts import Batch, BatchProgress, open_batch, take_messages
from outbox.delivery.settling import WHOLE_ANSWERS, Sending, Settler
from outbox.delivery.shared import Delivery, Turn
from outbox.delivery.verdict import Effect, Step, Verdict
from outbox.outcome import Ack, Reason, Release, Trouble
from outbox.store.sending import Claim
from outbox.wire_text import message_keys
from relay_client import Reading, Sort


class BatchEvents:
    """Sends the batch events of one agent; `grouping` counts their messages by index."""

    def __init__(self, delivery: Delivery, settler: Settler) -> None:
        """Nothing is known of any batch yet."""
        self._d = delivery
        self._settler = settler
        self._grouping = Grouping(delivery.size.items)
        self._seq = 0

    def send(self, sending: Sending, taken: Claim) -> Turn:
        """Send the next messages; one that is refused alone does not stop the others."""
        row = taken.rows[0]
        if row.seq != self._seq:
            self._seq, self._grouping = row.seq, Grouping(self._d.size.items)
        batch, progress = open_batch(row.wire_payload), BatchProgress.decode(row.progress)
        left = progress.left(len(batch.messages))
        if not left:
            return self._end(sending, taken, progress)
        run = self._choose(sending, batch, left)
        parcel = self._parcel(sending, taken, batch, run)
        reading = exchange(self._d, parcel, sending.token)
        if isinstance(reading, Cut):
            return self._settler.cut(sending, taken, reading)
        if len(run) > 1 and reading.sort not in {Sort.ITEMS, Sort.ACCEPTED}:
            return self._settle_whole(sending, taken, reading, parcel, run)
        items = reading.items if reading.sort is Sort.ITEMS else (reading,) * len(run)
        return self._settle_each(sending, taken, progress, run, items, done=len(run) == len(left))

    def _choose(self, sending: Sending, batch: Batch, left: list[int]) -> list[int]:
        alone = sending.permit.probe or sending.permit.path_probe
        size = self._d.most(1 if alone else self._grouping.items)
        return take_messages(batch, left, size, self._grouping.fence(left[0]))

    def _parcel(self, sending: Sending, taken: Claim, batch: Batch, run: list[int]) -> Parcel:
        origin = origin_of(sending.box.agent, sending.box.stream, taken.rows[0])
        if len(run) > 1:
            return Parcel(Form.GROUP, self._d.routes.batch, batch.body(run), None, origin, events=len(run))
        message = batch.messages[run[0]]
        return Parcel(Form.SINGLE, self._d.routes.messages, message, message_keys([message])[0], origin)

    def _settle_whole(
        self, sending: Sending, taken: Claim, reading: Reading, parcel: Parcel, run: list[int]
    ) -> Turn:
        """One answer for several messages: none of them is blamed."""
        row, settler = taken.rows[0], self._settler
        verdict = settler.regroup(sending, reading, parcel, self._grouping, run)
        settler.report(sending, verdict, reading)
        if reading.sort in WHOLE_ANSWERS or verdict.step is Step.HALVE:
            release = Release(row.seq, verdict.sent, row.attempts, None, row.progress)
            return settler.finish(sending.box, taken, [release], None)
        trouble = settler.trouble(reading, verdict.hold, sending.path)
        release = Release(
            row.seq, verdict.sent, row.attempts, trouble if verdict.sent else None, row.progress
        )
        return settler.finish(sending.box, taken, [release], Held(row, sending.token, reading, verdict))

    def _settle_each(
        self,
        sending: Sending,
        taken: Claim,
        progress: BatchProgress,
        run: list[int],
        items: tuple[Reading, ...],
        *,
        done: bool,
    ) -> Turn:
        row, settler = taken.rows[0], self._settler
        others = len(run) > 1 and any(item.sort is Sort.ACCEPTED for item in items)
        held: Held | None = None
        for index, item in zip(run, items, strict=True):
            verdict = settler.judge(sending, item, others_accepted=others)
            settler.report(sending, verdict, item)
            if verdict.step is Step.ACK:
                progress.stored.add(index)
            elif verdict.step is Step.BURY:
                progress.refused[index] = f"{item.status or ''} {item.code or item.detail}".strip()
            elif held is None:
                held = Held(row, sending.token, item, verdict)
        if held is None:
            self._grouping.grow()
            if done:
                return self._end(sending, taken, progress)
            return settler.part_done(sending.box, taken, progress.encode())
        if others:
            settler.witness.note(sending.path)
        attempts = row.attempts + held.verdict.counts
        if self._d.flushing and held.verdict.counts:
            settler.counted_in_flush.add(row.seq)
        trouble = settler.trouble(held.reading, held.verdict.hold, sending.path)
        reason = held.verdict.reason
        if reason and held.verdict.counts and attempts >= settler.most_attempts(row):
            return self._verdict(
                sending, taken, held, progress, reason=reason, attempts=attempts, trouble=trouble
            )
        release = Release(row.seq, held.verdict.sent, attempts, trouble, progress.encode())
        return settler.finish(sending.box, taken, [release], held)

    def _end(self, sending: Sending, taken: Claim, progress: BatchProgress) -> Turn:
        """Every message is stored or refused: delivered, or a dead letter that says which were refused."""
        row = taken.rows[0]
        if not progress.refused:
            ack: Ack = self._settler.acknowledge(row, Reading(Sort.ACCEPTED))
            return self._settler.finish(sending.box, taken, [ack], None)
        total = len(progress.stored) + len(progress.refused)
        said = "; ".join(f"message {index}: {text}" for index, text in list(progress.refused.items())[:5])
        detail = f"{len(progress.refused)} of {total} messages were refused: {said}"
        trouble = Trouble(self._d.clock.wall_ms(), str(Reason.REJECTED), detail=detail, path=sending.path)
        reading, verdict = (
            Reading(Sort.REFUSED, detail=detail),
            Verdict(Step.BURY, Effect.WORKS, Reason.REJECTED),
        )
        held = Held(row, sending.token, reading, verdict)
        return self._verdict(
            sending, taken, held, progress, reason=Reason.REJECTED, attempts=row.attempts, trouble=trouble
        )

    def _verdict(
        self,
        sending: Sending,
        taken: Claim,
        held: Held,
        progress: BatchProgress,
        *,
        reason: Reason,
        attempts: int,
        trouble: Trouble,
    ) -> Turn:
        """A dead letter, once the blame budget allows it."""
        row, settler = taken.rows[0], self._settler
        wait_ms = self._d.gate.verdict_wait_ms(sending.path, reason)
        if wait_ms:
            release = Release(
                row.seq, sent=True, attempts=attempts, trouble=trouble, progress=progress.encode()
            )
            waiting = dataclasses.replace(held, verdict_wait_ms=wait_ms)
            return settler.finish(sending.box, taken, [release], waiting)
        bury = settler.bury(row, reason, attempts, trouble, progress=progress.encode())
        return settler.finish(sending.box, taken, [bury], None)
