"""The gap: what the relay is told, in its place of the order, of what a bound dropped or damage lost."""

from __future__ import annotations

import json
from dataclasses import dataclass

GAP_KIND = "outbox-gap"


@dataclass(frozen=True, slots=True)
class Lost:
    """One event that is gone. Times are epoch milliseconds."""

    seq: int
    kind: str
    size_bytes: int
    occurred_at_ms: int


@dataclass(frozen=True, slots=True)
class Gap:
    """What one gap has to tell. `kinds` counts the lost events of each kind, sorted by name."""

    first_seq: int
    last_seq: int
    count: int
    size_bytes: int
    kinds: tuple[tuple[str, int], ...]
    reason: str
    from_ms: int
    to_ms: int

    def encode(self) -> bytes:
        """The JSON under which a gap that still grows stands in its row."""
        return json.dumps(
            {
                "firstSeq": self.first_seq,
                "lastSeq": self.last_seq,
                "count": self.count,
                "bytes": self.size_bytes,
                "kinds": dict(self.kinds),
                "reason": self.reason,
                "fromAt": self.from_ms,
                "toAt": self.to_ms,
            },
            separators=(",", ":"),
        ).encode()

    def message(self, agent: str) -> str:
        """The payload of the message that tells of it (a session message of kind `outbox-gap`), as JSON."""
        noun = "event was" if self.count == 1 else "events were"
        body = (
            f"{self.count:,} {noun} not delivered (seq {self.first_seq:,} to {self.last_seq:,}): "
            f"{_REASONS.get(self.reason, self.reason)}."
        )
        payload = json.loads(self.encode())
        return json.dumps(
            {"from": agent, "kind": GAP_KIND, "body": body, "payload": payload},
            separators=(",", ":"),
            ensure_ascii=False,
        )


_REASONS = {
    "max_events": "the outbox had reached its bound of events and dropped the oldest",
    "max_bytes": "the outbox had reached its bound of bytes and dropped the oldest",
    "max_age": "they had waited longer than the outbox keeps events",
    "damaged": "their file was damaged",
}


def decode(text: bytes) -> Gap:
    """The opposite of `Gap.encode`."""
    raw = json.loads(text)
    return Gap(
        first_seq=raw["firstSeq"],
        last_seq=raw["lastSeq"],
        count=raw["count"],
        size_bytes=raw["bytes"],
        kinds=tuple(sorted(raw["kinds"].items())),
        reason=raw["reason"],
        from_ms=raw["fromAt"],
        to_ms=raw["toAt"],
    )


def widen(gap: Gap | None, lost: Lost, reason: str) -> Gap:
    """The gap with one more lost event in it; the newest reason stands."""
    if gap is None:
        at = lost.occurred_at_ms
        return Gap(lost.seq, lost.seq, 1, lost.size_bytes, ((lost.kind, 1),), reason, at, at)
    kinds = dict(gap.kinds)
    kinds[lost.kind] = kinds.get(lost.kind, 0) + 1
    return Gap(
        first_seq=min(gap.first_seq, lost.seq),
        last_seq=max(gap.last_seq, lost.seq),
        count=gap.count + 1,
        size_bytes=gap.size_bytes + lost.size_bytes,
        kinds=tuple(sorted(kinds.items())),
        reason=reason,
        from_ms=min(gap.from_ms, lost.occurred_at_ms),
        to_ms=max(gap.to_ms, lost.occurred_at_ms),
    )
