"""The outbox for programs on asyncio: the same acts as `outbox.Outbox`, each in a worker thread.

The only module of the library that loads asyncio. SQLite and the flush stay out of the event loop's way.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable, Mapping
from types import TracebackType
from typing import Any, Self

from outbox.errors import OutboxError
from outbox.event import Draft
from outbox.library import FlushResult, Outbox
from outbox.store.enqueue import Receipt
from outbox.store.inspect import OutboxStatus


class AsyncOutbox:
    """One agent's outbox in an asyncio program; tasks may share it.

    >>> import asyncio, tempfile
    >>> from outbox.aio import AsyncOutbox
    >>> async def main(state_dir):
    ...     async with await AsyncOutbox.open("builder", state_dir=state_dir) as outbox:
    ...         receipt = await outbox.enqueue("session-message", {"from": "builder", "body": "done"})
    ...         return receipt.seq, receipt.state, await outbox.depth()
    >>> with tempfile.TemporaryDirectory() as state_dir:
    ...     asyncio.run(main(state_dir))
    (1, 'waiting', 1)

    One task's events are in the order in which it awaited them. A call that is cancelled may have stored its
    event all the same: with an `idempotency_key` of your own, asking again tells.
    """

    def __init__(self, outbox: Outbox) -> None:
        """Use `AsyncOutbox.open`, or wrap an outbox that is open; closing this one closes it."""
        self._outbox = outbox
        self.agent = outbox.agent

    @classmethod
    async def open(
        cls, agent: str, *, state_dir: str | os.PathLike[str] | None = None, allow_network_fs: bool = False
    ) -> Self:
        """Open the outbox of `agent`; parameters and errors are those of `Outbox.open`."""
        return cls(
            await asyncio.to_thread(
                Outbox.open, agent, state_dir=state_dir, allow_network_fs=allow_network_fs
            )
        )

    async def enqueue(self, kind: str, payload: object, **fields: Any) -> Receipt:
        """Put one event on disk: when this returns, it survives kill -9 and power loss.

        Fields and errors are those of `Outbox.enqueue`. The payload must not be changed before this returns.
        """
        return await asyncio.to_thread(self._outbox.enqueue, kind, payload, **fields)

    async def enqueue_many(
        self, events: Iterable[Mapping[str, Any] | str | bytes | Draft]
    ) -> list[Receipt | OutboxError]:
        """Put several events on disk with one commit; see `Outbox.enqueue_many`.

        `events` is read here, in the event loop, before anything is stored.
        """
        return await asyncio.to_thread(self._outbox.enqueue_many, list(events))

    async def flush(self, timeout_s: float = 10.0) -> FlushResult:
        """Send what waits, for at most `timeout_s` seconds; see `Outbox.flush`."""
        return await asyncio.to_thread(self._outbox.flush, timeout_s)

    async def depth(self) -> int:
        """How many events wait or are in flight."""
        return await asyncio.to_thread(lambda: self._outbox.depth)

    async def status(self) -> OutboxStatus:
        """What the file says of this outbox, now."""
        return await asyncio.to_thread(self._outbox.status)

    async def close(self) -> None:
        """Close the file; what waits stays on disk. `enqueue` raises StoreClosed afterwards."""
        await asyncio.to_thread(self._outbox.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
