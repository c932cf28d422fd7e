"""A real MCP server built with the official SDK, as a process: `mcp_sdk_server.py LOG sessions|both PORT`.

`sessions`: the era of sessions alone, as servers before 2026-07-28. Each run of a tool is a line of LOG.
"""

import asyncio
import json
import socket
import sys
from pathlib import Path

import uvicorn
from mcp.server.mcpserver import Context, MCPServer
from pydantic import BaseModel
from starlette.responses import JSONResponse

PATH = "/api/mcp"


class Name(BaseModel):
    """What `greet` asks for."""

    name: str


def server(log):
    """Tools that note when they run."""
    mcp = MCPServer("sdk")

    def ran(tool, ctx, **more):
        key = (
            ctx.request_context.meta.get("relay-outbox/idempotencyKey") if ctx.request_context.meta else None
        )
        with log.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"tool": tool, "key": key, **more}) + "\n")

    @mcp.tool(meta={"relay-outbox/bufferable": True})
    def note(text: str, ctx: Context) -> str:
        """Nobody waits for it; it has an output schema all the same."""
        ran("note", ctx, text=text)
        return f"noted {text}"

    @mcp.tool()
    def double(number: int, ctx: Context) -> int:
        """Its answer is wanted."""
        ran("double", ctx)
        return 2 * number

    @mcp.tool()
    async def slow(ctx: Context) -> str:
        """Tells of its progress, and ends when it is cancelled."""
        ran("slow", ctx)
        await ctx.report_progress(1, 2, "half")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            ran("cancelled", ctx)
            raise
        return "done"

    @mcp.tool()
    async def steps(ctx: Context) -> str:
        """Tells of its progress twice."""
        for step in (1, 2):
            await ctx.report_progress(step, 2)
        return "done"

    @mcp.tool()
    async def announce(ctx: Context) -> str:
        """Tells everybody of the session that its tools have changed."""
        while True:  # until it is cancelled: what is sent before somebody listens is lost
            await ctx.session.send_tool_list_changed()
            await asyncio.sleep(0.02)

    @mcp.tool()
    async def greet(ctx: Context) -> str:
        """Asks the client's person."""
        answer = await ctx.elicit("Who are you?", Name)
        return f"hello {answer.data.name}" if answer.action == "accept" else "hello nobody"

    return mcp


class SessionsOnly:
    """Answers what comes from the later era as a server of the earlier one does."""

    def __init__(self, app):
        self.app = app

    async def __call__(self, scope, receive, send):
        """Serve one request."""
        headers = dict(scope.get("headers") or [])
        if headers.get(b"mcp-protocol-version") == b"2026-07-28":
            error = {"code": -32600, "message": "Bad Request: Unsupported protocol version"}
            answer = JSONResponse({"jsonrpc": "2.0", "id": "server-error", "error": error}, status_code=400)
            await answer(scope, receive, send)
            return
        await self.app(scope, receive, send)


def main(log, eras, port):
    """Serve until killed; says where it listens."""
    app = server(Path(log)).streamable_http_app(streamable_http_path=PATH)
    listener = socket.create_server(("127.0.0.1", int(port)))
    sys.stdout.write(f"listening http://127.0.0.1:{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    served = SessionsOnly(app) if eras == "sessions" else app
    uvicorn.Server(uvicorn.Config(served, log_level="warning")).run(sockets=[listener])


if __name__ == "__main__":
    main(*sys.argv[1:])
