"""One request and what its answer says: the only place where delivery speaks to the relay."""

from __future__ import annotations

from dataclasses import dataclass

from outbox.delivery.parcel import Form, Parcel
from outbox.delivery.shared import Delivery
from relay_client import (
    Answer,
    Failure,
    Reading,
    read_archive_chunk,
    read_batch,
    read_preparation,
    read_single,
    read_tool_call,
)


@dataclass(frozen=True, slots=True)
class Cut:
    """We ended the request ourselves; `sent` says whether a byte of it may have left."""

    sent: bool


def exchange(delivery: Delivery, parcel: Parcel, token: str | None) -> Reading | Cut:
    """Send one request and read its answer."""
    if parcel.form is Form.TOOL:
        answer = delivery.mcp.call(
            parcel.body,
            tool=parcel.tool,
            token=token,
            key=parcel.key,
            origin=parcel.origin,
            deadline=delivery.deadline,
        )
        delivery.longest_call_ms = max(delivery.longest_call_ms, answer.elapsed_ms)
    else:
        answer = delivery.client.post_event(
            parcel.path,
            parcel.body,
            token=token,
            key=parcel.key,
            origin=parcel.origin,
            deadline=delivery.deadline,
        )
    reading = _read(delivery, parcel.form, parcel.events, answer)
    delivery.count("cut" if isinstance(reading, Cut) else str(reading.sort), answer.elapsed_ms / 1_000)
    return reading


def prepare_call(delivery: Delivery, tool: str, token: str | None) -> Reading | Cut | None:
    """Find out how an MCP endpoint is spoken to, without the call; None when all is ready."""
    answer = delivery.mcp.prepare(tool, token=token, deadline=delivery.deadline)
    return None if answer is None else _read(delivery, Form.TOOL, 1, answer)


def _read(delivery: Delivery, form: Form, count: int, answer: Answer) -> Reading | Cut:
    if answer.failure is Failure.STOPPED:
        return Cut(answer.sent and not answer.is_preparation)
    most, now_ms = delivery.max_retry_after_ms, delivery.clock.wall_ms()
    if answer.is_preparation:
        return read_preparation(answer, now_ms=now_ms, max_retry_after_ms=most)
    match form:
        case Form.GROUP:
            return read_batch(answer, count, now_ms=now_ms, max_retry_after_ms=most)
        case Form.ARCHIVE:
            return read_archive_chunk(answer, now_ms=now_ms, max_retry_after_ms=most)
        case Form.TOOL:
            return read_tool_call(answer, answer.request_id, now_ms=now_ms, max_retry_after_ms=most)
        case Form.SINGLE:
            return read_single(answer, now_ms=now_ms, max_retry_after_ms=most)
