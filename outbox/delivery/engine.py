"""The engine: lets many pumps take turns on a few threads, each when it is due, woken, or let in by the gate.

`step` runs one turn in the caller's thread (tests and a flush without a daemon use it); `start` makes worker
threads that do the same.
"""

from __future__ import annotations

import heapq
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from outbox.delivery.pump import Pump
from outbox.delivery.shared import Again, AtGate, Delivery, Sleep, Turn
from outbox.errors import OutboxError, StoreBusy, StoreClosed, StoreDamaged, StoreError, StoreHeld

_FILE_TROUBLE_MS = 1_000
_FAULT_MS = 10_000
_LEFT_ALONE_MS = 600_000  # a wake-up comes before
_LONGEST_WAIT_S = 60.0
_LOCK_WITHIN_S = 5.0  # it is never held for longer than a few steps take


@dataclass(slots=True)
class _Seat:
    """Where one pump is in the scheduler."""

    pump: Pump
    running: bool = False
    since_ms: int | None = None  # when its turn began; None for a turn that may take as long as it takes
    woken: bool = False
    ready: bool = False
    due_ms: int | None = None
    listed_ms: int | None = None  # the last moment for which it was listed, and need not be again
    tag: str | None = None
    trouble: str = ""
    mended: bool = False


class Engine:
    """The pumps of one state directory. Thread-safe."""

    def __init__(self, delivery: Delivery) -> None:
        """No pump yet: `wake` makes one for each file it hears of."""
        self.delivery = delivery
        self._cond = threading.Condition()
        self._seats: dict[Path, _Seat] = {}
        self._ready: deque[_Seat] = deque()
        self._due: list[tuple[int, int, _Seat]] = []
        self._at_gate: dict[str, deque[_Seat]] = {}
        self._ticket = 0
        self._threads: list[threading.Thread] = []
        self._resting: dict[int, float] = {}  # the worker threads that wait, and until when at the latest
        self._stopped = False

    # Waking ------------------------------------------------------------------------------------------------

    def wake(self, path: Path) -> None:
        """There may be something new in this file."""
        with self._cond:
            seat = self._seats.get(path)
            if seat is None:
                seat = self._seats[path] = _Seat(Pump(path, self.delivery))
            self._wake(seat)
            self._call_somebody()

    def wake_all(self, paths: Iterable[Path] = ()) -> None:
        """Look at every pump again, and at these files."""
        for path in paths:
            self.wake(path)
        with self._cond:
            for seat in self._seats.values():
                self._wake(seat)
            self._call_somebody()

    def dismiss(self, path: Path) -> bool:
        """Give up the sender's place of an outbox; False when it is at work. The next `wake` takes it anew.

        Raises StoreError when the file cannot be opened.
        """
        with self._cond:
            seat = self._seats.get(path)
            if seat is None:
                return True
            if seat.running or seat.ready or seat.tag is not None:
                return False
            seat.due_ms = None
            del self._seats[path]
        seat.pump.resign()
        return True

    def _wake(self, seat: _Seat) -> None:
        if seat.running:
            seat.woken = True
        elif seat.tag is None:
            self._make_ready(seat)

    def _make_ready(self, seat: _Seat) -> None:
        if not seat.ready:
            seat.ready, seat.due_ms, seat.tag = True, None, None
            self._ready.append(seat)

    def _call_somebody(self) -> None:
        """Wake a resting worker if there is something to do that nobody else comes for.

        Not after each turn: a second thread that looks in vain costs more than the turn of a small event.
        """
        due_ms = None if self._ready else self._next_due()
        if self._ready or (due_ms is not None and due_ms < min(self._resting.values(), default=0)):
            self._cond.notify()

    # Taking turns ------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Run one turn in this thread; False when no pump may do anything now."""
        with self._cond:
            self._collect()
            if not self._ready:
                return False
            seat = self._take()
        self._run(seat)
        return True

    def next_due_ms(self) -> int | None:
        """The monotonic moment of the next thing to do, as far as it is known."""
        with self._cond:
            return self._next_due()

    def _take(self) -> _Seat:
        seat = self._ready.popleft()
        seat.ready, seat.running, seat.woken = False, True, False
        seat.since_ms = self.delivery.clock.monotonic_ms()
        return seat

    def _collect(self) -> None:
        """Move whoever is due, and as many as the gate lets in, to the ready ones."""
        now = self.delivery.clock.monotonic_ms()
        while self._due and self._due[0][0] <= now:
            due_ms, _, seat = heapq.heappop(self._due)
            if seat.listed_ms == due_ms:
                seat.listed_ms = None
            if seat.due_ms == due_ms and not seat.running:
                self._make_ready(seat)
        for tag, seats in list(self._at_gate.items()):
            for _ in range(self.delivery.let_in(tag, len(seats), len(self._ready))):
                self._make_ready(seats.popleft())
            if not seats:
                del self._at_gate[tag]

    def _next_due(self) -> int | None:
        moments = [self._due[0][0]] if self._due else []
        for tag in self._at_gate:
            due_ms = self.delivery.next_due_ms(tag)
            if due_ms is not None:
                moments.append(due_ms)
        return min(moments, default=None)

    def _run(self, seat: _Seat) -> None:
        turn = self._turn(seat)
        with self._cond:
            seat.running = False
            if seat.woken and isinstance(turn, Sleep):  # it may have looked before there was something
                turn = Again()
            self._place(seat, turn)

    def _place(self, seat: _Seat, turn: Turn) -> None:
        match turn:
            case Again():
                self._make_ready(seat)
            case AtGate(tag):
                seat.tag = tag
                self._at_gate.setdefault(tag, deque()).append(seat)
            case Sleep(until_ms):
                seat.due_ms = until_ms
                if until_ms is not None and until_ms != seat.listed_ms:
                    seat.listed_ms = until_ms
                    self._ticket += 1
                    heapq.heappush(self._due, (until_ms, self._ticket, seat))

    def _turn(self, seat: _Seat) -> Turn:
        """One turn of a pump; trouble with one file never reaches another."""
        try:
            turn = seat.pump.turn()
        except StoreClosed:
            return Again()
        except StoreHeld:
            return self._later(_FILE_TROUBLE_MS)
        except StoreDamaged as error:
            return self._mend(seat, error)
        except StoreError as error:
            self._tell(seat, error)
            return self._later(_FILE_TROUBLE_MS if error.code == "busy" else _FAULT_MS)
        except Exception as error:  # noqa: BLE001 - a fault in one pump must not stop the others
            seat.pump.lost_track()
            self._tell(seat, error)
            return self._later(_FAULT_MS)
        seat.trouble, seat.mended = "", False
        return turn

    def _mend(self, seat: _Seat, error: StoreError) -> Turn:
        """Have the file set aside and go on with the new one; what cannot be mended is told of once."""
        seat.since_ms = None  # a large file takes its time
        try:
            self.delivery.files.mend(seat.pump.path, seat.pump.agent or None)
        except StoreBusy:
            return self._later(_FILE_TROUBLE_MS)
        except StoreError as why_not:
            error = why_not
        else:
            seat.pump.lost_track()
            if not seat.mended:
                seat.mended = True
                return Again()
        self._tell(seat, error)
        return self._later(_LEFT_ALONE_MS)

    def _later(self, wait_ms: int) -> Sleep:
        return Sleep(self.delivery.clock.monotonic_ms() + wait_ms)

    def _tell(self, seat: _Seat, error: Exception) -> None:
        """Once for each fault, not once for each try."""
        said = f"{type(error).__name__}: {error}"
        if said != seat.trouble:
            seat.trouble = said
            fields = {"agent": seat.pump.agent, "file": seat.pump.path.name, "detail": str(error)}
            if isinstance(error, OutboxError):
                self.delivery.log("file_trouble", {"level": "warning", "code": error.code, **fields})
                return
            frames = traceback.extract_tb(error.__traceback__)
            where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""
            self.delivery.log("fault", {"level": "error", **fields, "fault": said, "where": where})

    # Threads -----------------------------------------------------------------------------------------------

    def start(self, workers: int) -> None:
        """Start worker threads; they end with `stop`."""
        for number in range(workers):
            thread = threading.Thread(target=self._work, name=f"pump-{number}", daemon=True)
            thread.start()
            self._threads.append(thread)

    def stop(self, timeout_s: float) -> bool:
        """Let no turn begin any more; True when all that were under way ended in time."""
        with self._cond:
            self._stopped = True
            self._cond.notify_all()
        end = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def has_threads(self) -> bool:
        """Whether worker threads take the turns."""
        return bool(self._threads)

    def resign(self) -> None:
        """Give every sender's place back."""
        for seat in list(self._seats.values()):
            try:
                seat.pump.resign()
            except StoreError:
                continue

    def _work(self) -> None:
        me = threading.get_ident()
        while True:
            with self._cond:
                self._collect()
                while not self._ready and not self._stopped:
                    now_ms, due_ms = self.delivery.clock.monotonic_ms(), self._next_due()
                    wait_s = _LONGEST_WAIT_S
                    if due_ms is not None:
                        wait_s = min(_LONGEST_WAIT_S, max(0.001, (due_ms - now_ms) / 1_000))
                    self._resting[me] = now_ms + wait_s * 1_000
                    self._cond.wait(wait_s)
                    del self._resting[me]
                    self._collect()
                if self._stopped:
                    return
                seat = self._take()
                self._call_somebody()
            self._run(seat)

    # Looking -----------------------------------------------------------------------------------------------

    def stuck(self, longest_turn_ms: int) -> str:
        """Why the engine does not go on by itself any more; "" while it does.

        Its lock is not let go, a worker thread has ended, or a turn takes longer than a turn can.
        """
        if not self._cond.acquire(timeout=_LOCK_WITHIN_S):
            return "the lock of the scheduler is not let go"
        try:
            if not self._stopped and any(not thread.is_alive() for thread in self._threads):
                return "a worker thread has ended"
            latest_ms = self.delivery.clock.monotonic_ms() - longest_turn_ms
            for seat in self._seats.values():
                if seat.running and seat.since_ms is not None and seat.since_ms < latest_ms:
                    return f"a turn of agent {seat.pump.agent!r} does not end"
            return ""
        finally:
            self._cond.release()

    def rests(self, path: Path, until_ms: int) -> bool:
        """Whether this pump has nothing that it could send before the monotonic moment `until_ms`."""
        with self._cond:
            seat = self._seats.get(path)
            if seat is None:
                return True
            if seat.running or seat.ready or seat.tag is not None:
                return False
            return seat.due_ms is None or seat.due_ms > until_ms

    def begin_flush(self, deadline: float) -> None:
        """Ignore backoff until `end_flush`; requests end at `deadline` (monotonic seconds)."""
        delivery = self.delivery
        delivery.deadline, delivery.flushing = deadline, True
        delivery.tokens.hurry()
        delivery.gate.hurry()
        with self._cond:
            for seat in self._seats.values():
                seat.pump.begin_flush()
                self._wake(seat)
            self._call_somebody()

    def end_flush(self) -> None:
        """Back to the usual pace."""
        delivery = self.delivery
        delivery.flushing, delivery.deadline = False, None
        delivery.gate.hurry(on=False)
        self.wake_all()

    def forget_wait(self, path: Path) -> None:
        """A person changed something about this outbox: its head may go at once."""
        with self._cond:
            seat = self._seats.get(path)
            if seat is not None:
                seat.pump.forget_wait()
        self.wake(path)

    def nudge(self) -> None:
        """Look at the gate again: something was mended. Who looks calls others for what it lets in."""
        with self._cond:
            if self._at_gate:
                self._cond.notify()
