"""Group commit: what arrives while a commit runs goes into the next one together, one flush for all.

Nobody waits for company: a lone caller commits at once. Knows no SQL.
"""

from __future__ import annotations

from _thread import RLock  # see connection.py
from collections import deque
from collections.abc import Callable, Sequence

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, TypeVar

    _Event = TypeVar("_Event")
    _Result = TypeVar("_Result")

_MOST_EVENTS = 1_000  # in one commit; a larger call goes alone


class Interrupted(Exception):
    """The thread that committed for this caller was interrupted: its events may or may not be stored."""


class _Ticket:
    """One caller's events, and what became of them."""

    __slots__ = ("error", "events", "results")

    def __init__(self, events: Sequence[Any]) -> None:
        self.events = events
        self.results: list[Any] | None = None
        self.error: BaseException | None = None


class GroupCommit:
    """Joins the calls of many threads into few commits, in the order of the calls; each gets its results."""

    def __init__(self) -> None:
        self._waiting: deque[_Ticket] = deque()
        self._turn = RLock()
        self._leads = False

    def submit(
        self, events: Sequence[_Event], commit: Callable[[Sequence[_Event]], list[_Result]]
    ) -> list[_Result]:
        """Commit these events, together with those of other callers; one result for each of them.

        `commit` stores what it is given, all or nothing. Raises what it raises, and Interrupted.
        """
        if self._leads and self._turn.acquire(blocking=False):
            # A signal handler inside this very thread's commit: it must not answer for the others.
            try:
                if self._leads:
                    return commit(events)
            finally:
                self._turn.release()
        ticket = _Ticket(events)
        self._waiting.append(ticket)
        with self._turn:
            while ticket.results is None and ticket.error is None:
                self._lead(ticket, commit)
        if ticket.error is not None:
            raise ticket.error
        return ticket.results or []

    def _lead(self, own: _Ticket, commit: Callable[[Sequence[Any]], list[Any]]) -> None:
        tickets = self._next()
        together = tickets[0].events if len(tickets) == 1 else [e for one in tickets for e in one.events]
        self._leads = True
        try:
            results = commit(together)
        except Exception as error:  # noqa: BLE001 - it is everybody's whose events were in it
            for ticket in tickets:
                ticket.error = error
            return
        except BaseException as error:
            for ticket in tickets:
                ticket.error = error if ticket is own else Interrupted()
            raise
        finally:
            self._leads = False
        begin = 0
        for ticket in tickets:
            ticket.results = results[begin : begin + len(ticket.events)]
            begin += len(ticket.events)

    def _next(self) -> list[_Ticket]:
        """Those who waited longest; at least one."""
        tickets = [self._waiting.popleft()]
        events = len(tickets[0].events)
        while self._waiting and events + len(self._waiting[0].events) <= _MOST_EVENTS:
            tickets.append(self._waiting.popleft())
            events += len(tickets[-1].events)
        return tickets
