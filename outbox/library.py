"""The outbox as a program uses it: open, enqueue, flush. Loads the standard library and apsw only; what sends is
loaded when `flush` is called."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from outbox.bounds import Bounds
from outbox.errors import OutboxError, StoreClosed, UsageError
from outbox.event import Accepted, Draft, Limits, accept, check_agent, draft_event, parse_event, uuid7
from outbox.state_dir import state_dir as default_state_dir
from outbox.store.directory import StateDirectory
from outbox.store.enqueue import Receipt, enqueue
from outbox.store.file import OutboxFile, create_outbox, decode_rules, open_outbox
from outbox.store.inspect import OutboxStatus, read_status
from outbox.store.wake import wake_daemon

_BODY_LIMIT_VARIABLE = "AGENT_RELAY_MESSAGE_BODY_MAX_CHARS"


@dataclass(frozen=True, slots=True)
class FlushResult:
    """What a flush did: events delivered, left on disk, and turned into dead letters by it.

    `in_the_way` names for each agent with something left what stands in its way.
    """

    delivered: int
    left: int
    dead: int
    in_the_way: Mapping[str, str]


class Outbox:
    """One agent's outbox. Threads may share it; a forked child goes on with connections of its own.

    >>> import tempfile
    >>> from outbox import Outbox
    >>> state = tempfile.TemporaryDirectory()
    >>> with Outbox.open("builder", state_dir=state.name) as outbox:
    ...     receipt = outbox.enqueue("session-message", {"from": "builder", "to": "lead", "body": "done"})
    ...     (receipt.seq, receipt.state, outbox.depth)
    (1, 'waiting', 1)
    >>> state.cleanup()
    """

    def __init__(self, agent: str, state: StateDirectory, box: OutboxFile) -> None:
        """Use `Outbox.open`."""
        self.agent = agent
        self._state = state
        self._box = box
        self._mutex = threading.Lock()
        self._closed = False

    @classmethod
    def open(
        cls, agent: str, *, state_dir: str | os.PathLike[str] | None = None, allow_network_fs: bool = False
    ) -> Outbox:
        """Open the outbox of `agent` (1 to 512 bytes of UTF-8, compared exactly); it is made when it is not there.

        `state_dir` defaults to OUTBOX_STATE_DIR, $STATE_DIRECTORY or the user's own state folder. A daemon need
        not run. Raises UsageError for the agent's name, StoreError when the file cannot be used.
        """
        agent = check_agent(agent)
        place = Path(state_dir) if state_dir is not None else default_state_dir(None, os.environ)
        state = StateDirectory(place).create(allow_network_fs=allow_network_fs)
        return cls(agent, state, _opened(state, agent))

    def enqueue(
        self,
        kind: str,
        payload: object,
        *,
        mode: str = "append",
        dedupe_key: str | None = None,
        occurred_at_ms: int | None = None,
        idempotency_key: str | None = None,
        retry: Mapping[str, object] | None = None,
        account_id: str | None = None,
        run_id: str | None = None,
        step_id: str | None = None,
        parent_id: str | None = None,
        conversation_id: str | None = None,
        metadata: Mapping[str, object] | None = None,
        traceparent: str | None = None,
        tracestate: str | None = None,
    ) -> Receipt:
        """Put one event on disk: when this returns, it survives kill -9 and power loss.

        `payload` is any JSON value, `occurred_at_ms` epoch milliseconds (now by default). The same
        `idempotency_key` again gives the first event's receipt, with `duplicate=True`.

        Raises:
            UsageError: the event cannot be taken as it is; nothing was stored.
            StoreFull, StoreBusy, StoreError: nothing was stored; the operator can act.
        """
        draft = draft_event(
            kind,
            payload,
            limits=self._box.limits,
            mode=mode,
            dedupe_key=dedupe_key,
            occurred_at_ms=occurred_at_ms,
            idempotency_key=idempotency_key,
            retry=retry,
            account_id=account_id,
            run_id=run_id,
            step_id=step_id,
            parent_id=parent_id,
            conversation_id=conversation_id,
            metadata=metadata,
            traceparent=traceparent,
            tracestate=tracestate,
        )
        result = self._store([draft])[0]
        if isinstance(result, OutboxError):
            raise result
        return result

    def enqueue_many(
        self, events: Iterable[Mapping[str, Any] | str | bytes | Draft]
    ) -> list[Receipt | OutboxError]:
        """Put several events on disk with one commit, in order; one receipt or error for each.

        An event is a mapping or JSON text with the names of design section 5 (`kind`, `payload`, `occurredAt`, …).
        Those with an error were not taken; all others are durable when this returns.
        """
        drafts: list[Draft | UsageError] = []
        for event in events:
            try:
                drafts.append(self._draft(event))
            except UsageError as error:
                drafts.append(error)
        stored = iter(self._store([draft for draft in drafts if isinstance(draft, Draft)]))
        return [draft if isinstance(draft, UsageError) else next(stored) for draft in drafts]

    def flush(self, timeout_s: float = 10.0) -> FlushResult:
        """Send what waits, for at most `timeout_s` seconds: through the daemon where one runs, else by itself.

        Works from `atexit`. The relay and its token come from the environment or the configuration file. Raises
        ConfigError when no relay is set; the relay's trouble is no error: it shows in the result.
        """
        self._check_open()
        from outbox.daemon.flush import flush_agent  # noqa: PLC0415 - what sends is loaded only here

        return flush_agent(self._state, self.agent, timeout_s=timeout_s)

    @property
    def depth(self) -> int:
        """How many events wait or are in flight."""
        return self.status().waiting

    def status(self) -> OutboxStatus:
        """What the file says of this outbox, now."""
        self._check_open()
        return read_status(self._current())

    def close(self) -> None:
        """Close the file; what waits stays on disk. `enqueue` raises StoreClosed afterwards."""
        with self._mutex:
            self._closed = True
            self._box.close()

    def __enter__(self) -> Outbox:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _draft(self, event: Mapping[str, Any] | str | bytes | Draft) -> Draft:
        if isinstance(event, Draft):
            return event
        limits = self._box.limits
        if isinstance(event, (str, bytes)):
            return parse_event(event, limits)
        from outbox.json_text import dump  # noqa: PLC0415 - a mapping is the rare form

        return parse_event(dump(dict(event)), limits)

    def _store(self, drafts: Sequence[Draft]) -> list[Receipt | OutboxError]:
        self._check_open()
        if not drafts:
            return []
        now_ms = time.time_ns() // 1_000_000
        for last in (False, True):
            box = self._current()
            events = [self._accept(draft, box, now_ms) for draft in drafts]
            try:
                results = enqueue(box, events, now_ms=now_ms)
                break
            except StoreClosed:
                if last or self._closed:
                    raise
        wake_daemon(self._state.wake_socket, box.path.name)
        return results

    def _accept(self, draft: Draft, box: OutboxFile, now_ms: int) -> Accepted:
        return accept(
            draft, limits=box.limits, agent=self.agent, now_ms=now_ms, new_key=uuid7(now_ms, os.urandom(10))
        )

    def _current(self) -> OutboxFile:
        """The open file; opened anew when it was replaced, or in a forked child."""
        with self._mutex:
            if self._box.closed or self._box.was_replaced:
                self._box.close()
                self._box = _opened(self._state, self.agent)
            return self._box

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"The outbox of {self.agent!r} was closed. Nothing was stored; open it anew.")


def _opened(state: StateDirectory, agent: str) -> OutboxFile:
    path = state.outbox_path(agent)
    if not os.path.lexists(path):
        limits, bounds = read_rules(state)
        create_outbox(state, agent, limits, bounds, time.time_ns() // 1_000_000)
    box = open_outbox(state, path)
    body_limit = os.environ.get(_BODY_LIMIT_VARIABLE, "")
    if body_limit:
        box.override_body_limit(_body_limit(body_limit))
    return box


def read_rules(state: StateDirectory) -> tuple[Limits, Bounds]:
    """The rules for a new outbox: those that the daemon left in the state directory, else the defaults."""
    try:
        text = state.rules_file.read_text("utf-8")
    except OSError:
        return Limits(), Bounds()
    try:
        return decode_rules(text)
    except (ValueError, KeyError, TypeError, json.JSONDecodeError):
        return Limits(), Bounds()


def _body_limit(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise UsageError(
            f"{_BODY_LIMIT_VARIABLE}={text!r} is no whole number. Nothing was stored; correct or unset it."
        )
    return int(text)
