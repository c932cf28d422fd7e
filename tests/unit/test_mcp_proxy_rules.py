"""The proxy's decisions: which calls may wait, what becomes of one without a result, in which words."""

import json

import pytest

from outbox.capture import mcp_words as words
from outbox.capture.mcp_rules import Ran, Rules, Step, as_listed, next_step, whether_it_ran
from outbox.delivery.verdict import judge
from outbox.outcome import Reason
from outbox.record import Remembered
from outbox.store.records import Found
from relay_client import Answer, Failure, read_tool_call

NOW_MS = 1_800_000_000_000


def described(name, said=None, **more):
    """A tool's entry, with what its annotation says."""
    meta = {} if said is None else {"_meta": {"relay-outbox/bufferable": said}}
    return json.dumps({"name": name, **meta, **more})


@pytest.mark.parametrize(
    ("tool", "entry", "patterns", "waits"),
    [
        ("note_add", None, (), False),
        ("note_add", described("note_add"), (), False),
        ("note_add", described("note_add", said=True), (), True),
        ("note_add", described("note_add", said="true"), (), False),
        ("note_add", None, ("note_add",), True),
        ("note_add", None, ("note_*",), True),
        ("note_add", described("note_add", said=False), ("note_*",), True),
        ("Note_add", None, ("note_*",), False),
        ("a_note_add", None, ("note_*",), False),
        ("note_add", None, ("note?add", "[n]ote"), True),
        ("note", None, ("[n]ote", "n.te", "not?e"), False),
        ("[n]ote", None, ("[n]ote",), True),
        ("fire_and_forget_log", None, (), True),
        ("fireAndForget", None, (), True),
        ("log-fire-and-forget", None, (), True),
        ("fire_and_forget_log", described("fire_and_forget_log", said=False), (), False),
        ("campfire", None, (), False),
        ("", None, (), False),
    ],
)
def test_a_call_waits_only_when_its_answer_is_not_missed(tool, entry, patterns, waits):
    """Configured, else annotated, else named so; nothing else."""
    assert Rules(patterns).may_wait(tool, entry) is waits


def test_what_may_wait_is_listed_without_an_output_schema():
    """Clients check results against it, and "queued" fits none."""
    schema = {"type": "object"}
    waits, other = described("a", said=True, outputSchema=schema), described("b", outputSchema=schema)
    assert "outputSchema" not in json.loads(as_listed(waits, Rules()))
    assert as_listed(other, Rules()) == other


def answered(status, body=b"", **headers):
    """What a status says of the call."""
    answer = Answer(
        status, headers={name.replace("_", "-"): text for name, text in headers.items()}, body=body
    )
    return whether_it_ran(read_tool_call(answer, "1", now_ms=0, max_retry_after_ms=1))


@pytest.mark.parametrize("status", [401, 429, 503])
def test_what_ran_nothing_and_may_be_tried_later(status):
    """The relay asked to wait, or wants another token."""
    assert answered(status) is Ran.NO
    assert answered(status, retry_after="9") is Ran.NO


@pytest.mark.parametrize("status", [301, 307, 400, 408, 421, 423, 425, 500, 501, 502, 504])
def test_what_stood_before_the_call_ran_nothing(status):
    """Whatever was answered to the introduction: the call was not sent."""
    answer = Answer(status, headers={"retry-after": "9"})
    reading = read_tool_call(answer, "1", now_ms=0, max_retry_after_ms=1)._replace(not_run=True)
    assert whether_it_ran(reading) is Ran.NO


@pytest.mark.parametrize("status", [400, 403, 404, 405, 410, 413, 422])
def test_what_was_refused(status):
    """Trying again would not help."""
    assert answered(status) is Ran.REFUSED


@pytest.mark.parametrize("status", [500, 502, 504, 501, 408, 421, 423, 425, 409, 301, 307])
def test_what_may_have_run(status):
    """It was sent, and what came back does not tell: not even where it asks to wait, or sends elsewhere."""
    assert answered(status) is Ran.PERHAPS
    assert answered(status, retry_after="9") is Ran.PERHAPS


@pytest.mark.parametrize(("status", "body"), [(200, b"<html>"), (202, b"")])
def test_what_is_no_answer_of_a_tool(status, body):
    """Somebody answered, and perhaps it was the relay."""
    assert answered(status, body) is Ran.PERHAPS


@pytest.mark.parametrize("headers", [{}, {"retry-after": "9"}])
@pytest.mark.parametrize("body", [b"", b"<html>", b'{"error": {"code": "in_progress"}}'])
def test_what_is_an_unknown_outcome_to_the_daemon_is_one_to_the_proxy(headers, body):
    """One outcome table for both: no call is queued, or called refused, that may have run."""
    for status in range(200, 600):
        reading = read_tool_call(Answer(status, headers, body), "1", now_ms=0, max_retry_after_ms=1)
        verdict = judge(reading, unsafe=True, works=False)
        if verdict.reason is Reason.OUTCOME_UNKNOWN:
            assert whether_it_ran(reading) is Ran.PERHAPS, status


def test_without_an_answer_it_depends_on_whether_a_byte_left():
    """Nothing sent, nothing run."""
    for sent, ran in ((False, Ran.NO), (True, Ran.PERHAPS)):
        failure = Failure.LOST if sent else Failure.UNREACHABLE
        answer = Answer(None, failure=failure, sent=sent)
        assert whether_it_ran(read_tool_call(answer, "1", now_ms=0, max_retry_after_ms=1)) is ran


@pytest.mark.parametrize(
    ("ran", "may_wait", "safe", "step"),
    [
        (Ran.NO, True, False, Step.QUEUE),
        (Ran.NO, False, True, Step.SAY_NOT_RUN),
        (Ran.PERHAPS, True, True, Step.QUEUE),
        (Ran.PERHAPS, True, False, Step.SAY_PERHAPS),
        (Ran.PERHAPS, False, True, Step.SAY_PERHAPS),
        (Ran.REFUSED, True, True, Step.SAY_REFUSED),
    ],
)
def test_what_becomes_of_a_call_without_a_result(ran, may_wait, safe, step):
    """It is queued only where a second run does no harm."""
    assert next_step(ran, may_wait=may_wait, safe=safe) is step


def test_keys_that_the_relay_honours_make_every_call_safe():
    """As the setting does, and for one tool its name."""
    rules = Rules(safe_to_repeat=frozenset({"a"}))
    assert [rules.is_safe(tool, relay_honours_keys=False) for tool in ("a", "b")] == [True, False]
    assert rules.is_safe("b", relay_honours_keys=True)
    assert Rules(idempotent=True).is_safe("b", relay_honours_keys=False)


def test_queued_tells_place_key_and_how_to_look_it_up():
    """For a person, and for a program in `_meta`."""
    call = words.Queued("note", "-rf $HOME", "key-1", 1_234, 12, nobody_sends=True)
    result = json.loads(words.queued(call, "the relay does not answer (refused)"))
    text = result["content"][0]["text"]
    assert "event 1,234 of -rf $HOME (12 events before it)" in text
    assert "outbox show -- '-rf $HOME' key-1" in text
    assert "Nobody sends at the moment" in text
    assert result["isError"] is False
    told = {"agent": "-rf $HOME", "idempotencyKey": "key-1", "seq": 1234, "ahead": 12}
    assert result["_meta"] == {"relay-outbox/queued": told}


@pytest.mark.parametrize(
    ("state", "result", "said", "is_error"),
    [
        (
            "delivered",
            '{"content":[{"type":"text","text":"hi"}],"structuredContent":{"n":1e400}}',
            "hi",
            False,
        ),
        ("delivered", None, None, False),
        ("delivered", '{"content":[{"type":"te', '{"content":[{"type":"te', False),
        ("delivered", '{"other":1}', '{"other":1}', False),
        ("tool_error", '{"content":[{"type":"text","text":"no"}],"isError":true}', "no", True),
        ("replaced", None, None, True),
        ("dropped", None, None, True),
        ("discarded", None, None, True),
    ],
)
def test_what_became_of_a_call_that_is_gone(state, result, said, is_error):
    """Its kept result, whole or cut, and whether it is a result at all."""
    remembered = Remembered("key-1", 7, "mcp-tool-call", b"", state, NOW_MS, result)
    text = words.result_of("builder", Found(state, remembered), "key-1", [], NOW_MS)
    told = json.loads(text)
    texts = "\n".join(block["text"] for block in told["content"])
    assert texts.startswith("Event 7 of builder")
    assert said is None or said in texts
    assert told["isError"] is is_error
    assert told["_meta"] == {"relay-outbox/state": state}
    assert ('"structuredContent":{"n":1e400}' in text) == ("1e400" in (result or ""))


def test_the_own_tools_take_the_arguments_that_they_describe():
    """A client sees what to give."""
    tools = {name: json.loads(text) for name, text in words.OWN_TOOLS.items()}
    assert [tool["name"] for tool in tools.values()] == list(tools)
    assert tools[words.RESULT_TOOL]["inputSchema"]["required"] == ["key"]
    assert all(tool["annotations"]["readOnlyHint"] for tool in tools.values())
