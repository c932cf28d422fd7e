"""Single events of many connections: an agent's that come while a commit of it runs share the next one.

The event loop hands all of them to a worker at once and hears of them at once: a hand-over for each would
cost more than its event. A lone event is handed over as it comes; no agent waits for another one's commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable, Sequence
from http import HTTPStatus
from queue import SimpleQueue
from typing import NamedTuple

from starlette.responses import Response

from outbox.api.events_in import members, take
from outbox.api.problems import JSON, fault, problem_of
from outbox.api.requests import agent_of
from outbox.api.served import Served
from outbox.errors import OutboxError, Unavailable
from outbox.store.enqueue import Receipt

_MOST_AGENTS = 40  # whose commits run at the same time
_NO_THREAD = (
    "The daemon can start no thread to store it (ulimit -u, or the container's limit). Nothing was stored. "
    "Raise the limit, and send it again."
)

# The start of an answer and its rest, between which a connection puts the fields that are its own.
Answer = tuple[bytes, bytes]


class Asked(NamedTuple):
    """The body of one request, and who is told its answer, in the event loop."""

    body: bytes
    tell: Callable[[Answer], None]


class Gathering:
    """Commits single events. Only its workers are threads: all else is called in the event loop."""

    def __init__(self, daemon: Served) -> None:
        """No worker is started before the first event."""
        self._daemon = daemon
        self._next: dict[bytes, list[Asked]] = {}  # by agents whose commit is under way
        self._handed: SimpleQueue[tuple[asyncio.AbstractEventLoop, bytes, list[Asked]] | None] = SimpleQueue()
        self._workers = 0

    def add(self, agent: bytes, asked: Asked) -> None:
        """Have an event stored for an agent, which is named as in the path."""
        gathered = self._next.get(agent)
        if gathered is None:
            self._hand_over(agent, [asked])
        else:
            gathered.append(asked)

    def close(self) -> None:
        """Let the workers end, when they are done with what they have; from any thread."""
        for _ in range(self._workers):
            self._handed.put(None)

    def _hand_over(self, agent: bytes, together: list[Asked]) -> None:
        if self._workers < min(len(self._next) + 1, _MOST_AGENTS) and not self._has_another_worker():
            refusal = _answer(Unavailable(_NO_THREAD))
            self._daemon.meter.refuse(Unavailable.code, len(together))
            for asked in together:
                asked.tell(refusal)
            return
        self._next[agent] = []
        self._handed.put((asyncio.get_running_loop(), agent, together))

    def _has_another_worker(self) -> bool:
        """Start one, or do with those there are; False when there is none."""
        try:
            # a daemon thread: an end does not wait for a file that is locked
            threading.Thread(target=self._work, name=f"events-{self._workers + 1}", daemon=True).start()
        except RuntimeError:  # the limit of the user's threads, or of the container's
            return self._workers > 0
        self._workers += 1
        return True

    def _work(self) -> None:
        while (handed := self._handed.get()) is not None:
            loop, agent, together = handed
            answers = self._answers(agent, [asked.body for asked in together])
            with contextlib.suppress(RuntimeError):  # the loop has ended, and its connections with it
                loop.call_soon_threadsafe(self._stored, agent, together, answers)

    def _stored(self, agent: bytes, together: list[Asked], answers: Sequence[Answer]) -> None:
        gathered = self._next.pop(agent)
        if gathered:
            self._hand_over(agent, gathered)
        for asked, answer in zip(together, answers, strict=True):
            asked.tell(answer)

    def _answers(self, agent: bytes, bodies: Sequence[bytes]) -> list[Answer]:
        """The answer to each, once the events are on disk; in a worker."""
        try:
            results = take(self._daemon, agent_of(agent), bodies).results
        except OutboxError as error:
            return [_answer(error)] * len(bodies)
        except Exception as error:
            logging.getLogger("outbox.api").exception("Events could not be taken")
            return [_of_response(fault(error))] * len(bodies)
        return [_answer(result) for result in results]


def _answer(result: Receipt | OutboxError) -> Answer:
    if isinstance(result, OutboxError):
        return _of_response(problem_of(result))
    body = members(result)
    rest = f"content-length: {len(body) + 2}\r\ncontent-type: {JSON}\r\n\r\n{{{body}}}"
    return b"HTTP/1.1 200 OK\r\n", rest.encode("ascii")


def _of_response(response: Response) -> Answer:
    fields = b"".join(b"%b: %b\r\n" % field for field in response.raw_headers)
    status = HTTPStatus(response.status_code)
    return f"HTTP/1.1 {status} {status.phrase}\r\n".encode("ascii"), fields + b"\r\n" + bytes(response.body)
