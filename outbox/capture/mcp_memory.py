"""What the relay's MCP endpoint said last, on disk for outages: who it is, and its tools.

STATE/mcp-HASH.json, one for each endpoint; losing it costs who starts in an outage the sight of its tools.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import threading
from dataclasses import dataclass
from hashlib import blake2b

from outbox.capture.mcp_eras import Era, Hello
from outbox.capture.mcp_rules import tool_name
from outbox.errors import OutboxError
from outbox.json_text import last_values
from outbox.store.directory import StateDirectory
from outbox.store.place import write_private


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of an endpoint. `tools` are the entries of `tools/list`, as texts; None: never heard."""

    hello: Hello | None = None
    tools: tuple[str, ...] | None = None
    honours_keys: bool = False

    def described(self, tool: str) -> str | None:
        """The entry of a tool."""
        return next((text for text in self.tools or () if tool_name(text) == tool), None)


class Memory:
    """What is known of the endpoint at `url`; thread-safe, and kept on disk when it changes."""

    def __init__(self, state: StateDirectory, url: str) -> None:
        name = blake2b(url.encode(), digest_size=16).hexdigest()
        self._path = state.path / f"mcp-{name}.json"
        self._url = url
        self._mutex = threading.Lock()
        self.known = Known()
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError, OutboxError):
            self.known = _decoded(self._path.read_text("utf-8"), url)

    def learn(
        self,
        *,
        hello: Hello | None = None,
        tools: tuple[str, ...] | None = None,
        honours_keys: bool | None = None,
    ) -> None:
        """Take over what was said, written down when it is news. A full disk is no reason to stop."""
        with self._mutex:
            before = self.known
            self.known = dataclasses.replace(
                before,
                hello=before.hello if hello is None else hello,
                tools=before.tools if tools is None else tools,
                honours_keys=before.honours_keys if honours_keys is None else honours_keys,
            )
            if self.known != before:
                with contextlib.suppress(OutboxError):
                    write_private(self._path, _encoded(self.known, self._url))


def _encoded(known: Known, url: str) -> str:
    hello = known.hello
    return json.dumps(
        {
            "url": url,
            "era": hello and str(hello.era),
            "hello": hello and hello.result,
            "tools": None if known.tools is None else list(known.tools),
            "honoursKeys": known.honours_keys,
        }
    )


def _decoded(text: str, url: str) -> Known:
    """Raises ValueError, KeyError, TypeError or UsageError for a file that cannot be believed."""
    raw = json.loads(text)
    if raw["url"] != url:
        raise ValueError("the file of another endpoint")
    tools = raw["tools"]
    hello = None if raw["hello"] is None else Hello(Era(raw["era"]), raw["hello"])
    for object_text in [*(tools or ()), *([hello.result] if hello else [])]:
        if not isinstance(object_text, str):
            raise TypeError("the text of an object is expected")
        last_values(object_text)
    return Known(hello, None if tools is None else tuple(tools), raw["honoursKeys"] is True)
