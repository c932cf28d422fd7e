"""`outbox mcp`: the MCP proxy on stdin and stdout, for one agent. What it does is capture/mcp_proxy.py's."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import select
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from outbox.api.explain import explain
from outbox.api.obstacle import Scope
from outbox.api.report import opened
from outbox.capture.mcp_http import endpoint_of
from outbox.capture.mcp_memory import Memory
from outbox.capture.mcp_proxy import Proxy, Told
from outbox.capture.mcp_queue import CallQueue
from outbox.capture.mcp_relay import Way
from outbox.capture.mcp_rules import Rules
from outbox.capture.mcp_words import no_relay
from outbox.cli.output import clean, say
from outbox.cli.where import checked_agent, now_ms, settings_of, state_of
from outbox.daemon.compose import relay_client, tokens_of
from outbox.delivery.clock import Clock
from outbox.delivery.shared import silent
from outbox.delivery.tokens import NoTokenNow, Tokens
from outbox.errors import UsageError
from outbox.json_text import split_lines
from outbox.setting_keys import Settings
from outbox.store.directory import StateDirectory
from outbox.store.inspect import read_status
from outbox.store.place import running_daemon
from outbox.store.relay_state import RelayState, read_facts
from relay_client import Capabilities, read_spec

EXAMPLE = """\
outbox mcp --agent builder
outbox mcp --agent builder --buffer note_add --buffer 'log_*'"""

_AGENT_VARIABLE = "OUTBOX_AGENT"
_STDIN, _STDOUT = 0, 1
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_READ_BYTES = 64 * 1024
_ENVELOPE_BYTES = 1024 * 1024  # what may stand beside a call's arguments on its line
_LINE_BYTES = 64 * 1024 * 1024  # what does not wait may be larger than an event
_SPEC_TIMEOUT_MS = 5_000
_HEALTH_TIMEOUT_MS = 5_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose calls, and which of them may wait."""
    parser.add_argument("--agent", metavar="A", help=f"whose calls (default: ${_AGENT_VARIABLE})")
    parser.add_argument(
        "--buffer",
        metavar="TOOL",
        action="append",
        default=[],
        help="a tool, or a pattern such as 'log_*', whose calls may wait in the outbox; beside mcp.buffer",
    )


def run(args: argparse.Namespace) -> int:
    """Serve the client until its end of input, or a signal that means the same; 0."""
    agent = os.environ.get(_AGENT_VARIABLE) if args.agent is None else args.agent
    if not agent:
        raise UsageError(
            f"Whose calls? Nothing was started. Name the agent with --agent, or in ${_AGENT_VARIABLE}."
        )
    checked_agent(agent)
    settings = settings_of(args)
    state = state_of(settings).create(allow_network_fs=settings.daemon.allow_network_fs)
    rng = random.Random()  # noqa: S311 - jitter is no secret
    tokens = tokens_of(settings, state, RelayState(state.relay_state), log=silent, clock=Clock(), rng=rng)
    way = Way(
        endpoint_of(settings),
        agent,
        tokens,
        idempotency_header=settings.relay.idempotency_header,
        silence_s=settings.mcp.timeout_s,
        max_retry_after_ms=round(settings.relay.max_retry_after_s * 1_000),
    )
    rules = Rules(
        (*settings.mcp.buffer, *args.buffer), settings.mcp.idempotent, frozenset(settings.mcp.safe_to_repeat)
    )
    calls = CallQueue(state, agent, allow_network_fs=settings.daemon.allow_network_fs)
    proxy = Proxy(
        way=way,
        memory=Memory(state, way.endpoint.url),
        calls=calls,
        rules=rules,
        told=_told(settings, state, agent, tokens),
        write=_Output().write,
    )
    if sys.stdin is not None and sys.stdin.isatty():
        say("Waiting for an MCP client on stdin, a JSON-RPC message a line; Ctrl-D ends it.", to=sys.stderr)
    most_bytes = max(_LINE_BYTES, settings.events.max_payload_bytes + _ENVELOPE_BYTES)
    with _ended_by_signals() as ended:
        proxy.serve(_lines(most_bytes, ended))
    calls.close()
    return 0


def _told(settings: Settings, state: StateDirectory, agent: str, tokens: Tokens) -> Told:
    client = relay_client(settings)

    def why() -> list[str]:
        return explained()[0]

    def status() -> list[str]:
        lines, is_about_relay = explained()
        if is_about_relay:
            return lines
        trouble = no_relay(client.health(timeout_ms=_HEALTH_TIMEOUT_MS))
        return [*lines, clean(trouble)] if trouble else lines

    def explained() -> tuple[list[str], bool]:
        path = state.outbox_path(agent)
        if not os.path.lexists(path):
            return [clean(f"{agent}: nothing waits, and nothing was ever queued.")], False
        with opened(state, path) as box:
            status = read_status(box)
        found = explain(
            status,
            read_facts(state.relay_state),
            daemon_running=running_daemon(state) is not None,
            now_ms=now_ms(),
            paths=settings.kind_paths(),
            max_attempts=settings.delivery.max_attempts,
        )
        return [clean(line) for line in found.lines], found.scope is Scope.RELAY

    def capabilities() -> Capabilities | None:
        try:
            return read_spec(client.spec(token=tokens.token(agent), timeout_ms=_SPEC_TIMEOUT_MS))
        except NoTokenNow:
            return None

    return Told(why, status, capabilities, _notice)


def _notice(line: str) -> None:
    """A line on stderr; nobody who reads it is no reason to leave a client without its answer."""
    with contextlib.suppress(OSError):
        say(clean(line), to=sys.stderr)


class _Output:
    """stdout: one message a line, whole, from whichever thread. A client that is gone is no error.

    Whoever shares the pipe may have made it non-blocking (O_NONBLOCK is the pipe's, not the descriptor's).
    """

    def __init__(self) -> None:
        self._mutex = threading.Lock()

    def write(self, text: str) -> None:
        """Write one message."""
        rest = memoryview(text.encode("utf-8", "surrogatepass") + b"\n")
        with self._mutex, contextlib.suppress(OSError):
            while rest:
                try:
                    rest = rest[os.write(_STDOUT, rest) :]
                except BlockingIOError:
                    select.select([], [_STDOUT], [])


def _lines(most_bytes: int, ended: int) -> Iterator[bytes | UsageError]:
    """The client's lines, until its end of input, or until `ended` can be read."""
    yield from (line for _, line in split_lines(_chunks(ended), most_bytes))


def _chunks(ended: int) -> Iterator[bytes]:
    while True:
        ready, _, _ = select.select([_STDIN, ended], [], [])
        if ended in ready or not (chunk := os.read(_STDIN, _READ_BYTES)):
            return
        yield chunk


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[int]:
    """A descriptor that can be read as soon as a signal asks for the end.

    A client ends its servers so, and the terminal of an agent all that runs in it: what was read is still put
    where it belongs. Later signals change nothing, since that takes some seconds at most.
    """
    reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    heeded = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, _only_wake) for number in heeded}
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield reading
    finally:
        signal.set_wakeup_fd(-1)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(reading)
        os.close(writing)


def _only_wake(_number: int, _frame: FrameType | None) -> None:
    """The signal's number stands in the pipe by now."""
