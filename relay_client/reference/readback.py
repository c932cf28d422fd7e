"""`/api/reference/*`: what tests and newcomers read back, and faults; no part of the contract."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from relay_client.reference import json_text
from relay_client.reference.calls import token_digest
from relay_client.reference.faults import Faults
from relay_client.reference.incoming import Incoming, Invalid
from relay_client.reference.replies import Reply, json_reply, problem
from relay_client.reference.store import Store

_MAX_ROWS = 10_000
_MAX_BYTES = 32 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Readback:
    """The reading endpoints, over one store and one list of fault rules."""

    store: Store
    faults: Faults

    async def events(self, incoming: Incoming) -> Reply:
        """Return events in the order in which they were received; `next` is the `after` of the next page."""
        after, limit = _number(incoming, "after", 0), _number(incoming, "limit", 1000)
        agent = incoming.query.get("agent")
        rows = list(self.store.ledger.events(after, agent, min(limit, _MAX_ROWS), _MAX_BYTES))
        return json_reply(200, {"events": rows, "next": rows[-1]["n"] if rows else after})

    async def requests(self, incoming: Incoming) -> Reply:
        """Return the log of requests; those to `/api/reference/*` are not in it."""
        self.store.commit()
        after, limit = _number(incoming, "after", 0), _number(incoming, "limit", 1000)
        rows = self.store.ledger.requests(after, min(limit, _MAX_ROWS))
        return json_reply(200, {"requests": rows, "next": rows[-1]["n"] if rows else after})

    async def summary(self, _incoming: Incoming) -> Reply:
        """Return, of each agent, how much is kept and whether it came in order."""
        return json_reply(200, {"agents": self.store.ledger.summary()})

    async def archives(self, incoming: Incoming) -> Reply:
        """Return an agent's continuation archives, put together as far as the chunks are there."""
        if "agentId" not in incoming.query:
            raise Invalid("agentId: must be given")
        chunks = self.store.ledger.archive_chunks(incoming.query["agentId"])
        archives = [
            _archive(key, [body for _, body in group])
            for key, group in itertools.groupby(chunks, key=lambda chunk: chunk[0])
        ]
        return json_reply(200, {"archives": archives})

    async def list_faults(self, _incoming: Incoming) -> Reply:
        """Return the rules and how often each was used."""
        return json_reply(200, {"rules": self.faults.listing()})

    async def add_faults(self, incoming: Incoming) -> Reply:
        """Add one rule or a list of rules."""
        return json_reply(201, {"rules": self.faults.add(incoming.parsed().value)})

    async def clear_faults(self, _incoming: Incoming) -> Reply:
        """Forget all rules."""
        self.faults.clear()
        return Reply(204)

    async def revoke(self, incoming: Incoming) -> Reply:
        """Revoke a token, or with `revoked: false` take that back; kept over restarts."""
        value = incoming.parsed().value
        token = value.get("token") if isinstance(value, dict) else None
        if not isinstance(token, str):
            raise Invalid("token: must be a string")
        revoked = value.get("revoked", True) is True
        digest = token_digest(token)
        await self.store.submit(lambda ledger: ledger.set_revoked(digest, revoked=revoked))
        return Reply(204)


def refused(error: ValueError) -> Reply:
    """Return the answer to a request that cannot be read."""
    return problem(422, "validation_failed", str(error))


def _number(incoming: Incoming, name: str, default: int) -> int:
    value = incoming.query.get(name, str(default))
    if not (value.isascii() and value.isdigit() and len(value) <= 18):
        raise Invalid(f"{name}: must be a whole number")
    return int(value)


def _archive(key: tuple[str, str, int, int], bodies: list[bytes]) -> dict[str, Any]:
    agent_id, segment, generation, total = key
    # The texts are joined as they were written, so that an escaped surrogate pair cut in two is whole again.
    texts = [json_text.members(body.decode("utf-8"))["text"] for body in bodies]
    text = json.loads('"' + "".join(text[1:-1] for text in texts) + '"')
    return {
        "agentId": agent_id,
        "segment": segment,
        "generation": generation,
        "totalChunks": total,
        "chunks": len(bodies),
        "complete": len(bodies) == total,
        "text": text,
    }
