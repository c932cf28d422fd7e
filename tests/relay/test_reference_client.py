"""The project's client and the reference relay understand each other."""

import json

import pytest
from reference_calls import ARCHIVES, BATCH, MESSAGES, TOKEN, chunk, event

from relay_client import (
    Origin,
    RelayClient,
    Sort,
    read_archive_chunk,
    read_batch,
    read_health,
    read_single,
    read_spec,
    read_tool_call,
)
from relay_client.reference.process import RelayProcess

READ = {"now_ms": 0, "max_retry_after_ms": 3_600_000}


@pytest.fixture(scope="module")
def relay(tmp_path_factory):
    """The relay that the tests of this file share; each has agents of its own."""
    db = tmp_path_factory.mktemp("relay") / "relay.sqlite"
    with RelayProcess(db, [TOKEN]) as process:
        yield process


@pytest.fixture
def ours(relay):
    """The project's client."""
    client = RelayClient(relay.url, trust_env=False)
    yield client
    client.close()


def come_from(agent, seq=1):
    """Where a delivery comes from."""
    return Origin(agent, "5f0c9a52-6c1e-7b1a-8a53-0d2f4b6c8e10", seq=seq, attempt=1)


def post(client, body, path=MESSAGES, agent="builder", token=TOKEN):
    """Deliver one body; a batch carries its keys in its items."""
    text = json.dumps(body).encode()
    return client.post_event(path, text, token=token, key=body.get("idempotencyKey"), origin=come_from(agent))


def test_an_event_arrives_with_everything_about_it(relay, ours):
    """Accepted, then known; what the relay has of it is what the client was given."""
    agent, body = "ä/%\u2028 x", event('with "quotes" and \\'.replace(" ", "_"), half="\ud83d")
    readings = [read_single(post(ours, body, agent=agent), **READ).sort for _ in range(2)]
    [kept] = relay.events(agent)
    assert readings == [Sort.ACCEPTED, Sort.DUPLICATE]
    assert (kept["body"], kept["key"], kept["seq"]) == (json.dumps(body), body["idempotencyKey"], 1)


def test_a_batch_is_read_item_by_item(ours):
    """Each result becomes a reading of its own."""
    messages = [event("c-1"), {"bad": True}, event("c-1"), event("c-1", other="text")]
    reading = read_batch(post(ours, {"messages": messages}, BATCH), 4, **READ)
    assert [item.sort for item in reading.items] == [
        Sort.ACCEPTED,
        Sort.REFUSED,
        Sort.DUPLICATE,
        Sort.REFUSED,
    ]


def test_an_archive_tells_its_generation_twice(ours):
    """For the first chunk and for its repeat."""
    body = chunk("client-archive", 0, 2, "one")
    readings = [read_archive_chunk(post(ours, body, ARCHIVES), **READ) for _ in range(2)]
    assert [reading.sort for reading in readings] == [Sort.ACCEPTED, Sort.DUPLICATE]
    assert [reading.generation for reading in readings] == [1, 1]


@pytest.mark.parametrize(
    ("tool", "sort"),
    [("note_add", Sort.ACCEPTED), ("fail", Sort.TOOL_ERROR), ("outil/é", Sort.REFUSED)],
)
def test_tool_calls_are_read(ours, tool, sort):
    """A result, a tool that says no, and a tool that is not there (with a name no header carries plainly)."""
    call = {"token": TOKEN, "key": f"call-{sort}", "origin": come_from("caller"), "request_id": "r-1"}
    params = json.dumps({"name": tool, "arguments": {"n": 1}}).encode()
    assert read_tool_call(ours.call_tool(params, tool=tool, **call), "r-1", **READ).sort == sort


def test_the_relay_says_what_it_can(ours):
    """Health without a token; the document's limits become capabilities."""
    assert read_health(ours.health())
    capabilities = read_spec(ours.spec(token=TOKEN))
    assert capabilities.batch_max_items == 500
    assert capabilities.mcp_idempotency is True


@pytest.mark.parametrize(
    ("action", "sort"),
    [
        ({"close": True}, Sort.LOST),
        ({"storeThenClose": True}, Sort.LOST),
        ({"status": 200, "body": "<p>Sign in</p>"}, Sort.NOT_A_RELAY),
        ({"status": 409, "body": {"error": {"code": "in_progress", "message": ""}}}, Sort.IN_PROGRESS),
        ({"status": 503}, Sort.BUSY),
        ({"status": 302, "headers": {"Location": "http://elsewhere.example/"}}, Sort.REDIRECTED),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_faults_are_met_as_what_they_are(relay, ours, action, sort):
    """What a test asks of the relay is what the client sees."""
    relay.add_faults({"times": 1, "match": {"path": MESSAGES}, "action": action})
    assert read_single(post(ours, event("faulty")), **READ).sort == sort
    relay.clear_faults()


def test_a_wrong_token_is_unauthorized(ours):
    """And says so by the code of the contract."""
    reading = read_single(post(ours, event("wrong"), token="wrong"), **READ)
    assert (reading.sort, reading.code) == (Sort.UNAUTHORIZED, "invalid_token")
