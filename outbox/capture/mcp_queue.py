"""The proxy's side of the agent's outbox: calls put on disk, their place, what became of them."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence

from outbox.capture.mcp_words import Queued, result_of
from outbox.errors import OutboxError, UsageError
from outbox.event import uuid7
from outbox.event_checks import check_trace
from outbox.json_text import quoted
from outbox.library import Outbox, read_rules
from outbox.store.directory import StateDirectory
from outbox.store.file import open_outbox
from outbox.store.place import running_daemon
from outbox.store.records import find, listed
from outbox.wire_text import wire_key

_KIND = "mcp-tool-call"
_RANDOM_BYTES = 10


class CallQueue:
    """The calls of one agent; thread-safe. The outbox is made when the first call needs it."""

    def __init__(self, state: StateDirectory, agent: str, *, allow_network_fs: bool = False) -> None:
        self.agent = agent
        self._state = state
        self._allow_network_fs = allow_network_fs
        self._mutex = threading.Lock()
        self._outbox: Outbox | None = None

    def new_key(self) -> str:
        """A key for a call that the client gave none."""
        return uuid7(_now_ms(), os.urandom(_RANDOM_BYTES))

    def wire_key(self, key: str) -> str:
        """The key as the relay sees it, on the direct try and on every later one."""
        limits, _ = read_rules(self._state)
        return wire_key(key, self.agent, limits.key_scope == "agent")

    def has_calls(self) -> bool:
        """Whether older calls of this agent wait or are in flight; raises StoreError."""
        path = self._state.outbox_path(self.agent)
        if not os.path.lexists(path):
            return False
        outbox = self._opened()
        if not outbox.depth:
            return False
        with contextlib.closing(open_outbox(self._state, path)) as box:
            return next(listed(box, kind=_KIND), None) is not None

    def put(self, tool: str, arguments: str, key: str, trace: tuple[str, str] = ("", "")) -> Queued:
        """Put a call on disk: durable when this returns. `arguments` is JSON text, kept to the letter.

        `trace` is the client's `traceparent` and `tracestate` (W3C Trace Context); what is none is left out.
        Raises OutboxError: nothing was stored.
        """
        outbox = self._opened()
        payload = f'{{"tool":{quoted(tool)},"arguments":{arguments}}}'
        traced = "".join(f',"{name}":{quoted(text)}' for name, text in _traced(*trace).items())
        event = f'{{"kind":"{_KIND}","payload":{payload},"idempotencyKey":{quoted(key)}{traced}}}'
        (receipt,) = outbox.enqueue_many([event])
        if isinstance(receipt, OutboxError):
            raise receipt
        return Queued(
            tool,
            self.agent,
            key,
            receipt.seq,
            max(0, outbox.depth - 1),
            receipt.state if receipt.duplicate else "",
            running_daemon(self._state) is None,
        )

    def look_up(self, which: str, why: Callable[[], Sequence[str]]) -> str:
        """The tool result that tells what became of a call; `why` gives the reason why calls wait.

        Raises StoreError.
        """
        path = self._state.outbox_path(self.agent)
        if not os.path.lexists(path):
            return result_of(self.agent, None, which, (), _now_ms())
        with contextlib.closing(open_outbox(self._state, path)) as box:
            found = find(box, which)
        return result_of(self.agent, found, which, why(), _now_ms())

    def close(self) -> None:
        """Close the file; what waits stays on disk."""
        with self._mutex:
            if self._outbox is not None:
                self._outbox.close()

    def _opened(self) -> Outbox:
        with self._mutex:
            if self._outbox is None:
                self._outbox = Outbox.open(
                    self.agent, state_dir=self._state.path, allow_network_fs=self._allow_network_fs
                )
            return self._outbox


def _traced(traceparent: str, tracestate: str) -> dict[str, str]:
    """The fields of the trace that an event may have: a broken one is no reason not to queue."""
    given = {"traceparent": traceparent} | ({"tracestate": tracestate} if tracestate else {})
    try:
        check_trace(traceparent, tracestate or None)
    except UsageError:
        return _traced(traceparent, "") if tracestate else {}
    return given


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
