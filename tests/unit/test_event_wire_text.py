"""The wire text: what the relay gets for each kind, and how it comes apart again."""

import json
import re

import pytest

from outbox.errors import UsageError
from outbox.event import Limits, accept, draft_event, parse_event
from outbox.wire_text import (
    ARCHIVE_BYTES,
    CHUNK_BYTES,
    archive_chunks,
    message_keys,
    original_payload,
    split_batch,
    wire_key,
)

AT = 1_790_000_000_000
KEY = "01a0c2f1-9d20-7000-8000-000000000001"
STAMP = f'"occurredAt":{AT},"idempotencyKey":"{KEY}"'
HASH = re.compile(r"[0-9a-f]{16}")


def accepted(kind, payload, *, agent="builder", **limits):
    """An event with this payload (JSON text), accepted at a fixed moment under a fixed key."""
    its_limits = Limits(**limits)
    draft = parse_event(f'{{"kind":"{kind}","payload":{payload}}}', its_limits)
    return accept(draft, limits=its_limits, agent=agent, now_ms=AT, new_key=KEY)


def wire(kind, payload, **limits):
    """The wire text as text."""
    return accepted(kind, payload, **limits).wire_payload.decode()


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ("{}", f"{{{STAMP}}}"),
        ("{ \n }", f"{{ \n {STAMP}}}"),
        ('{"a":1}', f'{{"a":1,{STAMP}}}'),
        ('{ "a" : 1e400 , "a":2 }', f'{{ "a" : 1e400 , "a":2 ,{STAMP}}}'),
        ('{"a":{"occurredAt":1}}', f'{{"a":{{"occurredAt":1}},{STAMP}}}'),
        ('{"occurredAt":5,"a":1}', f'{{"occurredAt":{AT},"a":1,"idempotencyKey":"{KEY}"}}'),
        (
            '{"a":1,"idempotencyKey":null,"b":2}',
            f'{{"a":1,"idempotencyKey":"{KEY}","b":2,"occurredAt":{AT}}}',
        ),
        ('{"occurr\\u0065dAt":5,"a":[1, 2]}', f'{{"occurredAt":{AT},"a":[1, 2],"idempotencyKey":"{KEY}"}}'),
        ('{"occurredAt":1,"x":0,"occurredAt":2}', f'{{"occurredAt":{AT},"x":0,"idempotencyKey":"{KEY}"}}'),
        ('{"a":"\\u001b[0m"}', f'{{"a":"\\u001b[0m",{STAMP}}}'),
        ('{"a":"\\u007f",  "b":"\\"occurredAt\\""}', f'{{"a":"\\u007f",  "b":"\\"occurredAt\\"",{STAMP}}}'),
    ],
)
def test_an_object_keeps_its_text_and_gets_time_and_key(payload, text):
    """Only members of these two names change; they are found by name, however it is written."""
    for kind in ("insight", "session-message"):
        event = accepted(kind, payload)
        assert event.wire_payload.decode() == text
        assert event.shape == "object"


@pytest.mark.parametrize("payload", ["null", '""', "[]", "0", "false", "[1, {}]", "1e400"])
def test_what_is_no_object_travels_in_one(payload):
    """Any other value stands under "payload", with its own text."""
    event = accepted("insight", payload)
    assert event.wire_payload.decode() == f'{{"payload":{payload},{STAMP}}}'
    assert event.shape == "value"


def test_a_key_is_escaped_where_json_asks_for_it():
    """Quotes and backslashes are visible ASCII too."""
    limits = Limits()
    draft = draft_event("insight", {}, idempotency_key='a"b\\c', limits=limits)
    event = accept(draft, limits=limits, agent="a", now_ms=AT, new_key=KEY)
    assert json.loads(event.wire_payload)["idempotencyKey"] == event.key == 'a"b\\c'


def test_keys_can_be_scoped_to_the_agent():
    """On the wire the agent's hash stands before the key; the key itself stays the producer's."""
    event = accepted("insight", "{}", key_scope="agent")
    assert (event.key, event.scoped) == (KEY, True)
    sent = json.loads(event.wire_payload)["idempotencyKey"]
    assert sent == wire_key(KEY, "builder", scoped=True)
    scope, key = sent.split(":")
    assert HASH.fullmatch(scope)
    assert key == KEY
    assert sent != wire_key(KEY, "reviewer", scoped=True)
    assert wire_key(KEY, "builder", scoped=False) == KEY
    assert accepted("insight", "{}").scoped is False


# Message bodies


def test_a_long_body_is_cut_and_says_so():
    """The body becomes shorter, a member tells how long it was, and nothing else changes."""
    text = wire(
        "session-message",
        '{"n":1e400,"body":"' + "\\u0078" * 500 + '","to" : "b"}',
        message_body_max_chars=200,
    )
    sent = json.loads(text)
    assert sent["body"].startswith("xxx")
    assert sent["body"].endswith("… [cut by the outbox: 500 characters in all]")
    assert len(sent["body"]) == 200
    assert sent["bodyTruncated"] == {"originalChars": 500}
    assert text.startswith('{"n":1e400,"body":"xxx')
    assert '"to" : "b"' in text
    assert (sent["occurredAt"], sent["idempotencyKey"]) == (AT, KEY)


@pytest.mark.parametrize(
    "payload",
    [
        '{"body":"12345678901234567890"}',
        '{"body":"' + "\\ud83d\\ude80" * 20 + '"}',
        '{"text":"' + "x" * 100 + '"}',
        '{"body":{"text":"' + "x" * 100 + '"}}',
        '{"inner":{"body":"' + "x" * 100 + '"}}',
        '"' + "x" * 100 + '"',
    ],
)
def test_what_is_no_long_body_keeps_its_text(payload):
    """Only a text under `body` counts, as many characters as it has when read; at the limit it is whole."""
    text = wire("session-message", payload, message_body_max_chars=20)
    assert payload.removesuffix("}") in text
    assert "bodyTruncated" not in text


def test_only_session_messages_are_cut():
    """The limit is one of messages."""
    payload = '{"body":"' + "x" * 100 + '"}'
    assert payload[:-1] in wire("insight", payload, message_body_max_chars=20)


@pytest.mark.parametrize("limit", [None, 0])
def test_without_a_limit_nothing_is_cut(limit):
    """None and 0 mean: off."""
    assert "bodyTruncated" not in wire("session-message", '{"body":"xxxx"}', message_body_max_chars=limit)


def test_of_several_bodies_the_last_counts_and_stays_alone_when_cut():
    """The value a reader would see is the one that is cut; an own member of the added name is replaced."""
    payload = '{"body":"short","bodyTruncated":false,"body":"' + "y" * 90 + '","bodyTruncated":null}'
    sent = json.loads(wire("session-message", payload, message_body_max_chars=10), object_pairs_hook=list)
    assert sent == [
        ("body", "yyyyyyyyy…"),
        ("bodyTruncated", [("originalChars", 90)]),
        ("occurredAt", AT),
        ("idempotencyKey", KEY),
    ]


# Batches


def test_each_message_of_a_batch_gets_what_it_lacks():
    """Own key and time stay; others follow from the event's; what is beside the messages stays as it is."""
    payload = (
        '{"note": 1.0, "messages": [ {"a":1} , {"idempotencyKey":"mine","occurredAt":5}, "text", '
        '{"idempotencyKey":null,"b":2,"occurredAt":null}], "occurredAt": 3}'
    )
    event = accepted("session-message-batch", payload)
    assert event.shape == "batch"
    assert event.wire_payload.decode() == (
        '{"note": 1.0,"messages":['
        f'{{"a":1,"occurredAt":{AT},"idempotencyKey":"{KEY}:0"}},'
        '{"idempotencyKey":"mine","occurredAt":5},'
        f'{{"payload":"text","occurredAt":{AT},"idempotencyKey":"{KEY}:2"}},'
        f'{{"idempotencyKey":"{KEY}:3","b":2,"occurredAt":{AT}}}'
        '],"occurredAt": 3}'
    )
    _, messages, _ = split_batch(event.wire_payload)
    assert message_keys(messages) == [f"{KEY}:0", "mine", f"{KEY}:2", f"{KEY}:3"]


def test_a_bare_array_is_a_batch():
    """The array becomes the messages of an object."""
    assert wire("session-message-batch", " [ {} ]") == (
        f'{{"messages":[{{"occurredAt":{AT},"idempotencyKey":"{KEY}:0"}}]}}'
    )


def test_bodies_in_a_batch_are_cut_one_by_one():
    """The limit holds for each message, not for the batch."""
    payload = json.dumps([{"body": "x" * 30}, {"body": "y" * 5}])
    sent = json.loads(wire("session-message-batch", payload, message_body_max_chars=10))["messages"]
    assert [message["body"] for message in sent] == ["x" * 9 + "…", "yyyyy"]
    assert ["bodyTruncated" in message for message in sent] == [True, False]


def test_scoped_keys_in_a_batch_carry_the_scope_once():
    """Own keys are scoped like an event's; an exported batch, scoped already, is not scoped again."""
    own = wire_key("mine", "builder", scoped=True)
    text = wire("session-message-batch", '[{"idempotencyKey":"mine"},{}]', key_scope="agent")
    _, messages, _ = split_batch(text.encode())
    assert message_keys(messages) == [own, wire_key(f"{KEY}:1", "builder", scoped=True)]
    assert wire("session-message-batch", text, key_scope="agent") == text


def test_a_batch_comes_apart_and_together_again():
    """Any choice of the messages between head and tail is a request."""
    payload = '{"x":{"messages":[9]},"messages":[{"a":"]"},{"b":[1,[2]]},3],"y":"],"}'
    text = accepted("session-message-batch", payload).wire_payload
    head, messages, tail = split_batch(text)
    assert head + b",".join(messages) + tail == text
    assert head == b'{"x":{"messages":[9]},"messages":['
    chosen = json.loads(head + b",".join(messages[1:]) + tail)
    assert chosen["messages"] == [json.loads(message) for message in messages[1:]]
    assert chosen["y"] == "],"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("[]", "a batch holds 1 to 10,000 messages, not 0"),
        ('{"messages":[]}', "a batch holds 1 to 10,000 messages, not 0"),
        ("[" + "0," * 10_000 + "0]", "a batch holds 1 to 10,000 messages, not 10,001"),
        ("{}", 'a batch is {"messages": [...]} or an array of messages'),
        ('{"messages":{}}', 'a batch is {"messages": [...]} or an array of messages'),
        ("null", 'a batch is {"messages": [...]} or an array of messages'),
        ('"[]"', 'a batch is {"messages": [...]} or an array of messages'),
        (
            '[{},{"idempotencyKey":""}]',
            "message 1 of the batch: idempotencyKey is empty; leave it out and one is made",
        ),
        (
            '[{"idempotencyKey":7}]',
            "message 0 of the batch: idempotencyKey 7 is not 1 to 200 visible ASCII characters",
        ),
        (
            '[{"occurredAt":1.5}]',
            "message 0 of the batch: occurredAt 1.5 is no whole number of epoch milliseconds, 0 to 2^63-1",
        ),
        (
            '[{"idempotencyKey":"k"},{},{"idempotencyKey":"\\u006b"}]',
            "messages 0 and 2 of the batch have the same idempotencyKey",
        ),
    ],
)
def test_what_is_no_batch_is_refused(payload, message):
    """The refusal names the message by its index."""
    with pytest.raises(UsageError) as refusal:
        accepted("session-message-batch", payload)
    assert str(refusal.value) == message


def test_an_own_key_must_not_be_one_that_another_message_gets():
    """A key belongs to one message for ever, derived ones included."""
    with pytest.raises(UsageError, match="messages 0 and 1 of the batch have the same"):
        draft_event(
            "session-message-batch", [{"idempotencyKey": "k:1"}, {}], idempotency_key="k", limits=Limits()
        )


def test_ten_thousand_messages_are_a_batch():
    """The bound on a batch is inclusive."""
    event = accepted("session-message-batch", "[" + "{}," * 9_999 + "{}]")
    assert len(set(message_keys(split_batch(event.wire_payload)[1]))) == 10_000


# Tool calls


@pytest.mark.parametrize(
    ("payload", "text"),
    [
        ('{"tool":"t","arguments":{ "x":1e400 }}', '{"name":"t","arguments":{ "x":1e400 }}'),
        ('{"arguments":null,"tool":"\\u00e9"}', '{"name":"\\u00e9","arguments":{}}'),
        ('{"tool":"a","tool":"b"}', '{"name":"b","arguments":{}}'),
    ],
)
def test_a_tool_call_becomes_the_params_of_a_request(payload, text):
    """Name and arguments keep their own text; key and time travel beside them."""
    event = accepted("mcp-tool-call", payload)
    assert event.wire_payload.decode() == text
    assert (event.shape, event.tool) == ("tool", json.loads(text)["name"])


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        ("[]", 'a tool call is {"tool": NAME, "arguments": {...}}'),
        ("{}", 'a tool call needs "tool", the name of the tool, as a text'),
        ('{"tool":""}', 'a tool call needs "tool", the name of the tool, as a text'),
        ('{"tool":1}', 'a tool call needs "tool", the name of the tool, as a text'),
        ('{"tool":"\\ud83d"}', 'the tool "\\ud83d" has half a surrogate pair in it'),
        ('{"tool":"t","arguments":[]}', '"arguments" of a tool call is an object'),
        ('{"tool":"t","args":{}}', 'field "args" is not known; did you mean "arguments"?'),
    ],
)
def test_what_is_no_tool_call_is_refused(payload, message):
    """A tool, an object of arguments, and nothing else: what else there is would be lost on the way."""
    with pytest.raises(UsageError) as refusal:
        accepted("mcp-tool-call", payload)
    assert str(refusal.value) == message


# Continuation archives


def archive(text, **more):
    """An archive's payload as JSON text."""
    return json.dumps({"agentId": "builder", "segment": 3, "text": text} | more, ensure_ascii=False)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "short",
        "x" * CHUNK_BYTES,
        "x" * (CHUNK_BYTES + 1),
        "🚀" * (CHUNK_BYTES // 4 * 3 + 1),
        "é" + "🚀" * CHUNK_BYTES,
        "\ud83d" * CHUNK_BYTES,
        '"\\\n\0' * CHUNK_BYTES,
    ],
    ids=range(8),
)
def test_chunks_join_to_the_text_and_are_the_same_bytes_each_time(text):
    """Each chunk is at most 56 KiB of UTF-8 and cut between characters; empty text is one chunk."""
    wire_payload = accepted(
        "continuation-archive", json.dumps({"agentId": "b", "segment": "s", "text": text})
    )
    parts = archive_chunks(wire_payload.wire_payload)
    bodies = [parts.chunk(index, 7, "K") for index in range(parts.total)]
    chunks = [json.loads(body) for body in bodies]
    assert "".join(chunk["text"] for chunk in chunks) == text
    *full, last = [len(chunk["text"].encode("utf-8", "surrogatepass")) for chunk in chunks]
    assert all(CHUNK_BYTES - 3 <= size <= CHUNK_BYTES for size in full)
    assert last <= CHUNK_BYTES
    assert last > 0 or text == ""
    again = archive_chunks(wire_payload.wire_payload)
    assert [again.chunk(index, 7, "K") for index in range(again.total)] == bodies


def test_a_chunk_says_whose_it_is_and_where_it_belongs():
    """The members of the contract, in its order; the generation once it is known."""
    parts = archive_chunks(accepted("continuation-archive", archive("text")).wire_payload)
    start, end = '{"agentId":"builder","segment":3,', f'"occurredAt":{AT},"idempotencyKey":"K:0"}}'
    middle = '"chunkIndex":0,"totalChunks":1,"text":"text",'
    assert parts.chunk(0, None, "K").decode() == start + middle + end
    assert parts.chunk(0, 0, "K").decode() == start + '"generation":0,' + middle + end


def test_a_generation_of_the_producers_goes_before_the_relays():
    """What the producer gave is used from the first chunk on; null is none."""
    parts = archive_chunks(accepted("continuation-archive", archive("", generation=4)).wire_payload)
    assert json.loads(parts.chunk(0, None, "K"))["generation"] == 4
    assert json.loads(parts.chunk(0, 9, "K"))["generation"] == 4
    parts = archive_chunks(accepted("continuation-archive", archive("", generation=None)).wire_payload)
    assert "generation" not in json.loads(parts.chunk(0, None, "K"))


def test_other_members_of_an_archive_travel_with_each_chunk():
    """Everything else of a payload arrives as it was given; what the outbox counts itself does not."""
    payload = archive("x" * (CHUNK_BYTES + 1), why="compaction", chunkIndex=99, occurredAt=5)
    parts = archive_chunks(accepted("continuation-archive", payload).wire_payload)
    chunks = [json.loads(parts.chunk(index, None, "K")) for index in range(parts.total)]
    assert [(chunk["why"], chunk["chunkIndex"], chunk["occurredAt"]) for chunk in chunks] == [
        ("compaction", 0, AT),
        ("compaction", 1, AT),
    ]


def test_an_archive_beyond_8_mib_is_cut_visibly_and_counted():
    """Its size never makes it refused: the rest is cut between characters, and how much is noted."""
    event = accepted(
        "continuation-archive", archive("🚀" * (ARCHIVE_BYTES // 4 + 1000)), max_payload_bytes=1000
    )
    text = json.loads(event.wire_payload)["text"]
    assert len(text.encode()) <= ARCHIVE_BYTES
    kept, marker = text.split("…")
    assert set(kept) == {"🚀"}
    assert marker == " [cut by the outbox: 8,392,608 bytes in all]"
    assert event.notes == {"archive_cut_bytes": 8_392_608 - len(kept.encode())}
    assert (event.shape, json.loads(event.wire_payload)["idempotencyKey"]) == ("archive", KEY)


def test_an_archive_of_8_mib_is_whole_however_it_is_escaped():
    """What counts is the text, not how the producer wrote it."""
    payload = '{"agentId":"b","segment":1,"text":"' + "\\u00e9" * (ARCHIVE_BYTES // 2) + '"}'
    event = accepted("continuation-archive", payload)
    assert event.notes == {}
    assert event.wire_payload.decode().startswith(payload[:-1])


@pytest.mark.parametrize(
    "payload",
    [
        "[]",
        "{}",
        '{"agentId":"b","segment":1}',
        '{"agentId":"b","segment":1,"text":null}',
        '{"agentId":"b","segment":1,"text":5}',
        '{"agentId":"b","segment":null,"text":""}',
        '{"agentId":"b","text":""}',
        '{"agentId":"","segment":1,"text":""}',
        '{"agentId":5,"segment":1,"text":""}',
        '{"segment":1,"text":""}',
        '{"agentId":"b","segment":1,"text":"","generation":"1"}',
        '{"agentId":"b","segment":1,"text":"","generation":1.5}',
    ],
)
def test_what_is_no_archive_is_refused(payload):
    """Whose it is, which segment, and a text: without these no chunk can be made."""
    with pytest.raises(UsageError, match="continuation archive"):
        accepted("continuation-archive", payload)


def test_beside_its_text_an_archive_has_the_usual_limit():
    """Only the text is cut; the rest goes with every chunk and is bounded."""
    with pytest.raises(UsageError, match='"why" is 102 bytes of JSON, more than the 101 allowed'):
        accepted("continuation-archive", archive("x" * 200, why="y" * 100), max_payload_bytes=101)


# Back again


@pytest.mark.parametrize(
    ("kind", "payload"),
    [
        ("insight", "{}"),
        ("insight", "{ }"),
        ("insight", '{ "a" : 1e400 , "a":2 }'),
        ("session-message", '{"body":"x","n":{"occurredAt":1}}'),
        ("insight", "null"),
        ("insight", "[1, 2.50]"),
        ("insight", '"\\ud83d"'),
        ("mcp-tool-call", '{"tool":"t","arguments":{ "x" : 1 }}'),
        ("continuation-archive", '{"agentId":"b","segment":1, "text":"t"}'),
    ],
)
def test_the_payload_comes_back_to_the_letter(kind, payload):
    """What was exported can be given again and is the same event: same wire text, same digest."""
    event = accepted(kind, payload)
    back = original_payload(kind, event.shape, event.wire_payload)
    assert back.decode() == payload
    assert accepted(kind, back.decode()) == event


def test_a_payload_with_own_members_of_these_names_comes_back_without():
    """What the producer had in their place is gone; the rest is there."""
    event = accepted("insight", '{"a":1,"occurredAt":5,"b":[1, 2]}')
    assert original_payload("insight", "object", event.wire_payload) == b'{"a":1,"b":[1, 2]}'


def test_a_batch_comes_back_complete_or_without_what_followed_from_its_event():
    """Complete, it makes the same wire text again; with key and time told, another key can be given to it."""
    given = '{"messages":[{"a":1},{"idempotencyKey":"mine","occurredAt":5},{"b":2,"occurredAt":6}]}'
    event = accepted("session-message-batch", given)
    complete = original_payload(event.kind, event.shape, event.wire_payload)
    assert complete == event.wire_payload
    assert wire("session-message-batch", complete.decode()).encode() == event.wire_payload
    back = original_payload(event.kind, event.shape, event.wire_payload, key=KEY, occurred_at_ms=AT)
    assert back.decode() == given


@pytest.mark.parametrize("kind", ["session-message", "insight", "report"])
def test_a_kind_of_the_configuration_travels_as_an_insight(kind):
    """Custom kinds have no rules of their own."""
    text = wire(kind, '{"messages":[]}', custom_kinds=("report",))
    assert text == f'{{"messages":[],{STAMP}}}'
