"""The outbox as a program uses it: open, enqueue, flush.

Loads the standard library and apsw only; what sends is loaded when `flush` is called.
"""

from __future__ import annotations

import os
import time
from _thread import RLock  # see store/connection.py
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from weakref import WeakSet

from outbox.bounds import Bounds
from outbox.errors import OutboxError, StoreBusy, StoreClosed, StoreDamaged, StoreError, UsageError
from outbox.event import Accepted, Draft, Limits, accept, check_agent, draft_event, parse_event, uuid7
from outbox.json_text import dump
from outbox.state_dir import absolute, state_folder
from outbox.store.directory import StateDirectory
from outbox.store.enqueue import Receipt, enqueue_together
from outbox.store.file import OutboxFile, open_outbox
from outbox.store.rules import decode_rules
from outbox.store.wake import Waker
from outbox.value import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Self

    from outbox.store.inspect import OutboxStatus

_MOST_REPLACEMENTS = 10
_BODY_LIMIT_VARIABLE = "AGENT_RELAY_MESSAGE_BODY_MAX_CHARS"
_MOST_DIGITS = 18


class FlushResult(NamedTuple):
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
        self._waker = Waker(f"{state.folder}/wake.sock")
        self._mutex = RLock()
        self._closed = False
        _outboxes.add(self)

    @classmethod
    def open(
        cls, agent: str, *, state_dir: str | os.PathLike[str] | None = None, allow_network_fs: bool = False
    ) -> Outbox:
        """Open the outbox of `agent` (1 to 512 bytes of UTF-8, compared exactly); it is made when not there.

        `state_dir` defaults to OUTBOX_STATE_DIR, $STATE_DIRECTORY or the user's own state folder. A daemon
        need not run.

        Raises:
            UsageError: the agent's name cannot be one, or AGENT_RELAY_MESSAGE_BODY_MAX_CHARS is no number.
            ConfigError: no state directory is known.
            StoreError: the file or its folder cannot be used.
        """
        agent = check_agent(agent)
        folder = state_folder(os.environ) if state_dir is None else absolute(state_dir)
        state = StateDirectory(folder).create(allow_network_fs=allow_network_fs)
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

        An event is a mapping or JSON text with the names that events have in JSON (`kind`, `payload`,
        `occurredAt`, …; see docs/python-api.md). Those with an error were not taken; all others are durable
        when this returns.
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
        """Send what waits, for at most `timeout_s` seconds: through the daemon if one runs, else by itself.

        Works from `atexit`. The relay and its token come from the environment or the configuration file.
        Raises ConfigError when no relay is set; the relay's trouble is no error: it shows in the result.
        """
        self._check_open()
        from outbox.daemon.flush import flush_agent  # noqa: PLC0415 - what sends is loaded only here

        return flush_agent(self._state, self.agent, timeout_s=timeout_s)

    @property
    def depth(self) -> int:
        """How many events wait or are in flight."""
        from outbox.store.inspect import read_waiting  # noqa: PLC0415 - what only adds does not load it

        return read_waiting(self._current())

    def status(self) -> OutboxStatus:
        """What the file says of this outbox, now."""
        from outbox.store.inspect import read_status  # noqa: PLC0415 - as above

        return read_status(self._current())

    def close(self) -> None:
        """Close the file; what waits stays on disk. `enqueue` raises StoreClosed afterwards."""
        with self._mutex:
            self._closed = True
            self._box.close()
            self._waker.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _draft(self, event: Mapping[str, Any] | str | bytes | Draft) -> Draft:
        if isinstance(event, Draft):
            return event
        if isinstance(event, Mapping):
            event = dump(dict(event), "event")
        if isinstance(event, (str, bytes)):
            return parse_event(event, self._box.limits)
        raise UsageError(f"an event is a mapping or JSON text, not a {type(event).__name__}")

    def _store(self, drafts: Sequence[Draft]) -> list[Receipt | OutboxError]:
        box = self._box
        if self._closed or box.closed:
            box = self._current()
        if not drafts:
            return []
        now_ms = time.time_ns() // 1_000_000
        try:
            results = enqueue_together(box, self._accepted(drafts, box, now_ms), now_ms=now_ms)
        except StoreClosed:
            results = self._store_anew(drafts, now_ms)
        except StoreDamaged:
            mend(self._state, self.agent)
            results = self._store_anew(drafts, now_ms)
        self._waker.wake(box.name)
        return results

    def _store_anew(self, drafts: Sequence[Draft], now_ms: int) -> list[Receipt | OutboxError]:
        """The file was replaced or removed, and that may happen again before we come to it."""
        for _ in range(_MOST_REPLACEMENTS):
            box = self._current()
            try:
                return enqueue_together(box, self._accepted(drafts, box, now_ms), now_ms=now_ms)
            except StoreClosed:
                continue
        raise StoreBusy(
            f"The file of {self.agent!r} is replaced again and again. Nothing was stored; try again."
        )

    def _accepted(self, drafts: Sequence[Draft], box: OutboxFile, now_ms: int) -> list[Accepted]:
        return [
            accept(
                draft,
                limits=box.limits,
                agent=self.agent,
                now_ms=now_ms,
                new_key=draft.idempotency_key or uuid7(now_ms, os.urandom(10)),
            )
            for draft in drafts
        ]

    def _current(self) -> OutboxFile:
        """The open file; opened anew when it was replaced, or in a forked child. Raises StoreClosed."""
        with self._mutex:
            self._check_open()
            if self._box.closed or self._box.was_replaced:
                self._box.close()
                self._box = _opened(self._state, self.agent)
            return self._box

    def _check_open(self) -> None:
        if self._closed:
            raise StoreClosed(f"The outbox of {self.agent!r} was closed. Nothing was stored; open it anew.")


_outboxes: WeakSet[Outbox] = WeakSet()


def _free_mutexes_after_fork() -> None:
    """A thread of the parent may have held one: in the child nobody would ever let it go."""
    for outbox in list(_outboxes):
        outbox._mutex = RLock()  # noqa: SLF001 - the other half of Outbox
        outbox._waker.free_mutex()  # noqa: SLF001 - as above


os.register_at_fork(after_in_child=_free_mutexes_after_fork)


def _opened(state: StateDirectory, agent: str) -> OutboxFile:
    box = open_or_make(state, agent)
    body_limit = os.environ.get(_BODY_LIMIT_VARIABLE, "")
    if body_limit:
        box.override_body_limit(_body_limit(body_limit))
    return box


def open_or_make(state: StateDirectory, agent: str) -> OutboxFile:
    """Open an agent's file, made when it is not there, also when it is removed in this very moment.

    A damaged one is set aside, and opened anew. Raises StoreError when it cannot be made or used.
    """
    path, mended = state.outbox_file(agent), False
    for _ in range(_MOST_REPLACEMENTS):
        if not os.path.lexists(path):
            from outbox.store.create import create_outbox  # noqa: PLC0415 - once for each agent

            limits, bounds = read_rules(state)
            create_outbox(state, agent, limits, bounds, time.time_ns() // 1_000_000)
        try:
            return open_outbox(state, path)
        except StoreDamaged:
            if mended:
                raise
            mended = True
            mend(state, agent)
        except StoreError:
            if os.path.lexists(path):
                raise
    raise StoreBusy(f"The file of {agent!r} is removed again and again. Nothing was stored; try again.")


def mend(state: StateDirectory, agent: str) -> None:
    """Have a file that seems damaged set aside, with a warning to the logger "outbox"; raises StoreError."""
    from outbox.store.salvage import set_aside  # noqa: PLC0415 - an enqueue must not pay for it

    damage = set_aside(state, state.outbox_path(agent), agent, time.time_ns() // 1_000_000)
    if damage is not None:
        import logging  # noqa: PLC0415 - as above

        logging.getLogger("outbox").warning("%s", damage.sentence())


def read_rules(state: StateDirectory) -> tuple[Limits, Bounds]:
    """The rules for a new outbox: those that the daemon left in the state directory, else the defaults."""
    try:
        with open(f"{state.folder}/rules.json", encoding="utf-8") as file:  # noqa: PTH123 - without pathlib
            return decode_rules(file.read())
    except (OSError, UnicodeDecodeError):
        return Limits(), Bounds()


def _body_limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS):
        raise UsageError(
            f"{_BODY_LIMIT_VARIABLE}={text[:40]!r} is no whole number. Nothing was stored; correct or "
            "unset it."
        )
    return int(text)
