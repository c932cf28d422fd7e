"""Tokens heal themselves, and no event pays for it ([P7]): sources that are asked, on a clock of our own."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
from urllib.parse import parse_qs

import httpx
import pytest
from processes import wait_for
from world import HOUR_MS, MINUTE_MS, World, answer

from outbox.daemon.compose import tokens_of
from outbox.delivery.minted import MintedTokens
from outbox.delivery.tokens import AgentToken, NoTokenNow
from outbox.store.directory import file_name
from outbox.store.relay_state import read_facts
from outbox.store.token_cache import TokenCache
from relay_client import (
    Grant,
    OAuthClient,
    OAuthTokens,
    RuntimeTokens,
    StaticToken,
    TokenEndpoint,
    TokenUnavailable,
)

ENDPOINT = "http://login.test/token"
AGENTS = [f"agent-{n}" for n in range(20)]


class Issuer:
    """A token endpoint, the relay's re-mint, and what both gave out; `fail` may answer in their place."""

    def __init__(self, *, expires_in=3_600):
        self.asked = []
        self.good = {}  # token: the agent it is for
        self.expires_in = expires_in
        self.fail = lambda: None
        self.clock = None

    def handle(self, request):
        """One request for a token."""
        self.asked.append(request)
        said = self.fail()
        if isinstance(said, Exception):
            raise said
        if said is not None:
            return said
        token = f"tok-{len(self.asked)}"
        if request.url.path == "/token":
            self.good[token] = None
            return httpx.Response(200, json={"access_token": token, "expires_in": self.expires_in})
        self.good[token] = json.loads(request.content)["agentId"]
        expires_at = self.clock.wall_ms() + self.expires_in * 1_000
        return httpx.Response(201, json={"token": token, "expiresAt": expires_at})

    def lets_in(self, request):
        """Whether the relay takes this request's token."""
        token = request.headers["authorization"].removeprefix("Bearer ")
        return token in self.good and self.good[token] in {None, request.agent}


def minter_of(world, issuer, kind):
    """An OAuth client, or runtime tokens, asked without a network."""
    issuer.clock = world.clock
    transport = httpx.MockTransport(issuer.handle)
    if kind == "oauth":
        endpoint = TokenEndpoint(ENDPOINT, transport=transport)
        client = OAuthClient("outbox", lambda: "s3cret-of-client")
        return OAuthTokens(endpoint, client, wall_ms=world.clock.wall_ms)
    endpoint = TokenEndpoint("http://relay.test:4850/api/runtime-tokens", transport=transport)
    return RuntimeTokens(endpoint, StaticToken("tok-boot"), "host-1", wall_ms=world.clock.wall_ms)


class TokenWorld(World):
    """A world whose tokens are asked for; the relay takes only those that the issuer knows."""

    def __init__(self, folder, kind="oauth", issuer=None, minter=None, **options):
        self.issuer = issuer or Issuer()
        self._kind, self._minter = kind, minter
        super().__init__(folder, **options)
        if "behave" not in options:
            self.relay.behave = self.ask_for_a_good_token

    def _engine(self):
        engine = super()._engine()
        delivery = engine.delivery
        delivery.tokens = MintedTokens(
            self._minter or minter_of(self, self.issuer, self._kind),
            schedule=delivery.schedule, clock=self.clock, rng=self.rng, facts=delivery.gate._state,
            cache=TokenCache(self.state), log=self._log,
        )  # fmt: skip
        delivery.gate.token_from = ""
        return engine

    def ask_for_a_good_token(self, request):
        """401 for every other one."""
        if self.issuer.lets_in(request):
            return None
        return answer(401, www_authenticate='Bearer error="invalid_token"')

    def said(self, event):
        """The log lines about an event."""
        return [fields for name, fields in self.events if name == event]

    @property
    def facts(self):
        """What stands in STATE/relay.sqlite."""
        return read_facts(self.state.relay_state)


@pytest.mark.parametrize(("kind", "recoveries"), [("oauth", 1), ("runtime", 20)])
def test_a_token_revoked_in_the_middle(tmp_path, kind, recoveries):
    """500 events of 20 agents: one recovery for each credential, no attempt spent, all arrive in order."""
    with TokenWorld(tmp_path, kind) as world:
        for agent in AGENTS:
            world.enqueue(agent, 25, kind="insight")
        world.run(until=lambda: sum(map(len, world.relay.stored.values())) >= 250)
        before = len(world.issuer.asked)
        world.issuer.good.clear()
        world.run(5 * MINUTE_MS)
        assert len(world.issuer.asked) - before == recoveries
        for agent in AGENTS:
            assert world.numbers(agent) == list(range(25))
        assert (world.attempts(), world.dead(), world.relay.repeats) == (0, [], 0)
        assert world.facts["auth"]["state"] == "ok"


@pytest.mark.parametrize("kind", ["oauth", "runtime"])
def test_a_recovery_endpoint_that_is_down_for_three_hours(tmp_path, kind):
    """Nothing is lost, fewer than 400 recovery requests are made, and nothing goes out with the old token."""
    with TokenWorld(tmp_path, kind) as world:
        for agent in AGENTS:
            world.enqueue(agent, 5, kind="insight")
        world.run(until=lambda: sum(map(len, world.relay.stored.values())) >= 50)
        world.issuer.good.clear()
        world.issuer.fail = lambda: httpx.ConnectError("connection refused")
        before = len(world.issuer.asked)
        world.run(MINUTE_MS)
        sent = len(world.relay.requests)
        world.run(3 * HOUR_MS)
        assert 100 < len(world.issuer.asked) - before < 400
        assert len(world.relay.requests) == sent
        assert world.facts["auth"]["state"] == "failing"
        assert "connection refused" in world.facts["auth"]["detail"]
        assert world.facts["auth"]["nextTryAt"] > world.clock.wall_ms()
        assert world.said("token_recovery_failed")
        world.issuer.fail = lambda: None
        world.run(5 * MINUTE_MS)
        for agent in AGENTS:
            assert world.numbers(agent) == [0, 1, 2, 3, 4]
        assert (world.attempts(), world.dead()) == (0, [])


def test_one_agent_asks_for_all_while_nobody_gets_a_token(tmp_path):
    """With a thread for each agent, too, a round of a recovery that fails is one request."""
    asked, release = [], threading.Event()
    with TokenWorld(tmp_path, "runtime") as world:

        def out_of_order(request):
            asked.append(request)
            assert release.wait(60)
            return answer(503)

        endpoint = TokenEndpoint("http://relay.test/mint", transport=httpx.MockTransport(out_of_order))
        tokens = world.engine.delivery.tokens
        tokens._minter._endpoint = endpoint
        refused = []

        def ask(agent):
            with pytest.raises(NoTokenNow) as none:
                tokens.token(agent)
            refused.append(none.value)

        release.set()
        ask("agent-0")
        release.clear()
        world.clock.now_ms += HOUR_MS
        threads = [threading.Thread(target=ask, args=(agent,)) for agent in AGENTS]
        for thread in threads:
            thread.start()
        wait_for(lambda: len(refused) + len(asked) > len(AGENTS), 60)
        release.set()
        for thread in threads:
            thread.join(60)
        assert len(asked) == 2
        assert {none.reason for none in refused} == {"token_recovery"}
        assert all(none.next_ms > world.clock.monotonic_ms() for none in refused[1:])


def test_an_agent_that_is_refused_after_an_outage_shows_that_it_is_over(tmp_path):
    """The answer to the one who asked for all is a refusal of that one alone: the others ask at once."""
    with TokenWorld(tmp_path, "runtime") as world:
        world.issuer.fail = lambda: answer(503)
        tokens = world.engine.delivery.tokens
        with pytest.raises(NoTokenNow):
            tokens.token("builder")
        world.clock.now_ms += HOUR_MS
        world.issuer.fail = lambda: answer(403, {"error": {"code": "insufficient_scope"}})
        with pytest.raises(NoTokenNow):
            tokens.token("builder")
        world.issuer.fail = lambda: None
        assert tokens.token("reviewer") == "tok-3"
        assert world.facts["auth"]["state"] == "ok"


def test_a_retry_that_nobody_needed_leaves_a_good_token_as_it_is(tmp_path):
    """What people are told stays true, and nothing is asked."""
    with TokenWorld(tmp_path) as world:
        world.enqueue("builder", 1)
        world.run(MINUTE_MS)
        world.engine.delivery.tokens.retry()
        assert world.facts["auth"]["state"] == "ok"
        assert len(world.issuer.asked) == 1


def test_a_token_is_renewed_before_it_ends(tmp_path):
    """A day of events with tokens that live for an hour: none is ever refused, one is got for each hour."""
    with TokenWorld(tmp_path) as world:
        refused = []

        def behave(request):
            said = world.ask_for_a_good_token(request)
            refused.extend([request] if said else [])
            return said

        world.relay.behave = behave
        for minute in range(0, 24 * 60, 10):
            world.enqueue("builder", 1, first=minute)
            world.run(10 * MINUTE_MS)
        assert refused == []
        assert 24 <= len(world.issuer.asked) <= 30


def test_a_good_token_is_used_while_its_renewal_fails(tmp_path):
    """An endpoint that is down just before the end of a token keeps nothing waiting until it is over."""
    with TokenWorld(tmp_path) as world:
        world.enqueue("builder", 1)
        world.run(MINUTE_MS)
        world.issuer.fail = lambda: answer(503)
        world.clock.now_ms += HOUR_MS - 90_000
        world.enqueue("builder", 1, first=1)
        world.run(1_000)
        assert world.numbers("builder") == [0, 1]
        assert world.facts["auth"]["state"] == "failing"


def test_invalid_grant_stops_until_a_person_asks(tmp_path):
    """One request, then none for a day; a new start does not ask either; `auth retry` does."""
    with TokenWorld(tmp_path) as world:
        world.issuer.fail = lambda: answer(400, {"error": "invalid_grant", "error_description": "gone"})
        world.enqueue("builder", 2)
        world.run(24 * HOUR_MS)
        world.restart()
        world.run(HOUR_MS)
        assert len(world.issuer.asked) == 1
        assert [line["detail"] for line in world.said("token_stopped")] == [
            f"{ENDPOINT} answers 400: invalid_grant, gone"
        ]
        assert world.engine.delivery.gate.relay.reason == "token_stopped"
        world.issuer.fail = lambda: None
        world.engine.delivery.tokens.retry()
        world.engine.delivery.gate.retry_now()
        world.run(MINUTE_MS)
        assert world.numbers("builder") == [0, 1]
        assert world.attempts() == 0


class Printed:
    """A program that prints the same token each time."""

    one_per_agent = is_kept = False

    def __init__(self, *tokens):
        self.tokens, self.runs = list(tokens), 0

    def mint(self, agent, *, deadline):
        """The next one, the last one again and again."""
        self.runs += 1
        return Grant(self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0])

    def describe(self):
        """As the real one."""
        return "command print-token"

    def inputs(self):
        """Never changes."""
        return "same"

    def abort(self):
        """Nothing runs."""

    close = abort


def test_a_recovery_that_yields_the_same_token_ends_in_one_probe_by_backoff(tmp_path):
    """An hour of 401: some dozens of probes with it, never two at a time, and all is well afterwards."""
    printed = Printed("tok-always")
    with TokenWorld(tmp_path, minter=printed) as world:
        world.relay.behave = lambda request: answer(401)
        for agent in AGENTS:
            world.enqueue(agent, 2)
        world.run(HOUR_MS)
        assert 40 < len(world.relay.requests) < 200
        assert printed.runs < 200
        assert (world.attempts(), world.dead()) == (0, [])
        world.relay.behave = lambda request: None
        world.run(5 * MINUTE_MS)
        assert all(world.numbers(agent) == [0, 1] for agent in AGENTS)


def test_403_is_one_recovery_and_then_holds_the_agent_alone(tmp_path):
    """A token without the right: one new one is got, however long it stays so; the others go on."""
    with TokenWorld(tmp_path) as world:

        def behave(request):
            refused = answer(403, {"error": {"code": "insufficient_scope"}})
            return refused if request.agent == "builder" else world.ask_for_a_good_token(request)

        world.relay.behave = behave
        world.enqueue("builder", 2)
        world.enqueue("reviewer", 2)
        world.run(40 * MINUTE_MS)
        assert len(world.issuer.asked) == 2
        assert world.numbers("reviewer") == [0, 1]
        assert world.statuses()["builder"].blocked.reason == "forbidden"


def test_a_refused_agent_does_not_hold_the_others(tmp_path):
    """The relay gives no token to one agent: only that one waits, and says why."""
    with TokenWorld(tmp_path, "runtime") as world:
        handle = world.issuer.handle

        def no_builder(request):
            if b'"builder"' in request.content:
                return answer(403, {"error": {"code": "insufficient_scope", "message": "unknown agent"}})
            return handle(request)

        endpoint = TokenEndpoint("http://relay.test/mint", transport=httpx.MockTransport(no_builder))
        world.engine.delivery.tokens._minter._endpoint = endpoint
        world.enqueue("builder", 2)
        world.enqueue("reviewer", 2)
        world.run(10 * MINUTE_MS)
        assert world.numbers("reviewer") == [0, 1]
        blocked = world.statuses()["builder"].blocked
        assert blocked.reason == "token_recovery"
        assert "unknown agent" in blocked.detail


def test_an_agent_that_is_gone_for_good_leaves_no_token(tmp_path):
    """Neither on disk nor in what people are told; when it comes back it is given a new one."""
    with TokenWorld(tmp_path, "runtime") as world:
        world.enqueue("builder", 1)
        world.enqueue("reviewer", 1)
        world.run(MINUTE_MS)
        world.engine.delivery.tokens.forget("builder")
        assert [path.name for path in world.state.tokens.iterdir()] == [
            file_name("reviewer").replace(".sqlite", ".json")
        ]
        assert "token:builder" not in world.facts
        assert "token:reviewer" in world.facts
        world.enqueue("builder", 1, first=1)
        world.run(MINUTE_MS)
        assert world.numbers("builder") == [0, 1]
        assert len(world.issuer.asked) == 3


@pytest.mark.parametrize("where", ["at the endpoint", "behind another process"])
def test_a_request_for_a_token_that_we_end_ourselves_is_no_trouble(tmp_path, where):
    """When a daemon stops, nobody is told of a recovery that failed, and nobody is waited for."""
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        world = stack.enter_context(TokenWorld(tmp_path))
        tokens = world.engine.delivery.tokens
        url = f"http://127.0.0.1:{connection.getsockname()[1]}/"
        tokens._minter._endpoint = endpoint = TokenEndpoint(url, timeout_ms=600_000)
        if where != "at the endpoint":
            stack.enter_context(TokenCache(world.state).alone("", 10))
        refused = []

        def ask():
            with pytest.raises(NoTokenNow) as none:
                tokens.token("builder")
            refused.append(none.value)

        asking = threading.Thread(target=ask)
        asking.start()
        if where == "at the endpoint":
            stack.enter_context(connection.accept()[0])
        tokens.abort()
        asking.join(30)
        assert [none.reason for none in refused] == ["token_recovery"]
        assert world.said("token_recovery_failed") == []
        assert world.facts["auth"]["state"] == ""
        endpoint.close()


def test_a_token_is_shared_by_processes(tmp_path):
    """A second start uses the token of the first one, and asks for none."""
    with TokenWorld(tmp_path) as world:
        world.enqueue("builder", 1)
        world.run(MINUTE_MS)
        world.restart()
        world.enqueue("builder", 1, first=1)
        world.run(MINUTE_MS)
        assert world.numbers("builder") == [0, 1]
        assert len(world.issuer.asked) == 1
        assert [path.stat().st_mode & 0o777 for path in world.state.tokens.iterdir()] == [0o600]


def test_a_client_that_is_configured_otherwise_gets_a_token_of_its_own(tmp_path):
    """What was given out for another client is not used; the form is RFC 6749's."""
    with TokenWorld(tmp_path) as world:
        world.enqueue("builder", 1)
        world.run(MINUTE_MS)
        world.engine.delivery.tokens._minter._client = OAuthClient("other", scope="events", style="post")
        world.engine.delivery.tokens._credentials.clear()
        world.enqueue("builder", 1, first=1)
        world.run(MINUTE_MS)
        first, second = (parse_qs(request.content.decode()) for request in world.issuer.asked)
        assert first == {"grant_type": ["client_credentials"]}
        assert second == {"grant_type": ["client_credentials"], "client_id": ["other"], "scope": ["events"]}


def test_who_speaks_to_the_relay_beside_the_pumps_shares_their_token(tmp_path):
    """The same token in the same process; after a 401 one recovery, which the pumps take over."""
    with TokenWorld(tmp_path) as world:
        beside = AgentToken(world.engine.delivery.tokens, "builder")
        world.enqueue("builder", 1)
        world.run(MINUTE_MS)
        assert beside.token() == "tok-1"
        world.issuer.good.clear()
        assert beside.refresh()
        assert beside.token() == "tok-2"
        world.enqueue("builder", 1, first=1)
        world.run(MINUTE_MS)
        assert world.numbers("builder") == [0, 1]
        assert len(world.issuer.asked) == 2
        world.issuer.fail = lambda: answer(500)
        world.issuer.good.clear()
        assert not beside.refresh()
        with pytest.raises(TokenUnavailable, match="answers 500"):
            beside.token()


def test_a_recovery_is_taken_over_from_another_process(tmp_path):
    """Somebody else got a new token meanwhile: it is found, and nobody is asked."""
    with TokenWorld(tmp_path) as world:
        world.enqueue("builder", 1)
        world.run(MINUTE_MS)
        world.issuer.good = {"tok-from-elsewhere": None}
        tokens = world.engine.delivery.tokens
        inputs = tokens._minter.inputs()
        TokenCache(world.state).write("", inputs, "tok-from-elsewhere", world.clock.wall_ms() + HOUR_MS)
        world.enqueue("builder", 1, first=1)
        world.run(MINUTE_MS)
        assert world.numbers("builder") == [0, 1]
        assert len(world.issuer.asked) == 1


def test_another_source_is_told_of_from_the_start(tmp_path):
    """What was known of the tokens of another configuration is gone with it."""
    with TokenWorld(tmp_path, "runtime") as world:
        world.enqueue("builder", 1)
        world.run(MINUTE_MS)
        assert world.facts["token:builder"]["state"] == "ok"
        state = world.engine.delivery.gate._state
        tokens_of(world.settings, world.state, state, log=world._log, clock=world.clock, rng=world.rng)
        assert {name for name in world.facts if name == "auth" or name.startswith("token:")} == set()
