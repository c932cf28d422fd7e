"""The sender's side: claims by generation, settlements applied once, what is remembered of a try, crashes."""

import json
import signal
import subprocess
import sys

import pytest
from boxes import (
    NOW,
    ack,
    bury,
    contents,
    counter,
    dead_seqs,
    deliver,
    event,
    fill,
    first,
    kill,
    put,
    receipt_of,
    release,
    seqs,
    take,
    tool_call,
    total,
    trouble,
)  # fmt: skip

from outbox.errors import StoreHeld
from outbox.outcome import Ack, Blocked, Bury, Reason, Release, Trouble
from outbox.store.dead import discard, replay
from outbox.store.enqueue import enqueue
from outbox.store.file import open_outbox
from outbox.store.inspect import dead_letters, read_status
from outbox.store.people import is_paused, pause, resume, skip
from outbox.store.sending import claim, head, note_blocked, recover, settle


def test_a_claim_is_the_head_run(box):
    """In order of acceptance, as many as were chosen, and nothing behind them."""
    fill(box, 4)
    taken = take(box, 3)
    assert [row.seq for row in taken.rows] == [1, 2, 3]
    assert read_status(box).in_flight == 3


def test_nothing_is_claimed_when_nothing_is_chosen(box):
    """An empty outbox, and a choice of none, leave no claim behind."""
    assert claim(box, first(1), unsafe=False, now_ms=NOW) is None
    fill(box, 1)
    assert claim(box, lambda rows: [], unsafe=False, now_ms=NOW) is None
    assert counter(box, "claimed_through") == 0


def test_a_choice_reads_only_as_far_as_it_looks(box):
    """Rows come one by one, at most as many as allowed: a huge backlog costs nothing."""
    fill(box, 5)
    seen = []

    def choose(rows):
        seen.extend(row.seq for row in rows)
        return [head(box)]

    claim(box, choose, unsafe=False, now_ms=NOW, most=2)
    assert seen == [1, 2]


def test_results_are_applied_one_by_one(box):
    """Of one group each event goes its own way, and all the others wait in their order."""
    put(box, *(event({"n": n}, idempotency_key=f"k-{n}") for n in range(5)))
    taken = take(box, 4)
    settle(
        box,
        taken,
        [
            Ack(1, result='{"ok":true}'),
            Release(2, sent=True, attempts=1, trouble=trouble("busy", status=503)),
            Bury(
                3, Reason.REJECTED, 1, trouble("rejected", status=422, code="validation_failed", detail="no")
            ),
            Ack(4, tool_error=True),
        ],
        now_ms=NOW + 5,
        blocked=Blocked("busy", NOW, NOW + 1_000, "503"),
    )
    status = read_status(box)
    assert (status.waiting, status.in_flight, status.delivered, status.dead) == (2, 0, 1, 1)
    assert (status.head.seq, status.head.sends, status.head.attempts) == (2, 1, 1)
    assert status.blocked == Blocked("busy", NOW, NOW + 1_000, "503")
    assert [receipt_of(box, f"k-{n}") for n in range(5)] == ["delivered", None, None, "tool_error", None]
    assert box.one("SELECT result FROM receipts WHERE key = 'k-0'") == ('{"ok":true}',)
    assert total(box, "tool_error") == 1
    (letter,) = dead_letters(box)
    assert (letter.seq, letter.reason, letter.status, letter.detail) == (3, "rejected", 422, "no")
    assert (letter.attempts, letter.failed_at_ms) == (1, NOW + 5)


def test_a_row_without_a_settlement_waits_as_it_was(box):
    """What was claimed and never sent is untouched."""
    fill(box, 2)
    before = contents(box)["events"], contents(box)["tries"]
    settle(box, take(box, 2), [], now_ms=NOW)
    assert (contents(box)["events"], contents(box)["tries"]) == before
    assert counter(box, "claimed_through") == 0


def test_a_release_that_tells_nothing_new_writes_nothing(box):
    """An event cut off before a byte of it left has not been tried."""
    fill(box, 1)
    taken = take(box)
    settle(box, taken, [release(taken.rows[0], sent=False)], now_ms=NOW)
    assert head(box).first_try_at_ms is None


def test_tries_add_up(box):
    """Sends, attempts and troubles grow; the first try stays; the first trouble and the last 19 are kept."""
    fill(box, 1)
    for n in range(25):
        taken = take(box)
        row = taken.rows[0]
        settle(
            box,
            taken,
            [release(row, attempts=row.attempts + 1, why=Trouble(NOW + n, "failed", excerpt="long"))],
            now_ms=NOW + n,
        )
    row = head(box)
    assert (row.sends, row.attempts, row.first_try_at_ms) == (25, 25, NOW)
    history = json.loads(row.history)
    assert [entry["at_ms"] for entry in history] == [NOW, *(NOW + n for n in range(6, 25))]
    assert "excerpt" not in history[0]


def test_progress_is_kept_from_try_to_try(box):
    """Which parts of a batch are stored survives a release, a crash and a burial."""
    fill(box, 1)
    taken = take(box)
    settle(box, taken, [release(taken.rows[0], progress='{"stored":[0]}')], now_ms=NOW)
    take(box)
    recover(box, now_ms=NOW)
    taken = take(box)
    assert taken.rows[0].progress == '{"stored":[0]}'
    settle(box, taken, [bury(taken.rows[0])], now_ms=NOW)
    assert box.one("SELECT progress FROM dead") == ('{"stored":[0]}',)
    replay(box, 1, NOW)
    assert head(box).progress == '{"stored":[0]}'


def test_a_dead_letter_keeps_request_answer_and_history(box):
    """Everything a person needs to judge it."""
    given = event({"n": 1}, run_id="r-1", idempotency_key="k-1")
    put(box, given)
    taken = take(box)
    settle(box, taken, [release(taken.rows[0], attempts=1, why=trouble("lost"))], now_ms=NOW)
    taken = take(box)
    why = trouble(
        "rejected", status=400, code="bad", detail="half \ud800", excerpt="<p>\ud800", path="/api/x"
    )
    settle(box, taken, [bury(taken.rows[0], why=why)], now_ms=NOW + 9)
    row = box.one(
        "SELECT wire_payload, status, code, detail, answer, path, sends, attempts, first_try_at_ms, extra, "
        "history FROM dead"
    )
    assert row[:7] == (given.wire_payload, 400, "bad", "half ?", "<p>?", "/api/x", 2)
    assert row[7:9] == (1, NOW)
    assert json.loads(row[9]) == {"correlation": {"runId": "r-1"}}
    assert [entry["reason"] for entry in json.loads(row[10])] == ["lost", "rejected"]


def test_a_dead_letter_that_was_never_sent_says_so(box):
    """No send is counted and no first try made up."""
    fill(box, 1)
    taken = take(box)
    settle(box, taken, [bury(taken.rows[0], Reason.UNKNOWN_KIND, sent=False)], now_ms=NOW)
    assert box.one("SELECT sends, first_try_at_ms FROM dead") == (0, None)


@pytest.mark.parametrize(
    "text", ["half \ud83d", "\x00 in it", "é\U0001f600"], ids=["half a pair", "NUL", "not ASCII"]
)
def test_no_text_of_a_relay_keeps_a_settlement_from_being_written(box, text):
    """Results, details, progress and reasons are stored, whatever is in them."""
    fill(box, 4)
    taken = take(box, 3)
    settle(
        box,
        taken,
        [
            Ack(1, result=text),
            Release(2, sent=True, attempts=0, trouble=trouble(detail=text), progress=json.dumps({"x": text})),
            bury(taken.rows[2], why=trouble(detail=text, excerpt=text, code=text)),
        ],
        now_ms=NOW,
        blocked=Blocked("busy", NOW, None, text),
    )
    assert seqs(box) == [2, 4]
    assert read_status(box).blocked.reason == "busy"
    assert list(dead_letters(box))


# Generations ------------------------------------------------------------------------------------------------


def test_a_sender_that_lost_its_claim_changes_nothing(box):
    """P11: another one took over meanwhile."""
    fill(box, 2)
    old = take(box)
    recover(box, now_ms=NOW)
    new = take(box)
    before = contents(box)
    with pytest.raises(StoreHeld, match="Nothing was changed"):
        settle(box, old, [ack(old.rows[0])], now_ms=NOW)
    assert contents(box) == before
    settle(box, new, [ack(new.rows[0])], now_ms=NOW)
    assert counter(box, "delivered") == 1


def test_settling_twice_counts_once(box):
    """A settlement whose commit was reported lost, though it was not, may be written again."""
    fill(box, 2)
    taken = take(box)
    settle(box, taken, [ack(taken.rows[0])], now_ms=NOW)
    before = contents(box)
    settle(box, taken, [ack(taken.rows[0])], now_ms=NOW)
    assert contents(box) == before


def test_a_settlement_that_fails_changes_nothing(box):
    """All of it or nothing: the claim stays out, and can be settled then."""
    fill(box, 2)
    taken = take(box, 2)
    before = contents(box)
    with pytest.raises(KeyError):
        settle(box, taken, [ack(taken.rows[0]), Ack(99)], now_ms=NOW)
    assert contents(box) == before
    settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)
    assert seqs(box) == []


# Crashes ----------------------------------------------------------------------------------------------------


def test_nothing_in_flight_is_nothing_to_recover(box):
    """A clean stop leaves no trace in the next start."""
    fill(box, 1)
    before = contents(box)
    assert recover(box, now_ms=NOW) == []
    assert contents(box) == before


def test_crashes_count_and_from_the_third_on_they_are_attempts(box):
    """An event that kills its sender does not kill it for ever; two crashes are nobody's fault."""
    fill(box, 2)
    seen = []
    for n in range(4):
        take(box)
        recover(box, now_ms=NOW + n)
        row = head(box)
        seen.append((row.crashes, row.attempts, row.sends))
    assert seen == [(1, 0, 1), (2, 0, 2), (3, 1, 3), (4, 2, 4)]
    assert head(box).first_try_at_ms == NOW
    assert json.loads(head(box).history)[-1]["reason"] == "crashed"


def test_an_unsafe_call_in_flight_is_never_sent_again(box):
    """P3: its outcome is unknown; a person decides. What is behind it goes on."""
    put(box, tool_call(), event({"n": 1}))
    take(box, unsafe=True)
    assert recover(box, now_ms=NOW + 7) == [1]
    (letter,) = dead_letters(box)
    assert (letter.reason, letter.attempts, letter.failed_at_ms) == ("outcome_unknown", 0, NOW + 7)
    assert head(box).seq == 2


def test_a_safe_claim_after_an_unsafe_one_is_safe(box):
    """The mark belongs to one claim."""
    put(box, tool_call(), event({"n": 1}))
    taken = take(box, unsafe=True)
    settle(box, taken, [ack(taken.rows[0])], now_ms=NOW)
    take(box)
    assert recover(box, now_ms=NOW) == []


CLAIMING_PROCESS = """
import sys, time
from pathlib import Path
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.sending import claim

state = StateDirectory(Path(sys.argv[1]))
box = open_outbox(state, Path(sys.argv[2]))
box.become_sender()
claim(box, lambda rows: [next(rows)], unsafe=sys.argv[3] == "unsafe", now_ms=1)
print("claimed", flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("safety", ["safe", "unsafe"])
def test_after_kill_9_the_next_sender_takes_over(state, make, safety):
    """The lock ends with the process; the claim is on disk; the event goes again, or never if unsafe."""
    box = make()
    put(box, tool_call(idempotency_key="k-1"))
    other = subprocess.Popen(
        [sys.executable, "-c", CLAIMING_PROCESS, str(state.path), str(box.path), safety],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        assert other.stdout.readline() == "claimed\n"
        with pytest.raises(StoreHeld, match="Another process delivers"):
            box.become_sender()
        assert read_status(box).sender
        assert read_status(box).in_flight == 1
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
        other.stdout.close()
    box.become_sender()
    unknown = recover(box, now_ms=NOW)
    box.resign_sender()
    assert unknown == ([1] if safety == "unsafe" else [])
    assert seqs(box) == ([] if safety == "unsafe" else [1])
    assert not read_status(box).sender


# People -----------------------------------------------------------------------------------------------------


def test_pausing_is_remembered(box):
    """Over a new opening of the file, until somebody resumes; resuming forgets why the head waited."""
    note_blocked(box, Blocked("busy", NOW))
    pause(box, NOW)
    box.close()
    again = open_outbox(box.state, box.path)
    assert is_paused(again)
    assert read_status(again).paused_at_ms == NOW
    resume(again)
    assert (is_paused(again), read_status(again).blocked) == (False, None)
    again.close()


def test_a_skipped_event_is_a_dead_letter_and_can_be_replayed(box):
    """It was not sent, so no send is counted; its key stays its own."""
    put(box, event({"n": 1}, idempotency_key="k-1"), event({"n": 2}))
    skip(box, 1, NOW)
    assert box.one("SELECT reason, sends, detail FROM dead") == ("skipped", 0, "set aside by a person")
    assert replay(box, 1, NOW) == 3
    assert seqs(box) == [2, 3]


def test_skipping_the_head_ends_its_wait_and_no_other(box):
    """Why the head waits is forgotten when it is the head that was skipped."""
    fill(box, 3)
    note_blocked(box, Blocked("failed", NOW))
    skip(box, 2, NOW)
    assert read_status(box).blocked is not None
    skip(box, 1, NOW)
    assert read_status(box).blocked is None


def test_a_replayed_event_is_the_same_event_at_the_tail(box):
    """Same bytes, key, time and shape; new number, no attempts, and a note of what it was."""
    given = event({"n": 1}, idempotency_key="k-1", occurred_at_ms=5, run_id="r", retry={"maxAttempts": 2})
    put(box, given, event({"n": 2}))
    kill(box)
    assert replay(box, 1, NOW + 3) == 3
    deliver(box)
    row = head(box)
    assert row.sound
    assert (row.seq, row.key, row.wire_payload, row.occurred_at_ms) == (3, "k-1", given.wire_payload, 5)
    assert (row.accepted_at_ms, row.sends, row.attempts) == (NOW + 3, 0, 0)
    assert row.extra == {
        "retry": {"maxAttempts": 2}, "correlation": {"runId": "r"}, "replayedFrom": 1,
    }  # fmt: skip
    assert (counter(box, "accepted"), counter(box, "dead"), total(box, "replayed")) == (2, 0, 1)


def test_a_replayed_event_that_dies_again_can_be_replayed_again(box):
    """Each time under a new number; the note names the last one."""
    fill(box, 1)
    for seq in (1, 2, 3):
        kill(box)
        assert replay(box, seq, NOW) == seq + 1
    assert head(box).extra == {"replayedFrom": 3}


def test_a_discarded_dead_letter_is_gone_and_its_key_is_not(box):
    """Its bytes are free, and the event cannot come in again unnoticed."""
    put(box, event({"n": 1}, idempotency_key="k-1"))
    kill(box)
    discard(box, 1, NOW)
    assert (dead_seqs(box), receipt_of(box, "k-1"), counter(box, "dead_bytes")) == ([], "discarded", 0)


# Durability -------------------------------------------------------------------------------------------------

FULL, NORMAL = 2, 1


def settle_one(box):
    """Claim one event; the act is its settlement."""
    taken = take(box)
    return lambda: settle(box, taken, [ack(taken.rows[0])], now_ms=NOW)


@pytest.mark.parametrize(
    ("prepare", "level"),
    [
        (lambda box: lambda: enqueue(box, [event({"n": 9})], now_ms=NOW), FULL),
        (lambda box: lambda: take(box, unsafe=True), FULL),
        (lambda box: lambda: take(box), NORMAL),
        (settle_one, NORMAL),
        (lambda box: (take(box), lambda: recover(box, now_ms=NOW))[1], FULL),
        (lambda box: lambda: skip(box, 1, NOW), FULL),
        (lambda box: (kill(box), lambda: replay(box, 1, NOW))[1], FULL),
        (lambda box: (kill(box), lambda: discard(box, 1, NOW))[1], FULL),
        (lambda box: lambda: pause(box, NOW), FULL),
        (lambda box: lambda: note_blocked(box, None), NORMAL),
    ],
    ids=["enqueue", "unsafe claim", "claim", "settle", "recover", "skip", "replay", "discard", "pause",
         "blocked"],
)  # fmt: skip
def test_what_must_survive_a_power_cut_is_flushed(box, prepare, level):
    """Acceptance, people's acts and unsafe claims are FULL; what a lost commit only repeats is NORMAL."""
    fill(box, 2)
    act = prepare(box)
    levels = []
    box.db.trace_v2(
        1, lambda event: levels.append(box.db.pragma("synchronous")) if is_commit(event) else None
    )
    act()
    box.db.trace_v2(0, None)
    assert levels == [level]


def is_commit(event):
    """Whether a traced statement is the end of a transaction."""
    return event["sql"] == "COMMIT"
