"""The pump of one agent: looks at the head, asks the gate, claims a run, sends it, has it settled.

It holds what is only worth remembering while the process lives. What an answer means stands in verdict.py,
what becomes of the events in settling.py, what is known of the relay in gate.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from outbox.delivery.batch_event import BatchEvents
from outbox.delivery.exchange import Cut, exchange, prepare_call
from outbox.delivery.gate import Permit, Wait
from outbox.delivery.grouping import Grouping, Size, groupable, is_over, next_length, take_run, take_series
from outbox.delivery.parcel import Form, Parcel, group, key_of, origin_of, single
from outbox.delivery.parts import ArchiveProgress
from outbox.delivery.rate import RATE, Place
from outbox.delivery.settling import Sending, Settler
from outbox.delivery.shared import Again, AtGate, Delivery, Sleep, Turn
from outbox.delivery.tokens import NoTokenNow
from outbox.outcome import Reason
from outbox.store.file import OutboxFile
from outbox.store.inspect import read_status
from outbox.store.people import is_paused
from outbox.store.receipts import forget_old
from outbox.store.row import Row, first_try_as_head_ms
from outbox.store.sending import Claim, claim, clear_blocked, head, note_blocked, recover
from outbox.wire_text import archive_chunks
from relay_client import Reading, Sort

_TIDY_EVERY_MS = 60_000
_IN_PARTS = frozenset(("batch", "archive"))
_NOT_MATCHING = "the stored text does not match its checksum"


class Pump:
    """One agent's sender. `turn` is called by one thread at a time."""

    def __init__(self, path: Path, delivery: Delivery) -> None:
        """Nothing is opened yet."""
        self.path = path
        self._d = delivery
        self._settler = Settler(delivery)
        self._batches = BatchEvents(delivery, self._settler)
        self._grouping = Grouping(delivery.size.items)
        self._series_length = 1
        self._place = Place(delivery.rate)
        self._head_seq = 0
        self._is_sender = False
        self._lost_track = False
        self._tidy_at_ms = 0

    @property
    def agent(self) -> str:
        """Whose events these are; "" before the first turn."""
        return self._settler.agent

    # The turn ----------------------------------------------------------------------------------------------

    def turn(self) -> Turn:
        """Do one thing: at most one request. Raises StoreError for trouble with the file."""
        self._place.enter()
        try:
            return self._take_turn()
        finally:
            self._place.leave()

    def _take_turn(self) -> Turn:
        with self._d.files.borrow(self.path) as box:
            self._enter(box)
            if is_paused(box):
                return Sleep(None)
            row = head(box)
            if row is None:
                return self._rest(box)
            self._look_at(row)
            if not self._settler.wait.over:
                return Sleep(self._settler.wait.until_ms)
            return self._send_head(box, row)

    def begin_flush(self) -> None:
        """A new flush may try each event once more, at once."""
        self._settler.counted_in_flush.clear()
        self._settler.wait.hurry()

    def forget_wait(self) -> None:
        """Do not wait any longer, whatever the reason was."""
        self._settler.wait.forget()

    def lost_track(self) -> None:
        """A turn ended by a fault of ours: what it had claimed is taken over like a dead sender's."""
        self._lost_track = True

    def resign(self) -> None:
        """Give the sender's place back."""
        if self._is_sender:
            with self._d.files.borrow(self.path) as box:
                box.resign_sender()
            self._is_sender = False

    def _enter(self, box: OutboxFile) -> None:
        """Become the sender, and take over what a dead one left in flight."""
        if not self._is_sender:
            self._settler.serve(box.agent)
            box.become_sender()
            self._is_sender = self._lost_track = True
            self._settler.wait.restore(read_status(box), self._d.max_retry_after_ms)
            if self._d.rules is not None:  # what cannot be written is not waited for: sending makes room
                box.set_rules(*self._d.rules)
        self._settler.write_rest(box)
        if self._lost_track:
            for seq in recover(box, now_ms=self._d.clock.wall_ms()):
                fields = {"agent": self.agent, "seq": seq, "reason": str(Reason.OUTCOME_UNKNOWN)}
                self._d.log("dead_letter", {"level": "warning", **fields})
            self._lost_track = False

    def _look_at(self, row: Row) -> None:
        if row.seq != self._head_seq:
            self._head_seq = row.seq
            self._settler.witness.forget()
            self._settler.wait.new_head()

    def _rest(self, box: OutboxFile) -> Turn:
        """Nothing waits: forget what stood in the way; once a minute drop old receipts, give space back."""
        clear_blocked(box)
        self._settler.wait.end()
        now = self._d.clock.monotonic_ms()
        if now < self._tidy_at_ms:
            return Sleep(None if self._d.flushing else self._tidy_at_ms)
        self._tidy_at_ms = now + _TIDY_EVERY_MS
        forget_old(box, box.bounds, self._d.clock.wall_ms(), by_age=self._d.steady.lasts())
        box.give_space_back()
        return Sleep(None)

    # The head ----------------------------------------------------------------------------------------------

    def _send_head(self, box: OutboxFile, row: Row) -> Turn:
        path = self._d.routes.path_of(row)
        if not row.sound:  # its kind may be as wrong as the rest
            return self._bury_unsent(box, Reason.DAMAGED, _NOT_MATCHING, path or "")
        if path is None:
            return self._bury_unsent(box, Reason.UNKNOWN_KIND, f'kind "{row.kind}" is not known here', "")
        if dead := self._dead_unsent(row, path):
            return self._bury_unsent(box, *dead, path)
        if self._d.flushing and row.seq in self._settler.counted_in_flush:
            return Sleep(None)
        self._d.learn_spec(self.agent)
        unsafe = self._d.is_unsafe(row)
        if unsafe and not self._d.time_covers_a_call():
            return Sleep(None)
        wait_ms = self._d.gate.verdict_wait_ms(path, Reason.OUTCOME_UNKNOWN) if unsafe else 0
        if wait_ms:
            return self._hold(box, wait_ms)
        admitted = self._d.gate.admit(path, unsafe=unsafe)
        if isinstance(admitted, Wait):
            return AtGate(admitted.tag)
        try:
            return self._with_permit(box, admitted, row, unsafe=unsafe)
        finally:
            self._d.gate.finish(admitted)

    def _dead_unsent(self, row: Row, path: str) -> tuple[Reason, str] | None:
        """Why this event is a dead letter without being sent, if it is."""
        if self._d.gate.is_dead_end(path):
            return Reason.NO_ENDPOINT, f"the relay has no {path}"
        if self._d.gate.is_stuck(first_try_as_head_ms(row.history), self._d.tokens.evidence(self.agent)):
            blocked = self._settler.wait.blocked
            return Reason.STUCK, f"held for too long: {blocked.reason}" if blocked else "held for too long"
        return None

    def _hold(self, box: OutboxFile, wait_ms: int) -> Turn:
        """An unsafe call is not even sent while the calls before it ended in the dark."""
        self._settler.wait.hold("mass_rejection", "the outcome of the calls before is unknown", wait_ms)
        note_blocked(box, self._settler.wait.blocked)
        return Sleep(self._settler.wait.until_ms)

    def _with_permit(self, box: OutboxFile, permit: Permit, row: Row, *, unsafe: bool) -> Turn:
        try:
            token = self._d.token(self.agent)
        except NoTokenNow as none:
            return self._settler.without_token(box, permit, row, none)
        if permit.ask_health:
            return self._prove(permit)
        sending = Sending(box, permit, permit.path, token, unsafe)
        if unsafe and (turn := self._prepare(sending, row)):
            return turn
        if not self._place.may_send():
            return AtGate(RATE)
        choose, in_group = self._chooser(permit, row, unsafe=unsafe)
        taken = claim(box, choose, unsafe=unsafe, now_ms=self._d.clock.wall_ms())
        if taken is None:
            return Again()
        self._settler.witness.note_sending(permit.path)
        if not (in_group or unsafe or row.shape in _IN_PARTS):
            return self._send_series(sending, taken)
        self._place.sent(len(taken.rows))
        if row.shape == "batch":
            return self._batches.send(sending, taken)
        if row.shape == "archive":
            return self._send_chunk(sending, taken)
        return self._send_run(sending, taken)

    def _prove(self, permit: Permit) -> Turn:
        """After trouble an unsafe call waits until the relay answers health; the call itself is no probe."""
        gate = self._d.gate
        if self._d.healthy():
            gate.proven_by_health()
            return Again()
        gate.close(permit, gate.relay.reason or "unreachable", "it does not answer health")
        return AtGate("")

    def _prepare(self, sending: Sending, row: Row) -> Turn | None:
        """Before an unsafe call is claimed, find out what is spoken: no such call has to find it out."""
        reading = prepare_call(self._d, str(row.extra.get("tool", "")), sending.token)
        if reading is None:
            return None
        if isinstance(reading, Cut):
            return self._settler.after_cut()
        if reading.sort is Sort.NO_ENDPOINT:
            taken = self._claim_head(sending.box)
            return Again() if taken is None else self._settler.each(sending, taken, [reading])
        verdict = self._settler.judge(sending, reading)
        self._settler.report(sending, verdict, reading)
        return self._settler.wait_only(sending, row, reading, verdict)

    # Claims and requests -----------------------------------------------------------------------------------

    def _chooser(
        self, permit: Permit, row: Row, *, unsafe: bool
    ) -> tuple[Callable[[Iterator[Row]], list[Row]], bool]:
        """What to claim, a run that begins at this head or nothing; and whether it is a group."""
        alone = unsafe or permit.probe or permit.path_probe or self._d.gate.budget_spent(permit.path)
        fence = self._grouping.fence(row.seq)
        group = self._d.most(self._grouping.items)
        in_group = not alone and groupable(row) and group.items > 1 and fence != row.seq
        items = 1 if alone else group.items if in_group else self._series_length
        size = Size(self._place.most(items), group.bytes)

        def choose(rows: Iterator[Row]) -> list[Row]:
            run = take_run(rows, size, fence) if in_group else take_series(rows, size, self._d.routes.path_of)
            return run if run and run[0].seq == row.seq else []

        return choose, in_group

    def _claim_head(self, box: OutboxFile) -> Claim | None:
        def choose(rows: Iterator[Row]) -> list[Row]:
            row = next(rows, None)
            return [row] if row and row.seq == self._head_seq else []

        return claim(box, choose, unsafe=False, now_ms=self._d.clock.wall_ms())

    def _bury_unsent(self, box: OutboxFile, reason: Reason, detail: str, path: str) -> Turn:
        taken = self._claim_head(box)
        return Again() if taken is None else self._settler.unsent(box, taken, reason, detail, path)

    def _send_run(self, sending: Sending, taken: Claim) -> Turn:
        rows, box = list(taken.rows), sending.box
        several = len(rows) > 1
        make = group if several else single
        parcel = make(self._d.routes, box.agent, box.stream, rows)
        reading = exchange(self._d, parcel, sending.token)
        if isinstance(reading, Cut):
            return self._settler.cut(sending, taken, reading)
        if not several:
            return self._settler.each(sending, taken, [reading])
        if reading.sort not in {Sort.ITEMS, Sort.ACCEPTED}:
            return self._settler.group(sending, taken, reading, parcel, self._grouping)
        self._grouping.grow()
        items = reading.items if reading.sort is Sort.ITEMS else [reading] * len(rows)
        return self._settler.each(sending, taken, items)

    def _send_series(self, sending: Sending, taken: Claim) -> Turn:
        """Send one after another, for a moment or until one is not accepted, and settle them together."""
        box, clock, began_ms = sending.box, self._d.clock, self._d.clock.monotonic_ms()
        accepted: list[Reading] = []
        last: Reading | Cut | None = None
        for row in taken.rows:
            if accepted and (is_over(clock.monotonic_ms() - began_ms) or self._d.gate.is_shut(sending.path)):
                break
            answer = exchange(self._d, single(self._d.routes, box.agent, box.stream, [row]), sending.token)
            if isinstance(answer, Cut) or answer.sort is not Sort.ACCEPTED:
                last = answer
                break
            accepted.append(answer)
        self._place.sent(len(accepted) + (last is not None))
        if last is None:
            self._series_length = next_length(len(accepted), clock.monotonic_ms() - began_ms)
            self._grouping.grow()
        else:
            self._series_length = 1
            self._look_at(taken.rows[len(accepted)])
        return self._settler.series(sending, taken, accepted, last)

    def _send_chunk(self, sending: Sending, taken: Claim) -> Turn:
        """Send the next chunk of an archive; what is through is saved before the next one goes."""
        row, box = taken.rows[0], sending.box
        parts, progress = archive_chunks(row.wire_payload), ArchiveProgress.decode(row.progress)
        key = key_of(box.agent, row)
        body = parts.chunk(progress.chunks, progress.generation, key)
        origin = origin_of(box.agent, box.stream, row)
        parcel = Parcel(Form.ARCHIVE, sending.path, body, f"{key}:{progress.chunks}", origin)
        reading = exchange(self._d, parcel, sending.token)
        if isinstance(reading, Cut):
            return self._settler.cut(sending, taken, reading)
        stored = reading.sort in {Sort.ACCEPTED, Sort.DUPLICATE}
        if not stored or progress.chunks + 1 >= parts.total:
            return self._settler.each(sending, taken, [reading])
        generation = progress.generation if reading.generation is None else reading.generation
        saved = ArchiveProgress(progress.chunks + 1, generation).encode()
        self._settler.report(sending, self._settler.judge(sending, reading), reading)
        return self._settler.part_done(box, taken, saved)
