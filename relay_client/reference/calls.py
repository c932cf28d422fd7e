"""The calls of the contract: each reads a request, has it stored, and says what to answer."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from relay_client.reference import json_text, mcp
from relay_client.reference.faults import Fault
from relay_client.reference.incoming import Incoming, Invalid, is_key
from relay_client.reference.ledger import Chunk, Event, Kept, Ledger, Verdict
from relay_client.reference.replies import Reply, json_reply, problem
from relay_client.reference.store import Store

BATCH_PATH = "/api/messages/batch"
MESSAGES_PATH = "/api/messages"
MCP_PATH = "/api/mcp"

_WORDS = {
    Verdict.DUPLICATE: "This key is stored already.",
    Verdict.KEY_REUSED: "This key is stored already, with another text.",
    Verdict.CHUNK_CONFLICT: "This chunk is stored already under another key, or totalChunks has changed.",
    Verdict.UNKNOWN_GENERATION: "generation: must be the number that chunk 0 was answered with",
}


@dataclass(frozen=True, slots=True)
class Rules:
    """What the relay allows, as its OpenAPI document says it."""

    batch_max_items: int
    batch_max_bytes: int
    runtime_token_ttl_s: int


@dataclass(frozen=True, slots=True)
class Calls:
    """The product's endpoints, over one store."""

    store: Store
    rules: Rules
    clock_ms: Callable[[], int]

    async def event(self, incoming: Incoming, fault: Fault) -> Reply:
        """Take a message, an insight, or an event of a custom kind."""
        try:
            content = incoming.parsed()
            event = self._event(incoming, content)
            _check_header_key(incoming, event)
        except json_text.Malformed as error:
            return _malformed(error)
        except Invalid as error:
            return problem(422, "validation_failed", str(error))
        spoiled = fault.per_item.result(content) if fault.per_item else None
        if spoiled is not None:
            return json_reply(
                spoiled["status"], {name: spoiled[name] for name in spoiled if name != "status"}
            )
        return _said(await self.store.submit(lambda ledger: ledger.keep(event)))

    async def batch(self, incoming: Incoming, fault: Fault) -> Reply:
        """Take several messages: in their order, in one transaction, each with its own result."""
        try:
            items = json_text.elements(_messages_text(incoming.parsed()))
            base = self._event(incoming)
        except json_text.Malformed as error:
            return _malformed(error)
        except Invalid as error:
            return problem(422, "validation_failed", str(error))
        if len(items) > self.rules.batch_max_items or len(incoming.body) > self.rules.batch_max_bytes:
            limits = f"{self.rules.batch_max_items} messages and {self.rules.batch_max_bytes} bytes"
            return problem(413, "too_large", f"A batch holds at most {limits}.")
        drafts = [_batch_item(base, index, item) for index, item in enumerate(items)]
        if fault.per_item:
            spoiled = [fault.per_item.result(item) for item in items]
            drafts = [result or draft for result, draft in zip(spoiled, drafts, strict=True)]
        results = await self.store.submit(lambda ledger: [_keep_item(ledger, draft) for draft in drafts])
        if fault.wrong_count:
            results = results[:-1] if len(results) > 1 else [*results, {"status": 201}]
        whole = all(result["status"] < 300 for result in results)
        return json_reply(200 if whole else 207, {"results": results})

    async def archive(self, incoming: Incoming, _fault: Fault) -> Reply:
        """Take one chunk of a continuation archive; the answer names the generation it belongs to."""
        try:
            content = incoming.parsed()
            event = self._event(incoming, content)
            _check_header_key(incoming, event)
            chunk = _chunk(content.value)
        except json_text.Malformed as error:
            return _malformed(error)
        except Invalid as error:
            return problem(422, "validation_failed", str(error))
        event = replace(event, item=chunk.index)
        return _said(await self.store.submit(lambda ledger: ledger.keep_chunk(event, chunk)))

    async def mcp(self, incoming: Incoming, _fault: Fault) -> Reply:
        """Answer a JSON-RPC request; a call with a known key gets the kept result and runs nothing."""
        call = mcp.read(incoming)
        if isinstance(call, Reply):
            return call
        try:
            event = self._event(incoming)
        except Invalid as error:
            return mcp.failure(call.id_text, mcp.INVALID_PARAMS, str(error))
        digest = _digest(f"{json.dumps(call.tool)} {call.arguments}")
        event = replace(event, key=call.key, body=call.text.encode(), digest=digest)
        kept = await self.store.submit(lambda ledger: _keep_call(ledger, event, call))
        if kept.verdict is Verdict.KEY_REUSED:
            message = "This key was used for another call."
            return mcp.failure(call.id_text, mcp.INVALID_PARAMS, message, data={"code": kept.verdict})
        return mcp.result(call.id_text, kept.answer or "null")

    async def runtime_token(self, incoming: Incoming, _fault: Fault) -> Reply:
        """Mint a token for one agent's instance; whoever calls has shown the bootstrap token already."""
        try:
            value = incoming.parsed().value
            agent_id, instance_id = _text_field(value, "agentId"), _text_field(value, "instanceId")
        except json_text.Malformed as error:
            return _malformed(error)
        except Invalid as error:
            return problem(422, "validation_failed", str(error))
        token, now_ms = secrets.token_urlsafe(32), self.clock_ms()
        expires_at_ms = now_ms + self.rules.runtime_token_ttl_s * 1000
        digest = token_digest(token)

        def mint(ledger: Ledger) -> None:
            ledger.mint(digest, agent_id, instance_id, expires_at_ms=expires_at_ms, now_ms=now_ms)

        await self.store.submit(mint)
        return json_reply(201, {"token": token, "expiresAt": expires_at_ms})

    def _event(self, incoming: Incoming, content: json_text.Parsed | None = None) -> Event:
        """Return the event of a request; without a content, what all events of the request share."""
        base = Event(
            key=None,
            path=MESSAGES_PATH if incoming.path == BATCH_PATH else incoming.path,
            agent=incoming.agent,
            stream=incoming.stream,
            seq=incoming.count("Outbox-Seq"),
            attempt=incoming.count("Outbox-Attempt"),
            occurred_at_ms=None,
            received_at_ms=self.clock_ms(),
            body=b"",
            digest=b"",
        )
        return base if content is None else _with_content(base, content)


def token_digest(token: str) -> bytes:
    """Return what is kept of a token."""
    return hashlib.sha256(token.encode()).digest()


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


def _malformed(error: json_text.Malformed) -> Reply:
    return problem(400, "malformed", f"The body cannot be read as JSON: {error}.")


def _messages_text(content: json_text.Parsed) -> str:
    if not isinstance(content.value, dict) or not isinstance(content.value.get("messages"), list):
        raise Invalid("messages: must be a list")
    return json_text.members(content.text)["messages"]


def _with_content(base: Event, content: json_text.Parsed) -> Event:
    value, text = content.value, content.text
    if not isinstance(value, dict):
        raise Invalid("the event must be a JSON object")
    key, occurred_at_ms = value.get("idempotencyKey"), _whole(value.get("occurredAt"), -(2**63), 2**63 - 1)
    if not isinstance(key, str) or not is_key(key):
        raise Invalid("idempotencyKey: must be 1 to 512 visible ASCII characters")
    if occurred_at_ms is None:
        raise Invalid("occurredAt: must be a whole number, epoch milliseconds")
    digest = _digest(f"{base.path} {text}")
    return replace(base, key=key, occurred_at_ms=occurred_at_ms, body=text.encode(), digest=digest)


def _check_header_key(incoming: Incoming, event: Event) -> None:
    if incoming.header_key() not in (None, event.key):
        raise Invalid("Idempotency-Key: must agree with idempotencyKey in the body")


def _batch_item(base: Event, index: int, item: json_text.Parsed) -> Event | dict[str, Any]:
    try:
        return replace(_with_content(base, item), item=index)
    except Invalid as error:
        return {"status": 422, "error": {"code": "validation_failed", "message": str(error)}}


def _keep_item(ledger: Ledger, draft: Event | dict[str, Any]) -> dict[str, Any]:
    if isinstance(draft, dict):
        return draft
    kept = ledger.keep(draft)
    if kept.verdict is Verdict.STORED:
        return {"status": 201, "id": str(kept.n)}
    return {
        "status": 409,
        "id": str(kept.n),
        "error": {"code": kept.verdict, "message": _WORDS[kept.verdict]},
    }


def _keep_call(ledger: Ledger, event: Event, call: mcp.Call) -> Kept:
    kept = ledger.keep(event)
    return ledger.answer(kept.n, mcp.run(call, kept.n)) if kept.verdict is Verdict.STORED else kept


def _said(kept: Kept) -> Reply:
    answer: Mapping[str, Any] = json.loads(kept.answer) if kept.answer else {}
    if kept.verdict is Verdict.STORED:
        return json_reply(201, {"id": str(kept.n), **answer})
    if kept.verdict is Verdict.UNKNOWN_GENERATION:
        return problem(422, "validation_failed", _WORDS[kept.verdict])
    members: dict[str, Any] = {"id": str(kept.n), **answer} if kept.n else {}
    return problem(409, kept.verdict, _WORDS[kept.verdict], **members)


def _chunk(value: Mapping[str, Any]) -> Chunk:
    segment, generation = value.get("segment"), _whole(value.get("generation"), 1, 2**53 - 1)
    if isinstance(segment, bool) or not isinstance(segment, str | int | float):
        raise Invalid("segment: must be a string or a whole number")
    if generation is None and value.get("generation") is not None:
        raise Invalid("generation: must be a whole number from 1")
    total = _whole(value.get("totalChunks"), 1, 100_000)
    index = None if total is None else _whole(value.get("chunkIndex"), 0, total - 1)
    if total is None or index is None:
        raise Invalid("chunkIndex, totalChunks: must be whole numbers, the index below the total")
    if not isinstance(value.get("text"), str):
        raise Invalid("text: must be a string")
    if index > 0 and generation is None:
        raise Invalid(_WORDS[Verdict.UNKNOWN_GENERATION])
    return Chunk(_text_field(value, "agentId"), _sound(str(segment), "segment"), generation, index, total)


def _text_field(value: Any, name: str) -> str:
    text = value.get(name) if isinstance(value, dict) else None
    if not isinstance(text, str) or not text:
        raise Invalid(f"{name}: must be a string of at least one character")
    return _sound(text, name)


def _sound(text: str, name: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Invalid(f"{name}: holds half a surrogate pair") from None
    return text


def _whole(value: Any, least: int, most: int) -> int | None:
    """Return a whole number within the bounds (1.0 is one, as in JSON Schema), None for anything else."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    fits = isinstance(value, int) and not isinstance(value, bool) and least <= value <= most
    return value if fits else None
