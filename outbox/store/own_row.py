"""Whether the numbers in the one row of an outbox can be those that its processes wrote there. Pure.

It has no checksum: it changes with every event. A bit of it that has changed on the disk must not have an
event stored under a number that was given before, or fail every enqueue.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

READ_NUMBERS = """
SELECT last_seq, claimed_through, waiting, dead, (SELECT max(seq) FROM events), (SELECT max(seq) FROM dead),
       waiting_bytes, dead_bytes, receipt_bytes, accepted, delivered, dropped, generation, claim_unsafe,
       open_gap_seq, paused_at_ms, blocked_since_ms, blocked_next_ms, blocked_reason, blocked_detail,
       (SELECT page_count * page_size FROM pragma_page_count, pragma_page_size)
FROM outbox"""


NO_MOMENT = 1  # 0 and 1 take no room in a row: a flipped bit makes them of NULL


def numbers_make_sense(row: tuple[Any, ...]) -> bool:
    """Whether all are of their types, none below what rows prove, nor above what the file can hold.

    `row` is of READ_NUMBERS.
    """
    last_seq, claimed_through, waiting, dead, event, letter, *rest, file_bytes = row
    counts, texts = (last_seq, claimed_through, waiting, dead, *rest[:8]), rest[12:]
    waiting_bytes, dead_bytes, open_gap_seq, *moments = *rest[:2], *rest[8:12]
    return (
        all(type(count) is int and count >= 0 for count in counts)
        and (open_gap_seq is None or (type(open_gap_seq) is int and open_gap_seq > 0))
        and all(moment is None or (type(moment) is int and moment > NO_MOMENT) for moment in moments)
        and all(text is None or type(text) is str for text in texts)
        and last_seq >= max(event or 0, letter or 0, claimed_through, waiting, dead)
        and waiting_bytes + dead_bytes <= file_bytes
    )
