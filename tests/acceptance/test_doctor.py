"""`outbox doctor`: each thing that can be wrong is found and told with what to do, and nothing is changed."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest
from command_line import command, in_process
from peers import http_response, read_http_request, thread_server
from processes import DaemonProcess, outbox_command, wait_for

from outbox import Outbox
from outbox.api.report import status_report
from outbox.cli import doctor, doctor_folders, doctor_host
from outbox.cli.doctor_finding import Level, failure, ok, warning
from outbox.cli.seeds import seed_advice
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.place import RunningDaemon
from outbox.store.relay_state import RelayState
from relay_client.reference.process import RelayProcess

TOKEN = "tok-doctor-0123456789"
CHECKS = {
    *("software", "configuration", "directory", "file system", "disk", "clock", "descriptors"),
    *("daemon", "relay", "token", "contract", "files"),
}


@pytest.fixture(autouse=True)
def _own_place(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path)
    monkeypatch.setenv("OUTBOX_RELAY_TRUST_ENV", "false")


@pytest.fixture
def state(tmp_path):
    """The state directory that is looked at, with one outbox of two events, at rest."""
    with Outbox.open("builder", state_dir=tmp_path / "state") as outbox:
        outbox.enqueue("session-message", {"from": "builder", "body": "one"})
        outbox.enqueue("session-message", {"from": "builder", "body": "two"})
    state = StateDirectory(tmp_path / "state")
    open_outbox(state, state.outbox_path("builder")).close(checkpoint=True)
    return state


@pytest.fixture
def relay(tmp_path, monkeypatch):
    """The reference relay, as the settings name it."""
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        monkeypatch.setenv("OUTBOX_RELAY_URL", relay.url)
        monkeypatch.setenv("OUTBOX_RELAY_TOKEN", TOKEN)
        yield relay


def found(capsys, *words):
    """The exit status, and what was found: by check, in order."""
    status, told, errors = command(capsys, "doctor", "--json", *words)
    assert (errors, told.count("\n")) == ("", 1)
    data = json.loads(told)
    levels = [finding["level"] for finding in data["findings"]]
    assert data["worst"] == max(levels, key=("ok", "warning", "failure").index)
    by_check = {}
    for finding in data["findings"]:
        by_check.setdefault(finding["check"], []).append(finding)
    return status, by_check


def only(findings, check):
    """The one finding of a check: its level, and all that is said."""
    (finding,) = findings[check]
    return finding["level"], f"{finding['said']} {finding['todo']}".strip()


def listing(folder):
    """Every file below a folder, with its size, mode and the time of its last change."""
    return {
        str(path): (path.stat().st_size, path.stat().st_mode, path.stat().st_mtime_ns)
        for path in folder.rglob("*")
        if path.is_file()
    }


# All is well -----------------------------------------------------------------------------------------------


def test_all_is_well(state, relay):
    """With a daemon, a relay and a token: every check is a line that begins with ok, exit 0."""
    settings = {"relay.token": TOKEN, "relay.trust_env": "false"}
    with DaemonProcess(state.path, relay.url, settings):
        wait_for(lambda: len(relay.events()) == 2)
        done = outbox_command(state.path, "doctor", settings={"relay.url": relay.url, **settings})
    lines = done.stdout.decode().splitlines()
    assert (done.returncode, done.stderr) == (0, b"")
    assert [line for line in lines[:-1] if not line.startswith("ok ")] == []
    assert lines[-1] == "All is well. Nothing was changed."
    assert {line[9:24].strip() for line in lines[:-1]} == CHECKS


def test_nothing_is_changed(state, relay, capsys):
    """Not a byte, not a time, not a file more, whatever is looked at; and no event is sent."""
    (state.agents / ".new-left.sqlite").write_bytes(b"x")
    state.outbox_path("broken").write_bytes(b"no outbox" * 1_000)
    before = listing(state.path)
    status, findings = found(capsys)
    assert listing(state.path) == before
    assert relay.events() == []
    assert status == 5
    assert {request["method"] for request in relay.requests()} <= {"GET", "POST"}
    assert not any("idempotency-key" in map(str.lower, request["headers"]) for request in relay.requests())
    assert set(findings) >= CHECKS


def test_no_state_directory_yet(capsys, tmp_path):
    """A warning that says where to look, and nothing is made."""
    status, findings = found(capsys)
    level, said = only(findings, "directory")
    assert (status, level) == (0, "warning")
    assert "OUTBOX_STATE_DIR" in said
    assert only(findings, "files") == ("ok", "no outbox yet")
    assert not (tmp_path / "state").exists()


# The relay -------------------------------------------------------------------------------------------------


def test_a_relay_that_is_not_there(state, capsys, monkeypatch):
    """A failure with the reason; nothing more is asked of it."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        monkeypatch.setenv("OUTBOX_RELAY_URL", f"http://127.0.0.1:{bound.getsockname()[1]}")
        status, findings = found(capsys)
    level, said = only(findings, "relay")
    assert (status, level) == (69, "failure")
    assert "does not answer: connection refused" in said
    assert "Nothing is lost" in said
    assert not {"token", "contract"} & findings.keys()


def test_a_token_that_is_refused(state, relay, capsys, monkeypatch):
    """Found without sending an event; the token itself is not shown."""
    monkeypatch.setenv("OUTBOX_RELAY_TOKEN", "tok-wrong-0123456789")
    status, findings = found(capsys)
    level, said = only(findings, "token")
    assert (status, level) == (69, "failure")
    assert "The relay refuses the token (the configured token)" in said
    assert "tok-wrong" not in json.dumps(findings)


def test_a_token_that_is_accepted(state, relay, capsys):
    """Proven by what is shown with it and not without."""
    status, findings = found(capsys)
    assert (status, only(findings, "token")) == (0, ("ok", "the configured token, accepted"))


def answering(**answers):
    """A relay whose answers depend on whether a token came: {path: (with it, without it)}."""

    def handle(connection):
        while request := read_http_request(connection):
            path = request[0].split(b" ")[1].decode()
            with_token = b"\r\nauthorization: bearer " in request[0].lower()
            status = answers.get(path.strip("/").replace("/", "_"), (404, 404))[0 if with_token else 1]
            connection.sendall(http_response(status, b"{}"))

    return thread_server(handle)


@pytest.mark.parametrize(
    ("answers", "known", "level", "said"),
    [
        ({"api_spec": (200, 401)}, None, "ok", "accepted"),
        ({"api_spec": (200, 200), "api_mcp": (200, 403)}, None, "ok", "accepted"),
        ({"api_spec": (200, 200), "api_mcp": (401, 401)}, None, "failure", "refuses the token"),
        ({"api_spec": (401, 401)}, None, "failure", "refuses the token"),
        ({}, None, "ok", "whether it is accepted shows with the first event"),
        ({}, "ok", "ok", "accepted with the last event"),
        ({}, "refused", "failure", "refused the token"),
    ],
)
def test_what_proves_a_token(state, capsys, monkeypatch, answers, known, level, said):
    """Two answers that differ prove it; else what the relay said to the last event counts."""
    monkeypatch.setenv("OUTBOX_RELAY_TOKEN", TOKEN)
    with answering(api_health=(200, 200), **answers) as relay:
        url = f"http://127.0.0.1:{relay.port}"
        monkeypatch.setenv("OUTBOX_RELAY_URL", url)
        if known:
            know(state, gate={"url": url}, auth={"source": "file x", "state": known, "detail": ""})
        _, findings = found(capsys)
    told = only(findings, "token")
    assert told[0] == level
    assert said in told[1]


def know(state, **facts):
    """What is known of the relay."""
    relay_state = RelayState(state.relay_state)
    relay_state.write({name.replace("path_", "path:"): fact for name, fact in facts.items()})
    relay_state.close()


def test_a_token_file_that_is_missing(state, relay, capsys, monkeypatch, tmp_path):
    """Events would wait for it."""
    monkeypatch.delenv("OUTBOX_RELAY_TOKEN")
    monkeypatch.setenv("OUTBOX_RELAY_TOKEN_FILE", str(tmp_path / "nowhere"))
    status, findings = found(capsys)
    level, said = only(findings, "token")
    assert (status, level) == (69, "failure")
    assert "Events wait until there is" in said


def test_no_token_where_one_is_asked_for(state, capsys, monkeypatch):
    """None is set, and the relay's own document asks for one."""
    with answering(api_health=(200, 200), api_spec=(200, 401)) as relay:
        monkeypatch.setenv("OUTBOX_RELAY_URL", f"http://127.0.0.1:{relay.port}")
        _, findings = found(capsys)
    assert only(findings, "token")[0] == "failure"
    assert "none is set" in only(findings, "token")[1]


def test_no_token_where_the_last_event_was_refused(state, relay, capsys, monkeypatch):
    """A document shown to everybody proves nothing against the answer to an event."""
    monkeypatch.delenv("OUTBOX_RELAY_TOKEN")
    assert command(capsys, "flush", "--timeout", "2")[0] == 3
    status, findings = found(capsys)
    level, said = only(findings, "token")
    assert (status, level) == (69, "failure")
    assert "none is set" in said


def test_the_token_is_the_daemons_own(state, relay, capsys, monkeypatch):
    """Named where `serve` was started: what the relay says to that one counts, not that none is set here."""
    monkeypatch.delenv("OUTBOX_RELAY_TOKEN")
    with DaemonProcess(state.path, relay.url, {"relay.token": "tok-of-nobody-0123456789"}):
        wait_for(lambda: status_report(state)["relay"]["reason"] == "unauthorized")
        status, findings = found(capsys)
    level, said = only(findings, "token")
    assert (status, level) == (69, "failure")
    assert "The relay refused the token (the configured token)" in said
    assert only(findings, "delivery")[1].startswith("1 agent is held back: builder (unauthorized).")


def test_a_relay_that_answers_health_and_takes_no_event(state, relay, capsys):
    """Who is held back is told, with where to read more: all is not well."""
    relay.add_faults({"match": {"method": "POST"}, "action": {"status": 503}})
    with DaemonProcess(state.path, relay.url, {"relay.token": TOKEN}):
        wait_for(lambda: status_report(state)["relay"]["gate"] == "closed")
        status, findings = found(capsys)
    level, said = only(findings, "delivery")
    assert (status, level) == (0, "warning")
    assert said == "1 agent is held back: builder (busy). For what, and what to do: outbox why builder"


def test_something_that_is_no_relay(state, capsys, monkeypatch):
    """It answers, but not to health: a warning that names the settings."""
    with answering() as relay:
        monkeypatch.setenv("OUTBOX_RELAY_URL", f"http://127.0.0.1:{relay.port}")
        status, findings = found(capsys)
    level, said = only(findings, "relay")
    assert (status, level) == (0, "warning")
    assert "answers 404 to /api/health" in said
    assert "relay.paths.health" in said


def test_what_the_relay_says_of_itself(state, relay, capsys):
    """Sizes of batches, keys of tool calls; and what was learned of batches."""
    said = only(found(capsys)[1], "contract")[1]
    assert said == "/api/spec: batches of up to 500 messages and 4 MiB; honours keys of tool calls"
    never = {"offUntil": round(time.time() * 1_000) + 3_600_000, "reason": "", "accepted": False}
    know(state, **{"gate": {"url": relay.url}, "path:/api/messages/batch": never})
    level, said = only(found(capsys)[1], "contract")
    assert level == "warning"
    assert "takes no batches" in said


def test_no_relay_is_set(state, capsys):
    """The one that a daemon delivers to is asked; with none known, it is said."""
    level, said = only(found(capsys)[1], "relay")
    assert (level, "relay.url" in said) == ("warning", True)
    with answering(api_health=(200, 200)) as relay:
        know(state, gate={"url": f"http://127.0.0.1:{relay.port}"}, auth={"source": "file x", "state": "ok"})
        _, findings = found(capsys)
    assert only(findings, "relay")[0] == "ok"
    assert only(findings, "token") == ("ok", "file x, accepted with the last event")


# The files -------------------------------------------------------------------------------------------------


def test_a_damaged_file_hides_no_other(state, capsys):
    """Each file with a fault is a line of its own, exit 5; the sound ones are counted."""
    state.outbox_path("empty").write_bytes(b"")
    state.outbox_path("other").write_bytes(b"this is no database, however long it is" * 500)
    status, findings = found(capsys)
    assert status == 5
    *bad, good = findings["files"]
    assert [finding["level"] for finding in bad] == ["failure", "failure"]
    assert all("The other agents are not affected" in finding["todo"] for finding in bad)
    assert {finding["said"].split()[2] for finding in bad} == {
        state.outbox_path(agent).name for agent in ("empty", "other")
    }
    assert good["said"].startswith("1 outbox: ")


def test_a_misplaced_file_is_never_said_to_mend_itself(state, capsys):
    """Nobody sets it aside: whose it says it is, the name it should have, and what if there is none such."""
    own, wrong = state.outbox_path("builder"), state.outbox_path("somebody else")
    own.rename(wrong)
    status, findings = found(capsys)
    (finding,) = findings["files"][:1]
    assert status == 5
    assert f"The file {wrong.name} says that it holds the outbox of 'builder'" in finding["said"]
    assert f"Rename it to {own.name} if nothing is there. If you know no such agent" in finding["todo"]
    assert "sets it aside" not in finding["todo"]


def test_damaged_pages(state, capsys):
    """Found although the file can be opened, and every counter read."""
    with Outbox.open("large", state_dir=state.path) as outbox:
        outbox.enqueue_many([{"kind": "insight", "payload": {"text": "x" * 900, "n": n}} for n in range(200)])
    path = state.outbox_path("large")
    open_outbox(state, path).close(checkpoint=True)
    with path.open("r+b") as file:
        file.seek(20 * 4096)
        file.write(b"\xff" * 4096)
    status, findings = found(capsys)
    assert status == 5
    (bad,) = [finding for finding in findings["files"] if finding["level"] == "failure"]
    assert "(large) is damaged" in bad["said"]


def test_a_file_of_a_newer_release(state, capsys):
    """Named with both versions, exit 5, untouched."""
    path = state.outbox_path("newer")
    shutil.copyfile(state.outbox_path("builder"), path)
    content = bytearray(path.read_bytes())
    content[60:64] = (99).to_bytes(4, "big")  # user_version: sqlite.org/fileformat2.html
    path.write_bytes(content)
    status, findings = found(capsys)
    assert status == 5
    (bad,) = [finding for finding in findings["files"] if finding["level"] == "failure"]
    assert "format 99" in bad["said"]
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("UPDATE outbox SET waiting = 1", "waiting: 1 counted, 2 found"),
        (
            "UPDATE events SET wire_payload = CAST('{}' AS BLOB) WHERE seq = 2",
            "seq 2 is not what was accepted",
        ),
    ],
)
def test_what_does_not_agree(state, capsys, change, said):
    """Counters that are not true, rows that were altered."""
    box = open_outbox(state, state.outbox_path("builder"))
    with box.transaction(durable=False):
        box.run(change)
    box.close(checkpoint=True)
    status, findings = found(capsys)
    assert status == 5
    assert any(said in finding["said"] for finding in findings["files"])


def test_leftovers(state, capsys):
    """Drafts of a process that was killed, a log without a file; what is just being made is left out."""
    old = time.time() - 3_600
    draft, orphan = state.agents / ".new-1234.sqlite", state.agents / f"{state.outbox_path('gone').name}-wal"
    for path in (draft, orphan):
        path.write_bytes(b"x")
        path.chmod(0o600)
        os.utime(path, (old, old))
    (state.agents / ".new-young.sqlite").write_bytes(b"x")
    status, findings = found(capsys)
    said = [f"{finding['said']} {finding['todo']}" for finding in findings["leftovers"]]
    assert status == 0
    assert len(said) == 2
    assert f"rm {draft}" in said[0]
    assert orphan.name in said[1]
    assert "young" not in "".join(said)


def test_what_was_set_aside(state, relay, capsys):
    """A damaged file that a daemon replaced is told with what became of its events, until it is removed."""
    with Outbox.open("large", state_dir=state.path) as outbox:
        outbox.enqueue_many([{"kind": "insight", "payload": {"text": "x" * 900, "n": n}} for n in range(200)])
    path = state.outbox_path("large")
    open_outbox(state, path).close(checkpoint=True)
    with path.open("r+b") as file:
        file.seek(20 * 4096)
        file.write(b"\xff" * 4096 * 4)
    with DaemonProcess(state.path, relay.url, {"relay.token": TOKEN, "relay.trust_env": "false"}) as daemon:
        wait_for(lambda: daemon.said("damaged_file"))
    status, findings = found(capsys)
    (aside,) = findings["leftovers"]
    assert (status, aside["level"]) == (0, "warning")
    assert 'The file of agent "large" is damaged' in aside["said"]
    assert aside["todo"].startswith(f"Once it was looked at: rm {state.damaged}/")


def test_relay_facts_that_cannot_be_read(state, capsys):
    """No event is concerned: a warning."""
    state.relay_state.write_bytes(b"no database" * 500)
    state.relay_state.chmod(0o600)
    status, findings = found(capsys)
    assert status == 0
    assert any("relay.sqlite cannot be read" in finding["said"] for finding in findings["files"])


# The host --------------------------------------------------------------------------------------------------


def test_a_fault_in_the_configuration(state, capsys, monkeypatch):
    """Each is named with who set it; what does not hang on it is looked at all the same."""
    monkeypatch.setenv("OUTBOX_DELIVERY_WORKERS", "many")
    monkeypatch.setenv("OUTBOX_RELAY_URLL", "http://h")
    status, findings = found(capsys)
    failed, surprising = findings["configuration"]
    assert (status, failed["level"], surprising["level"]) == (69, "failure", "warning")
    assert "OUTBOX_DELIVERY_WORKERS" in failed["said"]
    assert "OUTBOX_RELAY_URL" in surprising["said"]
    assert only(findings, "files")[0] == "ok"


def test_commands_to_copy_hold_for_a_path_with_blanks(state, capsys, monkeypatch, tmp_path):
    """Unquoted they would change other folders than the one that is meant."""
    place = state.path.rename(tmp_path / "two words")
    monkeypatch.setenv("OUTBOX_STATE_DIR", str(place))
    place.chmod(0o755)
    StateDirectory(place).outbox_path("builder").chmod(0o644)
    folders, files = found(capsys)[1]["directory"]
    assert folders["todo"] == f"chmod 700 '{place}'"
    assert files["todo"].startswith(f"find '{place}' -type f")
    assert f"--agent AGENT '{place / 'a.sqlite'}';" in seed_advice(place / "a.sqlite")


def test_modes(state, capsys):
    """Folders and files that others may look into, with the command that closes them."""
    state.path.chmod(0o755)
    state.outbox_path("builder").chmod(0o644)
    status, findings = found(capsys)
    folders, files = findings["directory"]
    assert (status, folders["level"], files["level"]) == (0, "warning", "warning")
    assert folders["todo"] == f"chmod 700 {state.path}"
    assert str(state.outbox_path("builder")) in files["said"]


@pytest.mark.parametrize(
    ("name", "free", "level"),
    [("full", 100 << 20, "failure"), ("low", 400 << 20, "warning"), ("roomy", 9 << 30, "ok")],
)
def test_free_disk(state, capsys, monkeypatch, name, free, level):
    """Against what bounds.min_free_disk_bytes asks for."""
    real = os.statvfs

    def statvfs(path):
        told = list(real(path))
        told[0], told[1], told[4] = 4096, 4096, free // 4096
        return os.statvfs_result(told)

    monkeypatch.setattr(doctor_folders.os, "statvfs", statvfs)
    assert only(found(capsys)[1], "disk")[0] == level


def test_a_network_file_system(state, capsys, monkeypatch):
    """A failure, or a warning where the operator allows it."""
    monkeypatch.setattr(doctor_folders, "network_file_system", lambda _path: "nfs4")
    assert only(found(capsys)[1], "file system")[0] == "failure"
    monkeypatch.setenv("OUTBOX_DAEMON_ALLOW_NETWORK_FS", "true")
    assert only(found(capsys)[1], "file system")[0] == "warning"


def test_an_old_sqlite(state, capsys, monkeypatch):
    """It can damage files: a failure that says what to install."""
    monkeypatch.setattr(doctor_host, "sqlite_version", lambda: "3.51.2")
    level, said = only(found(capsys)[1], "software")
    assert level == "failure"
    assert "apsw 3.51.3" in said
    monkeypatch.setattr(doctor_host, "sqlite_version", lambda: "3.52.0")
    assert only(found(capsys)[1], "software")[0] == "ok"


@pytest.mark.parametrize(
    ("now_s", "level"),
    [(0, "failure"), (1_700_000_000, "failure"), (5_000_000_000, "failure"), (1_900_000_000, "ok")],
)
def test_the_year(tmp_path, now_s, level):
    """A host that wakes up in 1970 stamps events with it."""
    (finding,) = doctor_host.clock(StateDirectory(tmp_path), None, now_s)
    assert str(finding.level) == level


def test_files_from_the_future(state):
    """The clock was set back since they were written."""
    found = list(doctor_host.clock(state, None, time.time() - 7_200))
    assert [finding.level for finding in found] == [Level.WARNING]
    assert "in the future" in found[0].said


@pytest.mark.parametrize(("by_s", "way"), [(3_600, "forward"), (-3_600, "back")])
def test_a_clock_that_was_set_since_the_daemon_started(tmp_path, by_s, way):
    """Told by the daemon's true age, which the kernel knows."""
    text = Path("/proc/self/stat").read_text("ascii")
    began = int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    true_age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began
    now_s = 1_900_000_000
    daemon = RunningDaemon(os.getpid(), "0.1.0", round((now_s - true_age_s) * 1_000), tmp_path / "socket")
    assert [f.level for f in doctor_host.clock(StateDirectory(tmp_path), daemon, now_s)] == [Level.OK]
    (finding,) = doctor_host.clock(StateDirectory(tmp_path), daemon, now_s + by_s)
    assert finding.level is Level.WARNING
    assert f"It was set {way} by" in finding.said


def test_descriptors(state, capsys, monkeypatch):
    """Fewer than the settings would like: it works, and opens files more often."""
    assert only(found(capsys)[1], "descriptors")[0] == "ok"
    monkeypatch.setattr(doctor_host.resource, "getrlimit", lambda _which: (256, 256))
    monkeypatch.setenv("OUTBOX_DAEMON_MAX_OPEN_FILES", "500")
    level, said = only(found(capsys)[1], "descriptors")
    assert level == "warning"
    assert "256" in said


def test_a_command_to_notify_that_is_not_there(state, capsys, monkeypatch):
    """Nobody would be told of trouble: a failure."""
    monkeypatch.setenv("OUTBOX_NOTIFY_COMMAND", "/no/such/program --loud")
    status, findings = found(capsys)
    assert (status, only(findings, "notify")[0]) == (69, "failure")
    monkeypatch.setenv("OUTBOX_NOTIFY_COMMAND", "sh -c true")
    assert only(found(capsys)[1], "notify") == ("ok", "trouble is told by sh")


# The daemon ------------------------------------------------------------------------------------------------


def test_no_daemon(state, capsys):
    """Worth a warning while something waits."""
    level, said = only(found(capsys)[1], "daemon")
    assert level == "warning"
    assert "2 events wait" in said
    assert "outbox serve" in said


def test_a_daemon_of_another_release(state, relay, capsys, monkeypatch):
    """Older than the library: restart it; newer: the command is the old one."""
    with DaemonProcess(state.path, relay.url, {"relay.token": TOKEN, "relay.trust_env": "false"}):
        assert only(found(capsys)[1], "daemon")[0] == "ok"
        monkeypatch.setattr(doctor_host, "__version__", "9.0.0")
        level, said = only(found(capsys)[1], "daemon")
        assert (level, "Restart it" in said) == ("warning", True)
        monkeypatch.setattr(doctor_host, "__version__", "0.0.1")
        level, said = only(found(capsys)[1], "daemon")
        assert (level, "this command is older" in said) == ("warning", True)


def test_a_daemon_that_does_not_answer(state, relay, capsys, monkeypatch):
    """It holds its lock, and its socket is dead: a failure that says how to go on."""
    monkeypatch.setattr(doctor_host, "ANSWER_WITHIN_S", 0.3)
    with DaemonProcess(state.path, relay.url, {"relay.token": TOKEN, "relay.trust_env": "false"}) as daemon:
        wait_for(lambda: len(relay.events()) == 2)
        with daemon.frozen():
            status, findings = found(capsys)
    level, said = only(findings, "daemon")
    assert (status, level) == (69, "failure")
    assert "does not answer" in said
    assert "What waits stays on disk" in said


# What is made of it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("findings", "status"),
    [
        ([], 0),
        ([ok("a", ""), warning("b", "")], 0),
        ([failure("a", ""), warning("b", "")], 69),
        ([failure("a", ""), failure("b", "", damage=True)], 5),
    ],
)
def test_the_exit_status(findings, status):
    """Damage before everything else; warnings cost nothing."""
    assert doctor.exit_status(findings) == status


def test_a_configuration_without_a_place(capsys, monkeypatch):
    """No state directory is known: said, and the rest is left out."""
    monkeypatch.delenv("OUTBOX_STATE_DIR")
    monkeypatch.delenv("HOME")
    status, findings = found(capsys)
    assert (status, only(findings, "directory")[0]) == (69, "failure")
    assert "files" not in findings


def test_names_do_not_steer_the_terminal(state, capsys):
    """Agents may be called anything."""
    with Outbox.open("\x1b[31mred\u202e", state_dir=state.path):
        pass
    path = state.outbox_path("\x1b[31mred\u202e")
    box = open_outbox(state, path)
    with box.transaction(durable=False):
        box.run("UPDATE outbox SET accepted = 7")
    box.close(checkpoint=True)
    told = command(capsys, "doctor")[1]
    assert "\\x1b[31mred\\u202e" in told
    assert "\x1b" not in told


def test_it_takes_no_words():
    """It looks at everything."""
    parser = argparse.ArgumentParser()
    doctor.add_arguments(parser)
    assert [action.dest for action in parser._actions] == ["help"]
