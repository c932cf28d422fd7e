"""A real MCP server of the official SDK, as a process: `python mcp_tool_server.py FOLDER PORT OPTION…`.

Options: `sessions` and `stateless` (speaks this era alone), `json` (answers as JSON, else as a stream),
`keys` (a key has one effect), `zone` (`move` wants its region mirrored under another name).
FOLDER/ran.jsonl is the tools' own log, FOLDER/http.jsonl that of the requests. While FOLDER/lose is there,
the answer to one call is cut off, after the tool ran; the file goes with it.
"""

import json
import socket
import sys
from pathlib import Path
from typing import Annotated

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from pydantic import Field
from starlette.responses import JSONResponse


def note(file, **entry):
    """Add a line to a log."""
    with file.open("a", encoding="utf-8") as log:
        log.write(json.dumps(entry) + "\n")


def server(ran, options):
    """The tools; each effect is a line in their log."""
    mcp = MCPServer("tools", log_level="ERROR")
    region = {"x-mcp-header": "Zone" if "zone" in options else "Region"}

    def has_effect(tool, ctx, text):
        key = (ctx.request_context.meta or {}).get("relay-outbox/idempotencyKey")
        known = [json.loads(line)["key"] for line in ran.read_text("utf-8").splitlines()]
        if "keys" not in options or key not in known:
            note(ran, tool=tool, key=key, text=text)

    @mcp.tool()
    def append(text: str, ctx: Context) -> str:
        """Has an effect."""
        has_effect("append", ctx, text)
        return f"appended {text}"

    @mcp.tool()
    def refuse(text: str, ctx: Context) -> str:
        """Says no."""
        raise ToolError(f"not {text}")

    @mcp.tool()
    def move(
        text: str, where: Annotated[str, Field(json_schema_extra=region)], far: bool, ctx: Context
    ) -> str:
        """Wants an argument mirrored in a header field."""
        has_effect("move", ctx, f"{text} to {where}")
        return f"moved {text}"

    return mcp


def refusal(code, message, data=None):
    """How a version is refused that is not spoken."""
    error = {"code": code, "message": message} | ({} if data is None else {"data": data})
    return JSONResponse({"jsonrpc": "2.0", "id": None, "error": error}, status_code=400)


class Entry:
    """What stands before the SDK: health, a log of requests, an era that is not spoken, lost answers."""

    def __init__(self, app, folder, options):
        self.app, self.folder, self.options = app, folder, options

    async def __call__(self, scope, receive, send):
        """Serve one request."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        if not scope["path"].endswith("/mcp"):
            known = scope["path"].endswith("/health")
            return await JSONResponse({}, status_code=200 if known else 404)(scope, receive, send)
        return await self._mcp(scope, receive, send)

    async def _mcp(self, scope, receive, send):
        headers = {name.decode().lower(): value.decode() for name, value in scope["headers"]}
        body, more = b"", scope["method"] == "POST"
        while more:
            piece = await receive()
            body, more = body + piece.get("body", b""), piece.get("more_body", False)
        method = json.loads(body).get("method") if body else scope["method"]
        note(self.folder / "http.jsonl", method=method, headers=headers)

        async def again():
            nonlocal body
            if body is not None:
                piece, body = body, None
                return {"type": "http.request", "body": piece, "more_body": False}
            return await receive()

        is_stateless = headers.get("mcp-protocol-version") == "2026-07-28"
        if "sessions" in self.options and is_stateless:
            return await refusal(-32600, "Bad Request: Unsupported protocol version")(scope, again, send)
        if "stateless" in self.options and not is_stateless:
            known = {"supported": ["2026-07-28"], "requested": "a session"}
            return await refusal(-32022, "Unsupported protocol version", known)(scope, again, send)
        lose = self.folder / "lose"
        if method == "tools/call" and lose.exists():
            lose.unlink()

            async def unheard(_message):
                """The tool's answer goes nowhere."""

            await self.app(scope, again, unheard)
            start = {"type": "http.response.start", "status": 200}
            await send(
                {**start, "headers": [(b"content-type", b"application/json"), (b"content-length", b"99")]}
            )
            return await send({"type": "http.response.body", "body": b"{", "more_body": True})
        return await self.app(scope, again, send)


def main(folder, port, *options):
    """Serve until killed; says where it listens."""
    folder = Path(folder)
    (folder / "ran.jsonl").touch()
    mcp = server(folder / "ran.jsonl", options)
    app = mcp.streamable_http_app(streamable_http_path="/api/mcp", json_response="json" in options)
    listener = socket.create_server(("127.0.0.1", int(port)))
    sys.stdout.write(f"listening http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(Entry(app, folder, options), log_level="error")
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
