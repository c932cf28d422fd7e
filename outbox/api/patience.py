"""HTTP/1.1 for clients that are slow, silent, half closed or gone: none of them holds a connection for ever.

What this adds to uvicorn: a time for headers to come, for the rest of a request that was answered early, and
for answers to be read; a client that ends its side after its request still gets the answer; and one whose
request turns into something that is no HTTP is a client that is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_WITHIN_S = 30.0
LINGER_S = 10.0  # an answered request whose body goes on
READ_WITHIN_S = 60.0  # an answer that is not read
_UNREAD_BYTES = 8 * 1024 * 1024  # of answers, for a client that sends all its lines before it reads


class PatientProtocol(H11Protocol):
    """One connection."""

    def __init__(self, *args: Any, **named: Any) -> None:
        """Nothing is awaited yet."""
        super().__init__(*args, **named)
        self._headers_timer: asyncio.TimerHandle | None = None
        self._reading_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override] # as in uvicorn
        """From now on it has its time."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=_UNREAD_BYTES)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        """No timer outlives it."""
        super().connection_lost(exc)
        for timer in (self._headers_timer, self._reading_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Something came; the time for headers goes on until they are whole."""
        super().data_received(data)
        self._watch()

    def eof_received(self) -> bool:  # type: ignore[override] # asyncio lets it say that our side stays open
        """A whole request that is not answered yet gets its answer; anything else is over."""
        cycle = self.cycle
        if cycle is None or cycle.more_body or cycle.response_complete:
            return False
        cycle.keep_alive = False
        return True

    def send_400_response(self, msg: str) -> None:
        """What is no HTTP ends the connection, and the request that it stands in the middle of.

        Nothing more is sent for that one: h11 takes no second answer, and no half of one.
        """
        cycle = self.cycle
        if cycle is not None and not cycle.response_complete:
            cycle.disconnected = True
            cycle.message_event.set()
        if self.conn.our_state in {h11.IDLE, h11.SEND_RESPONSE}:
            with contextlib.suppress(h11.LocalProtocolError):  # an answer to HEAD has no body
                super().send_400_response(msg)
        self.transport.close()

    def _watch(self) -> None:
        incomplete = self.conn.their_state is h11.IDLE
        if incomplete and self._headers_timer is None:
            self._headers_timer = self.loop.call_later(HEADERS_WITHIN_S, self._no_headers)
        elif not incomplete:
            self._headers_came()

    def _headers_came(self) -> None:
        if self._headers_timer is not None:
            self._headers_timer.cancel()
            self._headers_timer = None

    def _no_headers(self) -> None:
        self._headers_timer = None
        if self.conn.their_state is h11.IDLE:
            self.transport.abort()

    def on_response_complete(self) -> None:
        """Whatever of its request still comes is read for a moment, so that the answer can be read."""
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY and self._linger_timer is None:
            self._linger_timer = self.loop.call_later(LINGER_S, self._linger_no_more)

    def _linger_no_more(self) -> None:
        self._linger_timer = None
        if self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete:
            self.transport.abort()

    def timeout_keep_alive_handler(self) -> None:
        """An idle connection ends, also when its last answer is not read."""
        super().timeout_keep_alive_handler()
        self._reading_timer = self._reading_timer or self.loop.call_later(READ_WITHIN_S, self.transport.abort)

    def pause_writing(self) -> None:
        """Too much is unread."""
        super().pause_writing()
        self._reading_timer = self._reading_timer or self.loop.call_later(READ_WITHIN_S, self.transport.abort)

    def resume_writing(self) -> None:
        """It is read again."""
        super().resume_writing()
        if self._reading_timer is not None:
            self._reading_timer.cancel()
            self._reading_timer = None
