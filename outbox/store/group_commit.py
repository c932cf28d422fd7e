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
    """One caller's events, and what became of them. Once it is answered, its caller has to wait no more."""

    __slots__ = ("error", "events", "is_answered", "results")

    def __init__(self, events: Sequence[Any]) -> None:
        self.events = events
        self.results: list[Any] | None = None
        self.error: BaseException | None = None
        self.is_answered = False

    def refuse(self, error: BaseException) -> None:
        """Answer with an error."""
        self.error, self.is_answered = error, True


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
        try:
            with self._turn:
                while not ticket.is_answered:
                    self._lead(ticket, commit)
        except BaseException as error:
            if not ticket.is_answered:  # interrupted while it waited: nobody commits it any more
                ticket.refuse(error)
            raise
        if ticket.error is not None:
            raise ticket.error
        return ticket.results or []

    def _lead(self, own: _Ticket, commit: Callable[[Sequence[Any]], list[Any]]) -> None:
        tickets: list[_Ticket] = []
        try:
            self._leads = True
            tickets = self._next()
            if not tickets:  # a signal handler was faster
                return
            together = tickets[0].events if len(tickets) == 1 else [e for one in tickets for e in one.events]
            results = commit(together)
            begin = 0
            for ticket in tickets:
                end = begin + len(ticket.events)
                ticket.results, ticket.is_answered = results[begin:end], True
                begin = end
        except Exception as error:  # noqa: BLE001 - it is everybody's whose events were in it
            for ticket in tickets:
                ticket.refuse(error)
        except BaseException as error:
            for ticket in tickets:
                if not ticket.is_answered:
                    ticket.refuse(error if ticket is own else Interrupted())
            raise
        finally:
            self._forget_answered()
            self._leads = False

    def _next(self) -> list[_Ticket]:
        """Those who waited longest. They stay in line until they are answered.

        An interrupt before that loses none of them: another one of those who wait leads then.
        """
        if len(self._waiting) == 1 and not self._waiting[0].is_answered:
            return [self._waiting[0]]
        tickets: list[_Ticket] = []
        events = 0
        for place in range(len(self._waiting)):  # others come in behind meanwhile
            ticket = self._waiting[place]
            if not ticket.is_answered:
                events += len(ticket.events)
                if tickets and events > _MOST_EVENTS:
                    break
                tickets.append(ticket)
        return tickets

    def _forget_answered(self) -> None:
        while self._waiting and self._waiting[0].is_answered:
            self._waiting.popleft()
