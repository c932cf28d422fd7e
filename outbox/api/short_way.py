"""The short way of a plain event: from its connection to the store and back, past parser and application.

They would cost several times what the event does. Whatever is not plain, or not admitted, goes the long way,
and is answered there.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11

from outbox.api.gathering import Answer, Asked, Gathering
from outbox.api.guard import Guard
from outbox.api.patience import PatientProtocol
from outbox.api.plain_event import START, plain_event

BODY_WITHIN_S = 1.0  # behind its head; whoever is slower goes the long way, where silence is answered


class ShortWay(PatientProtocol):
    """One connection. A request of it is under way here or in the parser, never in both."""

    def __init__(self, gathering: Gathering, guard: Guard | None, *args: Any, **named: Any) -> None:
        """`gathering` stores the events that `guard`, if there is one, admits."""
        super().__init__(*args, **named)
        self._gathering = gathering
        self._guard = guard
        self._under_way = False
        self._ends = False
        self._kept = b""  # a plain head without its whole body, or what came behind a request under way
        self._body_timer: asyncio.TimerHandle | None = None

    def data_received(self, data: bytes) -> None:
        """Take it the short way if all of it is one plain event."""
        if self._under_way:
            self._kept += data
            self.flow.pause_reading()
            return
        if self._kept:
            data = self._give_up_kept() + data
        if not (data.startswith(START) and self._is_at_rest() and self._takes(data)):
            super().data_received(data)

    def _is_at_rest(self) -> bool:
        """Whether the parser has nothing in its hands, and the last answer is read."""
        conn = self.conn
        return (
            conn.their_state is h11.IDLE
            and conn.our_state is h11.IDLE
            and not conn.trailing_data[0]
            and not self.flow.write_paused
            and not self.transport.is_closing()
        )

    def _takes(self, data: bytes) -> bool:
        event = plain_event(data)
        if event is None or not (self._guard is None or self._guard.admits(event.fields)):
            return False
        self._unset_keepalive_if_required()
        self._headers_came()
        if event.missing_bytes:
            self._kept = data
            self._body_timer = self.loop.call_later(BODY_WITHIN_S, self._goes_long)
        else:
            self._under_way = True
            self._gathering.add(event.agent, Asked(event.body, self._answered))
        return True

    def _answered(self, answer: Answer) -> None:
        self._under_way = False
        if self.transport.is_closing():
            return
        start, rest = answer
        fields = [b"%b: %b\r\n" % field for field in self.server_state.default_headers]
        self.transport.write(b"".join((start, *fields, rest)))
        if self._ends:
            self.transport.close()
            return
        self.on_response_complete()
        if self._kept:
            data, self._kept = self._kept, b""
            self.data_received(data)

    def _give_up_kept(self) -> bytes:
        if self._body_timer is not None:
            self._body_timer.cancel()
            self._body_timer = None
        kept, self._kept = self._kept, b""
        return kept

    def _goes_long(self) -> None:
        super().data_received(self._give_up_kept())

    def eof_received(self) -> bool:  # type: ignore[override] # as in patience.py
        """A whole event gets its answer before the end; half of one is half a request."""
        if self._under_way:
            self._ends = True
            return True
        if self._kept:
            self._goes_long()
        return super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing waits for the rest of a body any more."""
        self._give_up_kept()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        """The server ends: what is under way is answered first."""
        if self._under_way:
            self._ends = True
        else:
            super().shutdown()
