"""Faults asked of the reference relay: each does what it says, and only to what it was meant for."""

import select
import socket
import time

import httpx
import pytest
from reference_calls import BATCH, INSIGHTS, MESSAGES, TOKEN, client, event, origin, post_text

from relay_client.reference.process import RelayProcess


@pytest.fixture(scope="module")
def process(tmp_path_factory):
    """The process that the tests of this file share; each has agents of its own."""
    db = tmp_path_factory.mktemp("relay") / "relay.sqlite"
    with RelayProcess(db, [TOKEN, "second-token"]) as process:
        yield process


@pytest.fixture
def relay(process):
    """The relay without faults, before and after."""
    process.clear_faults()
    yield process
    process.clear_faults()


@pytest.fixture
def http(relay):
    """A connection with the host's token."""
    with client(relay.url) as http:
        yield http


def keys(relay, agent):
    """The keys kept of an agent, in order."""
    return [kept["key"] for kept in relay.events(agent)]


def test_a_status_is_answered_instead_so_many_times(relay, http):
    """Two 503 with their headers and body, nothing stored; the third try is as ever."""
    action = {"status": 503, "headers": {"Retry-After": "7"}, "body": {"error": "busy"}}
    relay.add_faults({"match": {"path": MESSAGES}, "times": 2, "action": action})
    answers = [http.post(MESSAGES, json=event("s-1"), headers=origin("status")) for _ in range(3)]
    assert [answer.status_code for answer in answers] == [503, 503, 201]
    assert (answers[0].headers["retry-after"], answers[0].json()) == ("7", {"error": "busy"})
    assert keys(relay, "status") == ["s-1"]


@pytest.mark.parametrize(
    ("action", "media_type", "body"),
    [
        (
            {"status": 200, "body": "<p>Sign in</p>", "headers": {"Content-Type": "text/html"}},
            "text/html",
            "<p>",
        ),
        ({"status": 500}, "application/problem+json", '"fault"'),
        ({"status": 302, "headers": [["Location", "http://elsewhere.example/"]]}, None, ""),
    ],
)
def test_a_status_comes_with_the_body_asked_for(relay, http, action, media_type, body):
    """Text as it is, an error's usual form, or nothing."""
    relay.add_faults({"action": action, "times": 1})
    answer = http.post(MESSAGES, json=event("body"), follow_redirects=False)
    assert answer.status_code == action["status"]
    assert answer.headers.get("content-type") == media_type
    assert body in answer.text


@pytest.mark.parametrize("action", [{"close": True}, {"hang": 0.05}])
def test_a_connection_is_dropped_without_an_answer(relay, http, action):
    """The client gets no byte, nothing is stored, and the log says what was done."""
    relay.add_faults({"times": 1, "action": action})
    agent = f"drop-{next(iter(action))}"
    with pytest.raises(httpx.TransportError):
        http.post(MESSAGES, json=event(agent), headers=origin(agent))
    assert keys(relay, agent) == []
    [entry] = [entry for entry in relay.requests() if entry["agent"] == agent]
    assert (entry["status"], entry["fault"]) == (None, next(iter(action)))
    assert http.post(MESSAGES, json=event(agent), headers=origin(agent)).status_code == 201


def test_a_lost_answer_leaves_the_event_stored(relay, http):
    """Stored, then dropped: the same event again is a duplicate."""
    relay.add_faults({"times": 1, "action": {"storeThenClose": True}})
    with pytest.raises(httpx.TransportError):
        http.post(MESSAGES, json=event("lost"), headers=origin("lost"))
    assert keys(relay, "lost") == ["lost"]
    assert http.post(MESSAGES, json=event("lost"), headers=origin("lost")).status_code == 409


def test_a_delay_is_of_the_answer_not_of_the_event(relay, http):
    """The event is there while its answer is still awaited, and another request is not held up."""
    relay.add_faults({"match": {"agent": "late"}, "action": {"delayS": 600}})
    request = http.build_request("POST", MESSAGES, json=event("late"), headers=origin("late"))
    head = "".join(f"{name}: {value}\r\n" for name, value in request.headers.items())
    with socket.create_connection((request.url.host, request.url.port)) as waiting:
        waiting.sendall(f"POST {MESSAGES} HTTP/1.1\r\n{head}\r\n".encode() + request.content)
        while keys(relay, "late") != ["late"]:
            time.sleep(0.01)
        assert http.post(MESSAGES, json=event("not-late"), headers=origin("not-late")).status_code == 201
        assert select.select([waiting], [], [], 0)[0] == []


def test_a_short_delay_ends_with_the_answer(relay, http):
    """With a status too: the answer asked for, only later."""
    relay.add_faults({"times": 1, "action": {"delayS": 0.05}}, {"action": {"delayS": 0.05, "status": 504}})
    answers = [http.post(MESSAGES, json=event("short"), headers=origin("short")) for _ in range(2)]
    assert [answer.status_code for answer in answers] == [201, 504]


def test_items_are_spoiled_one_by_one(relay, http):
    """The items that fit get the status asked for and are not stored, the others are as ever."""
    per_item = {
        "match": {"bodyContains": "poison"},
        "status": 422,
        "body": {"error": {"code": "x", "message": "y"}},
    }
    relay.add_faults({"match": {"path": BATCH}, "action": {"perItem": per_item}})
    messages = [event("i-1"), event("i-2", body="poison"), event("i-3")]
    answer = http.post(BATCH, json={"messages": messages}, headers=origin("items"))
    results = answer.json()["results"]
    assert answer.status_code == 207
    assert [result["status"] for result in results] == [201, 422, 201]
    assert results[1] == {"status": 422, "error": {"code": "x", "message": "y"}}
    assert keys(relay, "items") == ["i-1", "i-3"]
    assert relay.requests()[-1]["fault"] == "perItem"


def test_a_spoiled_item_sent_alone_is_answered_so_too(relay, http):
    """A client that bisects gets the same verdict at the end; a good message uses nothing up."""
    per_item = {"match": {"kind": "poison"}, "status": 500}
    relay.add_faults({"times": 1, "action": {"perItem": per_item}})
    good = http.post(MESSAGES, json=event("alone-1", kind="note"), headers=origin("alone"))
    bad = http.post(MESSAGES, json=event("alone-2", kind="poison"), headers=origin("alone"))
    again = http.post(MESSAGES, json=event("alone-2", kind="poison"), headers=origin("alone"))
    assert [answer.status_code for answer in (good, bad, again)] == [201, 500, 201]
    assert bad.json()["error"]["code"] == "fault"


@pytest.mark.parametrize(("count", "answered"), [(3, 2), (1, 2)])
def test_a_wrong_number_of_results(relay, http, count, answered):
    """All of it is stored, and the answer does not fit: the harder of the two cases for a client."""
    relay.add_faults({"times": 1, "action": {"wrongCount": True}})
    agent = f"count-{count}"
    messages = [event(f"{agent}-{number}") for number in range(count)]
    answer = http.post(BATCH, json={"messages": messages}, headers=origin(agent))
    assert len(answer.json()["results"]) == answered
    assert len(keys(relay, agent)) == count


def test_a_token_is_revoked_in_the_middle(relay, http):
    """The request that triggers it meets the revoked token already; another token goes on."""
    relay.add_faults({"match": {"bodyContains": "third"}, "times": 1, "action": {"revoke": TOKEN}})
    answers = [http.post(MESSAGES, json=event(f"revoke-{text}")) for text in ("first", "third", "fourth")]
    with client(relay.url, token="second-token") as other:
        answers.append(other.post(MESSAGES, json=event("revoke-third")))
    relay.revoke(TOKEN, revoked=False)
    assert [answer.status_code for answer in answers] == [201, 401, 401, 201]


@pytest.mark.parametrize(
    ("match", "fits"),
    [
        ({"path": INSIGHTS}, False),
        ({"path": MESSAGES}, True),
        ({"agent": "ä b"}, True),
        ({"agent": "other"}, False),
        ({"token": TOKEN}, True),
        ({"token": "second-token"}, False),
        ({"kind": "note"}, True),
        ({"kind": "nothing"}, False),
        ({"bodyContains": "Done."}, True),
        ({"method": "GET"}, False),
        ({"path": MESSAGES, "agent": "ä b", "kind": "nothing"}, False),
        ({}, True),
    ],
)
def test_a_rule_meets_what_it_names_and_nothing_else(relay, http, match, fits):
    """All that is named has to fit; what is not named does not matter."""
    relay.add_faults({"match": match, "action": {"status": 599}})
    answer = http.post(MESSAGES, json=event("match", kind="note"), headers=origin("%C3%A4%20b"))
    assert (answer.status_code == 599) is fits


def test_the_kind_of_one_message_in_a_batch_is_enough(relay, http):
    """A rule for a kind meets a batch that has one of it."""
    relay.add_faults({"match": {"kind": "outbox-gap"}, "action": {"status": 500}})
    messages = [event("kind-1", kind="note"), event("kind-2", kind="outbox-gap")]
    assert http.post(BATCH, json={"messages": messages[:1]}).status_code == 200
    assert http.post(BATCH, json={"messages": messages}).status_code == 500


def test_health_and_the_document_can_be_spoiled_too(relay, http):
    """An outage is one for health as well; reading back is never spoiled."""
    relay.add_faults({"action": {"status": 503}})
    assert [http.get(path).status_code for path in ("/api/health", "/api/spec")] == [503, 503]
    assert http.get("/api/reference/faults").json()["rules"][0]["used"] == 2


def test_the_first_rule_that_fits_counts(relay, http):
    """Rules are tried in the order they were given; one that is used up is passed over."""
    relay.add_faults({"times": 1, "action": {"status": 500}}, {"times": 1, "action": {"status": 502}})
    relay.add_faults({"action": {"status": 504}})
    statuses = [http.get("/api/health").status_code for _ in range(4)]
    relay.clear_faults()
    assert [*statuses, http.get("/api/health").status_code] == [500, 502, 504, 504, 200]


@pytest.mark.parametrize(
    "rule",
    [
        "[]x",
        "3",
        "{}",
        '{"action":{}}',
        '{"action":{"close":true},"tmies":1}',
        '{"action":{"close":true},"times":0}',
        '{"action":{"colse":true}}',
        '{"action":{"status":99}}',
        '{"action":{"hang":-1}}',
        '{"action":{"hang":"1"}}',
        '{"action":{"revoke":1}}',
        '{"action":{"perItem":{"match":{"path":"x"},"status":422}}}',
        '{"action":{"status":500},"match":{"paht":"/api"}}',
        '{"action":{"status":500},"match":{"path":1}}',
        '[{"action":{"status":500}},{"action":{}}]',
    ],
)
def test_a_rule_that_cannot_be_meant_is_refused(relay, http, rule):
    """A misspelt rule would let a test pass for nothing; of a list with one such, none is taken."""
    answer = post_text(http, "/api/reference/faults", rule)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")
    assert http.get("/api/reference/faults").json() == {"rules": []}
