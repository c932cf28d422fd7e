"""Why an event waits: the order of reasons, and what each of them says."""

import dataclasses
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox.api import reasons
from outbox.api.explain import explain
from outbox.api.obstacle import Scope
from outbox.outcome import Blocked
from outbox.store.inspect import Head, OutboxStatus

NOW_MS = 1_796_040_000_000  # 2026-11-30 12:00:00 UTC
MINUTE_MS = 60_000
MESSAGES, INSIGHTS = "/api/messages", "/api/insights/observations"


@pytest.fixture(autouse=True)
def _utc(monkeypatch):
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


HEAD = Head(
    seq=10_234,
    kind="session-message",
    key="k",
    accepted_at_ms=NOW_MS - 40_000,
    sends=5,
    attempts=4,
    first_try_at_ms=NOW_MS - 30_000,
    history=({"at_ms": NOW_MS - 1_000, "reason": "failed", "status": 500, "path": MESSAGES},),
)
STATUS = OutboxStatus(
    agent="builder",
    stream="s",
    waiting=3,
    waiting_bytes=300,
    in_flight=0,
    dead=2,
    dead_bytes=20,
    accepted=12_000,
    delivered=11_000,
    dropped=0,
    paused_at_ms=None,
    blocked=None,
    head=HEAD,
    sender=False,
)
EMPTY = dataclasses.replace(STATUS, head=None, waiting=0)


def valve(reason, detail="", *, failures=37, wait_ms=23_000, **more):
    """A fact about the relay or a path, as the gate writes it."""
    since = NOW_MS - 18 * MINUTE_MS
    base = {"reason": reason, "detail": detail, "since": since, "failures": failures}
    return {**base, "nextTryAt": NOW_MS + wait_ms, **more}


def held(reason, detail="", wait_ms=31_000):
    """STATUS with a wait of the agent's own."""
    since_ms = NOW_MS - 5 * MINUTE_MS
    return dataclasses.replace(STATUS, blocked=Blocked(reason, since_ms, NOW_MS + wait_ms, detail))


def why(status=STATUS, facts=None, *, daemon_running=True, **more):
    """`explain` at NOW_MS."""
    return explain(status, facts or {}, daemon_running=daemon_running, now_ms=NOW_MS, **more)


def text(explanation):
    """All lines behind the first."""
    return " ".join(explanation.lines[1:])


CLOSED = {"gate": valve("unreachable", "connection refused at relay", url="http://relay:4850")}
NO_MESSAGES = {f"path:{MESSAGES}": valve("no_endpoint", "Not Found")}


@pytest.mark.parametrize(
    ("reason", "status", "facts", "daemon_running"),
    [
        ("paused", dataclasses.replace(EMPTY, paused_at_ms=NOW_MS), CLOSED, False),
        ("paused", dataclasses.replace(held("failed"), paused_at_ms=NOW_MS), CLOSED, False),
        ("empty", EMPTY, CLOSED, False),
        ("no_daemon", held("retry_after"), CLOSED | NO_MESSAGES, False),
        ("unreachable", dataclasses.replace(STATUS, sender=True), CLOSED, False),
        ("retry_after", held("retry_after"), CLOSED | NO_MESSAGES, True),
        ("unreachable", held("failed", wait_ms=-1), CLOSED | NO_MESSAGES, True),
        ("unreachable", dataclasses.replace(STATUS, in_flight=1), CLOSED | NO_MESSAGES, True),
        ("no_endpoint", held("failed", wait_ms=-1), NO_MESSAGES, True),
        ("failed", held("failed", wait_ms=-1), {}, True),
        ("failed", dataclasses.replace(held("failed", wait_ms=-1), in_flight=1), {}, True),
        ("in_flight", dataclasses.replace(STATUS, in_flight=3), {"gate": valve("", url="x")}, True),
        ("ready", STATUS, {"gate": valve(""), f"path:{INSIGHTS}": valve("no_endpoint")}, True),
    ],
)
def test_the_order_of_reasons(reason, status, facts, daemon_running):
    """Of several obstacles the first one in the order is told, and only that."""
    assert why(status, facts, daemon_running=daemon_running).reason == reason


def test_a_closed_gate_with_its_numbers():
    """Who does not answer, since when, how often and when it is tried, and that nothing is lost."""
    told = why(facts=CLOSED)
    assert told.lines == [
        "builder: 3 events wait, first seq 10,234 (session-message), since 11:59:20 (40 s).",
        "The relay does not answer: connection refused at relay, since 11:42 (37 tries, next in 23 s).",
        reasons._SAFE,
    ]
    assert (told.scope, told.since_ms, told.next_try_at_ms) == (
        Scope.RELAY,
        NOW_MS - 18 * MINUTE_MS,
        NOW_MS + 23_000,
    )


def test_an_event_that_fails_alone_with_its_numbers():
    """What was answered, how often, which attempt comes when, and how to set it aside."""
    told = why(dataclasses.replace(held("failed", "boom"), waiting=1))
    assert told.lines == [
        "builder: 1 event waits, seq 10,234 (session-message), since 11:59:20 (40 s).",
        "The relay answered 500 to it 4 times while it worked for others: boom; attempt 5 of 12 in 31 s.",
        "After the last attempt it becomes a dead letter, and what is behind it goes on.",
        "To set it aside now: outbox skip builder 10234 (it becomes a dead letter, and is kept)",
    ]
    assert "attempt 5 of 7 in 31 s" in text(why(held("failed"), max_attempts=7))


@pytest.mark.parametrize(
    ("status", "facts", "daemon_running", "said"),
    [
        (EMPTY, {}, True, "What is enqueued now goes out next."),
        (dataclasses.replace(STATUS, in_flight=1), {}, True, "the relay's answer is waited for"),
        (STATUS, {}, True, "it goes out now"),
        (dataclasses.replace(STATUS, paused_at_ms=NOW_MS), {}, True, "outbox resume builder"),
        (STATUS, {}, False, "outbox serve, or once: outbox flush"),
        (STATUS, CLOSED, False, "when it was tried last: unreachable: connection refused"),
        (
            STATUS,
            {"gate": valve("no_token", "/t: is empty")},
            True,
            "no token to send with: /t: is empty",
        ),
        (
            STATUS,
            {"gate": valve("unauthorized", "invalid_token"), "auth": {"source": "file /t"}},
            True,
            "Renew the token (file /t)",
        ),
        (
            STATUS,
            {"gate": valve("not_a_relay", "HTML", url="u://x")},
            True,
            "at u://x is no relay: HTML",
        ),
        (
            STATUS,
            {"gate": valve("redirected", "to y", url="u://x")},
            True,
            "redirects are not followed",
        ),
        (STATUS, {"gate": valve("busy", "Too Many Requests")}, True, "asks to wait: Too Many Requests"),
        (STATUS, {"gate": valve("gateway")}, True, "A gateway answers in the relay's place, since"),
        (STATUS, {"gate": valve("failed")}, True, "The relay fails on everything, since"),
        (STATUS, {"gate": valve("lost")}, True, "gives no whole answer"),
        (STATUS, {"gate": valve("unreachable", wait_ms=-5)}, True, "(37 tries, next now)"),
        (dataclasses.replace(STATUS, in_flight=1), CLOSED, True, "(37 tries, being tried right now)"),
        (STATUS, NO_MESSAGES, True, "The relay has no /api/messages: Not Found, since 11:42"),
        (STATUS, NO_MESSAGES, True, "Only events that go there wait"),
        (
            STATUS,
            {f"path:{MESSAGES}": valve("not_a_relay")},
            True,
            "What answers at /api/messages is no relay",
        ),
        (STATUS, {f"path:{MESSAGES}": valve("redirected")}, True, "The relay redirects /api/messages"),
        (STATUS, {f"path:{MESSAGES}": valve("forbidden")}, True, "The relay is in trouble at /api/messages"),
        (held("retry_after", "slow", 31 * MINUTE_MS), {}, True, "to wait until 12:31 (Retry-After): slow."),
        (held("forbidden", "insufficient_scope"), {}, True, "refuses this agent (403): insufficient_scope"),
        (held("in_progress"), {}, True, "still at work on an earlier try"),
        (held("lost"), {}, True, "no whole answer, 4 times, while it worked for others; attempt 5 of 12"),
        (held("gateway"), {}, True, "Only this agent waits"),
        (held("busy"), {}, True, "asks this agent to wait"),
        (held("no_endpoint"), {}, True, "has no /api/messages, asked 4 times while its other paths worked"),
        (
            held("mass_rejection", "validation_failed"),
            {f"path:{MESSAGES}": valve("", inARow=5)},
            True,
            "The last 5 events for /api/messages became dead letters in a row",
        ),
        (held("mass_rejection"), {}, True, "The last events for /api/messages"),
        (held("mass_rejection"), {}, True, "outbox resume"),
        (held("something_new", "odd"), {}, True, "It is held: odd, since 11:55"),
    ],
)
def test_what_each_reason_says(status, facts, daemon_running, said):
    """The sentence that makes the difference."""
    assert said in text(why(status, facts, daemon_running=daemon_running))


def test_a_path_of_the_settings_is_looked_up_by_it():
    """Where a kind goes is what the settings say; for one that they do not know, where it was sent last."""
    facts = {"path:/other": valve("no_endpoint")}
    assert why(facts=facts).reason == "ready"
    assert why(facts=facts, paths={"session-message": "/other"}).reason == "no_endpoint"
    strange = dataclasses.replace(HEAD, kind="report", history=({"path": "/other"},))
    assert why(dataclasses.replace(STATUS, head=strange), facts).reason == "no_endpoint"


def test_a_gap_is_no_event_to_skip():
    """Its notice is told as what it is, and nobody is asked to set it aside."""
    gap = dataclasses.replace(HEAD, kind="outbox-gap")
    told = why(dataclasses.replace(held("failed"), head=gap, waiting=0))
    assert told.lines[0].startswith("builder: only the notice of a gap waits, seq 10,234 (outbox-gap)")
    assert "skip" not in text(told)


@pytest.mark.parametrize(
    ("agent", "word"),
    [("builder", "builder"), ("team worker", "'team worker'"), ("-rf", "-- -rf"), ("a'b", "'a'\"'\"'b'")],
)
def test_names_in_commands_can_be_typed(agent, word):
    """Quoted for a shell, and behind `--` where they look like an option."""
    told = why(dataclasses.replace(STATUS, agent=agent, paused_at_ms=NOW_MS))
    assert told.lines[-1] == f"To go on: outbox resume {word}"


REASONS = {reason for table, _ in reasons._TABLES.values() for reason in table} | {"of_another_release"}


@given(
    st.sampled_from(["paused", "own", "gate", "path", "none"]),
    st.sampled_from(sorted(REASONS)),
    st.text(st.characters(exclude_characters="{}"), max_size=20),
    st.booleans(),
    st.integers(0, 3),
    st.one_of(st.none(), st.integers(0, 2 * NOW_MS)),
)
def test_every_state_can_be_told(where, reason, detail, daemon_running, in_flight, moment):
    """Whatever the files say: lines without a control character, and no placeholder left in them."""
    status, facts = dataclasses.replace(STATUS, in_flight=in_flight, agent=f"a{detail}"), {}
    fact = {"reason": reason, "detail": detail, "since": moment, "failures": 1, "nextTryAt": moment}
    if where == "paused":
        status = dataclasses.replace(status, paused_at_ms=moment)
    elif where == "own":
        status = dataclasses.replace(status, blocked=Blocked(reason, 0, moment, detail))
    elif where != "none":
        facts = {{"gate": "gate", "path": f"path:{MESSAGES}"}[where]: fact}
    told = explain(status, facts, daemon_running=daemon_running, now_ms=NOW_MS)
    assert len(told.lines) >= 2
    assert all(line and line == reasons.printable(line) for line in told.lines)
    assert not {"{", "}"} & set("".join(told.lines))
