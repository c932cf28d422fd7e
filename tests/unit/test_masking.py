"""A token that a relay throws back is found in every spelling that would be read as the token again."""

import json

import pytest

from relay_client import Answer, read_single
from relay_client.masking import without_token, without_token_text

TOKEN = "tok/very+secret=77.41"


def spelled(escape):
    """A JSON body with the token, each of its characters as `escape` writes it."""
    return f'{{"error": {{"code": "no", "message": "not {"".join(map(escape, TOKEN))} here"}}}}'.encode()


def read(body):
    """What a refusal with this body says."""
    return read_single(Answer(422, headers={}, body=body), now_ms=0, max_retry_after_ms=0)


@pytest.mark.parametrize(
    "escape",
    [
        str,
        lambda one: one.replace("/", "\\/"),
        lambda one: f"\\u{ord(one):04x}",
        lambda one: f"\\u{ord(one):04X}",
        lambda one: f"\\u{ord(one):04x}" if one in "tcr/" else one,
    ],
    ids=["plain", "slash", "lower", "upper", "some"],
)
def test_a_token_in_json_is_found_however_it_is_spelled(escape):
    """The text is read as a token by JSON; after masking it is not, and all else is as it was."""
    body = spelled(escape)
    assert TOKEN in json.loads(body)["error"]["message"]
    assert json.loads(without_token(body, TOKEN))["error"]["message"] == "not [token] here"
    assert without_token_text(body.decode(), TOKEN) == without_token(body, TOKEN).decode()


def test_terminal_codes_inside_a_token_do_not_come_out_as_the_token():
    """What steers a terminal is taken out of what is shown; the halves on both sides stay apart."""
    body = f"tok/very\x1b[31m{TOKEN.removeprefix('tok/very')}".encode()
    reading = read(without_token(body, TOKEN))
    assert reading.detail == "tok/very +secret=77.41"
    assert TOKEN not in reading.excerpt


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-32"])
def test_json_is_utf_8_and_nothing_is_guessed(encoding):
    """In another encoding a token would not be found: such a body is no JSON (RFC 8259, section 8.1)."""
    body = spelled(str).decode().encode(encoding)
    reading = read(without_token(body, TOKEN))
    assert TOKEN not in repr(reading)
    assert reading.code == ""


def test_a_short_token_is_not_looked_for():
    """It would be found in words that have nothing to do with it."""
    assert without_token(b"a test", "test") == b"a test"
    assert without_token(b"a test", None) == b"a test"
