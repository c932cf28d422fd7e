"""What the answer to one event means: a test for each row of the outcome table and each oddity."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relay_client import Answer, Failure, Sort, read_archive_chunk, read_health, read_single, read_spec
from relay_client.reading import Capabilities

NOW_MS = 1_790_000_000_000
HOUR_MS = 3_600_000


def answer(status=200, body=b"", **headers):
    """An answer; a body that is no bytes is written as JSON."""
    body = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(status, {name.replace("_", "-"): value for name, value in headers.items()}, body)


def read(*args, **headers):
    """The reading of one event's answer."""
    return read_single(answer(*args, **headers), now_ms=NOW_MS, max_retry_after_ms=HOUR_MS)


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
@pytest.mark.parametrize(
    "body", [b"", b" \r\n", {"ok": True}, {"id": "m-1", "error": None}, {"error": ""}, [], "stored", 7, None]
)
def test_2xx_with_json_or_nothing_is_accepted(status, body):
    """JSON of any kind, and no body, say that it is stored; an `error` that says nothing is none."""
    reading = read(status, body)
    assert (reading.sort, reading.status, reading.excerpt) == (Sort.ACCEPTED, status, "")


@pytest.mark.parametrize(
    ("body", "detail"),
    [
        (b"<!doctype html><title>Sign in</title><form></form>", 'an HTML page, "Sign in"'),
        (b"<html><body>hello", "an HTML page"),
        (b"OK", "OK"),
        (b'{"ok":tru', '{"ok":tru'),
        (b"\x1f\x8b\x08\x00", "\ufffd"),
    ],
)
def test_2xx_with_something_else_is_not_a_relay(body, detail):
    """A page or half of a JSON text acknowledges nothing, whatever its status says."""
    reading = read(200, body, content_type="application/json")
    assert reading.sort is Sort.NOT_A_RELAY
    assert detail in reading.detail


def test_2xx_that_is_too_large_is_unreadable():
    """A 2xx beyond 8 MiB is no acceptance, even when its start happens to be JSON."""
    cut = Answer(200, {}, b"{}", cut=True)
    reading = read_single(cut, now_ms=NOW_MS, max_retry_after_ms=HOUR_MS)
    assert (reading.sort, reading.detail) == (Sort.NOT_A_RELAY, "the answer is too large")


def test_an_echo_of_a_huge_integer_is_still_json():
    """A relay that echoes an event with 5,000 digits in it has accepted it."""
    assert read(201, b'{"n":' + b"9" * 5000 + b"}").sort is Sort.ACCEPTED


@pytest.mark.parametrize(
    ("error", "sort", "code"),
    [
        ({"code": "validation_failed", "message": "no body"}, Sort.REFUSED, "validation_failed"),
        ({"code": "unknown_recipient"}, Sort.REFUSED, "unknown_recipient"),
        ({"code": "key_reused"}, Sort.REFUSED, "key_reused"),
        ({"code": "duplicate"}, Sort.DUPLICATE, "duplicate"),
        ({"code": "in_progress"}, Sort.IN_PROGRESS, "in_progress"),
        ({"code": "invalid_token"}, Sort.UNAUTHORIZED, "invalid_token"),
        ({"code": "insufficient_scope"}, Sort.FORBIDDEN, "insufficient_scope"),
        ({"code": "e500"}, Sort.FAILED, "e500"),
        ({"code": 17}, Sort.FAILED, "17"),
        ("duplicate", Sort.DUPLICATE, "duplicate"),
        ("no room", Sort.FAILED, ""),
        (True, Sort.FAILED, ""),
        ([1], Sort.FAILED, ""),
    ],
)
def test_2xx_with_an_error_is_no_acceptance(error, sort, code):
    """A known code is read as what it says; any other error is a failure, never a refusal."""
    reading = read(200, {"error": error})
    assert (reading.sort, reading.code) == (sort, code)


@pytest.mark.parametrize(
    ("status", "sort"),
    [
        (301, Sort.REDIRECTED),
        (302, Sort.REDIRECTED),
        (304, Sort.REDIRECTED),
        (307, Sort.REDIRECTED),
        (400, Sort.REFUSED),
        (401, Sort.UNAUTHORIZED),
        (402, Sort.FAILED),
        (403, Sort.FORBIDDEN),
        (404, Sort.NO_ENDPOINT),
        (405, Sort.NO_ENDPOINT),
        (406, Sort.FAILED),
        (407, Sort.FAILED),
        (408, Sort.BUSY),
        (409, Sort.DUPLICATE),
        (410, Sort.REFUSED),
        (413, Sort.TOO_LARGE),
        (415, Sort.REFUSED),
        (418, Sort.FAILED),
        (421, Sort.BUSY),
        (422, Sort.REFUSED),
        (423, Sort.BUSY),
        (425, Sort.BUSY),
        (429, Sort.BUSY),
        (499, Sort.FAILED),
        (500, Sort.FAILED),
        (501, Sort.NO_ENDPOINT),
        (502, Sort.GATEWAY),
        (503, Sort.BUSY),
        (504, Sort.GATEWAY),
        (505, Sort.FAILED),
        (599, Sort.FAILED),
        (999, Sort.FAILED),
    ],
)
def test_each_status_has_its_row(status, sort):
    """The table, for answers that say nothing but their status."""
    assert read(status).sort is sort


@pytest.mark.parametrize("status", [400, 404, 408, 413, 422, 429, 500, 501, 502, 503, 504, 599])
@pytest.mark.parametrize(("value", "wait_ms"), [("3", 3000), ("0", 0), ("864000", HOUR_MS)])
def test_retry_after_makes_any_error_a_wait(status, value, wait_ms):
    """Whatever asks to come again is busy, for as long as it says and no longer than the ceiling."""
    reading = read(status, retry_after=value)
    assert (reading.sort, reading.retry_after_ms) == (Sort.BUSY, wait_ms)


@pytest.mark.parametrize("value", ["soon", "-5", "1.5", "", "Mon, 30 Nov 1998 11:00:00 GMT"])
def test_an_unreadable_retry_after_is_none(value):
    """What cannot be read, or has passed, changes nothing."""
    reading = read(422, retry_after=value)
    assert (reading.sort, reading.retry_after_ms) == (Sort.REFUSED, None)


@pytest.mark.parametrize(("status", "sort"), [(401, Sort.UNAUTHORIZED), (403, Sort.FORBIDDEN)])
def test_retry_after_does_not_hide_a_refused_token(status, sort):
    """401 and 403 are about the token; the wait is told beside it."""
    reading = read(status, retry_after="9")
    assert (reading.sort, reading.retry_after_ms) == (sort, 9000)


def test_retry_after_of_a_2xx_is_nothing():
    """An acceptance asks for no wait."""
    assert read(200, {"ok": True}, retry_after="9").retry_after_ms is None


@pytest.mark.parametrize(
    ("body", "headers", "sort"),
    [
        ({"error": {"code": "duplicate"}}, {}, Sort.DUPLICATE),
        ({"code": "duplicate"}, {}, Sort.DUPLICATE),
        ({"type": "about:blank", "title": "Conflict", "status": 409}, {}, Sort.DUPLICATE),
        ({"type": "https://www.rfc-editor.org/rfc/rfc9110#section-15.5.10"}, {}, Sort.DUPLICATE),
        ({"type": "https://relay.example/problems/duplicate"}, {}, Sort.DUPLICATE),
        ({"error": "already stored"}, {}, Sort.DUPLICATE),
        (b"<html>Conflict", {}, Sort.DUPLICATE),
        (b"", {}, Sort.DUPLICATE),
        ({"error": {"code": "in_progress"}}, {}, Sort.IN_PROGRESS),
        ({"error": {"code": "in_progress"}}, {"retry_after": "1"}, Sort.IN_PROGRESS),
        (b"", {"retry_after": "1"}, Sort.IN_PROGRESS),
        ({"error": {"code": "key_reused"}}, {"retry_after": "1"}, Sort.IN_PROGRESS),
        ({"error": {"code": "key_reused"}}, {}, Sort.REFUSED),
        ({"error": "key_reused"}, {}, Sort.REFUSED),
        ({"type": "https://relay.example/problems/key-reused"}, {}, Sort.REFUSED),
        ({"error": {"code": "e409"}}, {}, Sort.REFUSED),
    ],
)
def test_409(body, headers, sort):
    """Stored already, still at work, or refused: the code decides; no code means stored."""
    assert read(409, body, **headers).sort is sort


def test_a_409_too_large_to_be_read_is_a_failure():
    """Without its code it can neither be taken as stored nor as refused."""
    cut = Answer(409, {}, b"{" * 65536, cut=True)
    assert read_single(cut, now_ms=NOW_MS, max_retry_after_ms=HOUR_MS).sort is Sort.FAILED


@pytest.mark.parametrize(
    ("body", "sort"),
    [
        ({"error": {"code": "unknown_recipient", "message": "nobody"}}, Sort.REFUSED),
        ({"type": "urn:relay:unknown-recipient"}, Sort.REFUSED),
        ({"error": {"code": "not_found"}}, Sort.NO_ENDPOINT),
        (b"<html>404", Sort.NO_ENDPOINT),
    ],
)
def test_404(body, sort):
    """An unknown recipient is the event's fault; everything else the path's."""
    assert read(404, body).sort is sort


@pytest.mark.parametrize(
    ("body", "code", "detail"),
    [
        (
            {"error": {"code": "validation_failed", "message": "to is missing"}},
            "validation_failed",
            "to is missing",
        ),
        ({"error": {"code": "e400"}}, "e400", "e400"),
        ({"error": "to is missing"}, "", "to is missing"),
        ({"error": "invalid_request", "error_description": "to is missing"}, "", "to is missing"),
        ({"type": "about:blank", "title": "Bad Request", "detail": "to is missing"}, "", "to is missing"),
        ({"type": "https://x.example/p/no-to", "title": "No to"}, "no_to", "No to"),
        ({"code": "e1", "message": "to is missing"}, "e1", "to is missing"),
        ({"message": ["a", "b"]}, "", "Bad Request"),
        (b"to is missing", "", "to is missing"),
        (b"<html><head><title>Bad\n request</title>", "", 'an HTML page, "Bad request"'),
        (b"\xff\xfe\x00\x01", "", "\ufffd"),
        (b"", "", "Bad Request"),
        (b"null", "", "Bad Request"),
    ],
)
def test_the_relays_words(body, code, detail):
    """The code and the sentence are found in every form in which errors come."""
    reading = read(400, body)
    assert reading.code == code
    assert detail in reading.detail


def test_a_challenge_gives_the_code_that_the_body_lacks():
    """RFC 6750: the error of a 401 stands in WWW-Authenticate."""
    challenge = 'Bearer realm="relay", error="invalid_token", error_description="it has expired"'
    reading = read(401, www_authenticate=challenge)
    assert (reading.code, reading.detail) == ("invalid_token", "invalid_token: it has expired")


def test_h23_the_detail_is_one_clean_line():
    """Line breaks and terminal codes in an error forge no second line and steer no terminal."""
    reading = read(400, b"bad\x1b[2J\nINFO outbox: all delivered\x07")
    assert reading.detail == "bad INFO outbox: all delivered"
    assert "\x1b" not in reading.excerpt
    assert "\x07" not in reading.excerpt


@given(st.text(max_size=400), st.sampled_from([400, 409, 200, 503, 302]))
def test_no_text_makes_a_detail_unprintable_or_long(text, status):
    """Whatever a relay writes: one line, no controls, no turned-round text, at most 300 characters."""
    for body in (text.encode("utf-8", "surrogatepass"), {"error": {"code": text, "message": text}}):
        reading = read(status, body, location=text)
        for shown in (reading.detail, reading.code):
            assert len(shown) <= 300
            assert not set(shown) & set(map(chr, [*range(32), *range(127, 160), *range(0x2028, 0x202F)]))
            assert not set(shown) & set("\u2066\u2067\u2068\u2069\u200e\u200f\u061c\ufeff")
            shown.encode()
        assert len(reading.excerpt.encode()) <= 2048


def test_the_excerpt_is_the_start_of_the_body():
    """At most 2 KiB of UTF-8 are kept for the dead letter, never half a character."""
    reading = read(422, "\u00e9".encode() * 5000)
    assert reading.excerpt == "\u00e9" * 1024


@pytest.mark.parametrize(
    ("location", "detail"),
    [
        ("http://other.invalid:9/messages?token=abc", "redirected to http://other.invalid:9"),
        ("https://user:secret@login.example/x", "redirected to https://login.example"),
        ("/login?next=x", "redirected within the same address"),
        ("http://[", "redirected to an address that cannot be read"),
        ("http://x:99999/", "redirected to an address that cannot be read"),
        ("", "Temporary Redirect"),
    ],
)
def test_a_redirect_names_the_origin_only(location, detail):
    """Where it points is told without what stands in the path, the query or before the host."""
    assert read(307, location=location).detail == detail


@pytest.mark.parametrize(
    ("failure", "sent", "sort"),
    [
        (Failure.UNREACHABLE, False, Sort.UNREACHABLE),
        (Failure.LOST, True, Sort.LOST),
        (Failure.STOPPED, True, Sort.LOST),
        (Failure.STOPPED, False, Sort.UNREACHABLE),
    ],
)
def test_no_answer(failure, sent, sort):
    """Without an answer the one thing that counts is whether a byte of the request may have left."""
    silent = Answer(None, failure=failure, detail="connection refused", sent=sent)
    reading = read_single(silent, now_ms=NOW_MS, max_retry_after_ms=HOUR_MS)
    assert (reading.sort, reading.status, reading.detail) == (sort, None, "connection refused")


@pytest.mark.parametrize(
    ("status", "body", "generation"),
    [
        (201, {"archive": {"generation": 4}}, 4),
        (200, {"archive": {"generation": 0}}, 0),
        (409, {"error": {"code": "duplicate"}, "archive": {"generation": 7}}, 7),
        (201, {"archive": {"generation": "4"}}, None),
        (201, {"archive": {"generation": True}}, None),
        (201, {"archive": {"generation": -1}}, None),
        (201, {"archive": 4}, None),
        (201, [1], None),
        (201, b"", None),
        (422, {"archive": {"generation": 4}}, None),
    ],
)
def test_an_archives_generation(status, body, generation):
    """It comes with a stored chunk and with a 409 for one stored before; nothing else is taken for one."""
    reading = read_archive_chunk(answer(status, body), now_ms=NOW_MS, max_retry_after_ms=HOUR_MS)
    assert reading.generation == generation


@pytest.mark.parametrize(
    ("given_answer", "healthy"),
    [
        (answer(200, {"status": "ok"}), True),
        (answer(204), True),
        (answer(200, b"<html>"), False),
        (answer(503, {"status": "ok"}), False),
        (answer(301), False),
        (Answer(200, {}, b"", cut=True), False),
        (Answer(None, failure=Failure.UNREACHABLE), False),
    ],
)
def test_health(given_answer, healthy):
    """Any 2xx with JSON or nothing is health; a page of something in between is not."""
    assert read_health(given_answer) is healthy


@pytest.mark.parametrize(
    ("document", "capabilities"),
    [
        ({"openapi": "3.1.0"}, Capabilities()),
        ({"x-outbox": []}, Capabilities()),
        ({"x-outbox": {"batch": 5, "mcpIdempotency": "yes"}}, Capabilities()),
        ({"x-outbox": {"batch": {"maxItems": 0, "maxBytes": -1}}}, Capabilities()),
        ({"x-outbox": {"batch": {"maxItems": True, "maxBytes": "9"}}}, Capabilities()),
        (
            {
                "x-outbox": {
                    "batch": {"maxItems": 5, "maxBytes": 999},
                    "idempotencyWindowSeconds": 60,
                    "mcpIdempotency": True,
                }
            },
            Capabilities(5, 999, 60, mcp_idempotency=True),
        ),
    ],
)
def test_capabilities(document, capabilities):
    """What makes sense in x-outbox is taken, everything else is the contract's default."""
    assert read_spec(answer(200, document)) == capabilities


@pytest.mark.parametrize(
    "given_answer",
    [answer(404), answer(200, b"<html>"), answer(200, [1]), Answer(200, {}, b"{}", cut=True), Answer(None)],
)
def test_no_document_no_capabilities(given_answer):
    """Without a readable document nothing is known about the relay."""
    assert read_spec(given_answer) is None
