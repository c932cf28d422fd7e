"""Two whole sessions, call by call: through an outage to the relay, and once more without a trace."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment
from hook_cases import expected, lines_of
from processes import DaemonProcess, wait_for

from outbox.bounds import Bounds
from outbox.capture.hook_call import key_of, read_call
from outbox.capture.hook_record import Desk, record
from outbox.capture.hook_redact import Redaction
from outbox.capture.hook_table import RUNNERS
from outbox.cli.hook_run import run_hook
from outbox.event import Limits
from outbox.store.create import create_outbox
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.records import everything
from relay_client.reference.process import RelayProcess

ROOT = Path(__file__).parent.parent.parent
SESSIONS = ("claude-code", "codex")


@pytest.fixture(autouse=True)
def _no_flusher(monkeypatch):
    """A flush that nobody waits for would outlive a test that runs in this process."""
    monkeypatch.setattr("outbox.capture.hook_flush.leave_flush_behind", lambda state, agent: None)


def session_of(runner, transcript):
    """The calls of a session, whose transcript is this file."""
    for line in lines_of(f"sessions/{runner}-session"):
        call = json.loads(line)
        yield json.dumps({**call, "transcript_path": str(transcript)})


def events_of(state, agent):
    """Kind, key and value of all that waits."""
    with contextlib.closing(open_outbox(state, state.outbox_path(agent))) as box:
        return [(r.event.kind, r.event.key, json.loads(r.event.wire_payload)) for r in everything(box)]


def grow(path):
    """A transcript gets longer between two calls."""
    with path.open("a", encoding="utf-8") as file:
        file.write("{}\n")


def feed(state, runner, texts, transcript=None):
    """Record calls in this process; whether each was new, None for an ignored one."""
    found = []
    for text in texts:
        call = read_call(RUNNERS[runner], text, None, ())
        desk = Desk(state, runner, 5_000)
        found.append(None if call is None else record(desk, call, Redaction(), 1_900_000_000_000))
        if transcript is not None:
            grow(transcript)
    return found


@pytest.mark.parametrize("runner", SESSIONS)
def test_a_session_is_recorded_in_order_and_once(tmp_path, runner):
    """As many messages as its table says, every key another, the insight last, with what was counted."""
    state, transcript = StateDirectory(tmp_path / "state").create(), tmp_path / "t.jsonl"
    told = expected(f"sessions/{runner}-session")
    texts = list(session_of(runner, transcript))
    new = feed(state, runner, texts, transcript)
    assert [row is not None for row in new] == [bool(line["makes"]) for line in told["lines"]]
    events = events_of(state, runner)
    hooks = [event["payload"]["hook"] for kind, _, event in events if kind == "session-message"]
    assert hooks == [json.loads(text) for text, row in zip(texts, new, strict=True) if row is not None]
    assert len(hooks) == told["messages"]
    assert len({key for _, key, _ in events}) == len(events) == told["messages"] + told["insights"]
    kind, key, insight = events[-1]
    assert (kind, key) == ("insight", f"{events[-2][1]}:insight")
    assert insight["counts"]["messages"] == told["messages"]
    assert insight["counts"]["user"] == sum(event.get("role") == "user" for _, _, event in events)
    assert insight["sessionId"] == hooks[0]["session_id"]


@pytest.mark.parametrize("runner", SESSIONS)
def test_fed_again_every_call_with_a_stable_key_adds_nothing(tmp_path, runner):
    """The transcript lies there as it was; calls that nothing names come once more, and no others."""
    state, transcript = StateDirectory(tmp_path / "state").create(), tmp_path / "t.jsonl"
    texts = list(session_of(runner, transcript))
    transcript.write_text("{}\n")
    sizes = []
    for text in texts:  # the size that the transcript has at each call, to be had again
        sizes.append(transcript.stat().st_size)
        feed(state, runner, [text], transcript)
    stable = [
        call is not None and key_of(call, 1) is not None
        for call in (read_call(RUNNERS[runner], text, None, ()) for text in texts)
    ]
    for text, size, is_stable in zip(texts, sizes, stable, strict=True):
        os.truncate(transcript, size)
        (is_new,) = feed(state, runner, [text])
        assert is_new in ({False} if is_stable else {True, None})
    assert sum(stable) > len(texts) // 3


@pytest.mark.parametrize("grows", [True, False])
def test_the_same_answer_twice_in_a_turn_is_two_where_the_transcript_grew(tmp_path, grows):
    """Lines 42 and 43 of the Claude Code file; a session's second end is another in any case."""
    state, transcript = StateDirectory(tmp_path / "state").create(), tmp_path / "t.jsonl"
    transcript.write_text("{}\n")
    stops = [
        json.dumps({**json.loads(line), "transcript_path": str(transcript)})
        for line in lines_of("claude-code")[41:43]
    ]
    assert feed(state, "claude-code", stops, transcript if grows else None) == [True, grows]
    assert feed(state, "claude-code", lines_of("claude-code")[5:7]) == [True, True]


def test_a_session_through_the_command_reaches_the_relay_in_order(tmp_path):
    """A process a call, the relay away for half of it: ordered messages and one insight, nothing twice."""
    told = expected("sessions/codex-session")
    transcript, state = tmp_path / "t.jsonl", tmp_path / "state"
    texts = list(session_of("codex", transcript))
    env = environment(tmp_path)
    relay = RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"])
    with relay, DaemonProcess(state, relay.url):
        for number, text in enumerate(texts):
            if number == len(texts) // 4:
                relay.stop()
            if number == 3 * len(texts) // 4:
                relay.start()
            done = subprocess.run(
                [sys.executable, "-m", "outbox", "hook", "codex"],
                input=text.encode(),
                env=env,
                cwd=ROOT,
                capture_output=True,
                timeout=60,
                check=False,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
            grow(transcript)
        whole = told["messages"] + told["insights"]
        arrived = wait_for(lambda: len(relay.events()) >= whole and relay.events(), 60)
    bodies = [json.loads(event["body"]) for event in arrived]
    hooks = [body["payload"]["hook"] for body in bodies if "payload" in body]
    made = [bool(line["makes"]) for line in told["lines"]]
    assert hooks == [json.loads(text) for text, is_made in zip(texts, made, strict=True) if is_made]
    assert [body["kind"] for body in bodies if "payload" not in body] == ["session-end"]
    assert len(arrived) == whole


def test_a_pair_is_both_or_none(tmp_path, capsys, monkeypatch):
    """Where a full outbox refuses, a session's end is not told without its insight."""
    state = StateDirectory(tmp_path / "state").create()
    bounds = Bounds(max_events=2, overflow="refuse", min_free_disk_bytes=0)
    create_outbox(state, "claude-code", Limits(), bounds, 1)
    feed(state, "claude-code", lines_of("claude-code")[7:8])
    end = lines_of("claude-code")[4]
    monkeypatch.setenv("OUTBOX_STATE_DIR", str(state.path))
    monkeypatch.delenv("OUTBOX_AGENT", raising=False)
    assert run_hook(["claude-code", end]) == 0
    assert "no room for a session's end with its insight" in capsys.readouterr().err
    assert [kind for kind, _, _ in events_of(state, "claude-code")] == ["session-message"]


def test_a_session_end_leaves_a_flush_behind_that_nobody_waits_for(tmp_path):
    """Without a daemon: what waits reaches the relay after the hook is gone."""
    with RelayProcess(tmp_path / "relay.sqlite", ["tok"]) as relay:
        env = environment(tmp_path, OUTBOX_RELAY_URL=relay.url, OUTBOX_RELAY_TOKEN="tok")
        for line in (lines_of("claude-code")[7], lines_of("claude-code")[4]):
            done = subprocess.run(
                [sys.executable, "-m", "outbox", "hook", "claude-code"],
                input=line.encode(),
                env=env,
                cwd=ROOT,
                capture_output=True,
                timeout=60,
                check=False,
            )
            assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
        arrived = wait_for(lambda: len(relay.events()) == 3 and relay.events(), 60)
        state = StateDirectory(tmp_path / "state")

        def is_over():
            with contextlib.closing(open_outbox(state, state.outbox_path("claude-code"))) as box:
                return not box.has_sender

        wait_for(is_over, 60)
    kinds = [json.loads(event["body"])["kind"] for event in arrived]
    assert kinds == ["agent-hook", "agent-hook", "session-end"]


def test_a_session_end_has_the_daemon_flush(tmp_path):
    """With a daemon whose relay was away: it goes out at once, and not when the backoff says."""
    slow = {"delivery.backoff_initial_s": "3600", "delivery.backoff_max_s": "3600"}
    state = tmp_path / "state"
    with RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"]) as relay:
        relay.stop()
        with DaemonProcess(state, relay.url, slow) as daemon:
            env = environment(tmp_path)
            words = [sys.executable, "-m", "outbox", "hook", "claude-code"]
            first, end = lines_of("claude-code")[7], lines_of("claude-code")[4]
            subprocess.run(words, input=first.encode(), env=env, cwd=ROOT, timeout=60, check=True)
            wait_for(lambda: daemon.said("gate_closed"), 60)
            relay.start()
            subprocess.run(words, input=end.encode(), env=env, cwd=ROOT, timeout=60, check=True)
            wait_for(lambda: len(relay.events()) == 3, 60)
