"""Every line of tests/cases/payloads, through `outbox enqueue` and `outbox serve` to a real relay.

The relay fails the first try of each event, each in another way: what is compared went out at least twice.
"""

import contextlib
import hashlib
import json
import runpy
import select
import subprocess
import sys
import time
from decimal import Decimal
from itertools import cycle
from pathlib import Path

import pytest
from command_line import process
from peers import fake_relay
from runs import (
    AGENT,
    TOKEN,
    hand_over,
    is_empty,
    letters_of,
    serve_environment,
    serve_running,
    status_of,
    until,
)

from relay_client.reference.process import RelayProcess

PAYLOADS = Path(__file__).parents[1] / "cases" / "payloads"
FILES = ("unicode", "numbers", "structure", "broken_lines", "envelope")
OWN_NAMES = {"occurredAt", "idempotencyKey"}
FAILURES = ({"storeThenClose": True}, {"status": 503}, {"close": True}, {"status": 500}, {"status": 408})
CLOCKS_MAY_DIFFER_MS = 5_000


# JSON as the expectations compare it ------------------------------------------------------------------------


def no_number(name):
    """NaN and Infinity are no JSON."""
    raise AssertionError(f"{name} is no JSON number")


def as_pairs(text):
    """A JSON text: integers digit by digit, other numbers by value, members in order, all of them."""
    return json.loads(
        text,
        parse_int=lambda digits: ("integer", digits),
        parse_float=lambda digits: ("number", Decimal(digits)),
        parse_constant=no_number,
        object_pairs_hook=lambda pairs: ("object", pairs),
    )


def given(line):
    """The payload of a line, as it is written; None where there is none."""
    return dict(as_pairs(line.decode("utf-8-sig"))[1]).get("payload")


def received(body):
    """The payload that a relay reads from a body: without what the outbox adds, and out of its wrapping."""
    _, members = as_pairs(body)
    assert [name for name, _ in members if name in OWN_NAMES] == ["occurredAt", "idempotencyKey"]
    rest = [member for member in members if member[0] not in OWN_NAMES]
    return ("object", rest)


def wrapped(payload):
    """As `received` tells it: a payload that is no object travels in one."""
    is_object = isinstance(payload, tuple) and payload[0] == "object"
    return payload if is_object else ("object", [("payload", payload)])


def plain(body):
    """The payload as a program reads it: the last of equal names wins."""
    return {name: value for name, value in json.loads(body).items() if name not in OWN_NAMES}


@pytest.fixture(autouse=True)
def deep_comparison():
    """Python compares 500 levels only with a higher limit; the processes under test have the usual one."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(10_000)
    yield
    sys.setrecursionlimit(usual)


# A file's way ----------------------------------------------------------------------------------------------


class Taken:
    """What `outbox enqueue` made of a file: receipts and refusals by line number."""

    def __init__(self, env, data):
        done = process(env, "enqueue", "--agent", AGENT, "--json", stdin=data)
        told, refusals = (
            [json.loads(line) for line in text.splitlines()] for text in (done.stdout, done.stderr)
        )
        self.receipts = {receipt["line"]: receipt for receipt in told}
        self.refused = {refusal["line"]: refusal["error"] for refusal in refusals}
        assert done.returncode == (4 if self.refused else 0)
        assert not self.receipts.keys() & self.refused.keys()
        assert all(error["message"].isprintable() for error in self.refused.values())

    @property
    def keys(self):
        """The keys, in the order of the lines."""
        return [receipt["idempotencyKey"] for _, receipt in sorted(self.receipts.items())]


def fail_each_once(relay, keys):
    """The first request that carries a key fails, each in another way."""
    actions = cycle(FAILURES)
    relay.add_faults(*({"match": {"bodyContains": key}, "times": 1, "action": next(actions)} for key in keys))


def unlike_requests(relay, held):
    """The requests whose body is not what the relay holds of these very events, byte for byte."""
    texts = {event["key"]: event["body"] for event in held}
    wrong = []
    for request in relay.requests():
        bodies = [texts[key] for key in request["keys"]]
        if request["path"].endswith("/batch"):
            bodies = ['{"messages":[' + ",".join(bodies) + "]}"]
        if bodies and hashlib.sha256(bodies[0].encode()).hexdigest() != request["bodySha256"]:
            wrong.append(request)
    return wrong


def unlike_expectation(right, line, taken, held):
    """How one line's fate differs from its expectation; None when it is right."""
    number, outcome = right["line"], right["outcome"]
    receipt = taken.receipts.get(number)
    if receipt is None:
        if outcome == "skip":
            return f"line {number} is told as refused" if number in taken.refused else None
        if number not in taken.refused:
            return f"line {number} is neither taken nor refused"
        return None if "refuse" in outcome else f"line {number} is refused: {taken.refused[number]}"
    if outcome in {"skip", "refuse"}:
        return f"line {number} is taken: {right['about']}"
    if receipt["idempotencyKey"] not in held:
        return f"line {number} did not arrive"
    event = held[receipt["idempotencyKey"]]
    own = {"occurredAt": event["occurredAt"], "idempotencyKey": event["key"]}
    if own != own | {name: right[name] for name in OWN_NAMES & right.keys()}:
        return f"line {number} has {own}"
    return unlike_value(right, line, event["body"])


def unlike_value(right, line, body):
    """How what arrived differs from what is right for a line; None when it does not."""
    exact = received(body) == wrapped(given(line))
    if "values" in right or "accept_text" in right:
        texts = right.get("accept_text", ())
        like_text = any(f'"v":{text},' in body or body.startswith(f"{text[:-1]},") for text in texts)
        exact = like_text or plain(body) in right.get("values", ())
    elif right["outcome"] == "deliver_number_near":
        exact = abs(plain(body)["v"] - right["value"]) <= 1e-15 * right["value"]
    if not exact:
        return f"line {right['line']} ({right['about']}) arrived as {body[:200]}"
    return None


@contextlib.contextmanager
def relay_running(home):
    """The reference relay as a process."""
    with RelayProcess(home / "relay.db", [TOKEN]) as relay:
        yield relay


@pytest.mark.parametrize("name", FILES)
def test_each_line_arrives_as_it_was_given_or_is_refused(name, tmp_path):
    """Through command, daemon and a relay that fails on each once: the right value, the same bytes."""
    data = (PAYLOADS / f"{name}.jsonl").read_bytes()
    expected = json.loads((PAYLOADS / f"{name}.expect.json").read_text("utf-8"))
    lines = data.split(b"\n")
    with relay_running(tmp_path) as relay:
        before_ms = time.time_ns() // 1_000_000
        taken = Taken(serve_environment(tmp_path, relay.url), data)
        after_ms = time.time_ns() // 1_000_000
        fail_each_once(relay, taken.keys)
        with serve_running(tmp_path, relay.url) as daemon:
            assert until(lambda: is_empty(tmp_path / "state"), 10 * len(taken.keys)), daemon.lines()
        held = relay.events(AGENT)
        assert unlike_requests(relay, held) == []
        assert {rule["used"] for rule in relay._ask("GET", "faults").json()["rules"]} == {1}
        (summary,) = relay.summary().values()
    assert letters_of(tmp_path / "state") == []
    assert [event["key"] for event in held] == taken.keys
    assert (summary["inOrder"], summary["distinctKeys"]) == (True, len(taken.keys))
    by_key = {event["key"]: event for event in held}
    assert [
        wrong
        for right in expected
        if (wrong := unlike_expectation(right, lines[right["line"] - 1], taken, by_key))
    ] == []
    for line, receipt in taken.receipts.items():
        (right,) = [right for right in expected if right["line"] == line]
        if "occurredAt" not in right:
            at_ms = by_key[receipt["idempotencyKey"]]["occurredAt"]
            assert before_ms - CLOCKS_MAY_DIFFER_MS <= at_ms <= after_ms + CLOCKS_MAY_DIFFER_MS
    log = daemon.stderr.read_bytes()
    assert [byte for byte in log if (byte < 0x20 and byte != 0x0A) or byte == 0x7F] == []


def test_a_flush_sends_the_same_bytes_again(tmp_path):
    """Without a daemon: each flush tries what failed once more, until nothing is left."""
    data = (PAYLOADS / "broken_lines.jsonl").read_bytes()
    with relay_running(tmp_path) as relay:
        env = serve_environment(tmp_path, relay.url)
        taken = Taken(env, data)
        fail_each_once(relay, taken.keys)
        statuses = []
        while len(statuses) <= len(taken.keys) and statuses[-1:] != [0]:
            done = process(env, "flush", "--timeout", "30", "--json")
            assert done.stderr == b""
            statuses.append(done.returncode)
            assert (done.returncode == 0) == (json.loads(done.stdout)["left"] == 0)
        assert statuses[-1] == 0
        assert set(statuses[:-1]) <= {3}
        held = relay.events(AGENT)
        assert unlike_requests(relay, held) == []
    assert [json.loads(event["body"])["n"] for event in held] == [1, 2, 7, 12]
    assert letters_of(tmp_path / "state") == []


def test_a_key_with_line_breaks_makes_no_header(tmp_path):
    """A key that would forge a header is refused, and no header field of that name reaches a relay."""
    line = (PAYLOADS / "envelope.jsonl").read_bytes().split(b"\n")[9]
    good = b'{"kind":"insight","payload":{"n":0}}'
    with fake_relay({"events": [], "steps": []}) as relay:
        env = serve_environment(tmp_path, relay.url)
        taken = Taken(env, line + b"\n" + good)
        assert list(taken.refused) == [1]
        assert process(env, "flush", "--timeout", "30").returncode == 0
        fields = {name.lower() for request in relay.requests() for name, _ in request["headers"]}
    assert "idempotency-key" in fields
    assert "x-extra" not in fields


# Large events ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big(tmp_path_factory):
    """The files of make_big.py and the sha256 of each text."""
    folder = tmp_path_factory.mktemp("big")
    made = subprocess.run(
        [sys.executable, str(PAYLOADS / "make_big.py"), str(folder)],
        check=True,
        capture_output=True,
        text=True,
    )
    rows = [row.split() for row in made.stdout.splitlines()]
    return {name: (folder / f"{name}.jsonl", sha256) for name, _, sha256 in rows}


BIG = tuple(runpy.run_path(str(PAYLOADS / "make_big.py"))["CASES"])
TOOL_ANSWER = '{"jsonrpc":"2.0","id":@@ID@@,"result":{"content":[]}}'
TOOL_STEPS = [
    {"when": {"body_contains": "image_add"}, "status": 503, "body": ""},
    {"when": {"target_contains": "/api/mcp"}, "status": 200, "body": TOOL_ANSWER, "repeat": "forever"},
]
BIG_FAULTS = [
    {"match": {"path": "/api/messages"}, "times": 1, "action": {"storeThenClose": True}},
    {"match": {"bodyContains": '"n":0'}, "times": 1, "action": {"status": 503}},
]


def read_lines(pipe, count, within_s=60):
    """That many lines of a process's output, as they come."""
    end, data = time.monotonic() + within_s, b""
    while data.count(b"\n") < count:
        ready, _, _ = select.select([pipe], [], [], max(0, end - time.monotonic()))
        assert ready, data
        piece = pipe.read1(65_536)
        assert piece, data
        data += piece
    return data.splitlines()


def peak_kib(pid):
    """The most memory that a process had in use so far."""
    status = Path(f"/proc/{pid}/status").read_text("ascii")
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])


def enqueue_and_measure(env, data):
    """`outbox enqueue` of a small event, then of `data`: by how many bytes its memory grew meanwhile."""
    command = [sys.executable, "-m", "outbox", "enqueue", "--agent", AGENT, "--json"]
    small = b'{"kind":"insight","payload":{"n":-1}}\n'
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe) as producer:
        try:
            producer.stdin.write(small)
            producer.stdin.flush()
            read_lines(producer.stdout, 1)
            before_kib = peak_kib(producer.pid)
            producer.stdin.write(data)
            producer.stdin.flush()
            read_lines(producer.stdout, data.count(b"\n"))
            grown_kib = peak_kib(producer.pid) - before_kib
            producer.stdin.close()
            assert producer.wait(60) == 0
        finally:
            producer.kill()
    return grown_kib * 1024


@contextlib.contextmanager
def relay_for(kind, home):
    """A relay that fails the first try; a scripted one for tools, since the reference relay has no such tool.

    Gives its URL, and what tells the bodies of all deliveries whose event it holds.
    """
    if kind != "mcp-tool-call":
        with relay_running(home) as relay:
            relay.add_faults(*BIG_FAULTS)
            yield relay.url, lambda: [event["body"] for event in relay.events(AGENT)]
            assert unlike_requests(relay, relay.events()) == []
        return
    with fake_relay({"events": [], "steps": TOOL_STEPS}) as relay:
        yield relay.url, lambda: [sent["body"] for sent in relay.requests() if carries(sent, AGENT)]


def carries(request, agent):
    """Whether a request to a scripted relay is a delivery of this agent's."""
    return ["Outbox-Agent", agent] in request["headers"]


@pytest.mark.parametrize("name", BIG)
def test_a_large_event_arrives_whole(name, big, tmp_path):
    """With its sha256, though the first try fails, and the small one behind it; memory stays in bounds."""
    path, sha256 = big[name]
    data = path.read_bytes()
    event_bytes = data.index(b"\n")
    kind = json.loads(data[:event_bytes])["kind"]
    state_dir = tmp_path / "state"
    with relay_for(kind, tmp_path) as (url, bodies), serve_running(tmp_path, url) as daemon:
        hand_over(state_dir, [{"kind": "insight", "payload": {"n": -2}}], "other")
        assert until(lambda: is_empty(state_dir, "other"))
        before_kib = daemon.memory_kib()
        grown_bytes = enqueue_and_measure(serve_environment(tmp_path, url), data)
        assert until(lambda: is_empty(state_dir), 60), daemon.lines()
        assert grown_bytes < 10 * event_bytes
        assert (daemon.memory_kib() - before_kib) * 1024 < 10 * event_bytes
        first, *tries, behind = (json.loads(body) for body in bodies())
    assert status_of(state_dir).delivered == 3
    assert (first["n"], behind["n"]) == (-1, 0)
    assert len(tries) == (2 if kind == "mcp-tool-call" else 1)
    assert {hashlib.sha256(text_of(body).encode()).hexdigest() for body in tries} == {sha256}


def text_of(body):
    """The large text of an event, out of what a relay got."""
    return body["params"]["arguments"]["data"] if "params" in body else body["text"]
