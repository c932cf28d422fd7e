"""The outbox as a program uses it: from Python, synchronously and with asyncio."""

import asyncio
import doctest
import json
import os
import shutil
import signal
import subprocess
import sys
import threading

import pytest

import outbox.aio
import outbox.library
from outbox import (
    ConfigError,
    Outbox,
    OutboxError,
    Receipt,
    StoreClosed,
    StoreError,
    StoreFull,
    UsageError,
)  # fmt: skip
from outbox.aio import AsyncOutbox
from outbox.bounds import Bounds
from outbox.event import Limits
from outbox.store.rules import encode_rules
from outbox.store.verify import verify_counters
from outbox.store.wake import bind_wake_socket

MESSAGE = {"from": "builder", "to": "lead", "body": "done"}


@pytest.fixture
def state(tmp_path):
    """Where the outboxes of a test lie."""
    return tmp_path / "state"


@pytest.fixture
def builder(state):
    """The outbox of one agent, with true counters in the end."""
    with Outbox.open("builder", state_dir=state) as opened:
        yield opened
        if not opened._closed:
            assert verify_counters(opened._current()) == []


def stored(opened):
    """The payloads that wait, as JSON values without what the outbox adds."""
    rows = opened._current().rows("SELECT wire_payload FROM events ORDER BY seq")
    added = ("occurredAt", "idempotencyKey")
    return [{k: v for k, v in json.loads(text).items() if k not in added} for (text,) in rows]


@pytest.mark.parametrize("module", [outbox.library, outbox.aio], ids=["library", "aio"])
def test_the_examples_run(module):
    """What stands in the docstrings is true."""
    result = doctest.testmod(module)
    assert (result.failed, result.attempted > 0) == (0, True)


LIGHT = """
import sys
from outbox import Outbox
with Outbox.open("builder", state_dir=sys.argv[1]) as outbox:
    outbox.enqueue("session-message", {"body": "x" * 100}, idempotency_key="k")
    outbox.enqueue_many([{"kind": "insight", "payload": {}}, '{"kind": "insight", "payload": 1}'])
    slow = {"typing", "pathlib", "dataclasses", "inspect", "hashlib", "socket", "urllib", "threading",
            "contextlib", "outbox.outcome"}
    print(sorted(slow & set(sys.modules)))
    assert outbox.depth == 3
    outbox.status()
heavy = {"asyncio", "httpx", "httpcore", "structlog", "starlette", "uvicorn", "rich", "tenacity", "argparse",
         "tomllib", "sqlite3", "logging", "relay_client", "outbox.settings", "outbox.delivery",
         "outbox.daemon"}
print(sorted(heavy & set(sys.modules)))
"""


def test_enqueueing_loads_nothing_heavy(state):
    """Every short process pays for what is imported: apsw and small parts of the standard library suffice."""
    done = subprocess.run(
        [sys.executable, "-c", LIGHT, str(state)], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout == "[]\n[]\n"


def test_an_event_is_on_disk_when_enqueue_returns(state):
    """P1: `kill -9` right after it takes nothing away."""
    code = (
        "import os, signal, sys\nfrom outbox import Outbox\n"
        "receipt = Outbox.open('builder', state_dir=sys.argv[1]).enqueue('insight', {'n': 1})\n"
        "print(receipt.idempotency_key, flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(state)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    with Outbox.open("builder", state_dir=state) as opened:
        assert opened.status().head.key == done.stdout.strip()
        assert stored(opened) == [{"n": 1}]


def test_every_field_of_an_event_can_be_given(builder):
    """Python names, with units; the receipt tells number and key."""
    receipt = builder.enqueue(
        "session-message", MESSAGE, mode="coalesce", dedupe_key="status", occurred_at_ms=5,
        idempotency_key="k-1", retry={"maxAttempts": 3}, account_id="a", run_id="r", step_id="s",
        parent_id="p", conversation_id="c", metadata={"x": 1},
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", tracestate="a=b",
    )  # fmt: skip
    assert receipt == Receipt(1, "k-1", duplicate=False, state="waiting")
    (text, extra) = builder._box.one("SELECT wire_payload, extra FROM events")
    assert json.loads(text) == MESSAGE | {"occurredAt": 5, "idempotencyKey": "k-1"}
    assert json.loads(extra)["correlation"]["conversationId"] == "c"


def test_a_key_of_our_own_making_sorts_by_time(builder):
    """UUIDs of version 7 (RFC 9562), made at acceptance."""
    keys = [builder.enqueue("insight", {}).idempotency_key for _ in range(20)]
    assert len(set(keys)) == 20
    assert {key[14] for key in keys} == {"7"}
    assert [key[:8] for key in keys] == sorted(key[:8] for key in keys)


def test_an_error_stores_nothing(builder):
    """A value that is no JSON, an unknown kind, a key that was used: the caller learns what to mend."""
    builder.enqueue("insight", {"n": 1}, idempotency_key="k-1")
    for kind, payload, key, words in [
        ("insight", {"n": float("nan")}, None, "nan is no JSON number"),
        ("insigt", {}, None, 'did you mean "insight"'),
        ("insight", {"n": 2}, "k-1", "already used"),
    ]:
        with pytest.raises(UsageError, match=words):
            builder.enqueue(kind, payload, idempotency_key=key)
    assert builder.depth == 1


def test_many_events_are_taken_with_one_commit(builder):
    """Mappings, JSON texts and bytes; what cannot be taken is told in its place, the others are durable."""
    results = builder.enqueue_many([
        {"kind": "insight", "payload": {"n": 1}, "idempotencyKey": "k-1"},
        '{"kind": "insight", "payload": {"n": 2}}',
        b'{"kind": "insight", "payload": {"n": 3}',
        {"kind": "insight"},
        {"kind": "insight", "payload": object()},
        ["no", "event"],
        b'{"kind": "insight", "payload": {"n":1}, "idempotencyKey": "k-1"}',
        '{"kind": "insight", "payload": {"n": 4}}',
    ])  # fmt: skip
    assert [getattr(result, "seq", None) for result in results] == [1, 2, None, None, None, None, 1, 3]
    assert all(isinstance(result, (Receipt, UsageError)) for result in results)
    assert results[6].duplicate
    assert stored(builder) == [{"n": 1}, {"n": 2}, {"n": 4}]


def test_no_events_are_no_trouble(builder):
    """Also from a generator, and with none that can be taken."""
    assert builder.enqueue_many(iter(())) == []
    assert isinstance(builder.enqueue_many(["no"])[0], UsageError)
    assert builder.depth == 0


def test_after_close_nothing_is_taken(builder):
    """Every use says that it is closed; closing again is nothing."""
    builder.close()
    builder.close()
    for use in (
        lambda: builder.enqueue("insight", {}),
        lambda: builder.enqueue_many([]),
        lambda: builder.depth,
        builder.status,
        builder.flush,
    ):
        with pytest.raises(StoreClosed, match="was closed"):
            use()


def test_names_that_cannot_be_an_agents_make_nothing(state):
    """Refused before anything is made on disk."""
    for name in ("", "a\0b", "x" * 513, "\ud800"):
        with pytest.raises(UsageError):
            Outbox.open(name, state_dir=state)
    assert not state.exists()


def test_the_state_directory_comes_from_the_environment(tmp_path, monkeypatch):
    """And is told when there is none."""
    monkeypatch.setenv("OUTBOX_STATE_DIR", str(tmp_path / "elsewhere"))
    with Outbox.open("builder") as opened:
        opened.enqueue("insight", {})
    assert (tmp_path / "elsewhere" / "agents").is_dir()
    for name in (
        "OUTBOX_STATE_DIR",
        "AGENT_RELAY_RUNNER_OUTBOX_DIR",
        "STATE_DIRECTORY",
        "XDG_STATE_HOME",
        "HOME",
    ):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="No state directory"):
        Outbox.open("builder")


def test_a_relative_state_directory_stays_where_it_was(tmp_path, monkeypatch):
    """A host program that changes its folder does not lose its outbox."""
    monkeypatch.chdir(tmp_path)
    with Outbox.open("builder", state_dir="state") as opened:
        opened.enqueue("insight", {"n": 1})
        (tmp_path / "other").mkdir()
        monkeypatch.chdir(tmp_path / "other")
        opened.enqueue("insight", {"n": 2})
        assert opened.depth == 2
    assert list((tmp_path / "other").iterdir()) == []


def test_a_new_outbox_takes_the_rules_that_the_daemon_left(state):
    """So that the first event of a new agent is bound by them too; unreadable ones are none."""
    Outbox.open("first", state_dir=state).close()
    rules = encode_rules(Limits(custom_kinds=("deploy",)), Bounds(max_events=1, overflow="refuse"))
    (state / "rules.json").write_text(rules, encoding="utf-8")
    with Outbox.open("builder", state_dir=state) as opened:
        opened.enqueue("deploy", {})
        with pytest.raises(StoreFull):
            opened.enqueue("deploy", {})
    (state / "rules.json").write_bytes(b"\xff{")
    with Outbox.open("other", state_dir=state) as opened, pytest.raises(UsageError, match="not known"):
        opened.enqueue("deploy", {})


def test_the_environment_limits_message_bodies(state, monkeypatch):
    """AGENT_RELAY_MESSAGE_BODY_MAX_CHARS stands above the rules; 0 is no limit, and words are an error."""
    Outbox.open("builder", state_dir=state).close()
    for given, body in [("5", True), ("0", False), ("", False)]:
        monkeypatch.setenv("AGENT_RELAY_MESSAGE_BODY_MAX_CHARS", given)
        with Outbox.open("builder", state_dir=state) as opened:
            opened.enqueue("session-message", {"body": "x" * 100})
            assert ("bodyTruncated" in stored(opened)[-1]) is body
    for given in ("many", "-1", "1e3", "9" * 5_000):
        monkeypatch.setenv("AGENT_RELAY_MESSAGE_BODY_MAX_CHARS", given)
        with pytest.raises(UsageError, match=f"BODY_MAX_CHARS='{given[:40]}' is no whole number"):
            Outbox.open("builder", state_dir=state)


def test_threads_share_an_outbox(builder):
    """All their events are there, each thread's in its order."""

    def produce(name):
        for n in range(30):
            builder.enqueue("insight", {"t": name, "n": n})

    threads = [threading.Thread(target=produce, args=(name,)) for name in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = stored(builder)
    assert len(found) == 90
    assert [[one["n"] for one in found if one["t"] == name] for name in "abc"] == [list(range(30))] * 3


def test_a_file_that_was_replaced_under_a_producer_is_opened_anew(state, builder):
    """The next event goes into the file that is there now; the old file gets nothing more."""
    builder.enqueue("insight", {"n": 1})
    path = builder._box.path
    path.rename(path.with_name("moved"))
    assert builder.enqueue("insight", {"n": 2}).seq == 1
    assert stored(builder) == [{"n": 2}]
    path.unlink()
    assert builder.depth == 0
    assert builder.enqueue("insight", {"n": 3}).seq == 1


def test_a_state_directory_that_was_removed_is_made_anew(state, builder):
    """A program that lives on while a person tidied up under it goes on by itself."""
    builder.enqueue("insight", 1)
    shutil.rmtree(state)
    receipt = builder.enqueue("insight", 2)
    assert (receipt.seq, receipt.duplicate, builder.depth) == (1, False, 1)
    assert state.stat().st_mode & 0o777 == 0o700
    with Outbox.open("builder", state_dir=state) as another:
        assert another.depth == 1


def test_a_state_directory_that_cannot_be_made_anew_is_a_clear_error(state):
    """What stands in its place is left alone, and the error is one that callers expect."""
    with Outbox.open("builder", state_dir=state) as builder:
        shutil.rmtree(state)
        state.write_text("a file")
        with pytest.raises(StoreError, match="cannot be made: File exists"):
            builder.enqueue("insight", 2)
    assert state.read_text() == "a file"


def test_a_damaged_file_is_set_aside(state, caplog):
    """P8: its agent goes on with a new one, a warning says so, the others notice nothing, it is kept."""
    with Outbox.open("a", state_dir=state) as one:
        path = one._box.path
    path.write_text("notes")
    with Outbox.open("b", state_dir=state) as other:
        assert other.enqueue("insight", {}).seq == 1
    with Outbox.open("a", state_dir=state) as again:
        receipt = again.enqueue("insight", {})
        assert receipt.state == "waiting"
    assert path.stem in caplog.text
    kept = [file for file in state.rglob("*") if file.is_file() and file.read_bytes() == b"notes"]
    assert len(kept) == 1


def test_a_daemon_hears_of_each_event(state, builder):
    """By a datagram that names the file; without a daemon nothing is missing."""
    with bind_wake_socket(state / "wake.sock") as daemon:
        builder.enqueue("insight", {})
        assert daemon.recv(500).decode() == builder._box.path.name
    builder.enqueue("insight", {})


def test_flush_without_a_relay_says_what_is_missing(builder, monkeypatch, tmp_path):
    """The caller's configuration is wrong, not the events: they stay."""
    for name in list(os.environ):
        if name.startswith(("OUTBOX_", "AGENT_RELAY_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    builder.enqueue("insight", {})
    with pytest.raises(ConfigError, match="relay"):
        builder.flush(1)
    assert builder.depth == 1


# asyncio ----------------------------------------------------------------------------------------------------


def test_the_same_acts_with_asyncio(state):
    """Open, enqueue, enqueue many, depth, status, close."""

    async def acts():
        async with await AsyncOutbox.open("builder", state_dir=state) as opened:
            one = await opened.enqueue("insight", {"n": 1}, idempotency_key="k-1")
            many = await opened.enqueue_many(
                {"kind": "insight", "payload": {"n": n}, "idempotencyKey": "k-1"} for n in (1, 2)
            )
            return opened.agent, one, many, await opened.depth(), (await opened.status()).accepted

    agent, one, many, depth, accepted = asyncio.run(acts())
    assert (agent, one.seq, depth, accepted) == ("builder", 1, 1, 1)
    assert many[0].duplicate
    assert isinstance(many[1], UsageError)


def test_tasks_share_an_async_outbox(state):
    """Each task's events are in the order in which it awaited them; errors reach the task that made them."""

    async def produce(opened, name):
        for n in range(20):
            await opened.enqueue("insight", {"t": name, "n": n})
        with pytest.raises(UsageError):
            await opened.enqueue("nothing known", {})

    async def acts():
        opened = await AsyncOutbox.open("builder", state_dir=state)
        await asyncio.gather(*(produce(opened, name) for name in "abc"))
        await opened.close()
        with pytest.raises(StoreClosed):
            await opened.enqueue("insight", {})
        with pytest.raises(StoreClosed):
            await opened.flush(0)

    asyncio.run(acts())
    with Outbox.open("builder", state_dir=state) as opened:
        found = stored(opened)
    assert [[one["n"] for one in found if one["t"] == name] for name in "abc"] == [list(range(20))] * 3


def test_the_event_loop_goes_on_while_the_file_is_locked(state):
    """Waiting for another program's lock happens in a thread."""
    import apsw  # noqa: PLC0415 - only here

    async def acts():
        async with await AsyncOutbox.open("builder", state_dir=state) as opened:
            path = opened._outbox._box.path
            other = apsw.Connection(str(path))
            other.execute("BEGIN IMMEDIATE")
            waiting = asyncio.create_task(opened.enqueue("insight", {}))
            for _ in range(5):
                await asyncio.sleep(0)
            assert not waiting.done()
            other.execute("ROLLBACK")
            other.close()
            return await waiting

    assert asyncio.run(acts()).seq == 1


def test_every_error_can_be_caught_as_one(state):
    """Whoever only wants to know that it failed catches OutboxError."""
    with Outbox.open("builder", state_dir=state) as opened, pytest.raises(OutboxError):
        opened.enqueue("nothing known", {})
