"""Moving an outbox: all that it holds, out of its file as lines and into another one, as it was."""

import json
import random
import tracemalloc

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
    gaps,
    kill,
    make_box,
    put,
    receipt_of,
    release,
    seqs,
    state_in,
    take,
    tool_call,
    total,
    trouble,
    try_put,
)  # fmt: skip

from outbox.errors import StoreFull, UsageError
from outbox.event import Limits, accept, parse_event
from outbox.outcome import Reason
from outbox.record import Record, Remembered
from outbox.record_line import read_line, read_record, record_line
from outbox.store.dead import discard, replay
from outbox.store.enqueue import Receipt
from outbox.store.records import everything
from outbox.store.sending import claim, head, recover, settle
from outbox.store.transfer import take_in
from outbox.store.verify import verify_counters

LATER = NOW + 5_000


def lines_of(box):
    """An export's lines of one outbox; its agent is always the builder."""
    with box.snapshot():
        return [record_line("builder", record) for record in everything(box)]


def records_in(lines, limits=None):
    """What lines hold."""
    return [read_record(read_line(line), limits or Limits()) for line in lines]


def move(box, other, *, at_once=1_000):
    """Everything of one outbox into another; what became of each."""
    records = records_in(lines_of(box))
    done = []
    for start in range(0, len(records), at_once):
        done += take_in(other, records[start : start + at_once], now_ms=LATER)
    return done


@pytest.fixture
def other(make):
    """The outbox that things are moved to."""
    return make("other")


# As it was --------------------------------------------------------------------------------------------------


def many_sorts(box):
    """An outbox with one of everything."""
    put(
        box,
        event({"n": 1, "idempotencyKey": "own", "z": 1.50}, idempotency_key="k-1"),
        event([1, "é\ud83d", None], occurred_at_ms=7),
        event({"messages": [{"a": 1}, {"b": 2, "idempotencyKey": "own"}]}, kind="session-message-batch"),
        tool_call(),
        event({"agentId": "a", "segment": 1, "text": "é" * 90}, kind="continuation-archive"),
        event({"n": 6}, mode="coalesce", dedupe_key="d"),
        event({"n": 7}, account_id="a", metadata={"m": [1.0, 2**70]}, retry={"maxAttempts": 3}),
        event({"n": 8}, traceparent="00-" + "a" * 32 + "-" + "b" * 16 + "-01", tracestate="v=1"),
        event({"n": 9}, limits=Limits(key_scope="agent")),
        event(
            {"messages": [{"a": 1, "idempotencyKey": "own"}, {"b": 2}]},
            kind="session-message-batch",
            limits=Limits(key_scope="agent"),
        ),
        event({"body": "x" * 90}, limits=Limits(message_body_max_chars=40)),
        *(event({"n": n}, kind="insight") for n in range(11, 15)),
    )
    taken = take(box, 3)
    settle(
        box,
        taken,
        [
            bury(
                taken.rows[0],
                why=trouble("rejected", status=422, code="no", detail="so", excerpt="<b>", path="/a"),
            ),
            ack(taken.rows[1]),
            release(taken.rows[2], attempts=2, why=trouble("failed", status=500), progress='{"stored":[1]}'),
        ],
        now_ms=NOW + 1,
    )
    kill(box, 1, Reason.EXHAUSTED)
    taken = take(box)
    settle(box, taken, [ack(taken.rows[0], result='{"é": 1}')], now_ms=NOW)
    kill(box)
    discard(box, 5, NOW)
    replay(box, 1, NOW)


def test_an_outbox_arrives_as_it_was(box, other):
    """Every row of events, tries, dead letters and receipts, byte for byte, but for the checksums."""
    many_sorts(box)
    done = move(box, other, at_once=3)
    assert all(isinstance(one, Receipt) and not one.duplicate for one in done)
    before, after = contents(box), contents(other)
    for table in ("events", "dead"):
        for row, copy in zip(before[table], after[table], strict=True):
            assert [*row[:10], *row[11:]] == [*copy[:10], *copy[11:]]
    assert sorted(before["receipts"]) == sorted(after["receipts"])
    assert before["tries"] == after["tries"]
    assert lines_of(other) == lines_of(box)
    taken = take(other, 100)
    assert all(row.sound for row in taken.rows)


def test_the_text_that_is_sent_never_changes(box, other):
    """Also where it does not follow from the payload: the relay may have it already, under this key."""
    put(box, event({"idempotencyKey": "mine", "n": 1, "occurredAt": 5}, idempotency_key="k"))
    wire = head(box).wire_payload
    assert wire.startswith(b'{"idempotencyKey":"k","n":1')
    move(box, other)
    assert head(other).wire_payload == wire


def test_line_breaks_of_a_payload_are_sent_as_they_were(box, other):
    """A payload may stand on several lines; a record stands on one, and what is sent stays the same."""
    line = '{"kind": "insight", "payload": {"a":\r\n 1.50,\n "b": "\\n"}, "idempotencyKey": "k"}'
    put(box, accept(parse_event(line, Limits()), limits=Limits(), agent="builder", now_ms=NOW, new_key=""))
    assert b"\r\n 1.50,\n" in head(box).wire_payload
    assert [line.count("\n") for line in lines_of(box)] == [0]
    move(box, other)
    assert head(other).wire_payload == head(box).wire_payload
    assert move(box, other)[0].duplicate


def test_random_outboxes_arrive_as_they_were(make):
    """Whatever happened to their events; the counters of both are true."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    box, other = make("one", max_events=60, max_dead=9), make("two")
    for step in range(150):
        match chance.randrange(6):
            case 0 | 1 | 2:
                payload = chance.choice([{"n": step}, [step], {"messages": [{"n": step}]}, f"é{step}"])
                kind = "session-message-batch" if "messages" in payload else "insight"
                dedupe = {"mode": "coalesce", "dedupe_key": "d"} if chance.random() < 0.2 else {}
                put(box, event(payload, kind=kind, idempotency_key=f"k-{step}", **dedupe))
            case 3 if seqs(box):
                deliver(box, chance.randint(1, 3))
            case 4 if seqs(box):
                kill(box, 1, chance.choice([Reason.REJECTED, Reason.STUCK]))
            case 5 if dead_seqs(box):
                chance.choice([replay, discard])(box, chance.choice(dead_seqs(box)), NOW)
    move(box, other, at_once=chance.randint(1, 40))
    assert lines_of(other) == lines_of(box)
    assert (verify_counters(box), verify_counters(other)) == ([], [])


def test_a_producer_is_known_where_its_outbox_went(box, other):
    """A key that was delivered, died or waits before the move is answered as before."""
    put(box, *(event({"n": n}, idempotency_key=f"k-{n}") for n in range(3)))
    deliver(box)
    kill(box)
    move(box, other)
    states = [try_put(other, event({"n": n}, idempotency_key=f"k-{n}")).state for n in range(3)]
    assert states == ["delivered", "dead", "waiting"]
    assert try_put(other, event({"n": 9}, idempotency_key="k-0")).code == "key_reused"


# Where they stand -------------------------------------------------------------------------------------------


def test_numbers_are_kept_in_a_new_outbox(box, other):
    """So that what people noted and what the history names stays true; the next event gets a new one."""
    fill(box, 6)
    deliver(box, 2)
    kill(box)
    move(box, other)
    assert (seqs(other), dead_seqs(other)) == ([4, 5, 6], [3])
    assert put(other, event({"n": 7})) == [7]


def test_the_numbers_of_what_is_gone_are_not_given_again(box, other):
    """A drained outbox arrives as receipts alone."""
    fill(box, 4)
    deliver(box, 4)
    move(box, other)
    assert put(other, event({"n": 5})) == [5]


def test_what_arrives_stands_behind_what_is_there(box, other):
    """In its own order, under new numbers where its own are taken."""
    fill(box, 4)
    deliver(box)
    fill(other, 3)
    take(other, 2)
    assert [one.seq for one in move(box, other)] == [4, 5, 6, 1]
    assert seqs(other) == [1, 2, 3, 4, 5, 6]
    assert [json.loads(row[3])["n"] for row in contents(other)["events"]] == [0, 1, 2, 1, 2, 3]


def test_nothing_is_coalesced(box, other):
    """What waits there and what arrives were both accepted."""
    put(other, event({"n": 1}, mode="coalesce", dedupe_key="d"))
    put(box, event({"n": 2}, mode="coalesce", dedupe_key="d"))
    move(box, other)
    assert len(seqs(other)) == 2
    put(other, event({"n": 3}, mode="coalesce", dedupe_key="d"))
    assert len(seqs(other)) == 1


# Twice ------------------------------------------------------------------------------------------------------


def test_twice_changes_nothing(box, other):
    """Whatever was in it."""
    many_sorts(box)
    move(box, other)
    before = contents(other)
    assert {one.duplicate for one in move(box, other)} == {True}
    assert contents(other) == before


def test_what_went_on_since_stays(box, other):
    """Delivered, dead or discarded after the first time: the second changes nothing of it."""
    fill(box, 4)
    move(box, other)
    deliver(other)
    kill(other)
    before = contents(other)
    assert [one.state for one in move(box, other)] == ["delivered", "dead", "waiting", "waiting"]
    assert contents(other) == before


def test_a_key_of_another_event_is_refused_alone(box, other):
    """What is behind it is taken."""
    put(other, event({"n": 1}, idempotency_key="k"))
    put(box, event({"n": 2}, idempotency_key="k"), event({"n": 3}))
    refused, taken = move(box, other)
    assert (type(refused), refused.code, taken.state) == (UsageError, "key_reused", "waiting")
    assert len(seqs(other)) == 2


@pytest.mark.parametrize("gone", ["discarded", "dropped"])
def test_a_dead_letter_that_was_thrown_away_comes_back(box, make, gone):
    """Exported, discarded, and taken in again when it is wanted after all; and that again."""
    other = make("other", max_dead=1)
    put(box, event({"n": 1}, idempotency_key="k"))
    kill(box)
    lines = lines_of(box)
    for _ in range(2):
        assert take_in(other, records_in(lines), now_ms=NOW)[0].state == "dead"
        if gone == "discarded":
            discard(other, dead_seqs(other)[0], NOW)
        else:
            fill(other, 1)
            kill(other)
            discard(other, dead_seqs(other)[0], NOW)
        assert (dead_seqs(other), receipt_of(other, "k")) == ([], gone)
        assert verify_counters(other) == []
    assert take_in(other, records_in(lines), now_ms=NOW)[0].state == "dead"
    assert receipt_of(other, "k") is None


# Room -------------------------------------------------------------------------------------------------------


def test_a_full_outbox_drops_nothing_for_it_and_takes_no_more(box, make):
    """Later ones would overtake; after it drained, the same import goes on where it ended."""
    other = make("other", max_events=4)
    fill(box, 6)
    fill(other, 1)
    done = move(box, other)
    assert [type(one) for one in done] == [Receipt] * 3 + [StoreFull] * 3
    assert (len(seqs(other)), gaps(other), counter(other, "dropped")) == (4, {}, 0)
    deliver(other, 4)
    assert [one.duplicate for one in move(box, other)] == [True, True, True, False, False, False]
    assert len(seqs(other)) == 3


def test_bytes_and_dead_letters_are_bounds_too(box, make):
    """The message names the bound."""
    fill(box, 3)
    kill(box, 3)
    few, small = make("few", max_dead=2), make("small", max_bytes=100)
    assert "bounds.max_dead" in str(move(box, few)[-1])
    assert "bounds.max_bytes" in str(move(box, small)[-1])
    assert (len(dead_seqs(few)), len(dead_seqs(small))) == (2, 1)


def test_a_full_disk_takes_nothing(box, state):
    """As for a producer."""
    fill(box, 1)
    other = make_box(state, "other", min_free_disk_bytes=2**62)
    with pytest.raises(StoreFull, match="are free"):
        move(box, other)
    other.close()


# What cannot go on as it was --------------------------------------------------------------------------------


def test_a_gap_is_told_once(make, other):
    """What was dropped before the move is told from where the outbox went, and not again later."""
    box = make(max_events=2)
    fill(box, 5)
    lines = lines_of(box)
    take_in(other, records_in(lines), now_ms=NOW)
    (gap,) = gaps(other).values()
    assert (gap["count"], gap["firstSeq"], gap["lastSeq"]) == (3, 1, 3)
    assert (counter(other, "waiting"), counter(other, "open_gap_seq")) == (2, None)
    assert head(other).sound
    before = contents(other)
    assert take_in(other, records_in(lines), now_ms=NOW)[0].duplicate
    assert contents(other) == before
    deliver(other, 3)
    assert all(one.duplicate for one in take_in(other, records_in(lines), now_ms=NOW))
    assert seqs(other) == []


def test_a_frozen_gap_keeps_its_text(make, other):
    """It may have been sent already."""
    box = make(max_events=2)
    fill(box, 3)
    taken = take(box)
    settle(box, taken, [release(taken.rows[0])], now_ms=NOW)
    move(box, other)
    assert head(other).wire_payload == head(box).wire_payload
    assert (head(other).kind, head(other).sends) == ("outbox-gap", 1)


def test_an_unsafe_call_in_flight_goes_to_the_dead_letters(box, other):
    """Nobody knows whether it had its effect: it is not sent again by itself, wherever it is."""
    put(box, tool_call(), tool_call())
    take(box, unsafe=True)
    move(box, other)
    assert (dead_seqs(other), seqs(other)) == ([1], [2])
    assert other.one("SELECT reason FROM dead")[0] == "outcome_unknown"
    recover(box, now_ms=NOW)


def test_a_safe_claim_in_flight_goes_as_it_is(box, other):
    """Its key tells a repeat."""
    fill(box, 2)
    take(box)
    move(box, other)
    assert (dead_seqs(other), seqs(other)) == ([], [1, 2])
    recover(box, now_ms=NOW)


@pytest.mark.parametrize(
    "damage",
    [
        "UPDATE events SET wire_payload = x'ff00' WHERE seq = 1",
        "UPDATE events SET occurred_at_ms = -5 WHERE seq = 1",
        "UPDATE events SET key = CAST(x'ff41' AS TEXT) WHERE seq = 1",
        "UPDATE events SET kind = 'insight', accepted_at_ms = 'then' WHERE seq = 1",
    ],
)
def test_a_damaged_event_is_kept_as_a_dead_letter(box, other, damage):
    """With the bytes that are left of it, to be looked at; and never sent."""
    fill(box, 2)
    with box.transaction(durable=True):
        box.run(damage)
        box.run("UPDATE outbox SET waiting_bytes = (SELECT sum(octet_length(wire_payload)) FROM events)")
    move(box, other)
    assert (dead_seqs(other), seqs(other)) == ([1], [2])
    (raw, reason) = other.one("SELECT wire_payload, reason FROM dead")
    assert (raw, reason) == (box.one("SELECT wire_payload FROM events")[0], "damaged")
    with pytest.raises(UsageError, match="damaged"):
        replay(other, 1, NOW)
    assert {one.duplicate for one in move(box, other)} == {True}


def test_an_export_is_of_one_moment(box):
    """What is enqueued, delivered or discarded meanwhile is not in it."""
    fill(box, 600)
    kill(box, 2)
    writer = make_box(box.state, box.agent)
    with box.snapshot():
        records = everything(box)
        found = [next(records)]
        fill(writer, 5)
        discard(writer, 2, NOW)
        taken = claim(writer, first(300), unsafe=False, now_ms=NOW)
        settle(writer, taken, [ack(row) for row in taken.rows], now_ms=NOW)
        found += records
    assert [record.seq for record in found] == list(range(1, 601))
    writer.close()


def test_memory_does_not_grow_with_what_is_moved(box):
    """Records are read one by one: 30 MB of events are never in memory at once."""
    put(box, *(event({"n": n, "body": "x" * 15_000}) for n in range(1_000)))
    kill(box, 1_000)
    put(box, *(event({"n": n, "body": "x" * 15_000}) for n in range(1_000)))
    tracemalloc.start()
    try:
        with box.snapshot():
            size = sum(len(record_line("builder", record)) for record in everything(box))
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert size > 30_000_000
    assert most < 2_000_000


# Lines ------------------------------------------------------------------------------------------------------


def a_line(box, **changes):
    """The line of one event, with fields exchanged (None: taken out)."""
    put(box, event({"n": 1, "idempotencyKey": "own"}, idempotency_key="k"))
    raw = json.loads(lines_of(box)[0])
    raw = {name: value for name, value in (raw | changes).items() if value is not None}
    return json.dumps(raw, separators=(",", ":"))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "sesion-message"}, 'did you mean "session-message"'),
        ({"kind": "outbox-gap"}, "made by the outbox itself"),
        ({"payload": None}, "payload is missing"),
        ({"idempotencyKey": None}, "idempotencyKey and occurredAt belong"),
        ({"occurredAt": None}, "idempotencyKey and occurredAt belong"),
        ({"idempotencyKey": "a b"}, "visible ASCII"),
        ({"occurredAt": -1}, "occurredAt"),
        ({"seq": "7"}, "seq is"),
        ({"seq": 2**62}, "seq is"),
        ({"acceptedAt": None}, "acceptedAt is missing"),
        ({"acceptedAt": 1.5}, "acceptedAt is 1.5"),
        ({"digest": "ff"}, "32 hex digits"),
        ({"history": [1]}, "history"),
        ({"history": {}}, "history"),
        ({"progress": 7}, "progress"),
        ({"attempts": True}, "attempts"),
        ({"notes": []}, "notes"),
        ({"dedupeKey": "d"}, "dedupeKey"),
        ({"wire": '{"n":2,"occurredAt":1790000000000,"idempotencyKey":"k"}'}, '"wire"'),
        ({"wire": '{"n":1,"occurredAt":1790000000000,"idempotencyKey":"other"}'}, '"wire"'),
        ({"wire": '{"n":1,"occurredAt":5,"idempotencyKey":"k"}'}, '"wire"'),
        ({"wire": '{"n":1,"occurredAt":'}, '"wire"'),
        ({"wire": "\ud83d"}, '"wire"'),
        ({"wire": {}}, '"wire"'),
        ({"type": "dead"}, "reason of a dead letter"),
        ({"type": "dead", "reason": "bad mood", "failedAt": 1}, "reason of a dead letter"),
        ({"type": "dead", "reason": "damaged", "failedAt": 1, "raw": "%"}, "base64"),
        ({"type": "receipt", "state": "waiting"}, "state of a receipt"),
        ({"type": "gap", "payload": 7}, "payload of a gap"),
        ({"type": "event", "surprise": 1}, "surprise"),
        ({"type": "note"}, "no line of an export"),
        ({"agent": ""}, "agent id is empty"),
    ],
)
def test_a_line_that_is_no_record_is_refused(box, changes, said):
    """It says what is wrong with it, as an event does at acceptance."""
    with pytest.raises(UsageError) as caught:
        read_record(read_line(a_line(box, **changes)), Limits())
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"type":"event"', b"\xff", b'{"type":"outbox-export","version":2}']
)
def test_what_is_no_line_at_all_is_refused(text):
    """And an export of a newer format says so."""
    with pytest.raises(UsageError):
        read_line(text)


HALF = json.dumps("\ud800 half")


@pytest.mark.parametrize("field", ["code", "detail", "answer", "path"])
def test_half_a_surrogate_pair_in_a_line_stops_no_import(box, other, field):
    """JSON can hold one, a file cannot: the line is taken without it."""
    put(box, event({"n": 1}))
    kill(box, reason=Reason.UNKNOWN_KIND)
    (line,) = lines_of(box)
    values = json.loads(line) | {field: "\ud800 half"}
    (receipt,) = take_in(other, records_in([json.dumps(values)]), now_ms=LATER)
    assert isinstance(receipt, Receipt)


def test_half_a_surrogate_pair_in_a_kind_is_refused(box):
    """No kind is called so, though one that is not known may wait for a release that knows it."""
    put(box, event({"n": 1}))
    kill(box, reason=Reason.UNKNOWN_KIND)
    (line,) = lines_of(box)
    with pytest.raises(UsageError, match="kind"):
        records_in([json.dumps(json.loads(line) | {"kind": "\ud800"})])


@pytest.mark.parametrize("field", ["kind", "result"])
def test_half_a_surrogate_pair_in_a_receipt_stops_no_import(box, other, field):
    """As in a dead letter."""
    put(box, tool_call())
    deliver(box)
    (line,) = lines_of(box)
    (receipt,) = take_in(other, records_in([json.dumps(json.loads(line) | {field: "\ud800"})]), now_ms=LATER)
    assert isinstance(receipt, Receipt)


@pytest.mark.parametrize("field", ["sends", "attempts", "crashes"])
def test_numbers_of_a_line_leave_room_for_more(box, other, field):
    """What a sender counts on from there must not become more than a file can hold."""
    put(box, event({"n": 1}))
    taken = take(box)
    settle(box, taken, [release(taken.rows[0], why=trouble())], now_ms=NOW)
    (line,) = lines_of(box)
    take_in(other, records_in([json.dumps(json.loads(line) | {field: 2**63 - 1})]), now_ms=LATER)
    again = take(other)
    assert recover(other, now_ms=LATER) == []
    (row,) = take(other).rows
    assert (row.sends, row.crashes) > (again.rows[0].sends, again.rows[0].crashes)


def test_a_name_in_a_line_cannot_become_two(box):
    """A name with a quote in it is an unknown field, and not the end of one."""
    line = a_line(box)[:-1] + ',"x\\":1,\\"kind":"insight"}'
    with pytest.raises(UsageError, match="not known"):
        read_record(read_line(line), Limits())


def test_the_limits_of_where_it_goes_are_checked(box):
    """Kinds, sizes and depth are; bodies are not cut again, since what was accepted does not change."""
    put(box, event({"body": "x" * 500}))
    (line,) = lines_of(box)
    (record,) = records_in([line], Limits(message_body_max_chars=20))
    assert record.event.wire_payload == head(box).wire_payload
    with pytest.raises(UsageError, match="bytes of JSON"):
        records_in([line], Limits(max_payload_bytes=100))


def test_a_letter_of_an_unknown_kind_waits_for_it_elsewhere_too(box, other):
    """A newer release wrote it; as a waiting event such a kind is refused."""
    put(box, event({"n": 1}, kind="later", limits=Limits(custom_kinds=("later",))), event({"n": 2}))
    kill(box, 1, Reason.UNKNOWN_KIND)
    move(box, other)
    assert other.one("SELECT kind, reason FROM dead") == ("later", "unknown_kind")
    line = lines_of(box)[0].replace("unknown_kind", "rejected")
    with pytest.raises(UsageError, match='kind "later" is not known'):
        records_in([line])


def test_values_come_back_equal(box):
    """A line says all that a record holds."""
    many_sorts(box)
    with box.snapshot():
        found = list(everything(box))
    assert records_in([record_line("builder", one) for one in found]) == found
    assert {type(one) for one in found} == {Record, Remembered}
    assert total(box, "discarded") == 1


def test_another_state_directory(tmp_path, box):
    """The same agent on another host has a file, an id and checksums of its own."""
    many_sorts(box)
    there = make_box(state_in(tmp_path / "there"))
    move(box, there)
    assert there.stream != box.stream
    assert lines_of(there) == lines_of(box)
    there.close()
