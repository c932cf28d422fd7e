"""What the tests of the reference relay send it."""

import json

import httpx

TOKEN = "host-token"
MESSAGES, BATCH = "/api/messages", "/api/messages/batch"
INSIGHTS, ARCHIVES = "/api/insights/observations", "/api/continuation-archives"
MCP, MINT = "/api/mcp", "/api/runtime-tokens"


def client(url, token=TOKEN):
    """A client that knows no proxy; `token` None shows none."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return httpx.Client(base_url=url, headers=headers, trust_env=False, verify=False, timeout=30)


def event(key, **fields):
    """An event's body."""
    return {"from": "builder", "body": "Done.", **fields, "occurredAt": 1790000000123, "idempotencyKey": key}


def origin(agent, seq=1, attempt=1, stream="7b0c1d1e-0000-4000-8000-000000000001"):
    """The headers that say where a delivery comes from."""
    return {
        "Outbox-Agent": agent,
        "Outbox-Stream": stream,
        "Outbox-Seq": str(seq),
        "Outbox-Attempt": str(attempt),
    }


def chunk(agent, index, total, text, **fields):
    """One chunk of a continuation archive."""
    place = {"agentId": agent, "segment": "s1", "chunkIndex": index, "totalChunks": total, "text": text}
    return event(f"{agent}-archive:{index}", **place, **fields)


def post_text(http, path, text, **headers):
    """Post a body as it is written."""
    body = text if isinstance(text, bytes) else text.encode()
    return http.post(path, content=body, headers={"Content-Type": "application/json", **headers})


REVISION = "2026-07-28"


def rpc(method, call_id="id-1", *, key=None, **params):
    """A JSON-RPC request of the stateless revision."""
    meta = {
        "io.modelcontextprotocol/protocolVersion": REVISION,
        "io.modelcontextprotocol/clientCapabilities": {},
    }
    if key is not None:
        meta["relay-outbox/idempotencyKey"] = key
    return {"jsonrpc": "2.0", "id": call_id, "method": method, "params": {**params, "_meta": meta}}


def post_rpc(http, request, **headers):
    """Post it with the headers the revision wants; one given as None is left out."""
    wanted = {"MCP-Protocol-Version": REVISION, "Mcp-Method": request["method"]}
    if request["method"] == "tools/call":
        wanted["Mcp-Name"] = request["params"]["name"]
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    merged = {name: value for name, value in {**wanted, **given}.items() if value is not None}
    return post_text(http, MCP, json.dumps(request), **merged)
