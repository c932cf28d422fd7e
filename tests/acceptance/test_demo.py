"""`outbox demo`: what it sends, what it checks, and that it leaves nothing behind."""

import argparse
import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from outbox import Outbox, UsageError
from outbox.cli import demo
from outbox.cli.demo_view import Lines, picture
from outbox.demo import play
from outbox.demo.check import Sent, by_kind, faults
from outbox.demo.session import AGENT, events_of, recorded_events
from outbox.demo.stage import Stage

QUICK = play.Pace(between_s=0.01)
DEMO = [sys.executable, "-m", "outbox", "demo"]
PIDS = re.compile(r"\(pid (\d+)\)")
REFUSE = {"match": {"bodyContains": "API Error"}, "action": {"status": 422, "body": {"error": "no"}}}


# What is sent ----------------------------------------------------------------------------------------------


def test_the_session_becomes_the_events_that_its_table_counts():
    """43 messages and an insight, as the recorded session's own table has it, and one tool call more."""
    counts = Counter(event.kind for event in recorded_events())
    assert counts == {"session-message": 43, "insight": 1, "mcp-tool-call": 1}


def test_the_texts_are_those_of_the_session():
    """Prompts, replies and tool results keep their words, colour codes included."""
    messages = [event.payload for event in recorded_events() if event.kind == "session-message"]
    said = [(message["kind"], message["body"]) for message in messages]
    assert ("user", "go on") in said
    assert ("assistant", "Week 35 is in.") in said
    assert ("tool", "\x1b[31mF\x1b[0m.\n1 failed, 1 passed in 0.11s\nDeprecationWarning: old style") in said
    assert messages[1]["payload"]["hook"]["hook_event_name"] == "UserPromptSubmit"


def test_what_says_nothing_makes_no_event():
    """A tool before it runs, and a helper of the runner itself, make no message."""
    before = {"hook_event_name": "PreToolUse", "tool_name": "Bash"}
    helper = {"hook_event_name": "SubagentStop", "agent_type": "", "last_assistant_message": "Go on."}
    assert events_of([before, helper]) == []


def test_the_tool_call_is_made_during_the_outage():
    """The buffered tool call waits: it is sent between the relay's death and its return."""
    kinds = [event.kind for event in recorded_events()]
    pace = play.Pace()
    assert pace.kill_before < kinds.index("mcp-tool-call") < pace.revive_before < len(kinds)


# What is checked -------------------------------------------------------------------------------------------


def sent_and_held(many=5):
    """Events as accepted, and a relay that holds exactly these."""
    sent = [Sent(seq, f"key-{seq}", "session-message", {"body": str(seq)}) for seq in range(1, many + 1)]
    held = [
        {
            "key": event.key,
            "seq": event.seq,
            "path": "/api/messages",
            "body": json.dumps({**event.payload, "occurredAt": 1, "idempotencyKey": event.key}),
        }
        for event in sent
    ]
    return sent, held


def summary_of(held, **differing):
    """What the relay says of such rows."""
    keys = len({row["key"] for row in held})
    return {"count": len(held), "distinctKeys": keys, "inOrder": True, **differing}


def test_nothing_is_wrong_when_all_is_there():
    """The very events, in order, once: no fault."""
    sent, held = sent_and_held()
    assert faults(sent, held, summary_of(held)) == []


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda rows: rows[:1] + rows[2:], "1 missing: 2"),
        (lambda rows: [*rows, rows[2]], "1 held more than once: 3"),
        (lambda rows: [rows[1], rows[0], *rows[2:]], "out of order: seq 2 stands where seq 1 belongs"),
        (
            lambda rows: [*rows, {**rows[0], "key": "alien"}],
            "1 held, though never sent in this session: alien",
        ),
        (
            lambda rows: [*rows[:-1], {**rows[-1], "body": '{"body": "other"}'}],
            "1 held with another content than was given: 5",
        ),
    ],
)
def test_each_fault_is_named(spoil, said):
    """Something missing, twice, out of order, foreign or changed is found in the rows themselves."""
    sent, held = sent_and_held()
    rows = spoil(held)
    assert faults(sent, rows, summary_of(rows)) == [said]


def test_the_relays_own_summary_counts_too():
    """A summary that contradicts the rows, or says that the order was broken, is a fault."""
    sent, held = sent_and_held()
    assert "counts 6 events" in faults(sent, held, summary_of(held, count=6))[0]
    assert "did not come in order" in faults(sent, held, summary_of(held, inOrder=False))[0]
    assert faults(sent, held, None) == ["the relay's summary does not know this agent"]


def test_many_missing_events_are_counted_and_a_few_named():
    """A long list of faults stays one line."""
    sent, _ = sent_and_held(20)
    assert faults(sent, [], None) == ["20 missing: 1, 2, 3, 4, 5 and 15 more"]


def test_what_is_held_is_told_in_words():
    """Paths are told as kinds, one of a kind in the singular."""
    held = [{"path": path} for path in ("/api/messages", "/api/mcp", "/api/messages", "/api/other")]
    assert by_kind(held) == "2 session messages, 1 tool call, 1 /api/other"


# How it looks ----------------------------------------------------------------------------------------------


def scene_with(number, **differing):
    """The moment after so many events, all delivered unless told otherwise."""
    events = list(enumerate(recorded_events(), 1))[:number]
    seen = play.Scene(
        "http://127.0.0.1:4850",
        relay_runs=True,
        events=events,
        delivered=number,
        waiting=0,
        delivered_through=number,
        why="",
    )
    return replace(seen, **differing)


def test_the_picture_shows_each_event_and_where_it_is():
    """Delivered and waiting ones differ, what is in the way is told, colour codes are escaped."""
    console = Console(file=io.StringIO(), width=120, color_system=None)
    waits = scene_with(9, relay_runs=False, delivered=5, waiting=4, delivered_through=5, why="refused")
    console.print(picture(waits, most_rows=9))
    lines = console.file.getvalue().splitlines()
    assert [line.rstrip().endswith("at the relay") for line in lines[-9:]] == [True] * 5 + [False] * 4
    assert "refused" in console.file.getvalue()
    assert r"\x1b[31mF" in console.file.getvalue()
    assert "\x1b" not in console.file.getvalue()


def test_a_pipe_gets_few_lines():
    """A line every ten events and one when a backlog is out, however often it is looked at."""
    out = io.StringIO()
    view = Lines(to=out)
    for number in range(1, 31):
        waiting = max(0, number - 14) if number < 30 else 0
        for _ in range(3):
            view.show(scene_with(number, waiting=waiting, delivered=number - waiting, why="refused"))
    assert out.getvalue().splitlines() == [
        "  10 accepted, 10 delivered, 0 waiting",
        "  20 accepted, 14 delivered, 6 waiting (refused)",
        "  30 accepted, 30 delivered, 0 waiting",
    ]


# How it goes -----------------------------------------------------------------------------------------------


class Watching:
    """A view that keeps what it is shown."""

    def __init__(self):
        self.scenes = []
        self.told = []

    def tell(self, *lines):
        """Keep what happened."""
        self.told += lines

    def show(self, scene):
        """Keep the moment."""
        self.scenes.append(scene)


def is_alive(pid):
    """Whether a process of this id is there."""
    return Path(f"/proc/{pid}").exists()


def test_a_whole_session_arrives_through_an_outage():
    """Events are accepted while the relay is dead; in the end it holds all of them, nothing is left over."""
    watching = Watching()
    with Stage() as stage, Outbox.open(AGENT, state_dir=stage.state_dir) as outbox:
        pids = stage.relay.pid, stage.daemon.pid
        ending = play.Play(stage, outbox, watching, lambda: False).perform(recorded_events(), QUICK)
        pids += (stage.relay.pid,)
        assert all(is_alive(pid) for pid in pids[1:])
    assert (ending.held, ending.faults) == (45, [])
    assert max(scene.waiting for scene in watching.scenes if not scene.relay_runs) >= 16
    assert watching.scenes[-1].delivered_through == 45
    assert not any(is_alive(pid) for pid in pids)
    assert not stage.folder.exists()


def args(**differing):
    """What the dispatcher hands to the command."""
    return argparse.Namespace(
        **{"keep": False, "json": False, "state_dir": None, "config": None, **differing}
    )


@pytest.fixture
def quick_with_a_refusal(monkeypatch, tmp_path):
    """The command's performance at a quick pace, on a relay that refuses the one event `REFUSE` fits."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    start = Stage.start_relay

    def start_and_spoil(stage):
        start(stage)
        stage.relay.add_faults(REFUSE)

    monkeypatch.setattr(Stage, "start_relay", start_and_spoil)
    monkeypatch.setattr(play, "Pace", lambda: replace(QUICK, arrive_within_s=20))


def test_it_says_what_is_missing_and_fails(quick_with_a_refusal, capsys):
    """An event that the relay refuses is missed by number; exit 1, and the files are kept for a look."""
    assert demo.run(args()) == 1
    out = capsys.readouterr().out
    assert "45 events accepted; what the relay holds does not match:\n  1 missing: 33.\n" in out
    folder = Path(re.search(r"kept in (\S+)\.", out).group(1))
    assert (folder / "daemon.log").exists()


def test_it_has_a_folder_of_its_own():
    """--state-dir is refused before anything is started: the demo never touches real events."""
    with pytest.raises(UsageError, match="folder of its own"):
        demo.run(args(state_dir="somewhere"))


def test_the_hosts_own_settings_are_forgotten():
    """Neither a real relay nor its token reaches the demo."""
    environ = {"OUTBOX_RELAY_URL": "http://real", "AGENT_RELAY_TOKEN": "tok", "HOME": "/home/a"}
    demo._forget_the_host(environ)
    assert environ == {"HOME": "/home/a"}


@contextlib.contextmanager
def started(*command):
    """A program and its lines, to be read; ended with the block, killed after two minutes."""
    environ = {**os.environ, "OUTBOX_RELAY_URL": "http://127.0.0.1:9/never"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environ
    ) as process:
        alarm = threading.Timer(120, process.kill)
        alarm.start()
        try:
            yield process
        finally:
            process.terminate()  # and not kill: it has children of its own to end
            process.communicate()
            alarm.cancel()


def until(stream, words):
    """All lines up to the one with these words."""
    said = line = ""
    while words not in line:
        line = stream.readline()
        said += line
        assert line, said
    return said


def test_ctrl_c_ends_both_processes_and_leaves_no_file():
    """An interrupt in the middle: exit 130, no child and no folder is left."""
    with started(*DEMO) as process:
        pids = [int(pid) for pid in PIDS.findall(until(process.stdout, "listens on"))]
        folder = Path(f"/proc/{pids[1]}/cmdline").read_text().split("\0--state-dir\0")[1].split("\0")[0]
        until(process.stdout, "10 accepted")
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert "Both processes are ended" in rest
    assert process.returncode == 130
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids)
    assert not Path(folder).parent.exists()


@pytest.mark.slow
def test_the_command_ends_by_itself_with_all_events_at_the_relay():
    """The main job on real input, at the pace of a person: exit 0, and few enough lines to read."""
    with started(*DEMO) as process:
        out = process.stdout.read()
    assert process.returncode == 0, out
    assert "Read back from the relay: 43 session messages, 1 tool call, 1 insight." in out
    assert out.splitlines()[-1].startswith("All 45 accepted events are there, in order, once")
    assert len(out.splitlines()) < 20


@pytest.mark.slow
def test_kept_up_it_names_commands_that_work():
    """With --keep, what it says to try does what it is said to do, in that order, until Ctrl-C: exit 0."""
    with started(*DEMO, "--keep") as process:
        until(process.stdout, "In another terminal:")
        commands = until(process.stdout, " relay --port ").splitlines()
        why, revive = (command.strip() for command in commands[-2:])
        wait = f"until {why} | grep -q refused; do sleep 0.1; done"  # the daemon's try may take a moment
        with started(
            "bash", "-c", "\n".join(["set -e", *commands[:-2], wait, why, f"exec {revive}"])
        ) as trying:
            said = until(trying.stdout, "takes events at")
            trying.send_signal(signal.SIGTERM)
            trying.wait()
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.returncode == 0
    assert trying.returncode == 0
    assert "1 event accepted" in said
    assert "connection refused" in said
