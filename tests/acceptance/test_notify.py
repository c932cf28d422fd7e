"""A person is told unasked: of what, how often, and that no event waits for it."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading

import pytest
from peers import fake_relay, http_response, read_http_request, thread_server
from processes import DaemonProcess, outbox_command, status_of, wait_for

from outbox import Outbox
from outbox.daemon import notify, notify_call
from outbox.daemon.alarms import Alarm, Known, Look, message, news
from outbox.daemon.lookout import Lookout
from outbox.daemon.notify import Notifier, Target
from outbox.settings import load
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.inspect import DeadLetter, Head, OutboxStatus
from relay_client.reference.process import RelayProcess

SOON = {"notify.min_interval_s": "0.1", "notify.alert_after_s": "0.3"}
NOTE = "import pathlib, sys; pathlib.Path(sys.argv[1]).open('a').write(sys.stdin.read() + '\\n')"


@pytest.fixture
def state(tmp_path):
    """A place for the events."""
    return tmp_path / "state"


@pytest.fixture
def told(tmp_path):
    """The settings of a command that notes what it is told; and what it noted."""
    file = tmp_path / "told.jsonl"
    command = f"{sys.executable} -c '{NOTE.replace(chr(39), chr(34))}' {file}"

    def read():
        return [json.loads(line) for line in file.read_text("utf-8").splitlines()] if file.exists() else []

    read.settings = {**SOON, "notify.command": command}
    return read


def alarms(calls):
    """Every alarm of all calls, in short."""
    return [(alarm["alarm"], alarm["agent"], alarm["reason"]) for call in calls for alarm in call["alarms"]]


def put(state, agent, *bodies, kind="session-message", **fields):
    """Enqueue some events."""
    with Outbox.open(agent, state_dir=state) as outbox:
        for body in bodies:
            outbox.enqueue(kind, {"from": agent, "body": body}, **fields)


def letters_tell(state, agent):
    """How many dead letters an agent has."""
    return status_of(state, agent).dead


# What is told ----------------------------------------------------------------------------------------------


def test_the_first_dead_letter_of_an_agent(state, told):
    """Told once for each agent, as a whole sentence; what was dead before the start is no news."""
    refuse = {"steps": [{"status": 422, "when": {"body_contains": "wrong"}, "repeat": "forever"}]}
    with fake_relay(refuse) as relay, DaemonProcess(state, relay.url, told.settings) as daemon:
        put(state, "builder", "wrong 1")
        wait_for(told)
        put(state, "builder", "wrong 2")
        put(state, "reviewer", "wrong 3")
        wait_for(lambda: letters_tell(state, "builder") == 2 and len(alarms(told())) >= 2)
        assert daemon.stop() == 0
        found = alarms(told())
        assert sorted(found) == [("dead_letter", agent, "rejected") for agent in ("builder", "reviewer")]
        first = told()[0]
        assert "builder: event 1 (session-message) became a dead letter, rejected" in first["text"]
        assert "outbox dead list" in first["text"]
        assert (first["stateDir"], first["more"]) == (str(state), 0)
        assert [line["by"] for line in daemon.said("notified")] == ["command"] * len(told())
        daemon.start()
        put(state, "third", "wrong 4")
        wait_for(lambda: len(alarms(told())) == 3)
        assert alarms(told())[-1] == ("dead_letter", "third", "rejected")


def test_what_a_person_set_aside_is_no_news(state, told):
    """`outbox skip` makes a dead letter that its maker knows of."""
    refuse = {"steps": [{"status": 422, "when": {"body_contains": "wrong"}, "repeat": "forever"}]}
    with fake_relay(refuse) as relay, DaemonProcess(state, relay.url, told.settings):
        put(state, "builder", "x")
        wait_for(lambda: not status_of(state, "builder").waiting)
        assert outbox_command(state, "pause", "builder").returncode == 0
        put(state, "builder", "y")
        assert outbox_command(state, "skip", "builder", "2").returncode == 0
        put(state, "other", "wrong")  # whoever is told of this was told of all before
        wait_for(told)
        assert alarms(told()) == [("dead_letter", "other", "rejected")]
        assert letters_tell(state, "builder") == 1


def test_a_gap(state, told):
    """Events that a bound dropped are told with number and reason, also those that no daemon saw go."""
    settings = {**told.settings, "bounds.max_events": "5", "bounds.min_free_disk_bytes": "0"}
    put(state, "builder", "first")
    assert outbox_command(state, "pause", "builder").returncode == 0
    with DaemonProcess(state, "http://127.0.0.1:9", settings) as daemon:
        wait_for(lambda: rules_of(state, "builder").max_events == 5)
        put_together(state, "builder", 6)
        wait_for(told)
        assert alarms(told()) == [("gap", "builder", "max_events")]
        assert "builder: 2 events will not be delivered (max_events)" in told()[0]["text"]
        assert daemon.stop() == 0
        put_together(state, "builder", 1)
        daemon.start()
        wait_for(lambda: len(told()) == 2)
        assert alarms(told())[-1] == ("gap", "builder", "max_events")


def put_together(state, agent, count):
    """Enqueue some events with one commit."""
    with Outbox.open(agent, state_dir=state) as outbox:
        outbox.enqueue_many([{"kind": "insight", "payload": n} for n in range(count)])


def rules_of(state, agent):
    """The bounds that a producer follows."""
    directory = StateDirectory(state)
    with contextlib.closing(open_outbox(directory, directory.outbox_path(agent))) as box:
        return box.bounds


def test_a_head_that_does_not_get_on(state, told):
    """What holds the relay is one alarm for all its agents; it is told again only after it was mended."""
    agents = ("a", "b", "c")
    with RelayProcess(state.parent / "relay.sqlite", ["tok-daemon"]) as relay:
        relay.add_faults({"action": {"status": 503}})
        with DaemonProcess(state, relay.url, told.settings):
            for agent in agents:
                put(state, agent, "x")
            wait_for(told)
            put(state, "d", "x")
            relay_is_asked = len(relay.requests())
            wait_for(lambda: len(relay.requests()) > relay_is_asked + 2)
            assert alarms(told()) == [("head_stuck", None, "busy")]
            assert "for the relay. The relay asks to wait" in told()[0]["text"]
            relay.clear_faults()
            wait_for(lambda: not any(status_of(state, agent).waiting for agent in (*agents, "d")))
            relay.add_faults({"action": {"status": 503}})
            put(state, "a", "y")
            wait_for(lambda: alarms(told())[1:])
            assert {alarm for alarm, _, _ in alarms(told())} == {"head_stuck"}


def test_a_head_of_one_agent_alone(state, told):
    """What holds one agent is told with its name and what to do; a paused one waits at a person's wish."""
    forbid = {"steps": [{"status": 403, "when": {"body_contains": "held"}, "repeat": "forever"}]}
    put(state, "resting", "x")
    assert outbox_command(state, "pause", "resting").returncode == 0
    with fake_relay(forbid) as relay, DaemonProcess(state, relay.url, told.settings):
        put(state, "builder", "held")
        wait_for(told)
        assert alarms(told()) == [("head_stuck", "builder", "forbidden")]
        assert "The relay refuses this agent (403)" in told()[0]["text"]


def test_a_damaged_file(state, told):
    """One that is set aside is told with what became of its events; one that is left alone as it is."""
    put(state, "builder", *map(str, range(50)))
    directory = StateDirectory(state)
    with directory.outbox_path("builder").open("r+b") as file:
        file.seek(3 * 4096)
        file.write(b"\xff" * 4096 * 4)
    nobodys = directory.outbox_path("reviewer")
    nobodys.write_bytes(b"no outbox at all" * 500)
    with (
        RelayProcess(state.parent / "relay.sqlite", ["tok-daemon"]) as relay,
        DaemonProcess(state, relay.url, told.settings),
    ):
        wait_for(
            lambda: (
                {agent for alarm, agent, _ in alarms(told()) if alarm == "damaged_file"} == {None, "builder"}
            )
        )
        texts = "\n".join(call["text"] for call in told())
    assert 'The file of agent "builder" is damaged' in texts
    assert "It was moved to damaged/" in texts
    assert nobodys.name in texts


# By what ---------------------------------------------------------------------------------------------------


def test_an_address_is_posted_to(state):
    """JSON, one request, no token; the address itself is in no log and in no `config show`."""
    posted = []

    def take(connection):
        while request := read_http_request(connection):
            posted.append(request)
            connection.sendall(http_response(204, b""))

    refuse = {"steps": [{"status": 422, "repeat": "forever"}]}
    with thread_server(take) as hook, fake_relay(refuse) as relay:
        settings = {**SOON, "notify.url": f"http://127.0.0.1:{hook.port}/T0/s3cret-path?key=s3cret-key"}
        with DaemonProcess(state, relay.url, settings, environ={"NO_PROXY": "*"}) as daemon:
            put(state, "builder", "wrong")
            wait_for(lambda: posted and daemon.said("notified"))
            log = daemon.log.read_text("utf-8")
        shown = outbox_command(state, "config", "show", settings=settings).stdout.decode()
    head, body = posted[0]
    assert head.startswith(b"POST /T0/s3cret-path?key=s3cret-key HTTP/1.1\r\n")
    assert b"content-type: application/json" in head.lower()
    assert b"authorization" not in head.lower()
    assert alarms([json.loads(body)]) == [("dead_letter", "builder", "rejected")]
    assert "s3cret" not in log + shown


def test_a_command_that_hangs_costs_nothing(state, tmp_path):
    """Events go on being delivered, and the daemon stops, while the command never ends."""
    with RelayProcess(tmp_path / "relay.sqlite", ["tok-daemon"]) as relay:
        relay.add_faults({"match": {"bodyContains": "wrong"}, "action": {"status": 422}})
        marker = tmp_path / "pid"
        settings = {**SOON, "notify.command": f"sh -c 'echo $$ > {marker}; exec sleep 600'"}
        with DaemonProcess(state, relay.url, settings) as daemon:
            put(state, "builder", "wrong")
            wait_for(lambda: marker.exists() and marker.read_text("ascii").strip())
            put(state, "builder", *map(str, range(20)))
            wait_for(lambda: len(relay.events()) == 20)
            assert daemon.stop(timeout_s=10) == 0
        os.kill(int(marker.read_text("ascii")), 9)


def test_a_command_that_cannot_be_ended_is_left_behind(monkeypatch):
    """One that became another user (sudo) is not ours to kill: nobody waits for it, and it is said."""
    started = []

    class Kept(subprocess.Popen):
        """Remembered, so that the test can end it."""

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            started.append(self)

    def refuse(_group, _number):
        raise PermissionError

    monkeypatch.setattr(notify_call.subprocess, "Popen", Kept)
    monkeypatch.setattr(notify_call.os, "killpg", refuse)
    monkeypatch.setattr(notify_call, "_ENDS_WITHIN_S", 0.1)
    try:
        trouble = notify_call.run_command(("sleep", "60"), b"{}", 0.1)
        assert started[0].poll() is None
        assert trouble == "sleep took longer than 0.1 s and cannot be ended by us"
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_a_command_that_fails_is_logged_once(state):
    """Its status, no traceback; delivery goes on."""
    refuse = {"steps": [{"status": 422, "when": {"body_contains": "wrong"}, "repeat": "forever"}]}
    settings = {**SOON, "notify.command": "false"}
    with fake_relay(refuse) as relay, DaemonProcess(state, relay.url, settings) as daemon:
        for agent in ("a", "b", "c"):
            put(state, agent, "wrong", "good")
        wait_for(lambda: daemon.said("notify_failed"))
        wait_for(lambda: not any(status_of(state, agent).waiting for agent in ("a", "b", "c")))
        assert daemon.stop() == 0
        assert [line["detail"] for line in daemon.said("notify_failed")] == ["false ended with status 1"]


def test_a_reload_takes_another_command(state, told, tmp_path):
    """SIGHUP: who is told changes, and what was told already is not told again."""
    file = tmp_path / "outbox.toml"
    file.write_text("", "utf-8")
    refuse = {"steps": [{"status": 422, "repeat": "forever"}]}
    with (
        fake_relay(refuse) as relay,
        DaemonProcess(state, relay.url, flags=["--config", str(file)]) as daemon,
    ):
        put(state, "early", "wrong")
        wait_for(lambda: letters_tell(state, "early"))
        words = told.settings["notify.command"].partition(" -c ")
        script, _, target = words[2].rpartition(" ")
        command = json.dumps([words[0], "-c", script.strip("'"), target])
        file.write_text(f"[notify]\ncommand = {command}\nmin_interval_s = 0.1\n", "utf-8")
        daemon.send(1)
        wait_for(lambda: daemon.said("reloaded"))
        put(state, "builder", "wrong")
        wait_for(lambda: ("dead_letter", "builder", "rejected") in alarms(told()))


def test_secrets_are_not_handed_on(monkeypatch, tmp_path):
    """The command does not inherit the relay's token, nor the address that is posted to."""
    for name in ("OUTBOX_RELAY_TOKEN", "AGENT_RELAY_TOKEN", "OUTBOX_NOTIFY_URL"):
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("OTHER", "kept")
    file = tmp_path / "environment"
    assert notify_call.run_command(("sh", "-c", f"env > {file}"), b"{}") == ""
    text = file.read_text("utf-8")
    assert "s3cret" not in text
    assert "OTHER=kept" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("/no/such/program",), "/no/such/program cannot be started: No such file or directory"),
        (("sh", "-c", "exit 7"), "sh ended with status 7"),
        (("sh", "-c", "sleep 60 & sleep 60"), "sh took longer than 0.2 s and was ended"),
        (("sh", "-c", "exec 0<&-; sleep 0.01"), ""),
    ],
)
def test_how_a_command_ends(words, said):
    """In one sentence; a command need not read what it is given, and takes its children with it."""
    assert notify_call.run_command(words, b"x" * 1_000_000, 0.2 if "longer" in said else 10) == said


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (http_response(200), ""),
        (http_response(302, b"", "location: http://127.0.0.1:9/other"), "the address answered 302"),
        (http_response(500, b"x" * 100), "the address answered 500"),
        (b"SSH-2.0-x\r\n", "the address does not answer: "),
        (None, "the address does not answer: "),
    ],
)
def test_how_an_address_answers(answer, said, monkeypatch):
    """Only 2xx counts; a redirect is not followed, and silence ends after a while."""
    monkeypatch.setenv("NO_PROXY", "*")
    over = threading.Event()

    def handle(connection):
        read_http_request(connection)
        if answer is None:
            over.wait(10)
        else:
            connection.sendall(answer)

    with thread_server(handle) as server:
        told = notify_call.post(f"http://127.0.0.1:{server.port}/s3cret", b"{}", 0.3)
        over.set()
        assert server.connections == 1
    assert told.startswith(said)
    assert bool(told) == bool(said)
    assert "s3cret" not in told


# How often -------------------------------------------------------------------------------------------------


def alarm(n=0):
    """Some alarm."""
    return Alarm("gap", f"agent-{n}", "max_events", f"text {n}")


def test_what_happens_between_two_calls_comes_with_the_next():
    """One call in the interval, however much happens."""
    calls, said = [], []
    target = Target("command", lambda body: calls.append(json.loads(body)) or "")
    for n in range(5):
        target.add([alarm(n)])
        target.turn(3_600, {}, lambda event, fields: said.append((event, fields)))
    assert [len(call["alarms"]) for call in calls] == [1]
    target.turn(0, {}, lambda event, fields: None)
    assert len(calls) == 1
    target._next_s = 0
    target.turn(0, {}, lambda event, fields: None)
    assert [len(call["alarms"]) for call in calls] == [1, 4]
    assert said == [("notified", {"by": "command", "alarms": ["gap"]})]


def test_more_than_a_hundred_are_counted():
    """A call stays small; the sentence says how many more there are."""
    calls = []
    target = Target("command", lambda body: calls.append(json.loads(body)) or "")
    target.add([alarm(n) for n in range(150)])
    target.turn(0, {}, lambda event, fields: None)
    assert (len(calls[0]["alarms"]), calls[0]["more"]) == (100, 50)
    assert calls[0]["text"].splitlines()[-1] == "And 130 more. See: outbox status"


def test_what_could_not_be_told_is_tried_again_and_then_left():
    """Three times; the fault is logged once, until it is another one."""
    calls, said = [], []
    target = Target("url", lambda body: calls.append(body) or f"fault {len(calls) // 3}")
    target.add([alarm()])
    for _ in range(10):
        target.turn(0, {}, lambda event, fields: said.append((event, fields["detail"])))
    assert len(calls) == 3
    assert said == [("notify_failed", "fault 0"), ("notify_failed", "fault 1")]


def test_trouble_of_its_own_does_not_end_it(state, monkeypatch):
    """A fault of ours while looking is logged, and the next alarm is told all the same."""
    said, told = [], threading.Event()
    notifier = Notifier(StateDirectory(state), lambda event, fields: said.append(event))
    broken = iter([RuntimeError("made up")])

    def look(_settings):
        for error in broken:
            raise error
        return [alarm()]

    monkeypatch.setattr(notifier._lookout, "look", look)
    monkeypatch.setattr(notify, "_targets", lambda _: [Target("command", lambda _body: told.set() or "")])
    notifier.use(load({"notify.command": "true", "notify.min_interval_s": 0.1}, environ={}))
    assert told.wait(60)
    assert "notify_failed" in said
    notifier.stop()


def test_a_file_that_went_before_it_was_opened_is_not_looked_for_again(state, monkeypatch):
    """An agent that is done for good leaves nothing to be opened at every look from then on."""
    put(state, "builder", 0)
    directory = StateDirectory(state)
    lookout, settings = Lookout(directory), load({}, environ={})
    changed = lookout._watch.changed

    def changed_and_gone():
        found = changed()
        for path in found:
            path.unlink()
        return found

    monkeypatch.setattr(lookout._watch, "changed", changed_and_gone)
    for _ in range(2):
        assert lookout.look(settings) == []
    assert not lookout._again


def test_a_fault_that_comes_again_is_told_again(state):
    """Once for each: a damaged file that was removed says nothing of the next one of that name."""
    put(state, "builder", 0)
    directory = StateDirectory(state)
    lookout, settings = Lookout(directory), load({}, environ={})
    (path,) = directory.outbox_files()
    for _ in range(2):
        path.write_bytes(b"no database" * 1_000)
        for beside in ("-wal", "-shm"):
            path.with_name(path.name + beside).unlink(missing_ok=True)
        assert [alarm.alarm for alarm in lookout.look(settings)] == ["damaged_file"]
        assert lookout.look(settings) == []
        path.unlink()
        assert lookout.look(settings) == []


def test_nobody_to_tell_costs_no_thread(state):
    """Without a command or an address nothing is looked at."""
    notifier = Notifier(StateDirectory(state), lambda event, fields: None)
    notifier.use(load({}, environ={}))
    assert notifier._thread is None
    notifier.stop()


# The decision ----------------------------------------------------------------------------------------------


def status(*, dead=0, dropped=0, head=None):
    """What a file says."""
    return OutboxStatus(
        "builder",
        "stream",
        int(head is not None),
        0,
        0,
        dead,
        0,
        9,
        0,
        dropped,
        None,
        None,
        head,
        sender=True,
    )


def letter(failed_at_ms, reason="rejected"):
    """A dead letter."""
    return DeadLetter(1, "insight", "key", 0, reason, 422, "no such field", 0, failed_at_ms)


def head(seq, kind="insight"):
    """The first event."""
    return Head(seq, kind, "key", 0, 0, 0, None, ())


def known(*, dead=False, **dropped):
    """What was seen the last time."""
    return Known(dead, dropped, None, 0)


@pytest.mark.parametrize(
    ("before", "look", "said"),
    [
        (None, Look(status(), {}, []), []),
        (None, Look(status(dead=1), {}, [letter(999)]), []),
        (None, Look(status(dead=1), {}, [letter(1_000)]), ["dead_letter"]),
        (None, Look(status(dropped=3), {"dropped:max_age": 3}, []), []),
        (None, Look(status(dropped=3, head=head(1, "outbox-gap")), {"dropped:max_age": 3}, []), ["gap"]),
        (known(), Look(status(dead=2), {}, [letter(1, "skipped"), letter(2)]), ["dead_letter"]),
        (known(), Look(status(dead=1), {}, [letter(1, "skipped")]), []),
        (known(dead=True), Look(status(dead=2), {}, [letter(2)]), []),
        (known(max_age=3), Look(status(), {"dropped:max_age": 3, "dropped:max_bytes": 6}, []), ["gap"]),
    ],
)
def test_what_is_news(before, look, said):
    """Only what came since the last look, or since the start."""
    _, found = news(before, look, began_ms=1_000, now_ms=50)
    assert [each.alarm for each in found] == said


def test_how_long_a_head_has_been_one():
    """Counted on our own clock from when it was seen first; another head starts afresh."""
    seen, _ = news(None, Look(status(head=head(1)), {}, []), began_ms=0, now_ms=100)
    seen, _ = news(seen, Look(status(head=head(1)), {}, []), began_ms=0, now_ms=900)
    assert seen.head_since_ms == 100
    seen, _ = news(seen, Look(status(head=head(2)), {}, []), began_ms=0, now_ms=1_000)
    assert seen.head_since_ms == 1_000


def test_the_message_is_data_and_a_text():
    """`text` is what a person reads; each alarm has its own, and what it is about."""
    told = message([alarm(1), alarm(2)], 0, host="h", stateDir="/s")
    assert told["text"] == "text 1\ntext 2"
    assert (told["host"], told["stateDir"], told["more"]) == ("h", "/s", 0)
    assert told["alarms"][0] == {"alarm": "gap", "agent": "agent-1", "reason": "max_events", "text": "text 1"}
