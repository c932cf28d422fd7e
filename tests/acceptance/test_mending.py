"""A person sees and mends: list, show, and what can be done with dead letters, against a real relay."""

import contextlib
import json
import os
import pty
import subprocess
import sys

import pytest
from command_line import command, environment, in_process, process

from outbox import Outbox
from outbox.cli.show import indented
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.verify import verify_counters
from relay_client.reference.process import RelayProcess

TOKEN = "tok-mending"
NO = {"error": {"code": "validation_failed", "message": "the word is not allowed"}}


@pytest.fixture(autouse=True)
def _own_place(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path)


@pytest.fixture
def relay(tmp_path, monkeypatch):
    """The reference relay, which the commands of this test send to."""
    with RelayProcess(tmp_path / "relay.sqlite", [TOKEN]) as relay:
        variables = {
            "OUTBOX_RELAY_URL": relay.url,
            "OUTBOX_RELAY_TOKEN": TOKEN,
            "OUTBOX_RELAY_TRUST_ENV": "false",
            "OUTBOX_DELIVERY_BACKOFF_INITIAL_S": "0.05",
        }
        for name, text in variables.items():
            monkeypatch.setenv(name, text)
        yield relay


@pytest.fixture
def state(tmp_path):
    """The state directory; the counters of all that was done in it are true in the end."""
    state = StateDirectory(tmp_path / "state").create()
    yield state
    for path in state.outbox_files():
        with contextlib.closing(open_outbox(state, path)) as box:
            assert verify_counters(box) == []


def put(state, *payloads, agent="builder", **fields):
    """Enqueue events, a kind of their own each where it is given."""
    with Outbox.open(agent, state_dir=state.path) as outbox:
        return [
            outbox.enqueue(fields.get("kind", "insight"), one, **_rest(fields, n))
            for n, one in enumerate(payloads)
        ]


def _rest(fields, n):
    rest = {name: value for name, value in fields.items() if name != "kind"}
    if "idempotency_key" in rest:
        rest["idempotency_key"] += str(n)
    return rest


def ok(capsys, *words):
    """A command that ends well; what it says."""
    status, told, errors = command(capsys, *words)
    assert (status, errors) == (0, ""), (words, told, errors)
    return told


def data(capsys, *words):
    """The lines of a command's JSON."""
    return [json.loads(line) for line in ok(capsys, *words, "--json").splitlines()]


def bodies(relay, agent="builder"):
    """What the relay stored, in the order of its arrival."""
    return [json.loads(event["body"]) for event in relay.events(agent)]


# Replay -----------------------------------------------------------------------------------------------------


def test_a_refused_event_is_seen_mended_at_the_relay_and_sent_again(capsys, state, relay):
    """From the list to the answer to the replay: the same event, with its key, behind what went on."""
    relay.add_faults({"match": {"bodyContains": '"bad"'}, "action": {"status": 422, "body": NO}})
    put(state, {"n": 1, "word": "bad"}, {"n": 2}, idempotency_key="k-", occurred_at_ms=1_790_000_000_000)
    assert command(capsys, "flush", "--timeout", "20")[0] == 0
    assert [(one["seq"], one["reason"], one["status"]) for one in data(capsys, "dead", "list")] == [
        (1, "rejected", 422)
    ]
    told = ok(capsys, "dead", "show", "builder", "1")
    assert "the word is not allowed" in told
    assert '  "word": "bad"\n' in told
    (shown,) = data(capsys, "show", "builder", "k-0")
    assert (shown["state"], shown["payload"], shown["code"]) == (
        "dead",
        {"n": 1, "word": "bad"},
        "validation_failed",
    )
    assert json.loads(shown["answer"]) == NO
    assert [entry["status"] for entry in shown["history"]] == [422]
    relay.clear_faults()
    assert "goes again as seq 3" in ok(capsys, "dead", "replay", "builder", "1")
    (waits,) = data(capsys, "list", "builder")
    assert (waits["seq"], waits["state"], waits["attempts"], waits["idempotencyKey"]) == (
        3,
        "waiting",
        0,
        "k-0",
    )
    ok(capsys, "flush", "--timeout", "20")
    assert [(body["n"], body["idempotencyKey"]) for body in bodies(relay)] == [(2, "k-1"), (1, "k-0")]
    assert bodies(relay)[1]["occurredAt"] == 1_790_000_000_000
    assert data(capsys, "show", "builder", "3")[0]["state"] == "delivered"
    assert "was delivered" in ok(capsys, "show", "builder", "k-0")
    assert data(capsys, "dead", "list") == []


def test_an_edited_event_arrives_under_a_new_key(capsys, state, relay, tmp_path):
    """With its time, its correlation and its own text; the old key stays known as discarded."""
    relay.add_faults({"match": {"bodyContains": '"bad"'}, "action": {"status": 422, "body": NO}})
    put(state, {"word": "bad"}, idempotency_key="k-", occurred_at_ms=5, run_id="r-1")
    command(capsys, "flush", "--timeout", "20")
    corrected = tmp_path / "corrected.json"
    corrected.write_text('{"word": "good",\n "n": 1e400}\n', "utf-8")
    (done,) = data(capsys, "dead", "replay", "builder", "1", "--edit", str(corrected))
    assert (done["seq"], done["newSeq"]) == (1, 2)
    shown = ok(capsys, "show", "builder", "2", "--json")
    assert '"runId":"r-1"' in shown
    assert '"payload":{"word": "good",  "n": 1e400}' in shown
    ok(capsys, "flush", "--timeout", "20")
    (stored,) = relay.events("builder")
    assert stored["key"] == done["idempotencyKey"] != "k-0"
    assert '"n": 1e400' in stored["body"]
    assert json.loads(stored["body"].replace("1e400", "1"))["occurredAt"] == 5
    assert data(capsys, "show", "builder", "k-0")[0]["state"] == "discarded"


BATCH = {"messages": [{"n": n, "word": "bad" if n == 1 else "fine"} for n in range(3)]}


@pytest.fixture
def half_stored(capsys, state, relay):
    """A batch event whose messages 0 and 2 the relay has, and whose message 1 it refused."""
    rule = {"match": {"bodyContains": '"bad"'}, "status": 422, "body": NO}
    relay.add_faults(
        {"match": {"path": "/api/messages/batch"}, "action": {"perItem": rule}},
        {"match": {"path": "/api/messages", "bodyContains": '"bad"'}, "action": {"status": 422, "body": NO}},
    )
    put(state, BATCH, kind="session-message-batch", idempotency_key="b-")
    command(capsys, "flush", "--timeout", "20")
    assert data(capsys, "show", "builder", "1")[0]["progress"]["stored"] == [0, 2]
    assert [body["n"] for body in bodies(relay)] == [0, 2]


def test_of_a_batch_only_what_the_relay_refused_goes_again(capsys, half_stored, relay):
    """With the key that it had in the batch."""
    relay.clear_faults()
    ok(capsys, "dead", "replay", "--all")
    ok(capsys, "flush", "--timeout", "20")
    assert [(body["n"], body["idempotencyKey"]) for body in bodies(relay)] == [
        (0, "b-0:0"),
        (2, "b-0:2"),
        (1, "b-0:1"),
    ]
    assert relay.summary()["builder"]["duplicates"] == 0


def with_edit(tmp_path, payload):
    """A file with a payload."""
    file = tmp_path / "edited.json"
    file.write_text(json.dumps(payload), "utf-8")
    return str(file)


def test_an_edited_batch_keeps_what_the_relay_has(capsys, half_stored, relay, tmp_path):
    """The corrected message goes alone, under the new key."""
    messages = [dict(message, word="fine") for message in BATCH["messages"]]
    edit = with_edit(tmp_path, {"messages": messages})
    (done,) = data(capsys, "dead", "replay", "builder", "1", "--edit", edit)
    ok(capsys, "flush", "--timeout", "20")
    assert [body["idempotencyKey"] for body in bodies(relay)] == [
        "b-0:0",
        "b-0:2",
        f"{done['idempotencyKey']}:1",
    ]


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([{"n": 0, "word": "fine"}, {"n": 2, "word": "fine"}], "changes the number of its messages"),
        (
            [{"n": 0, "word": "else"}, {"n": 1}, {"n": 2, "word": "fine"}],
            "a message that the relay has already",
        ),
    ],
)
def test_an_edit_of_what_the_relay_has_needs_a_new_key(capsys, half_stored, relay, tmp_path, messages, said):
    """Without it nothing is changed; with it all goes again, and it says what arrives a second time."""
    edit = with_edit(tmp_path, {"messages": messages})
    status, told, errors = command(capsys, "dead", "replay", "builder", "1", "--edit", edit)
    assert (status, told) == (2, "")
    assert said in errors
    assert "--new-key" in errors
    assert len(data(capsys, "dead", "list")) == 1
    told = ok(capsys, "dead", "replay", "builder", "1", "--edit", edit, "--new-key")
    assert "2 messages that the relay has already arrive a second time" in told
    ok(capsys, "flush", "--timeout", "20")
    assert [body["n"] for body in bodies(relay)] == [0, 2, *(message["n"] for message in messages)]


def test_an_archive_goes_on_where_it_was(capsys, state, relay, tmp_path):
    """Its delivered chunks are not sent again; an edit of them, or of their number, needs a new key."""
    relay.add_faults({"match": {"bodyContains": "ZZZ"}, "action": {"status": 422, "body": NO}})
    archive = {"agentId": "a", "segment": 1, "text": "x" * 60_000 + "ZZZ"}
    put(state, archive, kind="continuation-archive", idempotency_key="a-")
    command(capsys, "flush", "--timeout", "20")
    assert data(capsys, "show", "builder", "1")[0]["progress"]["chunks"] == 1
    for wrong in ({"text": "y" + archive["text"][1:]}, {"text": "x" * 300_000}, {"segment": 2}):
        edit = with_edit(tmp_path, archive | wrong)
        status, _, errors = command(capsys, "dead", "replay", "builder", "1", "--edit", edit)
        assert (status, "1 chunk that the relay has" in errors) == (2, True)
    ok(
        capsys,
        "dead",
        "replay",
        "builder",
        "1",
        "--edit",
        with_edit(tmp_path, archive | {"text": "x" * 60_000 + "AAA"}),
    )
    ok(capsys, "flush", "--timeout", "20")
    (whole,) = relay.archives("a")
    assert (whole["complete"], whole["chunks"], whole["text"]) == (True, 2, "x" * 60_000 + "AAA")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"n": 1,}', "not JSON"),
        ('{"n": 1} {"n": 2}', "not JSON"),
        ("", "no value"),
        ('1, "kind": "session-message"', "not JSON"),
        ('{"n": 0}', "is what it was"),
        (json.dumps("x" * 9_000_000), "bytes of JSON"),
        ("[" * 502 + "]" * 502, "nested"),
    ],
)
def test_an_edit_that_is_no_payload_changes_nothing(capsys, state, tmp_path, text, said):
    """The dead letter stays, and the message says what is wrong."""
    put(state, {"n": 0})
    ok(capsys, "skip", "builder", "1")
    file = tmp_path / "edited.json"
    file.write_text(text, "utf-8")
    status, told, errors = command(capsys, "dead", "replay", "builder", "1", "--edit", str(file))
    assert (status, told) == (2, "")
    assert said in errors
    assert "Nothing was changed" in errors
    assert len(data(capsys, "dead", "list")) == 1


def test_new_keys_for_several(capsys, state):
    """Each as a new event, with the payload that it had."""
    put(state, {"n": 0}, {"n": 1}, idempotency_key="k-")
    ok(capsys, "skip", "builder", "1")
    ok(capsys, "skip", "builder", "2")
    done = data(capsys, "dead", "replay", "--all", "--new-key")
    assert [one["newSeq"] for one in done] == [3, 4]
    waiting = data(capsys, "list")
    assert [one["idempotencyKey"] for one in waiting] == [one["idempotencyKey"] for one in done]
    assert not {"k-0", "k-1"} & {one["idempotencyKey"] for one in waiting}


def test_an_edit_comes_from_stdin_too(tmp_path, state):
    """In a pipe, with nobody at a terminal."""
    env = environment(tmp_path)
    put(state, {"n": 0})
    process(env, "skip", "builder", "1")
    done = process(env, "dead", "replay", "builder", "1", "--edit", "-", stdin=b'\xef\xbb\xbf{"n": 7}\n')
    assert (done.returncode, done.stderr) == (0, b"")
    shown = json.loads(process(env, "show", "builder", "2", "--json").stdout)
    assert (shown["payload"], shown["replayedFrom"]) == ({"n": 7}, 1)
    alone = process(env, "dead", "replay", "builder", "1", "--edit")
    assert alone.returncode == 2


# Choosing ---------------------------------------------------------------------------------------------------


@pytest.fixture
def letters(capsys, state):
    """Five dead letters of two agents, and one event that waits."""
    put(state, {"n": 0}, {"n": 1})
    put(state, {"n": 2}, kind="session-message")
    put(state, {"n": 3}, {"n": 4}, agent="42", idempotency_key="k-")
    for agent, seq in (("builder", 1), ("builder", 2), ("builder", 3), ("42", 1), ("42", 2)):
        ok(capsys, "skip", agent, str(seq))
    put(state, {"n": 5})


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--all"], ["42/1", "42/2", "builder/1", "builder/2", "builder/3"]),
        (["--agent", "builder"], ["builder/1", "builder/2", "builder/3"]),
        (["builder"], ["builder/1", "builder/2", "builder/3"]),
        (["builder", "3", "1"], ["builder/1", "builder/3"]),
        (["--agent", "42", "2"], ["42/2"]),
        (["--kind", "session-message"], ["builder/3"]),
        (
            ["--kind", "session-message", "--kind", "insight", "--agent", "builder"],
            ["builder/1", "builder/2", "builder/3"],
        ),
        (
            ["--reason", "skipped", "--newer-than", "1h"],
            ["42/1", "42/2", "builder/1", "builder/2", "builder/3"],
        ),
        (["--older-than", "1h"], []),
        (["--reason", "rejected"], []),
    ],
)
def test_which_are_meant(capsys, letters, words, found):
    """The same words choose for every act; a dry run tells which, and changes nothing."""
    before = data(capsys, "dead", "list")
    for act in ("replay", "discard"):
        told = data(capsys, "dead", act, *words, "--dry-run")
        assert [f"{one['agent']}/{one['seq']}" for one in told] == found
    assert [f"{one['agent']}/{one['seq']}" for one in data(capsys, "dead", "list", *words)] == found
    said = ok(capsys, "dead", "discard", *words, "--dry-run")
    assert "Nothing was changed." in said
    assert data(capsys, "dead", "list") == before


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Which dead letters?"),
        (["3"], "Whose?"),
        (["builder", "3", "99"], "There is no dead letter 99"),
        (["builder", "4"], "There is no dead letter 4"),
        (["builder", "x"], "'x' is no number"),
        (["nobody", "1"], "no outbox of 'nobody'"),
        (["builder", "1", "--kind", "session-message"], "fits"),
        (["--older-than", "soon"], "no length of time"),
        (["--reason", "mood"], "invalid choice"),
    ],
)
def test_a_choice_that_cannot_be_meant_changes_nothing(capsys, letters, words, said):
    """Exit 2, for both acts; what was right in it is not done either."""
    for act in ("replay", "discard"):
        status, told, errors = command(capsys, "dead", act, *words)
        assert (status, told) == (2, "")
        assert said in errors
    assert len(data(capsys, "dead", "list")) == 5


def test_an_edit_is_of_one(capsys, letters):
    """Which of several would get the payload nobody knows."""
    status, _, errors = command(capsys, "dead", "replay", "builder", "--edit", "x.json")
    assert (status, "3 are meant" in errors) == (2, True)


def test_replay_and_discard_of_several(capsys, letters, state):
    """In the order of their numbers; what is done is told, in a sentence or a line each."""
    told = ok(capsys, "dead", "replay", "builder")
    assert told.startswith("3 dead letters go again, behind what waits, with their keys.")
    assert [one["seq"] for one in data(capsys, "list", "builder")] == [4, 5, 6, 7]
    done = data(capsys, "dead", "discard", "--agent", "42")
    assert [(one["seq"], one["idempotencyKey"], one["state"]) for one in done] == [
        (1, "k-0", "discarded"),
        (2, "k-1", "discarded"),
    ]
    assert ok(capsys, "dead", "discard", "--all") == "No dead letter fits. Nothing was changed.\n"


def test_a_damaged_letter_stops_none_of_the_others(capsys, letters, state):
    """It is named, exit 4, and the others are replayed."""
    path = state.outbox_path("builder")
    with contextlib.closing(open_outbox(state, path)) as box, box.transaction(durable=True):
        box.run("UPDATE dead SET checksum = checksum + 1 WHERE seq = 2")
    status, told, errors = command(capsys, "dead", "replay", "--all", "--json")
    assert status == 4
    assert len(told.splitlines()) == 4
    assert json.loads(errors)["seq"] == 2
    assert "damaged" in json.loads(errors)["error"]["message"]
    shown = ok(capsys, "dead", "show", "builder", "2")
    assert "it is damaged" in shown
    assert data(capsys, "dead", "show", "builder", "2")[0]["payload"] is None


def test_letters_that_were_exported_come_back(capsys, letters, tmp_path):
    """Kept in a file, thrown away here, taken in when they are wanted after all."""
    file = tmp_path / "letters.jsonl"
    assert "3 dead letters" in ok(capsys, "dead", "export", "builder", "--output", str(file))
    before = data(capsys, "dead", "show", "builder", "3")
    ok(capsys, "dead", "discard", "builder", "--yes")
    assert ok(capsys, "import", str(file)).startswith("0 events and 3 dead letters taken.")
    after = data(capsys, "dead", "list", "builder")
    assert [one["kind"] for one in after] == ["insight", "insight", "session-message"]
    (again,) = data(capsys, "dead", "show", "builder", str(after[2]["seq"]))
    assert [again | {"seq": 3}] == before
    ok(capsys, "dead", "replay", "builder")
    assert "3 were known already" in ok(capsys, "import", str(file))


# At a terminal ----------------------------------------------------------------------------------------------


def at_terminal(env, *words, typed=b""):
    """A command whose streams are all one terminal: its exit status, and what stands there at its end."""
    here, there = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "outbox", *words], env=env, stdin=there, stdout=there, stderr=there
    ) as child:
        os.close(there)
        os.write(here, typed)
        shown = b""
        with contextlib.suppress(OSError):  # the other end was closed: that is how a terminal ends
            while chunk := os.read(here, 65_536):
                shown += chunk
        os.close(here)
        return child.wait(60), shown.decode()


def test_discarding_several_is_asked_for(capsys, letters, tmp_path):
    """No is no; yes is yes; one alone, or with --yes, is not asked for."""
    env = environment(tmp_path, TERM="dumb")
    status, shown = at_terminal(env, "dead", "discard", "builder", typed=b"n\n")
    assert (status, "Discard 3 dead letters of builder?" in shown) == (4, True)
    assert len(data(capsys, "dead", "list")) == 5
    status, shown = at_terminal(env, "dead", "discard", "builder", "1")
    assert (status, "[y/N]" in shown) == (0, False)
    status, shown = at_terminal(env, "dead", "discard", "--agent", "42", "--yes")
    assert (status, "[y/N]" in shown) == (0, False)
    status, shown = at_terminal(env, "dead", "discard", "--all", typed=b"yes\n")
    assert (status, "2 dead letters discarded" in shown) == (0, True)
    assert data(capsys, "dead", "list") == []


def editor(tmp_path, does):
    """An editor that does this with the file it is given."""
    script = tmp_path / "editor.py"
    script.write_text(f"import sys, pathlib; file = pathlib.Path(sys.argv[1]); {does}", "utf-8")
    return f"{sys.executable} {script}"


def test_the_payload_is_edited_in_an_editor(capsys, letters, tmp_path):
    """It stands there indented; what is saved is sent."""
    does = "text = file.read_text(); assert text.count('\\n') == 3; file.write_text(text.replace('0', '70'))"
    env = environment(tmp_path, TERM="dumb", EDITOR=editor(tmp_path, does))
    status, shown = at_terminal(env, "dead", "replay", "builder", "1", "--edit")
    assert (status, "goes again as seq 5" in shown) == (0, True)
    assert data(capsys, "show", "builder", "5")[0]["payload"] == {"n": 70}


@pytest.mark.parametrize(
    ("does", "said", "kept"),
    [
        ("file.write_text('{')", "not JSON", True),
        ("pass", "is what it was", False),
        ("sys.exit(3)", "ended with 3", False),
    ],
)
def test_an_edit_that_fails_loses_nothing(capsys, letters, tmp_path, does, said, kept):
    """Neither the dead letter nor what was typed."""
    env = environment(tmp_path, TERM="dumb", VISUAL=editor(tmp_path, does), TMPDIR=str(tmp_path))
    status, shown = at_terminal(env, "dead", "replay", "builder", "1", "--edit")
    assert (status, said in shown) == (2, True)
    assert ("Your text is kept" in shown) == kept
    assert len(list(tmp_path.glob("outbox-edit-*/*.json"))) == kept
    assert len(data(capsys, "dead", "list")) == 5


# Seeing -----------------------------------------------------------------------------------------------------


def test_what_waits_is_listed(capsys, state):
    """With what a person asks first: how old, how often tried, how large."""
    put(state, {"n": 0}, {"n": "x" * 3_000})
    put(state, {"n": 2}, agent="reviewer", kind="session-message")
    lines = ok(capsys, "list").splitlines()
    assert lines[0].split() == ["agent", "seq", "kind", "key", "age", "attempts", "size", "state"]
    assert [line.split()[0] for line in lines[1:]] == ["builder", "builder", "reviewer"]
    assert "3 KiB" in lines[2]
    assert [one["agent"] for one in data(capsys, "list", "--kind", "session-message")] == ["reviewer"]
    assert data(capsys, "list", "--state", "in-flight") == []
    assert len(data(capsys, "list", "--state", "waiting", "--limit", "2")) == 2
    assert "there are more: outbox list --limit" in ok(capsys, "list", "--limit", "2")
    assert ok(capsys, "list", "--kind", "none") == "Nothing waits.\n"
    assert command(capsys, "list", "nobody")[0] == 2
    assert command(capsys, "list", "--limit", "-1")[0] == 2


def test_an_event_is_shown_with_all_that_belongs_to_it(capsys, state):
    """And nothing in it can write to the terminal."""
    put(state, {"b": "\x1b[31m", "a": "é"}, idempotency_key="k-", account_id="acme", metadata={"x": 1},
        mode="coalesce", dedupe_key="d", retry={"maxAttempts": 3})  # fmt: skip
    told = ok(capsys, "show", "builder", "1")
    for part in (
        "waits.",
        "k-0",
        'accountId "acme"',
        '"x":1',
        'earlier waiting ones of "d"',
        '"maxAttempts":3',
        "é",
    ):
        assert part in told
    assert "\x1b" not in told
    (shown,) = data(capsys, "show", "builder", "1")
    assert (shown["payload"], shown["dedupeKey"], shown["metadata"]) == (
        {"b": "\x1b[31m", "a": "é"},
        "d",
        {"x": 1},
    )
    assert ok(capsys, "show", "builder", "1", "--json").isascii()


def test_what_is_not_known_is_said(capsys, state):
    """Exit 2, with where else it may be; `dead show` shows dead letters only."""
    put(state, {"n": 0})
    status, told, errors = command(capsys, "show", "builder", "7")
    assert (status, told) == (2, "")
    assert "No event '7'" in errors
    status, _, errors = command(capsys, "dead", "show", "builder", "1")
    assert (status, "it is waiting" in errors) == (2, True)


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("1e400", ["1e400"]),
        ('"a{b"', ['"a{b"']),
        ("{}", ["{}"]),
        ('{ "a" :[ ] }', ["{", '  "a": []', "}"]),
        ('{"a":"x,\\"[y","b":[1.0,{"c":null}]}', [
            "{", '  "a": "x,\\"[y",', '  "b": [', "    1.0,", "    {", '      "c": null', "    }", "  ]", "}",
        ]),
    ],
)  # fmt: skip
def test_json_is_indented_in_its_own_text(text, lines):
    """No value is read and written anew."""
    assert indented(text) == lines


@pytest.mark.parametrize("words", [("list",), ("dead", "list"), ("dead", "replay", "--all"), ("export",)])
def test_these_commands_are_light(tmp_path, state, words):
    """They load neither the client nor the daemon nor what draws on terminals."""
    put(state, {"n": 0})
    code = "import sys; from outbox.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"asyncio", "httpx", "structlog", "starlette", "rich", "relay_client", "uvicorn"}
    assert heavy & set(done.stderr.split()) == set()
