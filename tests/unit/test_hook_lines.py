"""What each line of a runner's hook input becomes: held to the expect files, value by value."""

import json
import random
from urllib.parse import quote

import pytest
from hook_cases import FILES, at, cases, expected, lines_of

from outbox.capture.hook_call import key_of, message_of, read_call
from outbox.capture.hook_json import digest, parsed
from outbox.capture.hook_redact import Redaction
from outbox.capture.hook_table import RUNNERS
from outbox.errors import UsageError
from outbox.event import Limits
from outbox.event_checks import check_payload

STARTED_MS = 1_900_000_000_000
CASES = list(cases())


def call_of(runner, text, row, record=()):
    """The call, read with the arguments that the row names."""
    args = row.get("args", [])
    return read_call(RUNNERS[runner], text, args[1] if args else None, record)


def message(call, *, key=None, redaction=None):
    """The message as a value, and the time it says it happened."""
    made = message_of(
        call,
        agent="a",
        key=key,
        started_ms=STARTED_MS,
        redaction=redaction or Redaction(),
        limits=Limits(),
    )
    return json.loads(made.payload), made.occurred_at_ms


@pytest.mark.parametrize(("runner", "text", "row"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_line_becomes_what_its_row_says(runner, text, row):
    """Ignored or not, pair or not, role, body, and all of the JSON beside it."""
    call = call_of(runner, text, row)
    if not row["makes"]:
        assert call is None
        return
    assert call.rule.ends == (row["makes"] == ["session-message", "insight"])
    told, _ = message(call)
    given = json.loads(text)
    assert told["role"] == row["role"]
    assert told["payload"]["hook"] == given
    assert told["payload"]["event"] == row["event"]
    body = row["body"]
    if "joined" in body:
        assert told["body"] == "\n".join(filter(None, (at(given, pointer) for pointer in body["joined"])))
    elif "json_of" in body:
        assert json.loads(told["body"]) == at(given, body["json_of"])
    else:
        assert row["event"] in told["body"]
        assert len(told["body"]) < 200


@pytest.mark.parametrize(("runner", "text", "row"), [c[1:] for c in CASES], ids=[c[0] for c in CASES])
def test_a_key_is_of_the_class_that_its_row_says(runner, text, row):
    """call: always the same; turn: with the size of the transcript; none: never."""
    if not row["makes"]:
        return
    call = call_of(runner, text, row)
    keys = [key_of(call, size) for size in (None, 7, 7, 8)]
    by_class = {
        "call": keys[0] is not None and len(set(keys)) == 1,
        "turn": keys[0] is None and keys[1] == keys[2] != keys[3] and None not in keys[1:],
        "none": set(keys) == {None},
    }
    assert [name for name, holds in by_class.items() if holds] == [row["key"]["class"]]
    assert all(len(key) <= 191 and quote(key, safe=":") == key for key in keys if key)


@pytest.mark.parametrize("name", FILES)
def test_two_lines_are_one_event_only_where_the_pairs_say_so(name):
    """Over a whole file: equal keys for the pairs of one event, and for no others."""
    told = expected(name)
    ones = {tuple(pair["lines"]) for pair in told["pairs"] if pair["events"] == "one"}
    keys = {}
    for text, row in zip(lines_of(name), told["lines"], strict=True):
        call = call_of(told["runner"], text, row)
        if call is not None and (key := key_of(call, 10 + row["line"])) is not None:
            keys.setdefault(key, []).append(row["line"])
    assert {tuple(lines) for lines in keys.values() if len(lines) > 1} == ones


def test_only_the_transcript_tells_two_equal_stops_apart():
    """Unchanged, the second is the first delivered again; grown, it is another stop of the turn."""
    first, second = (
        read_call(RUNNERS["claude-code"], line, None, ()) for line in lines_of("claude-code")[41:43]
    )
    assert key_of(first, 900) == key_of(second, 900)
    assert key_of(first, 900) != key_of(second, 901)
    assert key_of(first, None) is None


def test_the_order_of_keys_blanks_and_escapes_are_no_part_of_a_value():
    """Random values, written in two ways, have one digest; a changed one has another."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)

    def value(depth):
        kinds = [
            lambda: chance.randrange(-(10**30), 10**30),
            lambda: chance.random() * 10 ** chance.randrange(-9, 9),
            lambda: "".join(chance.choice('aé\n"\\\ud800/🍐') for _ in range(chance.randrange(5))),
            lambda: chance.choice([None, True, False]),
        ]
        if depth:
            kinds += [
                lambda: [value(depth - 1) for _ in range(chance.randrange(4))],
                lambda: {str(n): value(depth - 1) for n in range(chance.randrange(4))},
            ]
        return chance.choice(kinds)()

    def shuffled(item):
        if isinstance(item, dict):
            names = list(item)
            chance.shuffle(names)
            return {name: shuffled(item[name]) for name in names}
        return [shuffled(part) for part in item] if isinstance(item, list) else item

    for _ in range(200):
        whole = {"v": value(3), "w": value(3)}
        other = json.dumps(shuffled(whole), indent=chance.choice([None, 1]), ensure_ascii=True)
        if "\\ud800" not in other:
            other = json.dumps(json.loads(other), ensure_ascii=chance.choice([True, False]))
        assert digest(parsed(json.dumps(whole))) == digest(parsed(other))
        assert digest(parsed(json.dumps(whole))) != digest(parsed(json.dumps({**whole, "x": 1})))


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [
        ("1.50", "1.5", True),
        ("1.0", "1", True),
        ("1e400", "1e401", False),
        ("0.1000000000000000055", "0.1000000000000000056", False),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("1", '"1"', False),
        ("1", "true", False),
        ("null", '"null"', False),
    ],
)
def test_numbers_are_compared_as_what_they_are(one, two, same):
    """No digit is lost, and none is added by another way to write it."""
    assert (digest(parsed(f'{{"n":{one}}}')) == digest(parsed(f'{{"n":{two}}}'))) is same


def test_what_a_hook_says_travels_to_the_digit():
    """Big integers, nulls, odd numbers and lone halves of a pair stay as they are written."""
    text = (
        '{"hook_event_name":"New","n":123456789012345678901234567890,"f":1.50,"e":1e400,'
        '"s":"\\ud83d","z":null}'
    )
    made = message_of(
        read_call(RUNNERS["claude-code"], text, None, ()),
        agent="a",
        key=None,
        started_ms=1,
        redaction=Redaction(),
        limits=Limits(),
    )
    assert made.payload.endswith(f',"hook":{text}}}}}')


@pytest.mark.parametrize(
    ("runner", "text", "occurred_at_ms"),
    [
        ("gemini", '{"hook_event_name":"X","timestamp":"2031-02-03T09:13:06.120Z"}', 1_927_876_386_120),
        ("gemini", '{"hook_event_name":"X","timestamp":"2031-02-03T10:13:06.120+01:00"}', 1_927_876_386_120),
        ("gemini", '{"hook_event_name":"X","timestamp":"2031-02-03T09:13:06.120"}', 1_927_876_386_120),
        ("gemini", '{"hook_event_name":"X","timestamp":""}', STARTED_MS),
        ("gemini", '{"hook_event_name":"X","timestamp":"yesterday"}', STARTED_MS),
        ("gemini", '{"hook_event_name":"X","timestamp":"0001-01-01T00:00:00Z"}', STARTED_MS),
        ("copilot", '{"prompt":"x","timestamp":1927876364101}', 1_927_876_364_101),
        ("copilot", '{"prompt":"x","timestamp":true}', STARTED_MS),
        ("copilot", '{"prompt":"x","timestamp":-5}', STARTED_MS),
        ("copilot", '{"prompt":"x","timestamp":1e300}', STARTED_MS),
        ("copilot", '{"prompt":"x","timestamp":' + "9" * 4000 + "}", STARTED_MS),
        ("claude-code", '{"hook_event_name":"X","timestamp":1927876364101}', STARTED_MS),
    ],
)
def test_an_event_has_the_runners_time_or_the_start_of_the_hook(runner, text, occurred_at_ms):
    """A time that is missing, empty or absurd is none."""
    assert message(read_call(RUNNERS[runner], text, None, ()))[1] == occurred_at_ms


def test_opencode_tells_its_time_inside_the_part_or_the_info():
    """The end of a finished part, the making of a message or a session."""
    times = [
        message(call_of("opencode", text, row))[1]
        for text, row in zip(lines_of("opencode"), expected("opencode")["lines"], strict=True)
        if row["line"] in {1, 3, 5, 7}
    ]
    assert times == [1_927_876_364_101, 1_927_876_364_106, 1_927_876_365_501, 1_927_876_364_441]


def test_an_ignored_event_is_recorded_where_it_is_asked_for():
    """By its name; the others stay ignored."""
    text = lines_of("claude-code")[17]
    assert read_call(RUNNERS["claude-code"], text, None, {"FileChanged"}) is None
    call = read_call(RUNNERS["claude-code"], text, None, {"PreToolUse"})
    assert (call.event, key_of(call, None) is not None) == ("PreToolUse", True)


def test_pictures_are_named_and_their_bytes_are_no_part_of_a_body():
    """In lists of blocks, alone, and in a file: by media type and size."""
    rows = {("claude-code", 27), ("claude-code", 32), ("gemini", 10), ("opencode", 3)}
    found = 0
    for name, runner, text, row in CASES:
        if (name.rpartition("-")[0], row["line"]) not in rows:
            continue
        told, _ = message(call_of(runner, text, row))
        files = told["payload"]["attachments"]
        assert any(file["mediaType"].startswith("image/") and file["bytes"] > 0 for file in files)
        assert len(told["body"]) < 200
        found += 1
    assert found == len(rows)


def test_what_is_deeper_than_a_payload_may_be_is_kept_as_a_string():
    """The call is not refused for it; its JSON stands there in quotes."""
    for levels in (400, 496, 497, 498, 700):
        text = '{"hook_event_name":"X","a":' + "[" * levels + "]" * levels + "}"
        call = read_call(RUNNERS["codex"], text, None, ())
        made = message_of(call, agent="a", key=None, started_ms=1, redaction=Redaction(), limits=Limits())
        hook = json.loads(made.payload)["payload"]["hook"]
        assert hook == (json.loads(text) if levels < 498 else text)
        check_payload("session-message", made.payload, None, 8 << 20, 500)


def test_no_types_of_fields_can_hurt():
    """Random values in the place of any field, of every line: a message, or a refusal that says why."""
    seed = random.randrange(2**32)
    print("seed", seed)
    chance = random.Random(seed)
    odd = [None, True, 0, -1.5, "", "x", [], {}, [1], [{}], [[]], {"a": 1}, {"type": []}, {"text": []}]
    odd += [{"time": {}}, [{"type": {}, "data": 1}]]
    odd += [{"content": [{"type": "image", "source": {"data": 1, "media_type": 2}}]}]

    def changed(value, depth):
        if isinstance(value, dict) and depth:
            return {
                name: chance.choice(odd) if chance.random() < 0.2 else changed(part, depth - 1)
                for name, part in value.items()
                if chance.random() > 0.05
            }
        return value

    for _, runner, text, row in CASES * 5:
        value = changed(json.loads(text), 4)
        try:
            call = call_of(runner, json.dumps(value), row, {row["event"]})
        except UsageError:
            continue
        if call is not None:
            told, at_ms = message(call)
            key_of(call, 5)
            assert told["payload"]["hook"] == value
            assert isinstance(told["body"], str)
            assert at_ms > 0
