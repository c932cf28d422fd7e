"""The application of the local HTTP: which call is served where, and how each of them is answered."""

from __future__ import annotations

import os
import time
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from anyio import CapacityLimiter, to_thread
from starlette.applications import Starlette
from starlette.convertors import Convertor, register_url_convertor
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from outbox.api.events_in import take_events
from outbox.api.letters import (
    STATES,
    Done,
    discarding,
    do_each,
    done_data,
    event_text,
    letter_data,
    listed_data,
    page_of,
    picked,
    replaying,
    shown,
)
from outbox.api.outboxes import existing
from outbox.api.problems import JSON, answer, fault, problem, problem_of
from outbox.api.readiness import readiness
from outbox.api.report import opened, status_report
from outbox.api.requests import (
    agent_in,
    agent_or_all,
    asked,
    choice_in,
    one_of,
    parameters,
    segment,
    timeout_s,
    whole_number,
)
from outbox.api.served import Served
from outbox.errors import OutboxError, StoreError, UsageError

_MOST_FLUSHES = 64  # under way at once; they have threads of their own, so that none keeps an event waiting
_MOST_LOOKS = 8  # the same for those who only look
_MOST_PULSES = 2  # for those who ask whether we live: the files, on a slow disk, are no reason to restart us
_PAGE = 500
_MOST_PAGE = 10_000
_CHOICE = ("agent", "seqs", "reasons", "kinds", "failedBefore", "failedAfter")
_DOCUMENT = Path(__file__).with_name("openapi.json")

_Found = TypeVar("_Found")
Handler = Callable[[Request], Awaitable[Response]]


def local_app(daemon: Served) -> Starlette:
    """The application; its routes are those of openapi.json."""
    routes = Calls(daemon).routes()
    return Starlette(
        routes=[
            Route(path, _by_method(of), methods=list(of), include_in_schema=False)
            for path, of in routes.items()
        ],
        exception_handlers={OutboxError: _refused, HTTPException: _not_served, Exception: _fault},
    )


class _Segment(Convertor[str]):
    """One part of a path as it was sent, which may be empty; what it means is read later."""

    regex = "[^/]*"

    def convert(self, value: str) -> str:
        """The part itself."""
        return value

    def to_string(self, value: str) -> str:
        """The part itself."""
        return value


register_url_convertor("segment", _Segment())


def undecoded(app: ASGIApp) -> ASGIApp:
    """Have paths matched as they were sent: a slash in an agent's name (%2F) is no slash of the path."""

    async def with_raw_path(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["raw_path"].decode("ascii", "replace")}
        await app(scope, receive, send)

    return with_raw_path


def _by_method(of: dict[str, Handler]) -> Handler:
    async def handle(request: Request) -> Response:
        return await of["GET" if request.method == "HEAD" else request.method](request)

    return handle


class Calls:
    """What each call does."""

    def __init__(self, daemon: Served) -> None:
        """`daemon` does it."""
        self._daemon = daemon
        self._flushes = CapacityLimiter(_MOST_FLUSHES)
        self._looks = CapacityLimiter(_MOST_LOOKS)
        self._pulses = CapacityLimiter(_MOST_PULSES)
        self._metrics: Callable[[], bytes] | None = None

    def routes(self) -> dict[str, dict[str, Handler]]:
        """Each path with its methods."""
        agent = "/v1/agents/{agent:segment}"
        return {
            f"{agent}/events": {"POST": partial(take_events, self._daemon), "GET": self._list},
            f"{agent}/events/{{event:segment}}": {"GET": self._show},
            f"{agent}/dead/{{seq:segment}}": {"GET": self._show_dead},
            "/v1/dead": {"GET": self._list_dead},
            "/v1/dead/replay": {"POST": self._replay},
            "/v1/dead/discard": {"POST": self._discard},
            "/v1/status": {"GET": self._status},
            "/v1/flush": {"POST": self._flush},
            "/v1/pause": {"POST": self._pause},
            "/v1/resume": {"POST": self._resume},
            "/v1/auth/retry": {"POST": self._retry_tokens},
            "/v1/stop": {"POST": self._stop},
            "/v1/openapi.json": {"GET": self._document},
            "/livez": {"GET": self._alive},
            "/readyz": {"GET": self._ready},
            "/metrics": {"GET": self._measured},
        }

    async def _look(self, work: Callable[[], _Found]) -> _Found:
        return await to_thread.run_sync(work, limiter=self._looks)

    # Looking -----------------------------------------------------------------------------------------------

    async def _status(self, request: Request) -> Response:
        parameters(request, ())
        return answer(
            await self._look(partial(status_report, self._daemon.state, paths=self._daemon.kind_paths))
        )

    async def _list(self, request: Request) -> Response:
        agent, given = agent_in(request), parameters(request, ("state", "kind", "after", "limit"))
        state = one_of(given, "state", STATES)
        after = whole_number(given, "after", 0, 10**18)
        most = whole_number(given, "limit", _PAGE, _MOST_PAGE)

        def look() -> dict[str, Any]:
            directory = self._daemon.state
            with opened(directory, existing(directory, agent)) as box:
                page, more = page_of(box, kind=given.get("kind"), state=state, after=after, most=most)
                events = [listed_data(box.agent, event) for event in page]
            return {"events": events, "more": more}

        return answer(await self._look(look))

    async def _show(self, request: Request) -> Response:
        parameters(request, ())
        return await self._shown(agent_in(request), segment(request, "event"), dead=False)

    async def _show_dead(self, request: Request) -> Response:
        parameters(request, ())
        seq = segment(request, "seq")
        if not (seq.isascii() and seq.isdigit()):
            raise UsageError(f"{seq[:40]!r} is no number of a dead letter. Nothing was changed.")
        return await self._shown(agent_in(request), seq, dead=True)

    async def _shown(self, agent: str, which: str, *, dead: bool) -> Response:
        whose, found = await self._look(partial(shown, self._daemon.state, agent, which, dead=dead))
        return Response(event_text(whose, found).encode("ascii"), media_type=JSON)

    async def _list_dead(self, request: Request) -> Response:
        given = parameters(request, ("agent", "reason", "kind", "failedBefore", "failedAfter", "limit"))
        most = whole_number(given, "limit", _MOST_PAGE, _MOST_PAGE)
        moments: dict[str, Any] = {
            name: whole_number(given, name, 0, 10**18)
            for name in ("failedBefore", "failedAfter")
            if name in given
        }
        lists = {f"{name}s": [given[name]] for name in ("reason", "kind") if name in given}
        agent = agent_or_all(given)
        choice = choice_in({**moments, **lists}, required=False)

        def look() -> dict[str, Any]:
            found, troubles = picked(self._daemon.state, agent, choice)
            letters = [letter_data(one.agent, letter) for one in found for letter in one.letters]
            return {
                "letters": letters[:most],
                "more": len(letters) > most,
                "unread": _unread(troubles),
            }

        return answer(await self._look(look))

    async def _document(self, request: Request) -> Response:
        parameters(request, ())
        return Response(await self._look(_DOCUMENT.read_bytes), media_type=JSON)

    # How it is ---------------------------------------------------------------------------------------------

    async def _alive(self, request: Request) -> Response:
        parameters(request, ())
        if trouble := await to_thread.run_sync(self._daemon.hangs, limiter=self._pulses):
            return problem(
                503,
                "engine_stuck",
                f"Delivery does not go on by itself any more: {trouble}. Nothing is lost; what waits is on "
                "disk. Restart the daemon.",
            )
        return answer({"alive": True, "pid": os.getpid()})

    async def _ready(self, request: Request) -> Response:
        parameters(request, ())
        said = await self._look(partial(readiness, self._daemon))
        return answer(said, 200 if said["ready"] else 503)

    async def _measured(self, request: Request) -> Response:
        parameters(request, ())
        return Response(
            await self._look(self._exposition),
            headers={"Content-Type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    def _exposition(self) -> bytes:
        if self._metrics is None:
            from outbox.api.metrics import Exposition  # noqa: PLC0415 - most hosts scrape no metrics

            self._metrics = Exposition(self._daemon).text
        return self._metrics()

    # Acts --------------------------------------------------------------------------------------------------

    async def _replay(self, request: Request) -> Response:
        return await self._act_on_dead(request, replays=True)

    async def _discard(self, request: Request) -> Response:
        return await self._act_on_dead(request, replays=False)

    async def _act_on_dead(self, request: Request, *, replays: bool) -> Response:
        given = await asked(request, (*_CHOICE, "all", "dryRun"))
        agent, choice = agent_or_all(given), choice_in(given, required=True)
        dry = given.get("dryRun", False)
        if not isinstance(dry, bool):
            raise UsageError("dryRun is true or false. Nothing was changed.")
        state = self._daemon.state

        def act() -> dict[str, Any]:
            now_ms = time.time_ns() // 1_000_000
            meant, troubles = picked(state, agent, choice)
            if dry:
                letters = [letter_data(one.agent, letter) for one in meant for letter in one.letters]
                return {"results": letters, "done": 0, "refused": 0, "unread": _unread(troubles)}
            do = replaying(now_ms) if replays else discarding(now_ms)
            done = [one for some in do_each(state, meant, do) for one in some]
            return _acted(done, troubles, replays=replays)

        return answer(await to_thread.run_sync(act))

    async def _flush(self, request: Request) -> Response:
        given = await asked(request, ("agent", "timeoutS"))
        work = partial(self._daemon.flush, agent_or_all(given), timeout_s(given))
        return answer(await to_thread.run_sync(work, limiter=self._flushes))

    async def _pause(self, request: Request) -> Response:
        given = await asked(request, ("agent",))
        work = partial(self._daemon.pause, agent_or_all(given))
        return answer({"paused": await to_thread.run_sync(work)})

    async def _resume(self, request: Request) -> Response:
        given = await asked(request, ("agent",))
        work = partial(self._daemon.resume, agent_or_all(given))
        return answer({"resumed": await to_thread.run_sync(work)})

    async def _retry_tokens(self, request: Request) -> Response:
        await asked(request, ())
        await to_thread.run_sync(self._daemon.retry_tokens)
        return answer({"retried": True})

    async def _stop(self, request: Request) -> Response:
        await asked(request, ())
        self._daemon.stop()
        return answer({"stopping": True, "pid": os.getpid()}, 202)


def _acted(done: list[Done], troubles: list[tuple[Path, StoreError]], *, replays: bool) -> dict[str, Any]:
    refused = sum(one.error is not None for one in done)
    return {
        "results": [done_data(one, replayed=replays) for one in done],
        "done": len(done) - refused,
        "refused": refused,
        "unread": _unread(troubles),
    }


def _unread(troubles: Iterable[tuple[Path, StoreError]]) -> list[dict[str, str]]:
    """The files that could not be read, and why."""
    return [{"file": path.name, "code": error.code, "message": str(error)} for path, error in troubles]


# Errors ----------------------------------------------------------------------------------------------------


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, OutboxError)  # noqa: S101 - registered for these only
    return problem_of(error)


async def _not_served(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 - registered for these only
    message = f"{request.method} {request.url.path} is not served here. Nothing was changed."
    return problem(error.status_code, "not_served", message, error.headers)


async def _fault(_request: Request, error: Exception) -> Response:
    return fault(error)
