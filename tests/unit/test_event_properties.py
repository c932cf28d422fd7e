"""What holds for every payload there can be."""

import json

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox.event import Limits, accept, draft_event, parse_event
from outbox.wire_text import message_keys, original_payload, split_batch

UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
AT = 1_790_000_000_000
KEY = "01a0c2f1-9d20-7000-8000-000000000001"
TEXT = st.text(st.characters(exclude_categories=()), max_size=12)
NAMES = TEXT | st.sampled_from(["occurredAt", "idempotencyKey", "body", "bodyTruncated", "messages"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=20,
)
OBJECTS = st.dictionaries(NAMES, VALUES, max_size=6)
SPACING = st.sampled_from([(",", ":"), (", ", " : "), ("\n,", ":\t")])


def no_number(name):
    """NaN and Infinity fail a test."""
    raise AssertionError(f"{name} is no JSON number")


def strict(text: bytes | str):
    """Strict JSON, numbers as their text, so that 1 and 1.0 differ."""
    return json.loads(
        text, parse_constant=no_number, parse_int="int {}".format, parse_float="float {}".format
    )


def accepted(draft, **limits):
    """The draft, accepted at a fixed moment under a fixed key."""
    return accept(draft, limits=Limits(**limits), agent="builder", now_ms=AT, new_key=KEY)


def expected(value, text):
    """What the relay should read for this payload."""
    added = {"occurredAt": f"int {AT}", "idempotencyKey": KEY}
    return strict(text) | added if isinstance(value, dict) else {"payload": strict(text)} | added


@UNHURRIED
@given(VALUES | OBJECTS)
def test_a_python_value_arrives_as_it_is(value):
    """The wire text is strict JSON in UTF-8, and equal to the payload with time and key set."""
    event = accepted(draft_event("insight", value, limits=Limits()))
    assert strict(event.wire_payload.decode("utf-8")) == expected(value, json.dumps(value))


@UNHURRIED
@given(VALUES | OBJECTS, SPACING, st.booleans())
def test_a_json_text_arrives_as_it_is(value, spacing, ascii_only):
    """However it was written: with blanks or without, escaped or raw."""
    text = json.dumps(value, separators=spacing, ensure_ascii=ascii_only)
    text = text.encode("utf-8", "surrogatepass").decode("utf-8", "ignore") if not ascii_only else text
    draft = parse_event(f'{{"kind":"session-message","payload":{text}}}'.encode(), Limits())
    assert draft.payload_text == text
    event = accepted(draft)
    assert strict(event.wire_payload.decode("utf-8")) == expected(value, text)
    if not isinstance(value, dict) or strict(text).keys().isdisjoint(("occurredAt", "idempotencyKey")):
        assert original_payload(event.kind, event.shape, event.wire_payload).decode() == text


@UNHURRIED
@given(OBJECTS, TEXT, st.integers(1, 12))
def test_cutting_a_body_changes_nothing_else(value, body, limit):
    """Whatever else the message holds, only body, its note, time and key can differ."""
    payload = value | {"body": body}
    draft = draft_event("session-message", payload, limits=Limits())
    sent = strict(accepted(draft, message_body_max_chars=limit).wire_payload.decode("utf-8"))
    given_body = strict(json.dumps(body))
    if len(given_body) <= limit:
        assert sent == expected(payload, json.dumps(payload))
    else:
        assert len(sent["body"]) <= limit
        assert given_body.startswith(sent["body"].removesuffix("…"))
        assert sent["bodyTruncated"] == {"originalChars": f"int {len(given_body)}"}
        changed = expected(payload, json.dumps(payload)) | {
            name: sent[name] for name in ("body", "bodyTruncated")
        }
        assert sent == changed


@UNHURRIED
@given(st.lists(VALUES | OBJECTS, min_size=1, max_size=5), OBJECTS)
def test_every_message_of_a_batch_arrives_under_its_own_key(messages, beside):
    """Messages equal what single events would have sent, but for the derived key."""
    for message in messages:
        if isinstance(message, dict):
            message.pop("idempotencyKey", None)
            message.pop("occurredAt", None)
    draft = draft_event("session-message-batch", beside | {"messages": messages}, limits=Limits())
    text = accepted(draft).wire_payload
    head, parts, tail = split_batch(text)
    assert head + b",".join(parts) + tail == text
    assert message_keys(parts) == [f"{KEY}:{index}" for index in range(len(messages))]
    for index, (message, part) in enumerate(zip(messages, parts, strict=True)):
        assert strict(part) == expected(message, json.dumps(message)) | {"idempotencyKey": f"{KEY}:{index}"}
    rest = {name: value for name, value in strict(text).items() if name != "messages"}
    assert rest == {name: value for name, value in strict(json.dumps(beside)).items() if name != "messages"}
