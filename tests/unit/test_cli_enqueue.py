"""`outbox enqueue`: what stands on stdout and stderr, what is stored, when it is committed."""

import json
import os
import signal
import subprocess
import sys

import pytest
from command_line import command, environment, in_process
from processes import wait_for

from outbox import Outbox
from outbox.cli.intake import Intake, read_chunks
from outbox.errors import StoreBusy, StoreDamaged, StoreFull, UsageError
from outbox.store.directory import StateDirectory
from outbox.store.enqueue import Receipt
from outbox.store.file import open_outbox
from outbox.store.sending import head

INSIGHT = '{"kind":"insight","payload":{"n":1}}'


@pytest.fixture(autouse=True)
def _own_place(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path)


@pytest.fixture
def enqueue(monkeypatch, capsys, tmp_path):
    """Call `enqueue --agent builder` with this text on stdin."""

    def call(text, *words):
        file = tmp_path / "stdin"
        file.write_bytes(text if isinstance(text, bytes) else text.encode())
        with file.open() as stdin:
            monkeypatch.setattr(sys, "stdin", stdin)
            return command(capsys, "enqueue", "--agent", "builder", *words)

    return call


class FakeOutbox:
    """Takes every line until it is told to refuse; remembers the sizes of the batches."""

    def __init__(self, refusals=()):
        self.batches = []
        self._refusals = iter(refusals)

    def enqueue_many(self, lines):
        """As `Outbox.enqueue_many`."""
        lines = list(lines)
        self.batches.append(len(lines))
        if refusal := next(self._refusals, None):
            raise refusal
        return [Receipt(n, f"k{n}", duplicate=False, state="waiting") for n, _ in enumerate(lines, 1)]


def test_good_lines_are_taken_and_bad_ones_are_named(enqueue):
    """A summary on stdout, each refusal by its number on stderr, exit 4."""
    status, told, errors = enqueue(
        f'{INSIGHT}\n{{"kind":"insigth","payload":1}}\n\n{INSIGHT}\nNaN\n{INSIGHT}'
    )
    assert status == 4
    assert told == "3 events accepted, seq 1 to 3. 2 lines refused.\n"
    first, second = errors.splitlines()
    assert first == 'line 2: kind "insigth" is not known; did you mean "insight"? Not taken.'
    assert second.startswith("line 5: not JSON: NaN is no JSON number")
    assert second.endswith(". Not taken.")


def test_all_good(enqueue):
    """Exit 0, nothing on stderr."""
    assert enqueue(INSIGHT) == (0, "1 event accepted, seq 1.\n", "")
    assert enqueue("") == (0, "0 events accepted.\n", "")


def test_receipts_as_data(enqueue):
    """Stdout has nothing but receipts, each with the number of its line; refusals are data on stderr."""
    keyed = '{"kind":"insight","payload":{"n":1},"idempotencyKey":"k1"}'
    other = '{"kind":"insight","payload":{"n":2},"idempotencyKey":"k1"}'
    status, told, errors = enqueue(f"{keyed}\n[]\n{keyed}\n{other}\n{INSIGHT}", "--json")
    receipts = [json.loads(line) for line in told.splitlines()]
    assert status == 4
    assert receipts[:2] == [
        {"seq": 1, "idempotencyKey": "k1", "duplicate": False, "state": "waiting", "line": 1},
        {"seq": 1, "idempotencyKey": "k1", "duplicate": True, "state": "waiting", "line": 3},
    ]
    assert receipts[2] | {"idempotencyKey": ""} == {
        "seq": 2,
        "idempotencyKey": "",
        "duplicate": False,
        "state": "waiting",
        "line": 5,
    }
    refused = [json.loads(line) for line in errors.splitlines()]
    assert [(one["line"], one["error"]["code"]) for one in refused] == [(2, "usage"), (4, "key_reused")]
    assert all(one["error"]["message"] for one in refused)


def test_known_events_are_counted_apart(enqueue):
    """A producer that starts again with the same keys sees that nothing was stored twice."""
    lines = "\n".join(f'{{"kind":"insight","payload":{n},"idempotencyKey":"k{n}"}}' for n in range(3))
    enqueue(lines)
    assert enqueue(f"{lines}\n{INSIGHT}")[1] == "1 event accepted, seq 4. 3 were known already.\n"


def test_a_line_in_the_way_of_its_terminal_is_cleaned(enqueue):
    """What a line holds cannot steer the terminal that shows its refusal."""
    errors = enqueue('{"kind":"\\u001b[31mred","payload":1}')[2]
    assert "\x1b" not in errors
    assert errors.startswith("line 1: kind ")


def test_lines_are_committed_in_bounded_batches():
    """At most 500 lines or 4 MiB a commit, in the order of the lines."""
    outbox = FakeOutbox()
    intake = Intake(outbox, as_json=False)
    for number in range(1, 1_201):
        assert intake.add(number, b"1")
    intake.commit()
    intake.commit()
    assert outbox.batches == [500, 500, 200]
    for number in range(1, 6):
        intake.add(number, b"x" * 1_500_000)
    intake.commit()
    assert outbox.batches[3:] == [3, 2]


@pytest.mark.parametrize(
    ("refusal", "status"),
    [(StoreFull("the disk is full"), 4), (StoreBusy("locked"), 4), (StoreDamaged("torn"), 5)],
)
def test_a_store_that_refuses_ends_the_intake(capsys, refusal, status):
    """Nothing behind the refused lines is tried, since it would overtake them; the first one is named."""
    outbox = FakeOutbox([None, refusal])
    intake = Intake(outbox, as_json=False)
    taken = [intake.add(number, b"1") for number in range(1, 1_301)]
    intake.commit()
    assert (taken[:999], taken[999:]) == ([True] * 999, [False] * 301)
    assert outbox.batches == [500, 500]
    assert intake.finish() == status
    told = capsys.readouterr()
    assert told.out == "500 events accepted, seq 1 to 500. 500 lines refused.\n"
    assert told.err == f"From line 501 on nothing was taken: {refusal}\n"


def test_a_store_that_refuses_as_data(capsys):
    """Each line that was given and not stored has its own refusal; bad lines among them keep theirs."""
    intake = Intake(FakeOutbox([StoreFull("full")]), as_json=True)
    intake.add(1, b"1")
    intake.add(2, UsageError("too long", code="too_large"))
    intake.commit()
    assert intake.finish() == 4
    told = capsys.readouterr()
    assert told.out == ""
    refused = [json.loads(line) for line in told.err.splitlines()]
    assert [(one["line"], one["error"]["code"]) for one in refused] == [(1, "full"), (2, "too_large")]


def test_a_pause_of_the_producer_is_noticed():
    """Before it waits for more, the reader lets what it has be committed; at the end it does not wait."""
    read_end, write_end = os.pipe()
    pauses = []

    def pause():
        pauses.append(len(seen))
        if len(pauses) == 1:
            os.write(write_end, b"b\n")
        else:
            os.close(write_end)

    seen = []
    os.write(write_end, b"a\n")
    seen.extend(read_chunks(read_end, before_waiting=pause))
    os.close(read_end)
    assert (seen, pauses) == ([b"a\n", b"b\n"], [1, 2])


def test_a_producer_that_waits_gets_its_receipt(tmp_path):
    """A line, its receipt, the next line: nothing is held back until stdin ends."""
    words = [sys.executable, "-m", "outbox", "enqueue", "--agent", "builder", "--json"]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, env=environment(tmp_path), stdin=pipe, stdout=pipe, stderr=pipe) as process:
        for seq in (1, 2, 3):
            process.stdin.write(f"{INSIGHT}\n".encode())
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["seq"] == seq
        process.stdin.close()
        assert process.wait(30) == 0
        assert process.stderr.read() == b""


def test_one_event_from_flags(capsys, tmp_path):
    """Every field of an event has a flag, and the payload keeps its own text."""
    words = ["--kind", "insight", "--payload", '{"n": 1.50, "big": 12345678901234567890}', "--retry"]
    words += ['{"maxAttempts": 3}', "--idempotency-key", "my-key", "--occurred-at", "1790000000000"]
    words += [
        "--account-id",
        "a",
        "--run-id",
        "r",
        "--step-id",
        "s",
        "--parent-id",
        "p",
        "--conversation-id",
        "c",
    ]
    words += ["--metadata", '{"m": 1}', "--mode", "coalesce", "--dedupe-key", "d", "--tracestate", "x=1"]
    words += ["--traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"]
    assert command(capsys, "enqueue", "--agent", "builder", *words) == (0, "1 event accepted, seq 1.\n", "")
    state = StateDirectory(tmp_path / "state")
    box = open_outbox(state, state.outbox_path("builder"))
    row = head(box)
    box.close()
    assert row.wire_payload.startswith(b'{"n": 1.50, "big": 12345678901234567890')
    assert (row.key, row.occurred_at_ms, row.kind) == ("my-key", 1_790_000_000_000, "insight")
    assert row.extra["retry"]["maxAttempts"] == 3
    correlation = row.extra["correlation"]
    assert [
        correlation[name] for name in ("accountId", "runId", "stepId", "parentId", "conversationId")
    ] == list("arspc")
    assert (correlation["metadata"], row.extra["tracestate"]) == ({"m": 1}, "x=1")


def test_one_event_again(capsys):
    """The same key: the first receipt. The same key for another event: refused, exit 4."""
    words = ["enqueue", "--agent", "a", "--kind", "insight", "--idempotency-key", "k", "--payload"]
    command(capsys, *words, "1")
    assert command(capsys, *words, "1") == (
        0,
        "Known already: seq 1, waiting. Nothing was stored twice.\n",
        "",
    )
    status, told, errors = command(capsys, *words, "2")
    assert (status, told) == (4, "")
    assert "'k' was already used for another event (seq 1)" in errors
    receipt = json.loads(command(capsys, *words, "1", "--json")[1])
    assert receipt == {"seq": 1, "idempotencyKey": "k", "duplicate": True, "state": "waiting", "line": 1}


def test_an_end_by_ctrl_c_tells_what_was_taken(tmp_path):
    """A person who types events line by line learns which of them are on disk."""
    typed = b'{"kind": "insight", "payload": 1}\n'
    typing = subprocess.Popen(
        [sys.executable, "-m", "outbox", "enqueue", "--agent", "a", "--state-dir", str(tmp_path / "state")],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment(tmp_path),
    )  # fmt: skip
    with typing:
        typing.stdin.write(typed)
        typing.stdin.flush()
        wait_for(lambda: waiting(tmp_path / "state") == 1)
        typing.send_signal(signal.SIGINT)
        told = typing.stdout.read()
    assert (typing.returncode, told) == (130, b"1 event accepted, seq 1.\n")


def waiting(state_dir):
    """How many events wait in the outbox of a."""
    with Outbox.open("a", state_dir=state_dir) as outbox:
        return outbox.depth


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--kind", "insight"], "needs both --kind and --payload"),
        (["--payload", "1"], "needs both --kind and --payload"),
        (["--run-id", "r"], "needs both --kind and --payload"),
        (["--kind", "insight", "--payload", "NaN"], "--payload is not JSON: NaN is no JSON number"),
        (["--kind", "insight", "--payload", "{"], "--payload is not JSON: "),
        (["--kind", "insight", "--payload", '1,"kind":"x"'], "--payload is not JSON: Extra data"),
        (["--kind", "insight", "--payload", "[" * 100_000], "--payload is not JSON: "),
        (["--kind", "insight", "--payload", "1", "--retry", "often"], "--retry is not JSON: "),
        (["--kind", "insight", "--payload", "1", "--occurred-at", "noon"], 'occurredAt "noon" is no whole'),
        (["--kind", "insight", "--payload", "1", "--mode", "prepend"], 'mode "prepend" is not known'),
        (["--kind", "insigth", "--payload", "1"], 'did you mean "insight"? Not taken.'),
    ],
)
def test_one_event_that_is_wrong(capsys, words, said):
    """Exit 2, one line that says what is wrong, and no event."""
    status, told, errors = command(capsys, "enqueue", "--agent", "a", *words)
    assert (status, told, errors.count("\n")) == (2, "", 1)
    assert said in errors
    agents = json.loads(command(capsys, "status", "--json")[1])["agents"]
    assert [agent["waiting"] for agent in agents] in ([], [0])


def test_the_agent_may_stand_in_the_environment(monkeypatch, capsys, tmp_path):
    """OUTBOX_AGENT, unless --agent says otherwise; without both nothing is made."""
    words = ["enqueue", "--kind", "insight", "--payload", "1"]
    status, _, errors = command(capsys, *words)
    assert status == 2
    assert "OUTBOX_AGENT" in errors
    assert not (tmp_path / "state").exists()
    monkeypatch.setenv("OUTBOX_AGENT", "from-environment")
    command(capsys, *words)
    command(capsys, *words, "--agent", "given")
    agents = json.loads(command(capsys, "status", "--json")[1])["agents"]
    assert {agent["agent"] for agent in agents} == {"from-environment", "given"}


@pytest.mark.parametrize("agent", ["", "worker\0hidden", "x" * 513, "half \ud83d"])
def test_names_that_cannot_be(capsys, tmp_path, agent):
    """Refused in a printable form, exit 2, and nothing is made on disk."""
    status, _, errors = command(capsys, "enqueue", "--agent", agent, "--kind", "insight", "--payload", "1")
    assert status == 2
    assert errors.rstrip("\n").isprintable()
    assert not (tmp_path / "state").exists()


def test_a_producer_reads_no_file_unless_it_is_named(monkeypatch, capsys, tmp_path):
    """The file that is found by itself does not move events; that of --config does; --state-dir wins."""
    (tmp_path / ".config/relay-outbox").mkdir(parents=True)
    file = tmp_path / ".config/relay-outbox/outbox.toml"
    file.write_text(f'[daemon]\nstate_dir = "{tmp_path}/from-file"\n', "utf-8")
    monkeypatch.delenv("OUTBOX_STATE_DIR")
    words = ["enqueue", "--agent", "a", "--kind", "insight", "--payload", "1"]
    command(capsys, *words)
    assert (tmp_path / ".local/state/relay-outbox/agents").is_dir()
    assert not (tmp_path / "from-file").exists()
    command(capsys, *words, "--config", str(file))
    assert (tmp_path / "from-file/agents").is_dir()
    command(capsys, *words, "--state-dir", "~/by-flag")
    assert (tmp_path / "by-flag/agents").is_dir()


def test_stdin_that_was_closed(monkeypatch, capsys):
    """Said as what it is."""
    monkeypatch.setattr(sys, "stdin", None)
    status, _, errors = command(capsys, "enqueue", "--agent", "a")
    assert status == 2
    assert "stdin is closed" in errors


@pytest.mark.parametrize("words", [["--json"], []])
def test_a_full_disk_behind_stdout_is_not_that_of_the_events(tmp_path, words):
    """The event is stored; what is said must not have it given once more."""
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        done = subprocess.run(
            [sys.executable, "-m", "outbox", "enqueue", "--agent=a", "--kind=insight", "--payload=1", *words],
            env=environment(tmp_path),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.returncode == 4
    assert "Only the telling failed: what was accepted or changed before it stays so" in done.stderr
    with Outbox.open("a", state_dir=tmp_path / "state") as outbox:
        assert outbox.depth == 1
