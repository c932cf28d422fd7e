"""Secrets in hook input: which shapes are found, what stays, and that no text takes long."""

import json
import time

import pytest

from outbox.capture.hook_call import message_of, read_call
from outbox.capture.hook_redact import DEFAULT_SHAPES, Redaction
from outbox.capture.hook_table import RUNNERS
from outbox.errors import UsageError
from outbox.event import Limits

LONG = "aB3" * 14
JWT = f"eyJ{'hbGciOi' * 3}.eyJ{'zdWIiOi' * 3}.{'sig-_' * 8}"
KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\nIBAAKC\n-----END RSA PRIVATE KEY-----"

SECRETS = [
    ("github", f"ghp_{LONG}"),
    ("github", f"github_pat_{LONG}"),
    ("gitlab", f"glpat-{LONG}"),
    ("sk", f"sk-{LONG}"),
    ("sk", f"sk-ant-api03-{LONG}"),
    ("sk", f"sk_live_{LONG}"),
    ("aws", "AKIAABCDEFGHIJKLMNOP"),
    ("slack", "xoxb-123456789012-abcdefghij"),
    ("google", f"AIza{'x1Y' * 11}zz"),
    ("npm", f"npm_{LONG}"),
    ("hugging-face", f"hf_{LONG}"),
    ("jwt", JWT),
    ("private-key", KEY),
    ("private-key", KEY.replace("RSA ", "")),
    ("private-key", KEY.replace("RSA PRIVATE KEY", "PGP PRIVATE KEY BLOCK")),
]
KEPT_BEFORE = [
    ("authorization", "Authorization: Bearer ", LONG),
    ("authorization", "authorization: Basic ", "dXNlcjpwYXNzd29yZA=="),
    ("authorization", '"Authorization": "token ', LONG),
    ("aws-secret", "aws_secret_access_key = ", "w" * 40),
    ("slack-hook", "https://hooks.slack.com/", "services/T00000000/B00000000/XXXXXXXX"),
    ("url-password", "postgres://harvest:", "pear!tree"),
]
HARMLESS = [
    "task-force-one-two-three-four-five-six",
    "disk-0123456789012345678901234",
    "Bearer of good news",
    "https://example.com:8080/a@b",
    "the word AKIA alone, and eyJ alone",
    "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----",
    "monkey ghp_short xox-ray npm_config_cache hf_hub",
    "commit 5f0c2a1e0d3b4c559a771b2c3d4e5f605f0c2a1e",
]


def redacted(text, settings=""):
    """The text without its secrets, and their counts."""
    redaction = Redaction(settings)
    return redaction.redacted(text, redaction.suspects(text)), redaction.counts


@pytest.mark.parametrize(("name", "secret"), SECRETS)
@pytest.mark.parametrize("around", ["{}", "a {} b", '"{}"', "KEY={}\n", "({})"])
def test_a_secret_goes_and_what_is_around_it_stays(name, secret, around):
    """Whatever stands before and behind it."""
    assert redacted(around.format(secret)) == (around.format(f"[redacted: {name}]"), {name: 1})


@pytest.mark.parametrize(("name", "before", "secret"), KEPT_BEFORE)
def test_the_words_that_introduce_a_secret_stay(name, before, secret):
    """Who reads it sees that there was one."""
    behind = "@db/harvest" if name == "url-password" else " and more"
    assert redacted(before + secret + behind) == (f"{before}[redacted: {name}]{behind}", {name: 1})


@pytest.mark.parametrize("text", HARMLESS)
def test_what_only_looks_like_a_secret_stays(text):
    """Words, certificates, hashes, addresses."""
    assert redacted(text) == (text, {})


def test_a_key_block_that_was_cut_off_goes_to_its_end():
    """What follows may be the rest of the key."""
    assert redacted(f"a\n{KEY[:50]}")[0] == "a\n[redacted: private-key]"


def test_each_is_counted():
    """Several kinds, several of one."""
    text = f"ghp_{LONG} ghp_{LONG}x {KEY} {KEY}"
    assert redacted(text)[1] == {"github": 2, "private-key": 2}


def test_shapes_can_be_added_and_left_out():
    """A prefix of one's own; a default that finds what is none here."""
    assert redacted("acme_12345678 rest", "acme_") == ("[redacted: acme_] rest", {"acme_": 1})
    assert redacted(JWT, "-jwt, acme_") == (JWT, {})
    with pytest.raises(UsageError, match="no secrets are called 'jtw'"):
        Redaction("-jtw")


def test_a_secret_is_found_behind_escapes_in_names_and_deep_down():
    """In the JSON's own text nothing of it is left, however its letters are written."""
    token = f"ghp_{LONG}"
    escaped = "".join(f"\\u{ord(letter):04x}" for letter in token)
    for text in (
        f'{{"hook_event_name":"X","a":{{"b":["{token}"]}}}}',
        f'{{"hook_event_name":"X","a":"{escaped}"}}',
        f'{{"hook_event_name":"X","{token}":1}}',
        json.dumps({"hook_event_name": "X", "a": json.dumps({"b": KEY})}),
    ):
        redaction = Redaction()
        made = message_of(
            read_call(RUNNERS["codex"], text, None, ()),
            agent="a",
            key=None,
            started_ms=1,
            redaction=redaction,
            limits=Limits(),
        )
        assert sum(redaction.counts.values()) == 1
        assert token not in json.dumps(json.loads(made.payload))
        assert "MIIEow" not in made.payload


@pytest.mark.parametrize("shape", DEFAULT_SHAPES, ids=lambda shape: shape.name)
def test_no_text_takes_more_than_its_share_of_time(shape):
    """Four times the text takes about four times the time, of whatever it is made: never sixteen times."""
    pieces = [*shape.hints, *(hint + "A1" * 8 for hint in shape.hints), shape.hints[0] + ".", "-----BEGIN "]
    pieces += [shape.hints[0] + " " * 3, "://a:", "Authorization: ", "eyJ.eyJ.", "-----BEGIN PRIVATE KEY"]

    def spent_s(text):
        begun = time.process_time()
        Redaction().redacted(text, [shape])
        return time.process_time() - begun

    for piece in pieces:
        small, large = piece * (40_000 // len(piece)), piece * (160_000 // len(piece))
        took_s = min(spent_s(small) for _ in range(3))
        assert min(spent_s(large) for _ in range(3)) < 10 * took_s + 0.05, piece
