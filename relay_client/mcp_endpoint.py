"""One MCP endpoint, called in whichever era it speaks: finds it out, opens sessions, mends what ended them.

Thread-safe, and for one process. What answers show stands in mcp_era.py; a request is made by client.py.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from relay_client import mcp
from relay_client.client import RelayClient
from relay_client.mcp_era import (
    REFUSALS,
    Era,
    Lesson,
    code_of,
    era_shown_by_list,
    is_no,
    lesson_of,
    message_of,
    read_tool_page,
)
from relay_client.mcp_params import Mirror, mirrored_fields
from relay_client.reading import Answer, Failure, Origin

_MOST_TOKENS = 1_024  # agents may have tokens of their own, and tokens are renewed
_MOST_PAGES = 100
_MOST_TOOLS = 10_000
_LONGEST_LIST_S = 60.0  # for the pages after the first: a turn has to end
_FAREWELL_S = 1.0


@dataclass(slots=True, eq=False)
class _Open:
    """A session that is open; `worked` once a call in it was answered."""

    session: mcp.Session
    worked: bool = False


@dataclass(frozen=True, slots=True)
class _Way:
    """How a call goes out: in a session, or stateless with these arguments mirrored."""

    opened: _Open | None
    mirror: Mirror = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _FindingOut:
    """One thread finds out for all that have the same token; `answer` is what stood in its way."""

    done: threading.Event = field(default_factory=threading.Event)
    answer: Answer | None = None


class McpEndpoint:
    """The MCP endpoint of a relay.

    A session belongs to the token that it was opened with. Nothing that a network does raises.
    """

    def __init__(self, client: RelayClient) -> None:
        """Nothing is known of it yet."""
        self._client = client
        self._mutex = threading.Lock()
        self._era: Era | None = None
        self._sessions: dict[str | None, _Open] = {}
        self._mirrors: dict[str, Mirror] = {}
        self._listed: set[str | None] = set()
        self._under_way: dict[str | None, _FindingOut] = {}

    def prepare(self, tool: str, *, token: str | None, deadline: float | None = None) -> Answer | None:
        """Find out what must be known before `tool` is called with this token; no call is made.

        None when all is ready, without a request where it was before. Else the answer that stands in the way,
        with `is_preparation`.
        """
        while True:
            with self._mutex:
                if self._way(tool, token):
                    return None
                leads = token not in self._under_way
                work = self._under_way.setdefault(token, _FindingOut())
            if leads:
                self._lead(work, token, deadline)
            elif not work.done.wait(_left_s(deadline)):
                return _stopped()
            if work.answer is not None:
                return work.answer

    def call(
        self,
        params: bytes,
        *,
        tool: str,
        token: str | None,
        key: str | None,
        origin: Origin,
        deadline: float | None = None,
    ) -> Answer:
        """Call a tool, as `RelayClient.call_tool`; `request_id` of the answer is the one it was asked with.

        A call that certainly did not run (the session was gone, the era or the header fields were others)
        goes again once, with the same key.
        """

        def send(way: _Way) -> Answer:
            answer = self._client.call_tool(
                params,
                tool=tool,
                token=token,
                key=key,
                origin=origin,
                session=way.opened.session if way.opened else None,
                mirrored=mirrored_fields(way.mirror, params),
                deadline=deadline,
            )
            if way.opened and answer.status is not None and answer.status < 300:
                way.opened.worked = True
            return answer

        return self._call(send, tool, token, deadline)

    def close(self, *, deadline: float | None = None) -> None:
        """End the sessions, so that the server keeps nothing of them: as many as a second allows.

        Streamable HTTP, "Session Management". Whatever comes of it; the next call would open a new one.
        """
        end = min(time.monotonic() + _FAREWELL_S, math.inf if deadline is None else deadline)
        with self._mutex:
            opened = [(token, each.session) for token, each in self._sessions.items()]
            self._sessions.clear()
        for token, session in opened:
            if session.id is None:
                continue
            answer = self._client.end_session(session, token=token, deadline=end)
            if answer.status is None:
                return  # there is nobody, or no time

    def _call(
        self, send: Callable[[_Way], Answer], tool: str, token: str | None, deadline: float | None
    ) -> Answer:
        way = self._ready(tool, token, deadline)
        if isinstance(way, Answer):
            return way
        answer = send(way)
        lesson = self._learn(way, answer, tool, token)
        if lesson is Lesson.NOTHING:
            return answer
        other = self._ready(tool, token, deadline)
        if isinstance(other, Answer):
            return other
        is_same = bool(other.opened) == bool(way.opened) and other.mirror == way.mirror
        if lesson is not Lesson.SESSION_GONE and is_same:
            # In a session it may still be about the session: several servers that do not share theirs.
            return answer._replace(era_holds=way.opened is None)
        answer = send(other)
        self._learn(other, answer, tool, token)
        return answer

    def _ready(self, tool: str, token: str | None, deadline: float | None) -> _Way | Answer:
        while True:
            with self._mutex:
                if way := self._way(tool, token):
                    return way
            if answer := self.prepare(tool, token=token, deadline=deadline):
                return answer

    # What is known -----------------------------------------------------------------------------------------

    def _way(self, tool: str, token: str | None) -> _Way | None:
        """How a call goes out, once that is known."""
        if self._era is Era.SESSIONS and (opened := self._sessions.get(token)):
            return _Way(opened)
        if self._era is Era.STATELESS and (tool in self._mirrors or token in self._listed):
            return _Way(None, self._mirrors.get(tool, {}))
        return None

    def _learn(self, way: _Way, answer: Answer, tool: str, token: str | None) -> Lesson:
        """Forget what this answer to a call shows to be wrong."""
        worked = way.opened is not None and way.opened.worked
        lesson = lesson_of(answer, in_session=way.opened is not None, worked=worked)
        if lesson is Lesson.NOTHING:
            return lesson
        spoken = Era.SESSIONS if way.opened else Era.STATELESS
        with self._mutex:
            if way.opened and self._sessions.get(token) is way.opened:
                del self._sessions[token]
            if lesson is Lesson.OTHER_ERA and self._era is spoken:
                self._era = None
            if not way.opened:
                self._mirrors.pop(tool, None)
                self._listed.discard(token)
        return lesson

    # Finding out -------------------------------------------------------------------------------------------

    def _lead(self, work: _FindingOut, token: str | None, deadline: float | None) -> None:
        try:
            answer = self._find_out(token, deadline)
            work.answer = None if answer is None else answer._replace(is_preparation=True)
        finally:
            with self._mutex:
                del self._under_way[token]
            work.done.set()

    def _find_out(self, token: str | None, deadline: float | None) -> Answer | None:
        """List the tools, or open a session; the answer that stands in the way, if one does."""
        with self._mutex:
            has_sessions = self._era is Era.SESSIONS
        if has_sessions:
            refused = self._open(token, deadline)
            if refused is None or not is_no(refused):
                return refused
        listed = self._list(token, deadline)
        if listed is None or has_sessions or era_shown_by_list(listed) is not Era.SESSIONS:
            return listed
        refused = self._open(token, deadline)
        if refused is None or not is_no(refused):
            return refused
        if code_of(listed) in REFUSALS and message_of(listed):
            self._remember_tools({}, token)  # it understands the request, and lists nothing
            return None
        return listed

    def _list(self, token: str | None, deadline: float | None) -> Answer | None:
        """Ask for all pages of the tools; what comes in place of the first one, if that is no result.

        A tool that is missing after that is called as it is; the server says so where that is wrong.
        """
        found: dict[str, Mirror] = {}
        seen: set[str | None] = set()
        cursor: str | None = None
        end = min(time.monotonic() + _LONGEST_LIST_S, math.inf if deadline is None else deadline)
        while cursor not in seen and len(seen) < _MOST_PAGES and len(found) < _MOST_TOOLS:
            answer = self._client.discover_tools(
                token=token, cursor=cursor, deadline=end if seen else deadline
            )
            page = read_tool_page(answer)
            if page is None:
                if not seen:
                    return answer
                break
            found |= page.mirrors
            seen.add(cursor)
            if page.next_cursor is None:
                break
            cursor = page.next_cursor
        self._remember_tools(found, token)
        return None

    def _remember_tools(self, mirrors: Mapping[str, Mirror], token: str | None) -> None:
        with self._mutex:
            self._era = Era.STATELESS
            if len(self._mirrors) >= _MOST_TOOLS:
                self._mirrors.clear()  # what is asked for again is listed again
                self._listed.clear()
            self._mirrors |= mirrors
            if len(self._listed) >= _MOST_TOKENS:
                self._listed.clear()
            self._listed.add(token)

    def _open(self, token: str | None, deadline: float | None) -> Answer | None:
        """Open a session; the answer that stands in the way, if one does."""
        answer = self._client.initialize(token=token, deadline=deadline)
        session = None
        if answer.status is not None and answer.status < 300:
            session = mcp.opened_session(message_of(answer), answer.headers.get("mcp-session-id"))
        if session is None:
            return answer
        confirmed = self._client.confirm_session(session, token=token, deadline=deadline)
        if confirmed.status is None or confirmed.status >= 300:
            return confirmed
        with self._mutex:
            self._era = Era.SESSIONS
            while len(self._sessions) >= _MOST_TOKENS:
                del self._sessions[next(iter(self._sessions))]
            self._sessions[token] = _Open(session)
        return None


def _left_s(deadline: float | None) -> float:
    """How long somebody who waits may do so; a deadline may lie further ahead than a lock can count."""
    left_s = math.inf if deadline is None else deadline - time.monotonic()
    return min(threading.TIMEOUT_MAX, max(0.0, left_s))


def _stopped() -> Answer:
    """Our own time is over before anything was sent."""
    words = "stopped before it was sent"
    return Answer(None, failure=Failure.STOPPED, detail=words, sent=False, is_preparation=True)
