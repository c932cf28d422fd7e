"""Items become records in their agents' outboxes, in bounded batches, a commit each; each refusal is told."""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from outbox.api.report import opened
from outbox.bounds import Bounds
from outbox.cli.import_source import INCOMPLETE, Found, Item, Paused, Refused
from outbox.cli.intake import REFUSED, not_taken
from outbox.cli.output import clean, count, number, say
from outbox.cli.progress import Advance
from outbox.cli.where import now_ms
from outbox.errors import OutboxError, StoreError, StoreFull, UsageError
from outbox.event import Limits
from outbox.record import Record, Remembered
from outbox.store.create import create_outbox
from outbox.store.directory import StateDirectory
from outbox.store.file import OutboxFile
from outbox.store.people import pause
from outbox.store.transfer import take_in
from outbox.store.wake import wake_daemon

_BATCH_RECORDS = 500
_BATCH_BYTES = 4 * 1024 * 1024


class TakingIn:
    """Takes items, agent by agent; `finish` says how it ended. `with` closes the outbox that is open."""

    def __init__(
        self, state: StateDirectory, limits: Limits, bounds: Bounds, *, as_json: bool, advance: Advance
    ) -> None:
        """`limits` and `bounds` are those of outboxes that have to be made."""
        self.counts: Counter[str] = Counter()
        self._state = state
        self._rules = (limits, bounds)
        self._as_json = as_json
        self._advance = advance
        self._open = ExitStack()
        self._box: OutboxFile | None = None
        self._batch: list[tuple[str, Record | Remembered]] = []
        self._batch_bytes = 0
        self._stopped: set[str] = set()
        self._new: set[str] = set()  # the agents whose outboxes were made for this
        self._worst = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def add(self, found: Found) -> None:
        """Take one more."""
        self._advance(1)
        if isinstance(found, Refused):
            self._refuse(found.place, found.error)
            return
        box = None if found.agent in self._stopped else self._outbox_of(found.agent)
        if box is None:
            self.counts["refused"] += isinstance(found, Item)
        elif isinstance(found, Paused):
            self._pause(box, found.at_ms)
        else:
            self._take(box, found)

    def finish(self) -> int:
        """Commit what is left; the exit status."""
        self._commit()
        return self._worst

    def _outbox_of(self, agent: str) -> OutboxFile | None:
        """The agent's outbox, made where there is none; None when it cannot be used."""
        if self._box is not None and self._box.agent == agent:
            return self._box
        self._commit()
        self._open.close()
        self._box = None
        try:
            self._box = self._open.enter_context(opened(self._state, self._made(agent)))
        except StoreError as error:
            self._stop(agent, "Nothing", error)
        return self._box

    def _made(self, agent: str) -> Path:
        path = self._state.outbox_path(agent)
        if not os.path.lexists(path):
            self._new.add(agent)
        create_outbox(self._state, agent, *self._rules, now_ms())
        return path

    def _pause(self, box: OutboxFile, at_ms: int) -> None:
        """Only an agent that is new here: one that is at work goes on."""
        self._commit()
        if box.agent in self._new:
            pause(box, at_ms)
            self.counts["paused"] += 1

    def _take(self, box: OutboxFile, item: Item) -> None:
        try:
            record = item.read(box.limits)
        except UsageError as error:
            self._refuse(item.place, error)
            return
        self._batch.append((item.place, record))
        self._batch_bytes += len(record.event.wire_payload) if isinstance(record, Record) else 0
        if len(self._batch) >= _BATCH_RECORDS or self._batch_bytes >= _BATCH_BYTES:
            self._commit()

    def _commit(self) -> None:
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        box = self._box
        if box is None or not batch:
            return
        try:
            results = take_in(box, [record for _, record in batch], now_ms=now_ms())
        except StoreError as error:
            self.counts["refused"] += len(batch)
            self._stop(box.agent, f"From {batch[0][0]} on nothing", error)
            return
        wake_daemon(self._state.wake_socket, box.path.name)
        for (place, record), result in zip(batch, results, strict=True):
            if isinstance(result, StoreFull):
                self.counts["refused"] += 1
                self._stop(box.agent, f"From {place} on nothing", result)
            elif isinstance(result, OutboxError):
                self._refuse(place, result)
            else:
                self.counts["known" if result.duplicate else _sort_of(record)] += 1

    def _stop(self, agent: str, what: str, error: StoreError) -> None:
        """Nothing more of this agent is taken: it would overtake what was not."""
        if agent not in self._stopped:
            self._stopped.add(agent)
            self._tell(f"{what} of {agent} was taken: {error}", {"agent": agent}, error)

    def _refuse(self, place: str, error: OutboxError) -> None:
        of_a_record = isinstance(error, UsageError) and error.code != INCOMPLETE
        self.counts["refused"] += of_a_record
        text = not_taken(error) if of_a_record else str(error)
        self._tell(f"{place}: {text}", {"place": place}, error)

    def _tell(self, text: str, where: dict[str, str], error: OutboxError) -> None:
        self._worst = max(self._worst, error.exit_status if isinstance(error, StoreError) else REFUSED)
        if self._as_json:
            told = {**where, "error": {"code": error.code, "message": str(error)}}
            say(json.dumps(told), to=sys.stderr)
        else:
            say(clean(text), to=sys.stderr)


def _sort_of(record: Record | Remembered) -> str:
    if isinstance(record, Remembered):
        return "receipts"
    return "gaps" if record.is_gap else "events" if record.letter is None else "dead"


def summary(counts: Counter[str]) -> str:
    """How it ended, in a line: "493 events and 7 dead letters taken, with 12 receipts. 1 was not taken."."""
    taken = f"{count(counts['events'], 'event')} and {count(counts['dead'], 'dead letter')} taken"
    receipts = f", with {count(counts['receipts'], 'receipt')}" if counts["receipts"] else ""
    known = f" {count(counts['known'], 'was', 'were')} known already." if counts["known"] else ""
    refused = (
        f" {number(counts['refused'])} not taken; what was not stays where it was."
        if counts["refused"]
        else ""
    )
    return f"{taken}{receipts}.{known}{refused}"
