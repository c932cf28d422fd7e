"""The relay's MCP endpoint as the proxy asks it: finds out its era, keeps its session, answers with texts.

One `ask` is one request, sent again only where nothing can have run: with another token, in a new session.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from outbox.capture import mcp_message as rpc
from outbox.capture.mcp_eras import (
    Client,
    Era,
    Fields,
    Hello,
    client_of_meta,
    era_of,
    session_fields,
    speaks_stateless,
    stateless_fields,
)
from outbox.capture.mcp_http import Call, Endpoint, NoAnswer, Ticket
from outbox.capture.mcp_memory import Memory
from outbox.capture.mcp_message import Message
from outbox.delivery.tokens import NoTokenNow, Tokens
from relay_client import Answer, Capabilities, Reading, Sort, fingerprint, read_tool_call
from relay_client.headers import encode_agent, encode_key
from relay_client.masking import without_token, without_token_text
from relay_client.mcp import ACCEPT, KEY_FIELD
from relay_client.mcp_params import mirror_of, mirrored_fields
from relay_client.problem import parse_json

_HELLO_S = 5.0
_TOKEN_S = 30.0
_LISTEN_S = 3600.0
_FAREWELL_S = 1.0
_PASSING = frozenset({401, 408, 425, 429})  # 4xx that may be over the next time
_LISTEN_AGAIN_S = (1.0, 60.0)

Hear = Callable[[str], None]


class Unanswered(Exception):
    """There is no JSON-RPC answer; `reading` says what came instead."""

    def __init__(self, reading: Reading) -> None:
        super().__init__(reading.detail or str(reading.sort))
        self.reading = reading


@dataclass(frozen=True, slots=True)
class Way:
    """How requests are sent: what every one carries, and how long an answer may take."""

    endpoint: Endpoint
    agent: str
    tokens: Tokens
    idempotency_header: str = "quoted"
    silence_s: float = 120.0
    max_retry_after_ms: int = 3_600_000


@dataclass(slots=True)
class _Session:
    """What was agreed with the relay for now."""

    hello: Hello
    id: str | None = None
    is_heard: bool = False  # somebody reads its stream


class Relay:
    """Thread-safe. What the relay sends beside answers goes to `hear`, its requests included."""

    def __init__(
        self, way: Way, memory: Memory, hear: Hear, ask_capabilities: Callable[[], Capabilities | None]
    ) -> None:
        self.client: Client | None = None
        self._way = way
        self._memory = memory
        self._hear = hear
        self._ask_capabilities = ask_capabilities
        self._lock = threading.Lock()
        self._listening = threading.Lock()
        self._session: _Session | None = None
        self._refused: tuple[float, Reading] | None = None  # when somebody asked in vain, and what came of it
        self._own_ids = 0

    # Who is there -----------------------------------------------------------------------------------------

    def greet(self, ticket: Ticket, *, client: Client | None = None) -> Hello:
        """What the relay says of itself, asked once; a `client` that introduces itself begins anew.

        Who waited while somebody asked in vain does not ask too: requests in an outage would wait for each
        other. Raises Unanswered: whatever was to be sent was not.
        """
        came = time.monotonic()
        with self._lock:
            if client is not None:
                self.client, self._session = client, None
            if self._session is None:
                if self._refused is not None and self._refused[0] >= came:
                    raise Unanswered(self._refused[1])
                self._session = self._agreed(ticket)
            return self._session.hello

    def _agreed(self, ticket: Ticket) -> _Session:
        try:
            return self._agree(ticket)
        except Unanswered as none:
            if not ticket.is_cut:  # else it says something of the one request only
                self._refused = (time.monotonic(), none.reading)
            raise

    @property
    def era(self) -> Era | None:
        """The era that was agreed on, None while there is no agreement."""
        session = self._session
        return None if session is None else session.hello.era

    def _agree(self, ticket: Ticket) -> _Session:
        known = self._memory.known.hello
        first, second = self._discover, self._initialize
        if known is not None and known.era is Era.SESSIONS:
            first, second = second, first
        session = first(ticket) or second(ticket)
        if session is None:
            detail = "what answers there speaks no MCP that is known here"
            raise Unanswered(Reading(Sort.NO_ENDPOINT, 404, detail=detail))
        self._memory.learn(hello=session.hello)
        said = self._ask_capabilities()
        if said is not None:
            self._memory.learn(honours_keys=said.mcp_idempotency)
        return session

    def _discover(self, ticket: Ticket) -> _Session | None:
        """An agreement with a relay of the stateless era; None when it speaks the other one."""
        params = rpc.with_meta("{}", (self.client or Client()).meta())
        request = self._own("server/discover", params)
        text = self._handshake(request, stateless_fields(request), ticket)[0]
        result = _object_in(text)
        if result is None or not speaks_stateless(result):
            return None
        return _Session(Hello(Era.STATELESS, result))

    def _initialize(self, ticket: Ticket) -> _Session | None:
        """A new session; None when the relay has none."""
        client = self.client or Client()
        request = self._own("initialize", client.initialize_params())
        text, session_id = self._handshake(request, [("Accept", ACCEPT)], ticket)
        result = _object_in(text)
        if result is None:
            return None
        session = _Session(Hello(Era.SESSIONS, result), session_id)
        fields = session_fields(session.hello.version, session_id)
        self._post(rpc.notification("notifications/initialized"), fields, ticket, silence_s=_HELLO_S)
        return session

    def _handshake(self, request: Message, fields: Fields, ticket: Ticket) -> tuple[str | None, str | None]:
        """The answer to a request that runs nothing, and the session it opened; None: of the other era.

        Raises Unanswered for everything that says nothing of the era; its reading blames no call.
        """
        answer, text = self._post(request.text, fields, ticket, request=request, silence_s=_HELLO_S)
        if text is not None and rpc.within(text, "error") is None:
            return text, answer.headers.get("mcp-session-id")
        if text is not None or _may_be_of_other_era(answer):
            return None, None
        reading = self._read(answer)
        is_refusal = reading.sort is Sort.FORBIDDEN
        raise Unanswered(reading._replace(not_run=not is_refusal, detail=reading.detail or str(reading.sort)))

    def abort(self) -> None:
        """Ask for no token any more, at once and for good; what is under way is cut off by its ticket."""
        self._way.tokens.abort()

    def leave(self) -> None:
        """End the session, so that the relay keeps nothing of it; at most a second, whatever comes of it.

        Streamable HTTP, "Session Management".
        """
        session, self._session = self._session, None
        if session is None or session.id is None:
            return
        with contextlib.suppress(NoAnswer, Unanswered), Call(self._way.endpoint, _FAREWELL_S) as call:
            token = self._token(_FAREWELL_S)
            fields = session_fields(session.hello.version, session.id)
            call.send("DELETE", [*fields, *self._usual(token)])

    # Requests ---------------------------------------------------------------------------------------------

    def ask(self, request: Message, ticket: Ticket, *, key: str | None = None) -> str:
        """The text of the JSON-RPC answer, result or error, under the request's own id.

        `key` is the idempotency key of a tool call, as the relay sees it. A session that has expired is
        opened anew, and the request sent once more. Raises Unanswered.
        """
        for attempt in (1, 2):
            if self.client is None and era_of(request) is Era.STATELESS:
                self.client = client_of_meta(request)
            self.greet(ticket)
            session = self._session
            if session is None:
                continue  # another request found just now that it has expired
            said = self._for_era(request, session, key)
            answer, text = self._post(said.text, self._fields(said, session, key), ticket, request=said)
            if self._has_expired(session, answer, text) and attempt == 1:
                was_session = session.hello.era is Era.SESSIONS
                if was_session or self.greet(ticket).era is Era.SESSIONS:
                    continue
            if text is None:
                raise Unanswered(self._read(answer))
            return rpc.with_id(text, request.id or "null")
        raise Unanswered(Reading(Sort.BUSY, detail="the relay ends each session at once"))

    def tell(self, message: Message, ticket: Ticket) -> None:
        """Pass on a notification or an answer of the client, within a session; raises Unanswered."""
        session = self._session
        if session is not None and session.hello.era is Era.SESSIONS:
            fields = session_fields(session.hello.version, session.id)
            answer, _ = self._post(message.text, fields, ticket)
            if answer.status is None:
                raise Unanswered(self._read(answer))

    def reject(self, text: str, reason: str) -> None:
        """Answer a request of the relay's that no client can be asked; raises Unanswered."""
        asked = rpc.read_message(text)
        said = rpc.failure(asked.id or "null", rpc.METHOD_NOT_FOUND, reason)
        self.tell(rpc.read_message(said), Ticket())

    def _for_era(self, request: Message, session: _Session, key: str | None) -> Message:
        meta = {} if key is None else {KEY_FIELD: rpc.plain(key)}
        if session.hello.era is Era.STATELESS and era_of(request) is Era.SESSIONS:
            meta |= (self.client or Client()).meta()
        return rpc.with_params(request, rpc.with_meta(request.params, meta)) if meta else request

    def _fields(self, request: Message, session: _Session, key: str | None) -> Fields:
        if session.hello.era is Era.STATELESS:
            fields = [*stateless_fields(request), *self._mirrored(request)]
        else:
            fields = session_fields(session.hello.version, session.id)
        encoded = encode_key(key, self._way.idempotency_header) if key is not None else None
        return fields if encoded is None else [*fields, ("Idempotency-Key", encoded)]

    def _mirrored(self, request: Message) -> Fields:
        """The arguments that the tool wants in header fields; a client on stdio has no such fields to set."""
        if request.method != "tools/call":
            return []
        described = self._memory.known.described(request.string("name"))
        schema = rpc.within(described, "inputSchema") if described else None
        return mirrored_fields(mirror_of(parse_json(schema)), request.params.encode()) if schema else []

    def _has_expired(self, session: _Session, answer: Answer, text: str | None) -> bool:
        """Whether what was agreed is over: a session by 404, or by a 400 that is not about the request.

        Streamable HTTP, "Session Management": nothing was done then, and the next request agrees anew.
        """
        is_about_request = text is not None and rpc.read_message(text).id not in {None, "null"}
        if session.hello.era is Era.STATELESS:
            is_over = text is None and _may_be_of_other_era(answer)
        else:
            is_over = session.id is not None and (
                answer.status == 404 or (answer.status == 400 and not is_about_request)
            )
        if is_over:
            with self._lock:
                if self._session is session:
                    self._session = None
        return is_over

    # The stream of a session ------------------------------------------------------------------------------

    def listen(self) -> None:
        """Hear what the relay sends outside of answers, in a thread of its own, as long as the session lives.

        A relay without such a stream (405), and one of the stateless era, is not asked again.
        """
        with self._listening:
            session = self._session
            if session is None or session.hello.era is not Era.SESSIONS or session.is_heard:
                return
            session.is_heard = True
        threading.Thread(target=self._listen, args=(session,), name="mcp listen", daemon=True).start()

    def _listen(self, session: _Session) -> None:
        wait_s, most_s = _LISTEN_AGAIN_S
        fields = [*session_fields(session.hello.version, session.id)]
        fields[0] = ("Accept", "text/event-stream")
        while self._session is session:
            try:
                token = self._token()
                with Call(self._way.endpoint, _LISTEN_S) as call:
                    call.send("GET", [*fields, *self._usual(token)])
                    if call.is_stream:
                        wait_s = _LISTEN_AGAIN_S[0]
                        for text in _hidden(token, call.messages()):
                            self._hear(rpc.on_one_line(text))
                    elif call.status < 500 and call.status not in _PASSING:
                        return
            except (NoAnswer, Unanswered):
                pass
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, most_s)

    # One request ------------------------------------------------------------------------------------------

    def _post(
        self,
        text: str,
        fields: Fields,
        ticket: Ticket,
        *,
        request: Message | None = None,
        silence_s: float | None = None,
    ) -> tuple[Answer, str | None]:
        """Post a message: what came back, and the JSON-RPC answer in it. A 401 gets one other token.

        Raises Unanswered when there is no token; an answer without a status says that nothing came back.
        """
        tokens, agent = self._way.tokens, self._way.agent
        token = self._token()
        once = partial(self._post_once, text, fields, request=request, silence_s=silence_s)
        answer, found = once(token, ticket)
        if answer.status == 401 and tokens.recover(agent, fingerprint(token), deadline=_deadline()):
            token = self._token()
            answer, found = once(token, ticket)
        if answer.status is not None and answer.status < 300:
            tokens.accepted(agent, fingerprint(token))
        return answer, found

    def _token(self, within_s: float = _TOKEN_S) -> str | None:
        try:
            return self._way.tokens.token(self._way.agent, _deadline(within_s))
        except NoTokenNow as missing:
            raise Unanswered(Reading(Sort.UNAUTHORIZED, detail=f"no usable token ({missing})")) from None

    def _post_once(
        self,
        text: str,
        fields: Fields,
        token: str | None,
        ticket: Ticket,
        *,
        request: Message | None,
        silence_s: float | None,
    ) -> tuple[Answer, str | None]:
        with ticket.use(Call(self._way.endpoint, silence_s or self._way.silence_s)) as call:
            try:
                call.send("POST", [*fields, *self._usual(token)], text.encode())
                if not call.is_stream:
                    answer = _without(token, call.answer())
                    return answer, self._answer_in(answer, request)
                found = next(self._answers(_hidden(token, call.messages()), request), None)
            except NoAnswer as trouble:
                return trouble.as_answer(), None
            return _without(token, Answer(call.status, headers=call.headers)), found

    def _answers(self, texts: Iterator[str], request: Message | None) -> Iterator[str]:
        """The answer in a stream; everything else in it is heard."""
        for text in map(rpc.on_one_line, texts):
            if request is not None and _answers_to(text, request):
                yield text
            else:
                self._hear(text)

    def _answer_in(self, answer: Answer, request: Message | None) -> str | None:
        """The JSON-RPC answer that a body is. What is about the token or the relay's state is none."""
        if request is None or answer.cut or answer.status in {401, 403, 408, 421, 423, 425, 429}:
            return None
        if answer.status is None or answer.status >= 500:
            return None
        text = rpc.on_one_line(answer.body.decode("utf-8", "replace").strip())
        return text if text.startswith("{") and _answers_to(text, request) else None

    def _read(self, answer: Answer) -> Reading:
        """What an answer means that holds no JSON-RPC answer."""
        now_ms = time.time_ns() // 1_000_000
        return read_tool_call(answer, "", now_ms=now_ms, max_retry_after_ms=self._way.max_retry_after_ms)

    def _usual(self, token: str | None) -> Fields:
        fields = [("Outbox-Agent", encode_agent(self._way.agent))]
        return fields if token is None else [*fields, ("Authorization", f"Bearer {token}")]

    def _own(self, method: str, params: str) -> Message:
        self._own_ids += 1
        return rpc.read_message(rpc.request(f'"outbox-{self._own_ids}"', method, params))


def _deadline(within_s: float = _TOKEN_S) -> float:
    """Until when a token may be asked for."""
    return time.monotonic() + within_s


def _without(token: str | None, answer: Answer) -> Answer:
    """What a relay echoes of the token must not come into a message: it is no business of the client's."""
    headers = {name: without_token_text(value, token) for name, value in answer.headers.items()}
    return answer._replace(headers=headers, body=without_token(answer.body, token))


def _hidden(token: str | None, texts: Iterator[str]) -> Iterator[str]:
    """The same for the messages of a stream."""
    return (without_token_text(text, token) for text in texts)


def _object_in(text: str | None) -> str | None:
    """The result of an answer, where it is an object: nothing else introduces anybody."""
    result = rpc.within(text, "result") if text is not None else None
    return result if result is not None and result.startswith("{") else None


def _may_be_of_other_era(answer: Answer) -> bool:
    """Whether an answer without a JSON-RPC answer in it may come from the other era: a 4xx about the request.

    That is any but 401, 403, 408, 409, 425 and 429 (relay contract, "MCP").
    """
    status = answer.status or 0
    return 400 <= status < 500 and status not in {401, 403, 408, 409, 425, 429}


def _answers_to(text: str, request: Message) -> bool:
    """Whether a text is the answer to a request; an error may have no id: it could not be read."""
    try:
        message = rpc.read_message(text)
    except rpc.NotAMessage:
        return False
    if not message.is_answer:
        return False
    return rpc.same_id(message.id, request.id) or (
        message.id in {None, "null"} and rpc.within(text, "error") is not None
    )
