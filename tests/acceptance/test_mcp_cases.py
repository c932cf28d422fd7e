"""Every case of tests/cases/relay/mcp.json, M01 to M09: a scripted relay, the real engine, store and client.

The scripts speak the era of sessions. The calls are safe to repeat (`mcp.idempotent`), those of a second run
are not. A back-off of a second is a twentieth here.
"""

import json
from pathlib import Path

import pytest
from peers import fake_relay
from runs import AGENT, TOKEN, engine_running, hand_over, is_empty, letters_of, opened, status_of, until

CASES = {
    case["case"]: case
    for case in json.loads((Path(__file__).parents[1] / "cases" / "relay" / "mcp.json").read_text("utf-8"))[
        "cases"
    ]
}
KEY = "relay-outbox/idempotencyKey"
WITHIN_S = 30


def receipts_of(state_dir):
    """(state, result) of each event that was settled, in order."""
    with opened(state_dir) as box:
        return list(box.rows("SELECT state, result FROM receipts ORDER BY seq"))


def asked(relay, method):
    """The JSON-RPC requests of this method, and their header fields."""
    found = []
    for request in relay.requests():
        message = json.loads(request.get("body") or "{}")
        if message.get("method") == method:
            found.append((message, {name.lower(): value for name, value in request["headers"]}))
    return found


def play(name, home, **settings):
    """One case to an empty queue: the relay's requests and what the engine logged."""
    case = CASES[name]
    hand_over(home, case["events"])
    with fake_relay("mcp.json", name) as relay:
        with engine_running(home, relay.url, mcp__idempotent=True, **settings) as run:
            assert until(lambda: is_empty(home), case["check"].get("within_s", WITHIN_S)), run.log
        return asked(relay, "tools/call"), asked(relay, "initialize"), run.log


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_as_its_check_says(name, tmp_path):
    """Which calls are done, which failed and are told of, how many requests, and which of them are alike."""
    state = tmp_path / "state"
    check = dict(CASES[name]["check"])
    calls, opened_sessions, log = play(name, state)
    least, most = check.pop("requests", (2, len(calls)))
    assert least <= len(calls) <= most
    alike = check.pop("same", [])
    for group in alike:
        params = [calls[index][0]["params"] for index in group]
        assert all(other == params[0] for other in params)
        assert len({calls[index][0]["id"] for index in group}) == len(group)
    failed = [fields for event, fields in log if event in {"tool_error", "dead_letter"}]
    assert [fields["seq"] - 1 for fields in failed] == check.pop("failed_reported", [])
    delivered = {fields["seq"] - 1 for event, fields in log if event == "delivered"}
    assert sorted(delivered - {fields["seq"] - 1 for fields in failed}) == check.pop("succeeded")
    assert not {name for name in check if name != "within_s"}
    assert len(opened_sessions) == (2 if name == "M06" else 1)


def test_what_a_call_of_a_session_carries(tmp_path):
    """M01: the session and its revision, what we take, the token, and a key of its own for each call."""
    calls, [(_, first)], _ = play("M01", tmp_path)
    assert not {"mcp-session-id", "mcp-protocol-version"} & set(first)
    for message, fields in calls:
        assert fields["accept"] == "application/json, text/event-stream"
        assert (fields["mcp-session-id"], fields["mcp-protocol-version"]) == ("s-1", "2025-06-18")
        assert fields["authorization"] == f"Bearer {TOKEN}"
        assert fields["idempotency-key"] == f'"{message["params"]["_meta"][KEY]}"'
        assert fields["outbox-agent"] == AGENT
    assert len({message["params"]["_meta"][KEY] for message, _ in calls}) == 2


def test_a_new_session_is_asked_for_without_the_old_one(tmp_path):
    """M06: the second `initialize` names no session, and the call goes again with its key."""
    calls, opened_sessions, _ = play("M06", tmp_path)
    assert not any("mcp-session-id" in fields for _, fields in opened_sessions)
    keys = [message["params"]["_meta"][KEY] for message, _ in calls]
    assert keys[0] == keys[1] != keys[2]


def test_results_are_kept_with_the_receipts(tmp_path):
    """M03: a result that was split over two lines of a stream is kept whole, once for each call."""
    play("M03", tmp_path)
    assert receipts_of(tmp_path) == [("delivered", '{"content":[],"isError":false}')] * 2


def test_a_tools_no_is_kept_and_told(tmp_path):
    """M05: its words stand in the log and with the receipt, and it counts apart from what was delivered."""
    _, _, log = play("M05", tmp_path)
    ((state, result), (other, _)) = receipts_of(tmp_path)
    assert (state, other) == ("tool_error", "delivered")
    assert "no such note" in result
    assert [fields["detail"] for event, fields in log if event == "tool_error"] == ["no such note"]


def test_a_refused_call_is_a_dead_letter_with_the_reason(tmp_path):
    """M09: what the relay said of the unknown tool stands with the dead letter."""
    play("M09", tmp_path)
    ((letter, payload),) = letters_of(tmp_path)
    assert (letter.reason, payload["name"]) == ("rejected", "note_add")
    assert "Unknown tool: note_add" in letter.detail


HEALTHY = {"status": 200, "body": "{}", "when": {"target_contains": "/api/health"}, "repeat": "forever"}


def unsafe(name, home):
    """The same, of calls that must not be repeated; such a one waits for health after trouble."""
    case = CASES[name]
    hand_over(home, case["events"])
    with fake_relay({"steps": [HEALTHY, *case["steps"]]}) as relay:
        with engine_running(home, relay.url, mcp__idempotent=False) as run:
            assert until(lambda: is_empty(home), WITHIN_S), run.log
        return asked(relay, "tools/call")


@pytest.mark.parametrize("name", [name for name in CASES if name != "M08"])
def test_unsafe_calls_fare_alike(name, tmp_path):
    """Where no outcome is unknown, a call that must not be repeated goes again as any other."""
    calls = unsafe(name, tmp_path)
    least, most = CASES[name]["check"].get("requests", (2, 2))
    assert least <= len(calls) <= most
    assert [letter.reason for letter, _ in letters_of(tmp_path)] == ["rejected"] * (name == "M09")


def test_an_unsafe_call_whose_answer_was_lost_is_not_repeated(tmp_path):
    """M08: the stream ended before the result, so nobody knows; the call behind it is done."""
    assert len(unsafe("M08", tmp_path)) == 2
    ((letter, _),) = letters_of(tmp_path)
    assert letter.reason == "outcome_unknown"
    assert status_of(tmp_path).delivered == 1
