"""Every line of tests/cases/payloads and every id of tests/cases/agent_ids, as far as acceptance decides."""

import hashlib
import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from outbox.errors import UsageError
from outbox.event import Accepted, Limits, accept, check_agent, parse_event
from outbox.json_text import split_lines

CASES = Path(__file__).parents[1] / "cases"
PAYLOADS = CASES / "payloads"
NOW_MS = 1_790_000_000_500
NEW_KEY = "01a0c2f1-9d20-7000-8000-000000000001"
LINES = [
    (name, right["line"])
    for name in ("unicode", "numbers", "structure", "envelope")
    for right in json.loads((PAYLOADS / f"{name}.expect.json").read_text())
]


def no_number(name):
    """NaN and Infinity fail a test."""
    raise AssertionError(f"{name} is no JSON number")


def strict(text: str | bytes, pairs=lambda pairs: pairs):
    """JSON as it is written: numbers as their text, members as a list of pairs, nothing that is not JSON."""
    number = lambda digits: ("number", digits)  # noqa: E731
    return json.loads(
        text, parse_int=number, parse_float=number, parse_constant=no_number, object_pairs_hook=pairs
    )


def taken(line: bytes) -> Accepted:
    """The event of one line, accepted under the default limits."""
    limits = Limits()
    return accept(parse_event(line, limits), limits=limits, agent="a", now_ms=NOW_MS, new_key=NEW_KEY)


def sent_payload(event: Accepted):
    """What the relay gets, less the two members that the outbox adds."""
    assert event.wire_payload.decode("utf-8")
    wire = strict(event.wire_payload)
    own = [("occurredAt", ("number", str(event.occurred_at_ms))), ("idempotencyKey", event.key)]
    assert [member for member in wire if member[0] in ("occurredAt", "idempotencyKey")] == own
    rest = [member for member in wire if member not in own]
    return rest[0][1] if event.shape == "value" else rest


def given_payload(line: bytes):
    """The payload of one line, as it is written."""
    return dict(strict(line))["payload"]


@pytest.fixture
def deep_comparison():
    """Python compares 500 levels of pairs only with a higher limit; the code under test has the usual."""
    usual = sys.getrecursionlimit()
    yield lambda: sys.setrecursionlimit(10_000)
    sys.setrecursionlimit(usual)


@pytest.mark.parametrize(("name", "number"), LINES)
def test_each_line_has_the_right_outcome(name, number, deep_comparison):
    """Lines are delivered exactly or refused, as their expectation file says."""
    line = (PAYLOADS / f"{name}.jsonl").read_bytes().split(b"\n")[number - 1]
    (right,) = [
        right
        for right in json.loads((PAYLOADS / f"{name}.expect.json").read_text())
        if right["line"] == number
    ]
    try:
        event = taken(line)
    except UsageError as error:
        message = str(error)
        assert message.isprintable()
        assert "refuse" in right["outcome"], message
        return
    assert right["outcome"].startswith("deliver"), f"{right['about']}: should be refused"
    deep_comparison()
    assert sent_payload(event) == given_payload(line)
    if "values" in right or "accept_text" in right:
        text = event.wire_payload.decode()
        is_accepted_text = any(accepted in text for accepted in right.get("accept_text", ()))
        assert is_accepted_text or plain(sent_payload(event)) in right["values"]
    assert event.occurred_at_ms == right.get("occurredAt", NOW_MS)
    assert event.key == right.get("idempotencyKey", NEW_KEY)


def plain(pairs):
    """Pairs and number texts as Python values, the last of equal names winning."""
    if isinstance(pairs, tuple) and pairs[0] == "number":
        return json.loads(pairs[1])
    if isinstance(pairs, list) and pairs and isinstance(pairs[0], tuple):
        return {name: plain(value) for name, value in pairs}
    return pairs


@pytest.mark.parametrize("number", [8, 10, 11, 12])
def test_keys_that_are_no_header_are_refused(number):
    """Where a key may be refused or carried, ours refuses: empty, CR LF, beyond ASCII, 300 characters."""
    line = (PAYLOADS / "envelope.jsonl").read_bytes().split(b"\n")[number - 1]
    with pytest.raises(UsageError, match=r"^idempotencyKey "):
        taken(line)


@pytest.mark.parametrize("number", [5, 6, 7])
def test_numbers_that_no_float_holds_keep_their_text(number):
    """1e400, 1e-400 and 5000 digits are not refused: their text goes through."""
    line = (PAYLOADS / "numbers.jsonl").read_bytes().split(b"\n")[number - 1]
    digits = re.search(rb'"v":([^}]+)', line)[1]
    assert b'"v":' + digits + b"," in taken(line).wire_payload


@pytest.mark.parametrize("chunk_bytes", [1, 7, 65_536])
def test_broken_lines_are_refused_by_number_and_the_good_ones_arrive(chunk_bytes):
    """The lines n = 1, 2, 7 and 12 arrive in this order; each bad one is refused by its number."""
    data = (PAYLOADS / "broken_lines.jsonl").read_bytes()
    chunks = [data[start : start + chunk_bytes] for start in range(0, len(data), chunk_bytes)]
    arrived, refused = [], {}
    for number, line in split_lines(chunks, 8 * 1024 * 1024):
        try:
            arrived.append(json.loads(taken(line).wire_payload)["n"])
        except UsageError as error:
            refused[number] = str(error)
    assert arrived == [1, 2, 7, 12]
    assert list(refused) == [5, 6, 8, 9, 10, 12]
    assert refused[5] == "not JSON: NaN is no JSON number (column 40)"
    assert refused[6] == "not JSON: Infinity is no JSON number (column 40)"
    assert refused[9].startswith("not UTF-8: byte ")


def test_big_events_arrive_whole(tmp_path, capsys):
    """Payloads of 1 to 5 MiB arrive with their sha256, and so does the small event behind each."""
    runpy.run_path(str(PAYLOADS / "make_big.py"))["main"](str(tmp_path))
    for row in capsys.readouterr().out.splitlines():
        name, _, sha256 = row.split()
        big, small, _ = (tmp_path / f"{name}.jsonl").read_bytes().split(b"\n")
        sent = json.loads(taken(big).wire_payload)
        text = sent["arguments"]["data"] if "arguments" in sent else sent["text"]
        assert hashlib.sha256(text.encode()).hexdigest() == sha256
        assert json.loads(taken(small).wire_payload)["n"] == 0


def test_a_big_event_above_the_limit_is_refused_with_size_and_limit():
    """The refusal names both, so that the producer knows what to change."""
    line = b'{"kind":"insight","payload":"' + b"x" * 1022 + b'"}'
    limits = Limits(max_payload_bytes=1023)
    with pytest.raises(UsageError, match="1,024 bytes of JSON, more than the 1,023 allowed") as refusal:
        parse_event(line, limits)
    assert refusal.value.code == "too_large"


AGENT_GROUPS = json.loads((CASES / "agent_ids" / "agent_ids.json").read_text())["groups"]


@pytest.mark.parametrize("group", AGENT_GROUPS, ids=[group["group"] for group in AGENT_GROUPS])
def test_agent_ids_are_taken_exactly_or_refused(group):
    """An id is never cleaned up: it is itself, or an error that shows it in printable form."""
    for agent in group["ids"]:
        if group["want"] == "refuse":
            with pytest.raises(UsageError) as refusal:
                check_agent(agent)
            assert str(refusal.value).isprintable()
        else:
            assert check_agent(agent) == agent
