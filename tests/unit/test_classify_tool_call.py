"""What the answer to an MCP `tools/call` means."""

import json

import pytest

from relay_client import Answer, Failure, Sort, read_tool_call, speaks_other_era

ID = "call-1"


def answer(status, body, **headers):
    """An answer; a body that is no bytes is written as JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def read(status, body, **headers):
    """The reading of the answer to the call."""
    return read_tool_call(answer(status, body, **headers), ID, now_ms=0, max_retry_after_ms=60_000)


def result(value, message_id=ID):
    """A JSON-RPC result."""
    return {"jsonrpc": "2.0", "id": message_id, "result": value}


def error(code, message="no", message_id=ID):
    """A JSON-RPC error."""
    return {"jsonrpc": "2.0", "id": message_id, "error": {"code": code, "message": message}}


@pytest.mark.parametrize(
    "value", [{}, {"content": [], "isError": False}, {"resultType": "complete", "isError": None}]
)
def test_a_result_is_kept(value):
    """Delivered, with the result's JSON text."""
    reading = read(200, result(value))
    assert reading.sort is Sort.ACCEPTED
    assert json.loads(reading.result) == value


def test_a_result_among_several_messages_is_found():
    """Revisions before 2025-06-18 may answer with an array."""
    reading = read(200, [{"method": "notifications/progress"}, result({"n": 1}, "other"), result({"n": 2})])
    assert reading.result == '{"n":2}'


@pytest.mark.parametrize("character", ["x", "\u20ac", "\ud83d"])
def test_a_long_result_is_cut_at_16_kib(character):
    """At most 16 KiB of UTF-8, whatever it is made of."""
    reading = read(200, result({"content": [{"type": "text", "text": character * 20_000}]}))
    assert 16_300 < len(reading.result.encode()) <= 16_384


def test_is_error_is_the_tools_no():
    """The tool ran: settled, with its words, and not delivered."""
    value = {"content": [{"type": "image"}, {"type": "text", "text": "no such\nnote"}], "isError": True}
    reading = read(200, result(value))
    assert (reading.sort, reading.detail) == (Sort.TOOL_ERROR, "no such note")
    assert json.loads(reading.result) == value


@pytest.mark.parametrize("value", [{"isError": True}, {"isError": True, "content": "no"}])
def test_a_tool_that_says_no_without_words(value):
    """There is always something to show."""
    assert read(200, result(value)).detail == "the tool said no"


@pytest.mark.parametrize(
    ("status", "code", "sort"),
    [
        (200, -32601, Sort.REFUSED),
        (200, -32602, Sort.REFUSED),
        (404, -32601, Sort.REFUSED),
        (400, -32602, Sort.REFUSED),
        (200, -32603, Sort.FAILED),
        (500, -32603, Sort.FAILED),
        (400, -32020, Sort.FAILED),
        (400, -32021, Sort.REFUSED),
        (400, -32022, Sort.FAILED),
        (200, -32000, Sort.FAILED),
        (400, -32600, Sort.NO_ENDPOINT),
        (400, -32000, Sort.NO_ENDPOINT),
        (404, -32001, Sort.NO_ENDPOINT),
        (503, -32603, Sort.BUSY),
        (401, -32602, Sort.UNAUTHORIZED),
    ],
)
@pytest.mark.parametrize("message_id", [ID, None])
def test_json_rpc_errors(status, code, sort, message_id):
    """The code decides where the request was read; what only shows the other era holds the path."""
    reading = read(status, error(code, message_id=message_id))
    assert (reading.sort, reading.code) == (sort, str(code))


def test_input_required_is_refused():
    """There is nobody to answer what the tool asks."""
    reading = read(200, result({"resultType": "input_required", "inputRequests": {}}))
    assert (reading.sort, reading.code) == (Sort.REFUSED, "input_required")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        {},
        {"ok": True},
        result({}, "another call"),
        result({"resultType": "later"}),
        result(None),
        result("done"),
        error(-32602, message_id="another call"),
        [],
        7,
    ],
)
def test_a_2xx_without_a_result_is_lost(body):
    """The tool may have run; nothing says so."""
    reading = read(200, body)
    assert reading.sort is Sort.LOST
    assert "no result" in reading.detail


def test_a_result_too_large_to_be_read_is_lost():
    """The tool did run: sent again only where that is safe."""
    reading = read_tool_call(Answer(200, {}, b"{", cut=True), ID, now_ms=0, max_retry_after_ms=0)
    assert (reading.sort, reading.detail) == (Sort.LOST, "the answer is too large")


@pytest.mark.parametrize(
    ("status", "body", "headers", "sort"),
    [
        (200, b"<html>Sign in", {}, Sort.NOT_A_RELAY),
        (302, b"", {}, Sort.REDIRECTED),
        (401, b"", {}, Sort.UNAUTHORIZED),
        (403, b"", {}, Sort.FORBIDDEN),
        (429, b"{}", {"retry_after": "1"}, Sort.BUSY),
        (503, b"{}", {}, Sort.BUSY),
        (400, b"", {"retry_after": "1"}, Sort.BUSY),
        (400, b"", {}, Sort.NO_ENDPOINT),
        (404, b"", {}, Sort.NO_ENDPOINT),
        (405, b"", {}, Sort.NO_ENDPOINT),
        (406, b"", {}, Sort.NO_ENDPOINT),
        (422, b"<html>", {}, Sort.NO_ENDPOINT),
        (422, {"error": {"code": "validation_failed"}}, {}, Sort.REFUSED),
        (404, {"error": {"code": "unknown_recipient"}}, {}, Sort.REFUSED),
        (409, {"error": {"code": "duplicate"}}, {}, Sort.DUPLICATE),
        (409, {"error": {"code": "in_progress"}}, {}, Sort.IN_PROGRESS),
        (409, {"error": {"code": "key_reused"}}, {}, Sort.REFUSED),
        (413, b"", {}, Sort.TOO_LARGE),
        (500, b"", {}, Sort.FAILED),
        (501, b"", {}, Sort.NO_ENDPOINT),
        (502, b"", {}, Sort.GATEWAY),
        (504, b"", {}, Sort.GATEWAY),
    ],
)
def test_answers_that_are_no_json_rpc(status, body, headers, sort):
    """The table as for events; a 4xx that shows no understanding of MCP is about the endpoint."""
    assert read(status, body, **headers).sort is sort


def test_no_answer():
    """Lost on the way, or never sent."""
    lost = Answer(None, failure=Failure.LOST)
    unsent = Answer(None, failure=Failure.UNREACHABLE, sent=False)
    assert read_tool_call(lost, ID, now_ms=0, max_retry_after_ms=0).sort is Sort.LOST
    assert read_tool_call(unsent, ID, now_ms=0, max_retry_after_ms=0).sort is Sort.UNREACHABLE


@pytest.mark.parametrize(
    ("status", "body", "other"),
    [
        (400, b"", True),
        (400, error(-32000), True),
        (404, error(-32001), True),
        (405, b"", True),
        (406, b"", True),
        (400, error(-32020), False),
        (400, error(-32022), False),
        (404, error(-32601), False),
        (422, {"error": {"code": "validation_failed"}}, False),
        (401, b"", False),
        (403, b"", False),
        (408, b"", False),
        (409, b"", False),
        (425, b"", False),
        (429, b"", False),
        (200, b"", False),
        (500, b"", False),
    ],
)
def test_the_other_era(status, body, other):
    """A 4xx means the era of sessions unless it shows that the request was understood."""
    assert speaks_other_era(answer(status, body)) is other


def test_silence_says_nothing_about_the_era():
    """No answer, no era."""
    assert not speaks_other_era(Answer(None, failure=Failure.LOST))
