"""What the answer to a request of several messages means, message by message and as a whole."""

import json

import pytest

from relay_client import Answer, Failure, Sort, read_batch

STORED = {"status": 201, "id": "m-1"}


def read(status, body, count=2, **headers):
    """The reading of the answer to `count` messages."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    return read_batch(Answer(status, headers, body), count, now_ms=0, max_retry_after_ms=60_000)


@pytest.mark.parametrize("status", [200, 207])
def test_each_result_is_read_like_an_answer_of_its_own(status):
    """Status, error, code and wait of a result mean what they mean for one event."""
    results = [
        STORED,
        {"status": 422, "error": {"code": "validation_failed", "message": "no\nbody"}},
        {"status": 409, "error": {"code": "duplicate"}},
        {"status": 409, "error": {"code": "key_reused"}},
        {"status": 429, "retryAfter": 7, "error": {"code": "slow_down"}},
        {"status": 503, "retry_after": "9"},
        {"status": 200, "error": {"code": "unknown_recipient"}},
        {"status": 404, "error": {"code": "unknown_recipient"}},
        {"status": 500},
    ]
    reading = read(status, {"results": results}, len(results))
    assert reading.sort is Sort.ITEMS
    assert [item.sort for item in reading.items] == [
        Sort.ACCEPTED,
        Sort.REFUSED,
        Sort.DUPLICATE,
        Sort.REFUSED,
        Sort.BUSY,
        Sort.BUSY,
        Sort.REFUSED,
        Sort.REFUSED,
        Sort.FAILED,
    ]
    assert reading.items[1].detail == "validation_failed: no body"
    assert "validation_failed" in reading.items[1].excerpt
    assert [item.retry_after_ms for item in reading.items[4:6]] == [7000, 9000]


@pytest.mark.parametrize("body", [b"", b" ", {"ok": True}, {"stored": 2}, [], "stored"])
def test_a_2xx_without_results_means_all_are_stored(body):
    """JSON or nothing, without `results`: the batch was taken as a whole."""
    assert read(200, body).sort is Sort.ACCEPTED


@pytest.mark.parametrize(
    "body",
    [
        {"results": []},
        {"results": [STORED]},
        {"results": [STORED] * 3},
        {"results": {"0": STORED, "1": STORED}},
        {"results": None},
        {"results": [STORED, {"id": "m-2"}]},
        {"results": [STORED, {"status": "201"}]},
        {"results": [STORED, {"status": True}]},
        {"results": [STORED, {"status": 7}]},
        {"results": [STORED, 201]},
        b"<html>Sign in",
        b'{"results": [{"status": 201}',
    ],
)
def test_what_cannot_be_told_message_by_message_delivers_nothing(body):
    """A wrong number of results, one without a status, or no JSON: all go again singly."""
    reading = read(200, body)
    assert (reading.sort, reading.items) == (Sort.UNCLEAR_BATCH, ())


def test_a_2xx_too_large_to_be_read_is_unclear():
    """The results may stand in what was not read."""
    cut = Answer(200, {}, b"{}", cut=True)
    assert read_batch(cut, 2, now_ms=0, max_retry_after_ms=0).sort is Sort.UNCLEAR_BATCH


@pytest.mark.parametrize(
    ("error", "sort"),
    [({"code": "validation_failed"}, Sort.REFUSED), ({"code": "e1"}, Sort.FAILED), ("text", Sort.FAILED)],
)
def test_a_top_level_error_is_no_acceptance(error, sort):
    """Not even where results stand beside it."""
    assert read(200, {"error": error}).sort is sort
    assert read(200, {"error": error, "results": [STORED, STORED]}).sort is sort


@pytest.mark.parametrize(
    ("status", "body", "headers", "sort"),
    [
        (413, b"", {}, Sort.TOO_LARGE),
        (409, b"", {}, Sort.CONFLICT),
        (409, {"error": {"code": "duplicate"}}, {}, Sort.CONFLICT),
        (409, {"error": {"code": "key_reused"}}, {}, Sort.CONFLICT),
        (409, {"error": {"code": "in_progress"}}, {}, Sort.IN_PROGRESS),
        (409, b"", {"retry_after": "1"}, Sort.IN_PROGRESS),
        (400, b"", {}, Sort.REFUSED),
        (422, b"", {}, Sort.REFUSED),
        (404, b"", {}, Sort.NO_ENDPOINT),
        (405, b"", {}, Sort.NO_ENDPOINT),
        (501, b"", {}, Sort.NO_ENDPOINT),
        (404, {"error": {"code": "unknown_recipient"}}, {}, Sort.REFUSED),
        (401, b"", {}, Sort.UNAUTHORIZED),
        (403, b"", {}, Sort.FORBIDDEN),
        (429, b"", {}, Sort.BUSY),
        (422, b"", {"retry_after": "1"}, Sort.BUSY),
        (500, b"", {}, Sort.FAILED),
        (502, b"", {}, Sort.GATEWAY),
        (302, b"", {}, Sort.REDIRECTED),
    ],
)
def test_errors_speak_of_the_batch_as_a_whole(status, body, headers, sort):
    """The table as for one event; a 409 is never taken as stored."""
    assert read(status, body, **headers).sort is sort


def test_no_answer():
    """A lost answer is lost for all of them."""
    reading = read_batch(Answer(None, failure=Failure.LOST), 2, now_ms=0, max_retry_after_ms=0)
    assert reading.sort is Sort.LOST
