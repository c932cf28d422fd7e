"""Event lines, exports, seed runners' files and hook calls as nobody should send them.

Each is taken or refused in words; what is taken is on disk, under its own agent, inside the state directory.
"""

import contextlib
import io
import json
import random
import sys
import tempfile

import pytest
from command_line import in_process
from mutations import broken, hostile, is_safe
from seeds import make_seed, seed_row

from outbox import Outbox
from outbox.cli import main
from outbox.errors import UsageError
from outbox.event import Limits, parse_event
from outbox.store.directory import StateDirectory, file_name
from outbox.store.file import open_outbox
from outbox.store.verify import verify_counters

SECRET = "tok-very-secret-7741"
LINES = [
    {"kind": "session-message", "payload": {"from": "a", "to": "b", "body": "text"}, "occurredAt": 1},
    {"kind": "session-message-batch", "payload": {"messages": [{"body": "x"}, {"idempotencyKey": "k"}]}},
    {"kind": "insight", "payload": [1, "two"], "idempotencyKey": "key-1", "mode": "append"},
    {"kind": "insight", "payload": "text", "mode": "coalesce", "dedupeKey": "d"},
    {"kind": "mcp-tool-call", "payload": {"tool": "t", "arguments": {"a": 1}}},
    {"kind": "continuation-archive", "payload": {"agentId": "a", "segment": "s", "text": "long"}},
    {"kind": "insight", "payload": 1, "retry": {"maxAttempts": 3, "backoff": "fixed", "jitter": 0.5}},
    {"kind": "insight", "payload": None, "runId": "r", "metadata": {"a": [1]}, "traceparent": "00-"
     + "1" * 32 + "-" + "2" * 16 + "-01", "tracestate": "a=b"},
]  # fmt: skip
HOOKS = [
    ("claude-code", {"hook_event_name": "UserPromptSubmit", "session_id": "s", "prompt": "weigh the pears"}),
    ("claude-code", {"hook_event_name": "PostToolUse", "session_id": "s", "tool_name": "Bash",
                     "tool_input": {"command": "ls"}, "tool_response": {"stdout": "x"}}),
    ("claude-code", {"hook_event_name": "SessionEnd", "session_id": "s", "reason": "exit",
                     "transcript_path": "/nowhere"}),
    ("codex", {"type": "agent-turn-complete", "turn-id": "1", "last-assistant-message": "done"}),
    ("gemini", {"hook_event_name": "AfterAgent", "session_id": "s", "prompt_response": "x"}),
    ("copilot", {"sessionId": "s", "timestamp": 1, "prompt": "x"}),
    ("opencode", {"type": "session.idle", "properties": {"sessionID": "s"}}),
]  # fmt: skip


@pytest.fixture
def chance(seed):
    """What is broken, and how."""
    return random.Random(seed)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A home in whose folder nothing but the state directory may appear."""
    home = tmp_path / "deep" / "home"
    home.mkdir(parents=True)
    in_process(monkeypatch, home)
    monkeypatch.chdir(home)
    monkeypatch.setenv("OUTBOX_BOUNDS_MIN_FREE_DISK_BYTES", "0")
    monkeypatch.setenv("OUTBOX_RELAY_TOKEN", SECRET)
    return home


def call(*words, stdin=b""):
    """A command in this process: its status, stdout and stderr; what it did not foresee fails the test."""
    out, err = io.TextIOWrapper(io.BytesIO(), "utf-8"), io.StringIO()
    with contextlib.ExitStack() as stack:
        given = stack.enter_context(open_stdin(stdin))
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        before, sys.stdin = sys.stdin, given
        try:
            status = main(words)
        finally:
            sys.stdin = before
    out.flush()
    return status, out.buffer.getvalue().decode(), err.getvalue()


@contextlib.contextmanager
def open_stdin(data):
    """A file on disk as stdin, since commands read its descriptor."""
    with tempfile.TemporaryFile("w+b") as file:
        file.write(data)
        file.seek(0)
        with io.TextIOWrapper(file) as text:
            yield text


def require_readable(*texts):
    """Whatever a person sees is lines of visible characters, without a traceback and without the token."""
    for text in texts:
        assert "Traceback" not in text
        assert SECRET not in text
        assert is_safe(text.replace("\n", "")), text


def require_sound(home):
    """Each outbox is its agent's, its counters are true, and nothing lies outside of the state directory."""
    state, waiting = StateDirectory(home / "state"), {}
    for path in state.outbox_files():
        with contextlib.closing(open_outbox(state, path)) as box:
            assert path.name == file_name(box.agent)
            assert verify_counters(box) == []
            waiting[box.agent] = box.rows("SELECT seq, key FROM events ORDER BY seq")
    outside = [path for path in home.parent.parent.rglob("*") if state.path not in (path, *path.parents)]
    assert [path for path in outside if path not in (home, home.parent) and path.name != "source"] == []
    return waiting


def test_a_line_is_an_event_or_an_error_in_words(chance, rounds):
    """No line raises anything else, and its error is one line that can be printed."""
    drafts, refusals = [], []
    for _ in range(rounds(30) * 100):
        try:
            drafts.append(parse_event(hostile(chance, chance.choice(LINES)), Limits()))
        except UsageError as error:
            refusals.append(str(error))
    assert [text for text in refusals if not is_safe(text)] == []
    assert all(json.loads(draft.payload_text) is not Ellipsis for draft in drafts)
    assert min(len(drafts), len(refusals)) > 10


def test_lines_given_to_the_command_are_stored_or_named(chance, place, rounds):
    """As many receipts as stored events, a refusal for each other line, and nothing in between."""
    lines = [hostile(chance, chance.choice(LINES)) for _ in range(rounds(10) * 100)]
    status, out, err = call("enqueue", "--agent", "builder", "--json", stdin=b"\n".join(lines))
    assert status == 4
    require_readable(out, err)
    receipts = [json.loads(line) for line in out.splitlines()]
    refusals = [json.loads(line) for line in err.splitlines()]
    stored = require_sound(place)["builder"]
    new = [one for one in receipts if not one["duplicate"]]
    kept = {(one["seq"], one["idempotencyKey"]) for one in new if one["state"] == "waiting"}
    assert set(stored) <= {(one["seq"], one["idempotencyKey"]) for one in new}
    assert {key for _, key in stored} <= {key for _, key in kept}
    given = [line for line in b"\n".join(lines).split(b"\n") if line.strip(b" \t\r")]
    assert len(receipts) + len(refusals) == len(given)


def test_an_export_that_was_tampered_with(chance, place, rounds):
    """Records of whatever agent it names go to that agent's own outbox, or are refused by their line."""
    with Outbox.open("builder") as box:
        for line in LINES:
            fields = {"mode": line["mode"], "dedupe_key": line["dedupeKey"]} if "dedupeKey" in line else {}
            box.enqueue(line["kind"], line["payload"], **fields)
    call("skip", "builder", "1")
    _, export, _ = call("export")
    records = [json.loads(line) for line in export.splitlines()]
    source = place / "source"
    for n in range(rounds(30) * 4):
        some = [
            hostile(chance, one) if chance.random() < 0.5 else json.dumps(one).encode() for one in records
        ]
        if chance.random() < 0.3:
            chance.shuffle(some)
        source.write_bytes(b"\n".join(some))
        status, out, err = call("--state-dir", str(place / "state" / f"other-{n % 4}"), "import", str(source))
        assert status in {0, 2, 4, 5}, (status, err)
        require_readable(out, err)
    for n in range(4):
        require_sound_at(place / "state" / f"other-{n}")
    require_sound(place)


def require_sound_at(folder):
    """The outboxes of one state directory."""
    state = StateDirectory(folder)
    for path in state.outbox_files():
        with contextlib.closing(open_outbox(state, path)) as box:
            assert path.name == file_name(box.agent)
            assert verify_counters(box) == []


def test_a_seed_runners_file_that_is_broken(chance, place, rounds):
    """Pages changed, odd rows: taken or refused by row, the file itself never changed."""
    odd = ["\0", "\ud800", "x" * 100_000, b"\xff\xfe", -1, 2**62, 1.5, "NaN", '{"a":', "[" * 5_000, "", "{}"]
    source = place / "source"
    for n in range(rounds(15) * 2):
        rows = [seed_row(m) for m in range(1, 6)]
        for row in rows:
            for name in chance.sample(sorted(row), chance.randrange(3)):
                if name != "seq":
                    row[name] = chance.choice([one for one in odd if one != "\ud800"])
        source.unlink(missing_ok=True)
        make_seed(source, rows, mode="delete")
        if n % 2:
            source.write_bytes(broken(chance, source.read_bytes()))
        before = source.read_bytes()
        status, out, err = call("import", "--agent", f"agent-{n % 3}", str(source))
        assert status in {0, 2, 4, 5}, (status, err)
        require_readable(out, err)
        assert source.read_bytes() == before
    require_sound(place)


def test_a_hooks_call_is_exit_0_and_silent(chance, place, rounds, monkeypatch):
    """Whatever a runner gives: status 0, nothing on stdout, at most one readable line on stderr."""
    monkeypatch.delenv("OUTBOX_SOCKET", raising=False)
    for _ in range(rounds(30) * 4):
        runner, value = chance.choice(HOOKS)
        status, out, err = call("hook", runner, stdin=hostile(chance, value))
        assert (status, out) == (0, "")
        require_readable(err)
        assert err.count("\n") <= 1
    stored = require_sound(place)
    assert sum(map(len, stored.values())) > 10
