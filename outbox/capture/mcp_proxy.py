"""The proxy between an agent's MCP client (lines) and the relay: which message goes where.

A thread for each request; calls that may wait go one after the other, so that none overtakes another.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from outbox.capture import mcp_message as rpc
from outbox.capture import mcp_words as words
from outbox.capture.mcp_eras import (
    Era,
    Hello,
    client_of,
    discover_result,
    era_of,
    initialize_result,
    result_for,
    wants_input,
    with_tools,
)
from outbox.capture.mcp_http import MOST_BYTES, Ticket
from outbox.capture.mcp_memory import Memory
from outbox.capture.mcp_message import Message, NotAMessage
from outbox.capture.mcp_queue import CallQueue
from outbox.capture.mcp_relay import Relay, Unanswered, Way
from outbox.capture.mcp_rules import Ran, Rules, Step, as_listed, next_step, tool_name, whether_it_ran
from outbox.errors import OutboxError, UsageError
from relay_client import Capabilities, Reading, Sort
from relay_client.client import VERSION
from relay_client.mcp import KEY_FIELD

OWN_INFO = {"name": "relay-outbox", "version": VERSION}

_MOST_PAGES = 100
_LOOK_AGAIN_S = (1.0, 60.0)
_GRACE_S = 1.0
_LAST_S = 5.0


@dataclass(frozen=True, slots=True)
class Told:
    """What the proxy asks of whoever runs it: why calls wait, how things stand, what the relay can; notes."""

    why: Callable[[], Sequence[str]]
    status: Callable[[], Sequence[str]]
    capabilities: Callable[[], Capabilities | None]
    notice: Callable[[str], None]


@dataclass(slots=True)
class _Job:
    """One request of the client under way."""

    request: Message
    ticket: Ticket = field(default_factory=Ticket)

    @property
    def id(self) -> str:
        """The client's id, as text."""
        return self.request.id or "null"

    @property
    def tool(self) -> str:
        """The tool that is called."""
        return self.request.string("name")


class Proxy:
    """Takes the client's lines, writes answers with `write` (one text a call, from any thread)."""

    def __init__(
        self,
        *,
        way: Way,
        memory: Memory,
        calls: CallQueue,
        rules: Rules,
        told: Told,
        write: Callable[[str], None],
    ) -> None:
        self._memory, self._calls, self._rules, self._told = memory, calls, rules, told
        self._write = write
        self._relay = Relay(way, memory, self._hear, told.capabilities)
        self._client_era = Era.SESSIONS
        self._initialized = False
        self._leaving = False
        self._watching = False
        self._idle = threading.Condition()
        self._jobs: list[_Job] = []
        self._waiting_calls: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        threading.Thread(target=self._serve_calls, name="mcp calls", daemon=True).start()

    def serve(self, lines: Iterable[bytes | UsageError]) -> None:
        """Take every line; return when they end and nothing that was read is left undone.

        What is under way gets a second. Then it is cut off: a call that may wait and surely did not run (or
        may be repeated) goes to the outbox, everything else is nobody's any more.
        """
        for line in lines:
            if isinstance(line, UsageError):
                self._write(rpc.failure("null", rpc.INVALID_REQUEST, f"Not taken: {line}."))
            else:
                self.take(line)
        if not self._settled(_GRACE_S):
            self._leaving = True
            self._relay.abort()
            for job in self._under_way():
                job.ticket.cut()
            self._settled(_LAST_S)
        self._relay.leave()

    def take(self, line: bytes) -> None:
        """Take one line of the client."""
        try:
            message = rpc.read_message(line)
        except NotAMessage as wrong:
            self._write(wrong.answer)
            return
        if message.is_request:
            self._client_era = era_of(message)
            job = _Job(message)
            with self._idle:
                self._jobs.append(job)
            if self._may_wait(job):
                self._waiting_calls.put(job)
            else:
                threading.Thread(target=self._do, args=(job, self._handler(job)), daemon=True).start()
        elif message.method == "notifications/cancelled":
            self._cancel(message)
        elif message.method == "notifications/initialized":
            self._initialized = True
            self._relay.listen()
        else:
            threading.Thread(target=self._pass_on, args=(message,), daemon=True).start()

    # One request ------------------------------------------------------------------------------------------

    def _do(self, job: _Job, handle: Callable[[_Job], str]) -> None:
        try:
            text = handle(job)
        except Unanswered as none:
            text = rpc.failure(
                job.id, rpc.INTERNAL_ERROR, f"The relay does not answer: {none}. Try again later."
            )
        except OutboxError as error:
            text = rpc.failure(job.id, rpc.INTERNAL_ERROR, str(error))
        except Exception as fault:  # noqa: BLE001 - a fault of ours must not leave the client waiting for ever
            self._told.notice(f"A fault of this program: {fault!r}, at {job.request.method}.")
            text = rpc.failure(job.id, rpc.INTERNAL_ERROR, f"A fault of the proxy: {type(fault).__name__}.")
        if not job.ticket.cancelled:
            self._write(text)
        if self._initialized:
            self._relay.listen()
        with self._idle:
            self._jobs.remove(job)
            self._idle.notify_all()

    def _handler(self, job: _Job) -> Callable[[_Job], str]:
        own = {words.STATUS_TOOL: self._status, words.RESULT_TOOL: self._result}
        by_method = {
            "initialize": self._initialize,
            "server/discover": self._discover,
            "ping": lambda job: rpc.answer(job.id, "{}"),
            "tools/list": self._list_tools,
            "tools/call": own.get(job.tool, self._call),
        }
        return by_method.get(job.request.method, self._forward)

    def _forward(self, job: _Job) -> str:
        """Ask the relay, and say its answer in the client's era."""
        return self._in_its_era(job, self._relay.ask(job.request, job.ticket))

    def _in_its_era(self, job: _Job, text: str) -> str:
        result, era = rpc.within(text, "result"), era_of(job.request)
        if result is None:
            return text
        if era is Era.SESSIONS and wants_input(result):
            if job.request.method == "tools/call":
                return rpc.answer(job.id, words.no_input(job.tool))
            return rpc.failure(job.id, rpc.INTERNAL_ERROR, "The relay asks for input, which cannot be given.")
        fitting = result_for(era, job.request.method, result)
        return text if fitting == result else rpc.answer(job.id, fitting)

    # Who is there -----------------------------------------------------------------------------------------

    def _initialize(self, job: _Job) -> str:
        client = client_of(job.request)
        try:
            hello: Hello | None = self._relay.greet(job.ticket, client=client)
        except Unanswered as none:
            hello = self._memory.known.hello
            self._told.notice(f"The relay does not answer ({none}); its last answers are given in its place.")
        return rpc.answer(job.id, initialize_result(hello, client.version, OWN_INFO))

    def _discover(self, job: _Job) -> str:
        try:
            hello = self._relay.greet(job.ticket)
            if hello.era is Era.STATELESS:
                text = self._relay.ask(job.request, job.ticket)
                result = rpc.within(text, "result")
                return text if result is None else rpc.answer(job.id, with_tools(result))
        except Unanswered:
            known = self._memory.known.hello
            if known is None:
                return rpc.answer(job.id, discover_result(OWN_INFO))
            hello = known
        if hello.era is Era.STATELESS:
            return rpc.answer(job.id, with_tools(hello.result))
        # What a server of sessions says to it: the client then introduces itself in that era.
        return rpc.failure(job.id, rpc.METHOD_NOT_FOUND, "The relay speaks the era of sessions: initialize.")

    # Tools ------------------------------------------------------------------------------------------------

    def _list_tools(self, job: _Job) -> str:
        """The whole list, ours at its end; in an outage the last one that the relay gave."""
        if job.request.member("cursor") is not None:
            return self._forward(job)
        result = '{"tools":[]}'
        try:
            text = self._relay.ask(job.request, job.ticket)
            if (first := rpc.within(text, "result")) is None:
                return text
            result = first
            tools = self._all_pages(job, result)
            self._memory.learn(tools=tools)
        except Unanswered as none:
            tools = self._memory.known.tools or ()
            self._told.notice(f"The relay does not answer ({none}); {len(tools)} tools are known.")
            self._tell_of_others_than(tools, job)
        theirs = [as_listed(text, self._rules) for text in tools if tool_name(text) not in words.OWN_TOOLS]
        whole = ",".join([*theirs, *words.OWN_TOOLS.values()])
        listed = rpc.with_member(result, {"tools": f"[{whole}]", "nextCursor": None})
        return rpc.answer(job.id, result_for(era_of(job.request), "tools/list", listed))

    def _tell_of_others_than(self, tools: tuple[str, ...], job: _Job) -> None:
        """Have a client of sessions list its tools anew when the relay is back and has others."""
        with self._idle:
            is_first = era_of(job.request) is Era.SESSIONS and not self._watching
            self._watching |= is_first
        if is_first:
            threading.Thread(target=self._watch, args=(tools,), name="mcp tools", daemon=True).start()

    def _watch(self, told: tuple[str, ...]) -> None:
        wait_s, most_s = _LOOK_AGAIN_S
        asked = rpc.read_message(rpc.request('"outbox-tools"', "tools/list", "{}"))
        while self._watching:
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, most_s)
            with contextlib.suppress(Unanswered):
                result = rpc.within(self._relay.ask(asked, Ticket()), "result")
                if result is None:  # an error is no list
                    continue
                tools = self._all_pages(_Job(asked), result)
                self._memory.learn(tools=tools)
                self._watching = False
                if tools != told:
                    self._write(rpc.notification("notifications/tools/list_changed"))

    def _all_pages(self, job: _Job, result: str) -> tuple[str, ...]:
        """The tools of this page and of those that follow; an end to pages that would never end."""
        tools = rpc.objects(rpc.within(result, "tools"))
        seen = {'""'}
        while len(seen) <= _MOST_PAGES and sum(map(len, tools)) < MOST_BYTES:
            cursor = rpc.within(result, "nextCursor")
            if cursor is None or cursor[0] != '"' or cursor in seen:
                break
            seen.add(cursor)
            params = rpc.with_member(job.request.params, {"cursor": cursor})
            text = self._relay.ask(rpc.with_params(job.request, params), job.ticket)
            page = rpc.within(text, "result")
            if page is None:
                raise Unanswered(Reading(Sort.FAILED, detail="a page of the tools was refused"))
            result = page
            tools += rpc.objects(rpc.within(result, "tools"))
        return tuple(tools)

    def _may_wait(self, job: _Job) -> bool:
        if job.request.method != "tools/call" or job.tool in words.OWN_TOOLS:
            return False
        return self._rules.may_wait(job.tool, self._memory.known.described(job.tool))

    def _call(self, job: _Job) -> str:
        """A call whose answer would be missed: made now, or said at once that it was not."""
        try:
            return self._forward(job)
        except Unanswered as none:
            step = next_step(whether_it_ran(none.reading), may_wait=False, safe=False)
            return rpc.answer(job.id, self._without_result(job, step, _why(none.reading)))

    def _serve_calls(self) -> None:
        while True:
            job = self._waiting_calls.get()
            self._do(job, self._call_or_queue)

    def _call_or_queue(self, job: _Job) -> str:
        """A call that may wait: behind older ones, else made now, else queued with the key of the try."""
        key = job.request.string("_meta", KEY_FIELD) or self._calls.new_key()
        if job.ticket.cancelled:
            return ""
        if self._leaving:
            return self._queued(job, key, "the client left before it was sent")
        if self._calls.has_calls():
            return self._queued(job, key, "older calls of this agent wait, and it stays behind them")
        try:
            text = self._relay.ask(job.request, job.ticket, key=self._calls.wire_key(key))
            return self._in_its_era(job, text)
        except Unanswered as none:
            ran = whether_it_ran(none.reading)
            step = next_step(ran, may_wait=not job.ticket.cancelled, safe=self._is_safe(job.tool))
            if step is Step.QUEUE:
                return self._queued(job, key, _why(none.reading), ran)
            return rpc.answer(job.id, self._without_result(job, step, _why(none.reading)))

    def _queued(self, job: _Job, key: str, why: str, ran: Ran = Ran.NO) -> str:
        trace = (job.request.string("_meta", "traceparent"), job.request.string("_meta", "tracestate"))
        try:
            call = self._calls.put(job.tool, job.request.member("arguments") or "null", key, trace)
        except OutboxError as error:
            perhaps = ran is not Ran.NO
            return rpc.answer(job.id, words.not_stored(job.tool, why, str(error), perhaps=perhaps))
        return rpc.answer(job.id, words.queued(call, why))

    def _without_result(self, job: _Job, step: Step, why: str) -> str:
        if step is Step.SAY_REFUSED:
            return words.refused(job.tool, why)
        if step is Step.SAY_PERHAPS:
            return words.perhaps_run(job.tool, why, safe=self._is_safe(job.tool))
        return words.not_run(job.tool, why)

    def _is_safe(self, tool: str) -> bool:
        return self._rules.is_safe(tool, relay_honours_keys=self._memory.known.honours_keys)

    def _status(self, job: _Job) -> str:
        return rpc.answer(job.id, words.lines_result(self._told.status()))

    def _result(self, job: _Job) -> str:
        which = job.request.string("arguments", "key") or job.request.member("arguments", "key") or ""
        if not which:
            return rpc.failure(job.id, rpc.INVALID_PARAMS, 'Which call? "key" is the key that "queued" told.')
        return rpc.answer(job.id, self._calls.look_up(which, self._told.why))

    # What is no request -----------------------------------------------------------------------------------

    def _cancel(self, message: Message) -> None:
        which = message.member("requestId")
        for job in self._under_way():
            if rpc.same_id(job.request.id, which) and job.request.method != "initialize":
                job.ticket.cancel()
                threading.Thread(target=self._pass_on, args=(message,), daemon=True).start()

    def _pass_on(self, message: Message) -> None:
        try:
            self._relay.tell(message, Ticket())
        except Unanswered as none:
            self._told.notice(f"{message.method or 'An answer'} did not reach the relay: {none}.")

    def _reject(self, text: str, reason: str) -> None:
        try:
            self._relay.reject(text, reason)
        except Unanswered as none:
            self._told.notice(f"The refusal of its request did not reach the relay: {none}.")

    def _hear(self, text: str) -> None:
        """A message of the relay beside the answers. A client of the stateless era is asked nothing."""
        try:
            message = rpc.read_message(text)
        except NotAMessage as wrong:
            self._told.notice(f"The relay sent what is no message: {wrong}")
            return
        if message.is_request and self._client_era is Era.STATELESS:
            reason = "The client speaks the era without requests from the server."
            threading.Thread(target=self._reject, args=(text, reason), daemon=True).start()
        elif message.method:
            self._write(message.text)

    # The end ----------------------------------------------------------------------------------------------

    def _under_way(self) -> list[_Job]:
        with self._idle:
            return list(self._jobs)

    def _settled(self, timeout_s: float) -> bool:
        with self._idle:
            return self._idle.wait_for(lambda: not self._jobs, timeout_s)


def _why(reading: Reading) -> str:
    """The relay's trouble in a few words."""
    detail = reading.detail or str(reading.sort)
    if reading.sort is Sort.UNREACHABLE:
        return f"the relay does not answer ({detail})"
    if reading.sort is Sort.UNAUTHORIZED and reading.status is None:
        return detail
    if reading.status is None or reading.status < 300:
        return f"no whole answer came ({detail})"
    return f"the relay answered {reading.status} ({detail})"
