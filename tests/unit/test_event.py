"""Drafts: what is taken, what is refused, and how the refusal speaks."""

import enum
import json
import uuid
from datetime import UTC, datetime
from types import MappingProxyType

import pytest

from outbox.errors import UsageError
from outbox.event import (
    BUILT_IN_KINDS,
    Draft,
    Limits,
    accept,
    check_agent,
    draft_event,
    parse_event,
    row_checksum,
    uuid7,
)

LIMITS = Limits()
TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
NEW_KEY = "01a0c2f1-9d20-7000-8000-000000000001"


def event_text(**fields) -> str:
    """An insight as JSON text, with these fields."""
    return json.dumps({"kind": "insight", "payload": {"n": 1}} | fields)


def accepted(draft: Draft, limits: Limits = LIMITS, agent: str = "builder"):
    """The draft, accepted at a fixed moment."""
    return accept(draft, limits=limits, agent=agent, now_ms=1_790_000_000_000, new_key=NEW_KEY)


def test_json_and_python_make_the_same_draft():
    """Every field in JSON has its twin in Python."""
    given = {
        "mode": "coalesce",
        "dedupe_key": "status",
        "occurred_at_ms": 1_790_000_000_123,
        "idempotency_key": "run-7/step-2",
        "retry": {"maxAttempts": 3, "backoff": "fixed", "initialDelayMs": 5, "maxDelayMs": 9, "jitter": 0.25},
        "account_id": "acc",
        "run_id": "run",
        "step_id": "step",
        "parent_id": "parent",
        "conversation_id": "conversation",
        "metadata": {"a": [1, {"é": None}]},
        "traceparent": TRACE,
        "tracestate": "vendor=1",
    }
    in_json = {
        "occurred_at_ms": "occurredAt",
        "idempotency_key": "idempotencyKey",
        "dedupe_key": "dedupeKey",
        "account_id": "accountId",
        "run_id": "runId",
        "step_id": "stepId",
        "parent_id": "parentId",
        "conversation_id": "conversationId",
    }
    line = json.dumps(
        {"kind": "insight", "payload": {"é": 1}}
        | {in_json.get(name, name): value for name, value in given.items()},
        ensure_ascii=False,
        separators=(",", ":"),
    )
    draft = draft_event("insight", {"é": 1}, limits=LIMITS, **given)
    assert parse_event(line, LIMITS) == draft
    assert parse_event(line.encode(), LIMITS) == draft
    assert json.loads(draft.retry) == given["retry"]
    assert json.loads(draft.correlation) == {
        "accountId": "acc",
        "runId": "run",
        "stepId": "step",
        "parentId": "parent",
        "conversationId": "conversation",
        "metadata": {"a": [1, {"é": None}]},
    }
    assert draft.payload_text == '{"é":1}'
    assert (draft.mode, draft.dedupe_key, draft.occurred_at_ms) == ("coalesce", "status", 1_790_000_000_123)
    assert (draft.idempotency_key, draft.traceparent, draft.tracestate) == (
        "run-7/step-2",
        TRACE,
        "vendor=1",
    )


def test_a_parsed_payload_keeps_its_own_text():
    """Blanks, number forms, escapes, order and duplicates of the payload stay to the letter."""
    payload = '{ "b" : 1e400,\n"a":-0.0 ,"a": "\\ud83d\\u0041\\/", "c": [ 1.50, 12345678901234567890123 ] }'
    draft = parse_event(f' {{"payload" : {payload} , "kind":"insight"}}\r\n', LIMITS)
    assert draft.payload_text == payload


def test_null_counts_as_absent_except_as_payload():
    """An optional field that is null is no field; a payload that is null is one."""
    optional = (
        "mode",
        "dedupeKey",
        "occurredAt",
        "idempotencyKey",
        "retry",
        "runId",
        "metadata",
        "traceparent",
        "lane",
        "nonsense",
    )
    draft = parse_event(event_text(payload=None, **dict.fromkeys(optional)), LIMITS)
    assert draft == Draft("insight", "null")


def test_of_a_field_given_twice_the_last_counts():
    """The last of equal names wins, also when it is written with escapes."""
    line = '{"kind":"nonsense","payload":1,"k\\u0069nd":"insight","payload":2}'
    assert parse_event(line, LIMITS) == Draft("insight", "2")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "not JSON: expecting value (column 1)"),
        ("{", "not JSON: expecting a name in double quotes (column 2)"),
        ('{"kind"', "not JSON: expecting ':' (column 8)"),
        ('{"kind":"insight"', "not JSON: expecting ',' or '}' (column 18)"),
        ('{"kind":"insight"]', "not JSON: expecting ',' or '}' (column 18)"),
        ('{"kind":"insight",}', "not JSON: expecting a name in double quotes (column 19)"),
        ('{"kind":"in\tsight"}', "not JSON: invalid control character (column 12)"),
        ('{"kind":"insight', "not JSON: unterminated string (column 9)"),
        ('{"payload":"\\x"}', "not JSON: invalid \\escape (column 13)"),
        ('{"payload":01}', "not JSON: expecting ',' or '}' (column 13)"),
        ('{"payload":[1,\n 2,\n tru]}', "not JSON: expecting value (line 3, column 2)"),
        (
            '{"payload":"NaN",\n"metadata":[1,-Infinity]}',
            "not JSON: -Infinity is no JSON number (line 2, column 15)",
        ),
        ('{"payload":"\\"NaN","p":{"q":NaN}}', "not JSON: NaN is no JSON number (column 29)"),
        ('{"payload":1} {"payload":2}', "not JSON: extra data (column 15)"),
        ("[1]", "a JSON object is expected"),
        ('"text"', "a JSON object is expected"),
    ],
)
def test_what_is_no_json_object_is_refused_with_the_column(line, message):
    """The message says what is wrong and where, in characters from 1."""
    with pytest.raises(UsageError) as refusal:
        parse_event(line, LIMITS)
    assert str(refusal.value) == message


@pytest.mark.parametrize("line", [b'{"kind":"\xff"}', '{"kind":"\udcff"}'])
def test_what_is_not_utf_8_is_refused(line):
    """Broken bytes are refused, also where Python smuggled them through a string (surrogateescape)."""
    with pytest.raises(UsageError, match=r"^not UTF-8: ") as refusal:
        parse_event(line, LIMITS)
    assert refusal.value.code == "not_json"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"payload":1}', "the kind is missing"),
        ('{"kind":null,"payload":1}', "the kind is missing"),
        ('{"kind":7,"payload":1}', "the kind is a text, not 7"),
        ('{"kind":["insight"],"payload":1}', "the kind is a text, not a list"),
        ('{"kind":"","payload":1}', 'the kind is a text, not ""'),
        (
            '{"kind":"sesion-message","payload":1}',
            'kind "sesion-message" is not known; did you mean "session-message"?',
        ),
        ('{"kind":"outbox-gap","payload":1}', 'kind "outbox-gap" is made by the outbox itself'),
        ('{"kind":"insight"}', "the payload is missing; for one without content give null"),
        (event_text(dedupekey="x"), 'field "dedupekey" is not known; did you mean "dedupeKey"?'),
        (event_text(occurred_at=1), 'field "occurred_at" is not known; did you mean "occurredAt"?'),
        (
            event_text(agent="a"),
            '"agent" is no field of an event: all events of one call are one agent\'s (--agent)',
        ),
        (event_text(lane="x"), '"lane" belongs to pull lanes, which this outbox does not have; leave it out'),
        (
            event_text(priority=1),
            '"priority" belongs to pull lanes, which this outbox does not have; leave it out',
        ),
        (
            event_text(notBefore=1),
            '"notBefore" belongs to pull lanes, which this outbox does not have; leave it out',
        ),
        (event_text(mode="sideways"), 'mode "sideways" is not known; it is append or coalesce'),
        (event_text(mode=["append"]), "mode a list is not known; it is append or coalesce"),
        (event_text(mode="coalesce"), 'mode "coalesce" needs a dedupeKey'),
        (event_text(dedupeKey="x"), 'a dedupeKey belongs to mode "coalesce"'),
        (event_text(mode="coalesce", dedupeKey=""), "the dedupeKey is empty"),
        (event_text(mode="coalesce", dedupeKey=5), "the dedupeKey is a text, not 5"),
        (event_text(idempotencyKey=""), "idempotencyKey is empty; leave it out and one is made"),
        (
            event_text(idempotencyKey="a b\r\n\u202e"),
            'idempotencyKey "a b\\r\\n\\u202e" is not 1 to 200 visible ASCII characters',
        ),
        (event_text(idempotencyKey=12), "idempotencyKey 12 is not 1 to 200 visible ASCII characters"),
        (event_text(runId=12), "runId is a text, not 12"),
        (event_text(metadata=[]), "metadata is an object, not a list"),
        (event_text(metadata="x"), 'metadata is an object, not "x"'),
        (event_text(tracestate="a=1"), "a tracestate needs a traceparent"),
        (
            event_text(traceparent=TRACE, tracestate="a\n"),
            'tracestate "a\\n" is not 1 to 512 printable ASCII characters',
        ),
    ],
)
def test_what_is_no_event_is_refused_in_plain_words(line, message):
    """One message for each thing that can be wrong; the nearest known name where there is one."""
    with pytest.raises(UsageError) as refusal:
        parse_event(line, LIMITS)
    assert str(refusal.value) == message
    assert str(refusal.value).isprintable()


def test_a_name_with_no_near_one_gets_the_list():
    """Without a guess the message lists what is known."""
    with pytest.raises(UsageError, match="known are continuation-archive, insight, "):
        draft_event("zzz", 1, limits=LIMITS)


@pytest.mark.parametrize(
    "at", [-1, 2**63, 1.0, 1e3, "1790000000000", True, [], {}, 10**30], ids=lambda at: repr(at)[:20]
)
def test_a_time_is_an_integer_of_63_bits(at):
    """No text, no truth, no float, nothing negative, nothing beyond 64 bits."""
    with pytest.raises(UsageError, match=r"^occurredAt ") as from_json:
        parse_event(event_text(occurredAt=at), LIMITS)
    with pytest.raises(UsageError) as from_python:
        draft_event("insight", 1, occurred_at_ms=at, limits=LIMITS)
    assert str(from_python.value) == str(from_json.value)


def test_a_number_with_thousands_of_digits_is_no_time():
    """Python's own limit on digits comes out as a plain refusal."""
    with pytest.raises(UsageError, match="occurredAt has a number with too many digits"):
        parse_event('{"kind":"insight","payload":1,"occurredAt":' + "7" * 5000 + "}", LIMITS)


@pytest.mark.parametrize("at", [0, 1, 2**63 - 1])
def test_the_ends_of_time_are_taken(at):
    """Zero is a time, and so is the last that fits a column."""
    assert draft_event("insight", 1, occurred_at_ms=at, limits=LIMITS).occurred_at_ms == at


@pytest.mark.parametrize(
    "trace",
    [
        "",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7",
        "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        "00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        TRACE + "\n",
        TRACE + "-more",
        5,
    ],
)
def test_a_traceparent_has_the_form_of_w3c_trace_context(trace):
    """Version 00, lower-case hex, no id of zeros only, nothing behind it."""
    with pytest.raises(UsageError, match=r"^traceparent "):
        draft_event("insight", 1, traceparent=trace, limits=LIMITS)


@pytest.mark.parametrize(
    ("retry", "stored"),
    [
        ({}, None),
        ({"maxAttempts": None}, None),
        ({"maxAttempts": 1}, {"maxAttempts": 1}),
        ({"jitter": True}, {"jitter": 0.5}),
        ({"jitter": False}, {"jitter": 0}),
        ({"jitter": 1}, {"jitter": 1}),
        ({"backoff": "exponential", "maxDelayMs": 0}, {"backoff": "exponential", "maxDelayMs": 0}),
    ],
)
def test_a_retry_rule_is_stored_in_one_form(retry, stored):
    """What is null is left out; jitter is always a number."""
    text = draft_event("insight", 1, retry=retry, limits=LIMITS).retry
    assert (None if text is None else json.loads(text)) == stored


@pytest.mark.parametrize(
    "retry",
    [
        "fixed",
        [],
        {"maxAttempts": 0},
        {"maxAttempts": 1001},
        {"maxAttempts": True},
        {"maxAttempts": 1.5},
        {"backoff": "linear"},
        {"backoff": ["fixed"]},
        {"initialDelayMs": -1},
        {"maxDelayMs": 10**12},
        {"jitter": 1.1},
        {"jitter": -0.1},
        {"jitter": float("nan")},
        {"jitter": "half"},
        {"initialDelayMs": 10, "maxDelayMs": 9},
        {"max_attempts": 3},
        {3: 3},
    ],
    ids=repr,
)
def test_what_is_no_retry_rule_is_refused(retry):
    """Unknown names, wrong types and values out of range are errors of the caller."""
    with pytest.raises(UsageError, match=r"^retry"):
        draft_event("insight", 1, retry=retry, limits=LIMITS)


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (
            {"a": [1, {"when": datetime(2026, 11, 30, tzinfo=UTC)}]},
            "payload.a[1].when: a datetime is no JSON value",
        ),
        ({"a": {"b": float("nan")}}, "payload.a.b: nan is no JSON number"),
        ([float("-inf")], "payload[0]: -inf is no JSON number"),
        (b"bytes", "payload: a bytes is no JSON value"),
        ({"a": {(1, 2): 3}}, "payload.a: a key is a tuple, which is no JSON name"),
        ({1: {2: set()}}, "payload.1.2: a set is no JSON value"),
    ],
)
def test_a_value_that_is_no_json_is_refused_with_its_place(payload, message):
    """The caller learns where in the payload it stands."""
    with pytest.raises(UsageError) as refusal:
        draft_event("insight", payload, limits=LIMITS)
    assert str(refusal.value) == message


def test_a_payload_that_holds_itself_is_refused():
    """A circle is an error of the caller, not an endless loop."""
    circle: list = []
    circle.append(circle)
    with pytest.raises(UsageError, match="holds itself") as refusal:
        draft_event("insight", circle, limits=LIMITS)
    assert refusal.value.code == "too_deep"


def test_an_integer_beyond_pythons_digits_is_refused():
    """Python will not write 5000 digits; that is a refusal like any other."""
    with pytest.raises(UsageError, match=r"^payload: .*digits"):
        draft_event("insight", 7 * 10**5000, limits=LIMITS)


@pytest.mark.parametrize("bracket", ["[]", "{}"])
def test_nesting_has_a_limit_that_ignores_strings(bracket):
    """500 levels inside the payload are taken, 501 are not; brackets in strings are none."""

    def nested(levels):
        opening = "[" if bracket == "[]" else '{"\\"[{\\\\":'
        return '{"kind":"insight","payload":' + opening * levels + '"[[[\\""' + bracket[1] * levels + "}"

    draft = parse_event(nested(501), LIMITS)
    assert accepted(draft).shape == ("value" if bracket == "[]" else "object")
    for levels in (502, 5000):
        with pytest.raises(UsageError, match="nested") as refusal:
            parse_event(nested(levels), LIMITS)
        assert refusal.value.code == "too_deep"


def test_the_nesting_limit_holds_for_python_values_and_metadata():
    """Both ways in, and both places where a producer can nest."""
    deep: list = []
    for _ in range(10):
        deep = [deep]
    limits = Limits(max_nesting=5)
    with pytest.raises(UsageError, match="the payload is nested more than 5 levels deep"):
        draft_event("insight", deep, limits=limits)
    with pytest.raises(UsageError, match="metadata is nested more than 5 levels deep"):
        draft_event("insight", 1, metadata={"deep": deep}, limits=limits)


def test_many_flat_brackets_are_not_deep():
    """Ten thousand neighbours are one level."""
    assert draft_event("insight", [[] for _ in range(10_000)], limits=Limits(max_nesting=1))


@pytest.mark.parametrize(
    ("payload", "limit", "taken"),
    [("é" * 10, 22, True), ("é" * 10, 21, False), ("x" * 20, 22, True), ("x" * 20, 21, False)],
)
def test_the_size_limit_counts_bytes_of_utf_8(payload, limit, taken):
    """The JSON text as it is stored is what counts, quotes included."""
    limits = Limits(max_payload_bytes=limit)
    if taken:
        assert draft_event("insight", payload, limits=limits)
    else:
        with pytest.raises(UsageError, match="22 bytes of JSON, more than the 21 allowed"):
            draft_event("insight", payload, limits=limits)


def test_metadata_has_a_limit_of_its_own():
    """What is stored beside the payload is bounded too."""
    with pytest.raises(UsageError, match="more than the 65,536 allowed"):
        draft_event("insight", 1, metadata={"x": "y" * 70_000}, limits=LIMITS)


def test_any_mapping_is_metadata():
    """A frozen mapping is one too."""
    draft = draft_event("insight", 1, metadata=MappingProxyType({"a": 1}), limits=LIMITS)
    assert draft.correlation == '{"metadata":{"a":1}}'


def test_custom_kinds_are_known_and_the_gap_is_not():
    """Kinds of the configuration are taken, but none may speak as the outbox itself."""
    limits = Limits(custom_kinds=("build-report", "outbox-gap"))
    assert draft_event("build-report", 1, limits=limits).kind == "build-report"
    with pytest.raises(UsageError, match="made by the outbox itself"):
        draft_event("outbox-gap", 1, limits=limits)
    with pytest.raises(UsageError, match='did you mean "build-report"') as refusal:
        draft_event("buildreport", 1, limits=limits)
    assert refusal.value.code == "unknown_kind"


def test_acceptance_uses_key_and_time_of_the_producer_or_makes_them():
    """What the producer gave stands; the rest is given at acceptance, and it is known which."""
    made = accepted(draft_event("insight", {}, limits=LIMITS))
    assert (made.key, made.occurred_at_ms, made.key_given) == (NEW_KEY, 1_790_000_000_000, False)
    given = accepted(draft_event("insight", {}, idempotency_key="k", occurred_at_ms=0, limits=LIMITS))
    assert (given.key, given.occurred_at_ms, given.key_given) == ("k", 0, True)


def test_acceptance_carries_the_rest_of_the_draft_along():
    """Nothing of a draft is lost on the way to the store."""
    draft = draft_event(
        "insight",
        {},
        mode="coalesce",
        dedupe_key="d",
        retry={"maxAttempts": 2},
        run_id="r",
        traceparent=TRACE,
        tracestate="a=1",
        limits=LIMITS,
    )
    event = accepted(draft)
    for name in ("kind", "mode", "dedupe_key", "retry", "correlation", "traceparent", "tracestate"):
        assert getattr(event, name) == getattr(draft, name)


def test_the_digest_tells_content_and_not_time():
    """The same key with the same content is a duplicate, whenever; with another kind or payload it is not."""

    def digest(kind, payload, at=None):
        return accepted(draft_event(kind, payload, occurred_at_ms=at, limits=LIMITS)).digest

    assert len(digest("insight", {"a": 1})) == 16
    assert digest("insight", {"a": 1}, at=5) == digest("insight", {"a": 1}, at=6)
    assert digest("insight", {"a": 1}) != digest("insight", {"a": 2})
    assert digest("insight", {"a": 1}) != digest("session-message", {"a": 1})


def test_every_built_in_kind_has_a_path():
    """The table of kinds is that of the contract."""
    assert all(path.startswith("/api/") for path in BUILT_IN_KINDS.values())
    assert len(BUILT_IN_KINDS) == 5


@pytest.mark.parametrize(
    ("agent", "message"),
    [
        ("", "the agent id is empty"),
        ("a\0b\x1b", 'the agent id "a\\x00b\\x1b" has a NUL in it'),
        ("half \ud83d", 'the agent id "half \\ud83d" has half a surrogate pair in it'),
        (None, "the agent id is a text, not null"),
        (b"a", "the agent id is a text, not a bytes"),
        ("é" * 257, f'the agent id "{"é" * 80}…" is 514 bytes, more than 512'),
    ],
)
def test_an_agent_id_that_cannot_be_one_is_shown_in_printable_form(agent, message):
    """No control character reaches the terminal, and a long id does not fill it."""
    with pytest.raises(UsageError) as refusal:
        check_agent(agent)
    assert str(refusal.value) == message


def test_an_agent_id_of_512_bytes_is_taken():
    """The limit counts bytes, and is inclusive."""
    assert check_agent("é" * 256) == "é" * 256


def test_the_checksum_covers_every_column_it_is_told():
    """A row that stands in another place, or was changed in one column, does not match."""
    row = ("stream", 5, "insight", "key", 1_790_000_000_000, b"{}")
    others = ("other", 6, "session-message", "kez", 1, b"[]")
    changed = [(*row[:column], other, *row[column + 1 :]) for column, other in enumerate(others)]
    sums = {row_checksum(*columns) for columns in (row, *changed)}
    assert len(sums) == 7
    assert all(0 <= checksum < 2**32 for checksum in sums)


def test_a_uuid7_is_one_and_sorts_by_time():
    """Time in front, version 7, variant of RFC 9562, and the rest from chance."""
    made = uuid.UUID(uuid7(1_790_000_000_123, b"\xff" * 10))
    assert made.version == 7
    assert made.variant == uuid.RFC_4122
    assert made.int >> 80 == 1_790_000_000_123
    assert uuid7(1_790_000_000_123, b"\xff" * 10) < uuid7(1_790_000_000_124, b"\0" * 10)
    # The example of RFC 9562, appendix A.6.
    chance = (0xCC3 << 62 | 0x18C4DC0C0C07398F).to_bytes(10, "big")
    assert uuid7(0x017F22E279B0, chance) == "017f22e2-79b0-7cc3-98c4-dc0c0c07398f"


def test_members_of_a_text_enum_count_as_their_text():
    """Programs name their kinds in enums; what is stored is the plain text and number."""

    class Kind(str, enum.Enum):  # noqa: UP042 - the form that programs have
        INSIGHT = "insight"

    class Moment(enum.IntEnum):
        START = 5

    limits = Limits()
    draft = draft_event(
        Kind.INSIGHT, 1, idempotency_key=Kind.INSIGHT, occurred_at_ms=Moment.START, limits=limits
    )
    assert draft == draft_event("insight", 1, idempotency_key="insight", occurred_at_ms=5, limits=limits)
    assert [type(value) for value in (draft.kind, draft.idempotency_key, draft.occurred_at_ms)] == [
        str,
        str,
        int,
    ]


def test_an_endless_integer_as_time_is_refused_too():
    """Python refuses to print it; the refusal does not."""
    with pytest.raises(UsageError, match="occurredAt a number beyond 128 bits is no whole number"):
        draft_event("insight", 1, occurred_at_ms=10**5000, limits=Limits())
