"""Events that need several requests, a batch event and a continuation archive: what is left of one. Pure.

A batch event's progress names the messages that are stored and those that were refused; an archive's the
generation and the number of chunks that are through. A crash resumes behind the last saved progress.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from outbox.delivery.grouping import Size
from outbox.wire_text import split_batch


@dataclass(slots=True)
class BatchProgress:
    """Which messages of a batch event are done. `refused` maps an index to what the relay said."""

    stored: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)

    def encode(self) -> str:
        """As it stands in the row."""
        raw: dict[str, Any] = {"stored": sorted(self.stored)}
        if self.refused:
            raw["refused"] = {str(index): said for index, said in sorted(self.refused.items())}
        return json.dumps(raw, separators=(",", ":"), ensure_ascii=False)

    @classmethod
    def decode(cls, text: str | None) -> BatchProgress:
        """The opposite of `encode`; no progress yet is an empty one."""
        raw = json.loads(text) if text else {}
        refused = {int(index): said for index, said in raw.get("refused", {}).items()}
        return cls(set(raw.get("stored", ())), refused)

    def left(self, count: int) -> list[int]:
        """The messages that still have to go, in order."""
        return [index for index in range(count) if index not in self.stored and index not in self.refused]


@dataclass(frozen=True, slots=True)
class Batch:
    """A batch event taken apart."""

    head: bytes
    messages: list[bytes]
    tail: bytes

    def body(self, indexes: list[int]) -> bytes:
        """The request for some of its messages."""
        return self.head + b",".join(self.messages[index] for index in indexes) + self.tail


def open_batch(wire_payload: bytes) -> Batch:
    """A batch event's stored text, taken apart without changing a byte of its messages."""
    return Batch(*split_batch(wire_payload))


def take_messages(batch: Batch, left: list[int], size: Size, fence: int | None) -> list[int]:
    """The next messages of a batch event that go in one request."""
    run: list[int] = []
    total = len(batch.head) + len(batch.tail)
    for index in left:
        total += len(batch.messages[index]) + 1
        over = len(run) >= size.items or total > size.bytes or (fence is not None and index > fence)
        if run and over:
            break
        run.append(index)
    return run


@dataclass(frozen=True, slots=True)
class ArchiveProgress:
    """How far an archive is."""

    chunks: int = 0
    generation: int | None = None

    def encode(self) -> str:
        """As it stands in the row."""
        return json.dumps({"chunks": self.chunks, "generation": self.generation}, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str | None) -> ArchiveProgress:
        """The opposite of `encode`; no progress yet is an empty one."""
        raw = json.loads(text) if text else {}
        return cls(raw.get("chunks", 0), raw.get("generation"))
