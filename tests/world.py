"""A whole outbox on a clock of our own: real files, the real engine and client, a relay that is a function.

Time passes only when nothing can be done, so that a week takes seconds.
"""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import httpx

from outbox import Outbox
from outbox.bounds import Bounds
from outbox.daemon.compose import routes_of, schedule_from
from outbox.delivery.clock import Clock
from outbox.delivery.engine import Engine
from outbox.delivery.gate import Gate
from outbox.delivery.grouping import Size
from outbox.delivery.shared import Delivery
from outbox.delivery.tokens import HostToken
from outbox.setting_keys import Settings
from outbox.settings import load
from outbox.store.directory import StateDirectory
from outbox.store.inspect import DeadLetter, dead_letters, read_status
from outbox.store.open_files import OpenFiles
from outbox.store.relay_state import RelayState
from relay_client import RelayClient, StaticToken

URL = "http://relay.test:4850"
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS
DAY_MS = 24 * HOUR_MS
START_MS = 1_790_000_000_000


class TestClock(Clock):
    """A clock that is told what time it is."""

    __test__ = False

    def __init__(self) -> None:
        self.now_ms = (
            10**12
        )  # far ahead of the machine's own clock, which the client knows: no deadline is over
        self.offset_ms = START_MS - self.now_ms

    def monotonic_ms(self) -> int:
        """The time of this world."""
        return self.now_ms

    def wall_ms(self) -> int:
        """The same, as epoch milliseconds."""
        return self.now_ms + self.offset_ms


@dataclass
class Request:
    """One request as the relay saw it."""

    at_ms: int
    method: str
    path: str
    agent: str
    seq: int
    keys: list[str]
    body: bytes
    headers: dict[str, str]
    messages: list[dict]


class Refuse(Exception):
    """Raised by a behaviour: the connection is refused."""


class Lose(Exception):
    """Raised by a behaviour: the request was read, and no answer comes."""


def answer(status: int, body: object = None, **headers: str) -> httpx.Response:
    """A JSON answer."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return httpx.Response(status, headers=named, json=body if body is not None else {})


Behaviour = Callable[[Request], httpx.Response | None]


@dataclass
class Relay:
    """Keeps what it accepts, once for each key; `behave` may answer in its place."""

    clock: TestClock
    behave: Behaviour = lambda request: None
    health: Callable[[], int] = lambda: 200
    requests: list[Request] = field(default_factory=list)
    stored: dict[str, list[tuple[int, str]]] = field(default_factory=lambda: defaultdict(list))
    keys: set[str] = field(default_factory=set)
    repeats: int = 0
    spec: dict | None = None
    effects: list[str] = field(default_factory=list)

    def handle(self, http: httpx.Request) -> httpx.Response:
        """Answer one request, as `behave` says or by storing it."""
        if http.url.path == "/api/health":
            status = self.health()
            if status == 0:
                raise httpx.ConnectError("refused")
            if status == -1:
                return httpx.Response(200, html="<title>Sign in</title>")
            return answer(status)
        if http.url.path == "/api/spec":
            return answer(200, {"openapi": "3.1.0", "x-outbox": self.spec}) if self.spec else answer(404)
        request = self._request(http)
        self.requests.append(request)
        try:
            said = self.behave(request)
        except Refuse as error:
            raise httpx.ConnectError("connection refused") from error
        except Lose as error:
            raise httpx.ReadError("connection lost") from error
        return said if said is not None else self.accept(request)

    def accept(
        self, request: Request, *, items: Callable[[dict], tuple[int, object] | None] = lambda m: None
    ):
        """Store it; `items` may answer for a message of a batch in place of 201."""
        if request.path.endswith("/batch"):
            results = []
            for message in request.messages:
                said = items(message)
                if said is None:
                    self._store(request.agent, message["idempotencyKey"], message)
                    results.append({"status": 201})
                else:
                    results.append({"status": said[0], "error": said[1]})
            return answer(207, {"results": results})
        if request.path == "/api/mcp":
            return self._call(request)
        self._store(request.agent, request.keys[0], json.loads(request.body))
        return answer(201, {"id": "x"})

    def _store(self, agent: str, key: str, event: dict) -> None:
        if key in self.keys:
            self.repeats += 1
            return
        self.keys.add(key)
        self.stored[agent].append((event.get("n", -1), key))

    def _call(self, request: Request) -> httpx.Response:
        call = json.loads(request.body)
        if call["method"] == "tools/call":
            self.effects.append(call["params"]["_meta"]["relay-outbox/idempotencyKey"])
            self._store(request.agent, self.effects[-1], call["params"]["arguments"])
        return answer(200, {"jsonrpc": "2.0", "id": call["id"], "result": {"content": []}})

    def _request(self, http: httpx.Request) -> Request:
        body = http.read()
        parsed = json.loads(body) if body else {}
        messages = parsed.get("messages", [parsed]) if isinstance(parsed, dict) else []
        keys = [str(message.get("idempotencyKey", "")) for message in messages]
        headers = dict(http.headers)
        return Request(
            self.clock.now_ms, http.method, http.url.path, headers.get("outbox-agent", ""),
            int(headers.get("outbox-seq", "0")), keys, body, headers, messages,
        )  # fmt: skip


class World:
    """One state directory, its engine on a clock of ours, and a relay."""

    def __init__(
        self,
        folder: Path,
        *,
        behave: Behaviour = lambda r: None,
        health=lambda: 200,
        seed: int = 7,
        **flags: object,
    ):
        print(f"seed {seed}")
        self.clock = TestClock()
        self.relay = Relay(self.clock, behave, health)
        self.folder = folder
        self.state = StateDirectory(folder).create(allow_network_fs=True)
        overrides = {name.replace("__", "."): value for name, value in flags.items()}
        self.settings: Settings = load({"relay.url": URL, **overrides}, environ={}, config_path=None)
        self.rng = random.Random(seed)
        self.events: list[tuple[str, dict]] = []
        self.tokens = HostToken(StaticToken("tok-test"))
        self.engine = self._engine()
        self.boxes: dict[str, Outbox] = {}

    def _engine(self) -> Engine:
        settings = self.settings
        client = RelayClient(URL, transport=httpx.MockTransport(self.relay.handle), trust_env=False)
        gate = Gate(
            url=URL, schedule=schedule_from(settings), clock=self.clock, rng=self.rng,
            state=RelayState(self.state.relay_state), most=settings.delivery.workers,
            max_stuck_ms=round(settings.delivery.max_stuck_s * 1_000),
        )  # fmt: skip
        gate.on_change = self._log
        return Engine(
            Delivery(
                client=client, tokens=self.tokens, gate=gate,
                files=OpenFiles(self.state, settings.daemon.max_open_files), routes=routes_of(settings),
                schedule=schedule_from(settings),
                size=Size(settings.delivery.batch_max_items, settings.delivery.batch_max_bytes),
                clock=self.clock, rng=self.rng,
                max_retry_after_ms=round(settings.relay.max_retry_after_s * 1_000), log=self._log,
                rules=(settings.limits(), Bounds(min_free_disk_bytes=0, **self.bounds)),
            )
        )  # fmt: skip

    bounds: dict = {}  # noqa: RUF012 - a test may set its own

    def _log(self, event: str, fields: dict) -> None:
        self.events.append((event, fields))
        if event == "fault":
            raise AssertionError(fields)

    def restart(self) -> None:
        """As after kill -9 and a new start: nothing is remembered but what is on disk."""
        self.close_engine()
        self.engine = self._engine()
        self.wake()

    def close_engine(self) -> None:
        """Give places and files back."""
        self.engine.resign()
        self.engine.delivery.files.close()
        self.engine.delivery.gate.close_state()
        self.engine.delivery.client.close()

    def close(self) -> None:
        """Close everything."""
        for box in self.boxes.values():
            box.close()
        self.close_engine()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def enqueue(
        self, agent: str, count: int, *, kind: str = "session-message", first: int = 0, **fields: object
    ):
        """Hand over `count` numbered events with one commit."""
        box = self.boxes.get(agent) or Outbox.open(agent, state_dir=self.folder, allow_network_fs=True)
        self.boxes[agent] = box
        payload = {"from": agent, "to": "lead", "kind": "note", "body": "x", **fields}
        events = []
        for n in range(first, first + count):
            body = (
                {"tool": "note_add", "arguments": {"n": n}}
                if kind == "mcp-tool-call"
                else {**payload, "n": n}
            )
            events.append({"kind": kind, "payload": body})
        receipts = box.enqueue_many(events)
        self.wake()
        return receipts

    def wake(self) -> None:
        """Let the engine look at every file."""
        self.engine.wake_all(self.state.outbox_files())

    def run(
        self, for_ms: int | None = None, *, until: Callable[[], bool] | None = None, steps: int = 2_000_000
    ) -> None:
        """Let the engine work, and time pass when it cannot, until nothing is left to do or time is up."""
        end = None if for_ms is None else self.clock.now_ms + for_ms
        for _ in range(steps):
            if until is not None and until():
                return
            if self.engine.step():
                continue
            due = self.engine.next_due_ms()
            if due is None or (end is not None and due >= end):
                break
            self.clock.now_ms = max(self.clock.now_ms + 1, due)
        else:
            raise AssertionError("the engine does not come to rest")
        if end is not None:
            self.clock.now_ms = max(self.clock.now_ms, end)

    def statuses(self):
        """What each file says, by agent."""
        found = {}
        for path in self.state.outbox_files():
            with self.engine.delivery.files.borrow(path) as box:
                status = read_status(box)
            found[status.agent] = status
        return found

    def dead(self) -> list[DeadLetter]:
        """All dead letters."""
        found: list[DeadLetter] = []
        for path in self.state.outbox_files():
            with self.engine.delivery.files.borrow(path) as box:
                found += dead_letters(box)
        return found

    def attempts(self) -> int:
        """All attempts that are counted against waiting events."""
        total = 0
        for path in self.state.outbox_files():
            with self.engine.delivery.files.borrow(path) as box:
                total += box.one("SELECT coalesce(sum(attempts), 0) FROM tries")[0]
        return total

    def numbers(self, agent: str) -> list[int]:
        """The numbers of an agent's events that the relay holds, in its order."""
        return [n for n, _ in self.relay.stored[agent]]
