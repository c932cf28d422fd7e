"""`outbox hook RUNNER` as runners call it: a process a call, exit 0, silence; an event, or why none."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import environment
from hook_cases import CASES, lines_of, refused

from outbox.capture.hook_faults import read_faults
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.records import everything

ROOT = Path(__file__).parent.parent.parent
REFUSED = list(refused())
PROMPT = b'{"hook_event_name":"UserPromptSubmit","session_id":"s","prompt_id":"p","prompt":"weigh the pears"}'


def state_of(home):
    """Where the commands of this home keep their events."""
    return StateDirectory(home / "state")


def waiting(home, agent):
    """The events that wait: kind, key, and the wire text as a value."""
    state = state_of(home)
    path = state.outbox_path(agent)
    if not path.exists():
        return []
    with contextlib.closing(open_outbox(state, path)) as box:
        return [(r.event.kind, r.event.key, json.loads(r.event.wire_payload)) for r in everything(box)]


@pytest.fixture
def hook(tmp_path):
    """Run `outbox hook WORDS` to its end; it must exit 0 with nothing on stdout. What stands on stderr."""

    def call(*words, stdin=b"", **variables):
        given = {"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}
        done = subprocess.run(
            [sys.executable, "-m", "outbox", *words],
            env=environment(tmp_path, **variables),
            capture_output=True,
            timeout=60,
            check=False,
            cwd=ROOT,
            **given,
        )
        assert (done.returncode, done.stdout) == (0, b"")
        return done.stderr.decode()

    return call


@pytest.mark.parametrize(("words", "stdin", "row"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED])
def test_odd_input_is_one_event_or_one_line(hook, tmp_path, words, stdin, row):
    """Exit 0 and silence on stdout for each; what is refused is told once and counted once."""
    told = hook(*words, stdin=stdin)
    events = waiting(tmp_path, words[1])
    faults = read_faults(state_of(tmp_path))
    assert row["events"] in {len(events), "accepted or refused"} or (row["events"], events) == ("refused", [])
    assert (faults.lost if faults else 0) == 1 - len(events)
    assert told.count("\n") == 1 - len(events)
    if not events:
        assert told.startswith(f"outbox hook {words[1]}: ")
        assert told.rstrip().endswith(
            "This call is not recorded; the runner goes on. Counted in: outbox status."
        )


def test_the_body_of_wrong_types_is_their_json(hook, tmp_path):
    """A prompt that is a list of parts is kept, as its JSON text."""
    (row,) = [row for row in REFUSED if row[0] == "wrong types"]
    hook(*row[1], stdin=row[2])
    ((_, _, message),) = waiting(tmp_path, "claude-code")
    assert json.loads(message["body"]) == json.loads(row[2])["prompt"]


def test_nine_mebibytes_are_kept_as_far_as_a_payload_goes(hook, tmp_path):
    """Body and the hook's JSON are cut with a mark that says how much there was; all else stays."""
    (row,) = [row for row in REFUSED if row[0] == "very large"]
    hook(*row[1], stdin=row[2])
    ((_, _, message),) = waiting(tmp_path, "claude-code")
    given = json.loads(row[2])
    copy = message["payload"]["hook"]
    for text in (message["body"], copy["tool_response"]["stdout"]):
        assert text.startswith("crate\ncrate\n")
        assert text.endswith("... [cut by the outbox: 9,437,184 characters in all]")
    assert message["payload"]["cut"] is True
    copy["tool_response"]["stdout"] = given["tool_response"]["stdout"]
    assert copy == given


@pytest.mark.parametrize("words", [[], ["--agent"], ["--help", "x"], ["codex", "{}", "{}"]])
def test_a_slip_in_the_command_is_no_exit_status_either(hook, tmp_path, words):
    """Runners read 2 as "block": it is one line, and counted."""
    if words[:1] == ["--help"]:
        words = ["claude-code", "--help"]
    assert hook("hook", *words, stdin=PROMPT).count("\n") == 1
    assert read_faults(state_of(tmp_path)).lost == 1


def test_status_counts_what_hooks_lost_and_says_the_last(hook, tmp_path):
    """With its reason, for a person and as data."""
    hook("hook", "claude-code", stdin=b"{")
    hook("hook", "cursr", stdin=PROMPT)
    look = [sys.executable, "-m", "outbox", "status"]
    env = environment(tmp_path)
    done = subprocess.run(look, env=env, capture_output=True, text=True, check=True, timeout=60)
    assert "Hooks could not record 2 calls, the last at " in done.stdout
    assert 'no runner is called "cursr"' in done.stdout
    done = subprocess.run([*look, "--json"], env=env, capture_output=True, text=True, check=True, timeout=60)
    assert json.loads(done.stdout)["hooks"]["lost"] == 2


# Surroundings -----------------------------------------------------------------------------------------------


def test_a_state_folder_that_cannot_be_written_is_said(hook, tmp_path):
    """A file in its place (root may write into any folder): one line with the folder's name."""
    (tmp_path / "state").write_text("no folder")
    assert str(tmp_path / "state") in hook("hook", "claude-code", stdin=PROMPT)


def test_no_home_and_no_state_folder_is_said(hook):
    """Nothing says where to keep events: one line that could not be counted."""
    told = hook("hook", "claude-code", stdin=PROMPT, HOME="", OUTBOX_STATE_DIR="")
    assert told.count("\n") == 1
    assert "No state directory" in told


def test_a_locked_file_is_waited_for_in_vain_and_said(hook, tmp_path):
    """Another program holds the file for as long as it takes: the loss is told and counted."""
    hook("hook", "claude-code", stdin=PROMPT)
    path = state_of(tmp_path).outbox_path("claude-code")
    script = ROOT / "tests" / "cases" / "database" / "hold_lock.py"
    with subprocess.Popen(
        [sys.executable, str(script), str(path), "60"], stdout=subprocess.PIPE, text=True
    ) as holder:
        try:
            assert holder.stdout.readline() == "held\n"
            told = hook("hook", "claude-code", stdin=PROMPT.replace(b'"p"', b'"q"'))
        finally:
            holder.kill()
    assert "was locked by another program" in told
    assert len(waiting(tmp_path, "claude-code")) == 1
    assert read_faults(state_of(tmp_path)).lost == 1


def test_a_full_disk_is_said_and_counted(hook, tmp_path):
    """Less is free than is to stay so: nothing is stored, and a later daemon is not needed to know."""
    state = state_of(tmp_path).create()
    state.rules_file.write_text(json.dumps({"bounds": {"minFreeDiskBytes": 1 << 60}}))
    told = hook("hook", "claude-code", stdin=PROMPT)
    assert "bytes are free" in told
    assert waiting(tmp_path, "claude-code") == []
    assert read_faults(state).lost == 1


@pytest.mark.parametrize("before", [b"", PROMPT, PROMPT[:20]])
def test_a_stdin_that_stays_open_holds_nobody_up(tmp_path, before):
    """What came is taken if it is whole; in any case the hook ends by itself."""
    with subprocess.Popen(
        [sys.executable, "-m", "outbox", "hook", "claude-code"],
        env=environment(tmp_path),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        cwd=ROOT,
    ) as process:
        process.stdin.write(before)
        process.stdin.flush()
        assert process.wait(30) == 0
        assert process.stdout.read() == b""
    assert len(waiting(tmp_path, "claude-code")) == (before == PROMPT)


@pytest.mark.parametrize("closed", ["1", "2", "1 2", "0 1 2"])
def test_closed_streams_cost_no_event(tmp_path, closed):
    """Neither stdout nor stderr is needed; without stdin an argument is taken."""
    shut = " ".join(f"{number}>&-" for number in closed.split()).replace("0>&-", "0<&-")
    words = f"{sys.executable} -m outbox hook codex '{PROMPT.decode()}' {shut}"
    done = subprocess.run(["sh", "-c", words], env=environment(tmp_path), check=False, timeout=60, cwd=ROOT)
    assert done.returncode == 0
    assert len(waiting(tmp_path, "codex")) == 1


def test_without_a_daemon_an_event_waits_on_disk(hook, tmp_path):
    """In the outbox named for the runner, or for whom the caller says."""
    assert hook("hook", "claude-code", stdin=PROMPT) == ""
    assert hook("hook", "claude-code", "--agent", "builder", stdin=PROMPT) == ""
    assert hook("hook", "claude-code", stdin=PROMPT, OUTBOX_AGENT="reviewer") == ""
    for agent in ("claude-code", "builder", "reviewer"):
        ((kind, _, message),) = waiting(tmp_path, agent)
        assert (kind, message["from"], message["body"]) == ("session-message", agent, "weigh the pears")


def test_a_call_delivered_twice_is_one_event_whatever_the_order_of_its_keys(hook, tmp_path):
    """Lines 19 and 20 are one call; 21 has its id, and is another."""
    for line in lines_of("claude-code")[18:21]:
        assert hook("hook", "claude-code", stdin=line.encode()) == ""
    assert len(waiting(tmp_path, "claude-code")) == 2


def test_a_file_in_the_transcripts_place_is_never_read(hook, tmp_path):
    """A pipe that nobody writes to would hold up whoever opens it."""
    pipe = tmp_path / "transcript"
    os.mkfifo(pipe)
    stop = {"hook_event_name": "Stop", "session_id": "s", "prompt_id": "p", "stop_hook_active": False}
    for _ in range(2):
        hook("hook", "claude-code", stdin=json.dumps({**stop, "transcript_path": str(pipe)}).encode())
    assert len(waiting(tmp_path, "claude-code")) == 1


def test_a_body_is_cut_where_the_environment_says(hook, tmp_path):
    """The body alone; what is no number cuts nothing, and costs no event."""
    hook("hook", "claude-code", stdin=PROMPT, AGENT_RELAY_MESSAGE_BODY_MAX_CHARS="6")
    hook("hook", "codex", stdin=PROMPT, AGENT_RELAY_MESSAGE_BODY_MAX_CHARS="many")
    ((_, _, cut),) = waiting(tmp_path, "claude-code")
    ((_, _, whole),) = waiting(tmp_path, "codex")
    assert (len(cut["body"]), whole["body"]) == (6, "weigh the pears")
    assert cut["bodyTruncated"] == {"originalChars": 15}
    assert cut["payload"]["hook"]["prompt"] == "weigh the pears"


def test_a_secret_is_nowhere_in_what_is_stored(hook, tmp_path):
    """Neither in the body nor in the copy of the JSON; how many there were is said."""
    token = "ghp_" + "a1B2" * 9
    line = PROMPT.replace(b"the pears", f"{token} and acme_0123456789".encode())
    hook("hook", "claude-code", "--redact", "acme_", stdin=line)
    ((_, _, message),) = waiting(tmp_path, "claude-code")
    assert message["body"] == "weigh [redacted: github] and [redacted: acme_]"
    assert message["payload"]["redacted"] == {"github": 1, "acme_": 1}
    for file in (tmp_path / "state").rglob("*"):
        assert not file.is_file() or token.encode() not in file.read_bytes()


def test_a_call_loads_only_what_an_append_needs(tmp_path):
    """No argparse, no other command, nothing that sends; at a session's end neither."""
    code = "import sys; from outbox.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    end = '{"hook_event_name":"SessionEnd","session_id":"s"}'
    for text in (PROMPT.decode(), end):
        done = subprocess.run(
            [sys.executable, "-c", code, "hook", "claude-code", "--", text],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        loaded = set(done.stdout.split())
        assert "outbox.capture.hook_record" in loaded
        assert (
            loaded & {"argparse", "asyncio", "httpx", "structlog", "rich", "starlette", "subprocess"} == set()
        )
        assert {name for name in loaded if name.startswith("outbox.cli.")} == {"outbox.cli.hook_run"}
    assert [kind for kind, _, _ in waiting(tmp_path, "claude-code")] == [*["session-message"] * 2, "insight"]


def test_a_call_loads_nothing_that_takes_long(tmp_path):
    """A runner waits for each call: what takes milliseconds to load serves nobody who only appends."""
    code = "import sys; from outbox.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    for prompt in ("the pears, and the outbox is made", "the plums, and it is there"):
        call = PROMPT.decode().replace("the pears", prompt)
        done = subprocess.run(
            [sys.executable, "-c", code, "hook", "claude-code", call],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
    slow = {"typing", "pathlib", "dataclasses", "inspect", "hashlib", "socket", "urllib", "threading"}
    slow |= {"contextlib", "unicodedata", "outbox.library", "outbox.outcome"}
    assert slow & set(done.stdout.split()) == set()
    assert len(waiting(tmp_path, "claude-code")) == 2


def test_the_commands_cases_name_what_is_tested_here():
    """Each surrounding of the cases has its test above."""
    names = [row["name"] for row in json.loads((CASES / "refused.json").read_text("utf-8"))["surroundings"]]
    assert len(names) == 6


def test_many_hooks_at_once_lose_nothing(tmp_path):
    """Eight calls at the same time into an outbox that none of them finds made."""
    calls = [
        subprocess.Popen(
            [sys.executable, "-m", "outbox", "hook", "codex", PROMPT.decode().replace("weigh", f"{n}")],
            env=environment(tmp_path),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            cwd=ROOT,
        )
        for n in range(8)
    ]
    told = [call.communicate(timeout=60)[1] for call in calls]
    faults = read_faults(state_of(tmp_path))
    assert len(waiting(tmp_path, "codex")) + (faults.lost if faults else 0) == 8, told
