"""Lines become events in bounded batches, a commit each; nothing is held back while stdin pauses."""

from __future__ import annotations

import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Protocol

from outbox.cli.output import clean, count, number, say
from outbox.errors import OutboxError, UsageError
from outbox.store.enqueue import Receipt

REFUSED = 4  # the exit status when a line was not taken

_BATCH_LINES = 500
_BATCH_BYTES = 4 * 1024 * 1024
_CHUNK_BYTES = 256 * 1024

Line = tuple[int, bytes | UsageError]


def read_chunks(fd: int, before_waiting: Callable[[], object]) -> Iterator[bytes]:
    """What a descriptor gives until its end; `before_waiting` is called whenever it has nothing just now."""
    while True:
        if not select.select([fd], [], [], 0)[0]:
            before_waiting()
        chunk = os.read(fd, _CHUNK_BYTES)
        if not chunk:
            return
        yield chunk


class Taking(Protocol):
    """An outbox, as far as lines are put into it."""

    def enqueue_many(self, events: list[str | bytes], /) -> list[Receipt | OutboxError]:
        """A receipt or an error for each."""


class Intake:
    """Takes numbered lines into an outbox, and tells what became of each.

    Receipts go to stdout (with `as_json` one a line, else a summary), refusals to stderr.
    """

    def __init__(self, outbox: Taking, *, as_json: bool) -> None:
        self._outbox = outbox
        self._as_json = as_json
        self._batch: list[Line] = []
        self._batch_bytes = 0
        self._accepted = self._known = self._refused = 0
        self._first_seq = self._last_seq = 0
        self._failure: OutboxError | None = None

    def add(self, line_number: int, line: bytes | UsageError) -> bool:
        """One more line; False when the store refuses everything, so that reading on is of no use."""
        self._batch.append((line_number, line))
        self._batch_bytes += len(line) if isinstance(line, bytes) else 0
        if len(self._batch) >= _BATCH_LINES or self._batch_bytes >= _BATCH_BYTES:
            self.commit()
        return self._failure is None

    def commit(self) -> None:
        """Put the lines so far on disk, and tell of each."""
        batch, self._batch, self._batch_bytes = self._batch, [], 0
        if not batch or self._failure is not None:
            return
        try:
            stored = iter(self._outbox.enqueue_many([line for _, line in batch if isinstance(line, bytes)]))
        except OutboxError as error:
            self._fail(batch, error)
            return
        results = [(at, line if isinstance(line, UsageError) else next(stored)) for at, line in batch]
        self._tell(results)

    def finish(self) -> int:
        """Say how it ended; the exit status: 4 when a line was refused, or that of what stopped it."""
        if not self._as_json:
            say(self._summary())
        if self._failure is not None:
            return self._failure.exit_status
        return REFUSED if self._refused else 0

    def _tell(self, results: list[tuple[int, Receipt | OutboxError]]) -> None:
        refused = [(at, result) for at, result in results if isinstance(result, OutboxError)]
        taken = [(at, result) for at, result in results if isinstance(result, Receipt)]
        for _, receipt in taken:
            self._count(receipt)
        self._refused += len(refused)
        if self._as_json:
            say(*(json.dumps(receipt_json(receipt, at)) for at, receipt in taken))
        say(*(self._refusal(at, error) for at, error in refused), to=sys.stderr)

    def _count(self, receipt: Receipt) -> None:
        if receipt.duplicate:
            self._known += 1
            return
        self._accepted += 1
        self._first_seq = self._first_seq or receipt.seq
        self._last_seq = receipt.seq

    def _fail(self, batch: list[Line], error: OutboxError) -> None:
        """Nothing of this batch is stored, and nothing behind it is tried: it would overtake."""
        self._failure = error
        self._refused += len(batch)
        if self._as_json:
            own = ((at, line if isinstance(line, UsageError) else error) for at, line in batch)
            say(*(self._refusal(at, refused) for at, refused in own), to=sys.stderr)
        else:
            say(clean(f"From line {number(batch[0][0])} on nothing was taken: {error}"), to=sys.stderr)

    def _refusal(self, line_number: int, error: OutboxError) -> str:
        if self._as_json:
            return json.dumps({"line": line_number, "error": {"code": error.code, "message": str(error)}})
        return clean(f"line {line_number}: {not_taken(error)}")

    def _summary(self) -> str:
        accepted = f"{count(self._accepted, 'event')} accepted"
        if self._accepted == 1:
            accepted += f", seq {number(self._first_seq)}"
        elif self._accepted:
            accepted += f", seq {number(self._first_seq)} to {number(self._last_seq)}"
        known = f" {count(self._known, 'was', 'were')} known already." if self._known else ""
        refused = f" {count(self._refused, 'line')} refused." if self._refused else ""
        return f"{accepted}.{known}{refused}"


def not_taken(error: OutboxError) -> str:
    """The error as a sentence that says so; events' checks give the first part only."""
    said = str(error)
    if "Not taken" in said:
        return said
    return f"{said} Not taken." if said.endswith((".", "?")) else f"{said}. Not taken."


def receipt_json(receipt: Receipt, line: int) -> dict[str, object]:
    """A receipt as data."""
    return {
        "seq": receipt.seq,
        "idempotencyKey": receipt.idempotency_key,
        "duplicate": receipt.duplicate,
        "state": receipt.state,
        "line": line,
    }
