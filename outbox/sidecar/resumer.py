"""Self-resume, done: hears hand-offs and notes, asks `resume` what follows, publishes, and tells issuers."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from outbox.errors import StoreError
from outbox.sidecar.child import status_in_words
from outbox.sidecar.control import Announcement, ControlSocket, refused
from outbox.sidecar.handoff import COMPACTED, SESSION, Notes, names_session
from outbox.sidecar.launch import relaunched
from outbox.sidecar.record import Place
from outbox.sidecar.resume import (
    Act,
    Announced,
    CannotStart,
    Compacted,
    Event,
    Exited,
    GoOffline,
    Handoff,
    Launch,
    Recover,
    Refusal,
    Refuse,
    Restart,
    Rules,
    SessionKnown,
    Situation,
    TimePassed,
    decide,
    next_moment_ms,
)
from outbox.sidecar.runner import nudge

_LOOK_EVERY_MS = 100
_SAYS = {
    Refusal.SUPERSEDED: "Another hand-off was announced before the command had ended; that one counts now.",
    Refusal.TIMEOUT: "The command did not end in time. It goes on as before; the hand-off is over.",
    Refusal.STOPPING: "The sidecar was asked to end: the command is not started again.",
    Refusal.TOO_MANY: "The command is not started again: too often in a row, without a long run between.",
    Refusal.FAILED: "The command could not be started again.",
}


class Resumer:
    """One sidecar's hand-offs. All of it but the control socket's listening happens in the main thread."""

    def __init__(
        self,
        place: Place,
        argv: Sequence[str],
        rules: Rules,
        timeout_ms: int,
        *,
        publish: Callable[[Mapping[str, Any]], None],
        drain: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        """Listen from now on.

        `publish` takes the payload of a session message, `drain` has what waits sent soon, `changed` is
        called when what `told` gives has changed. Raises StoreError.
        """
        self._argv = list(argv)
        self._rules = rules
        self._timeout_ms = timeout_ms
        self._publish, self._drain, self._changed = publish, drain, changed
        self._now = Situation(started_at_ms=_now_ms())
        self._numbers = itertools.count(1)
        self._issuers: dict[int, Announcement] = {}
        self._opened_at_ms: int | None = None
        self._next: Restart | None = None
        self._ended = False
        self.restarts = 0
        try:
            self._notes = Notes(place.notes)
        except OSError as error:
            raise StoreError(
                f"The file {str(place.notes)!r} cannot be made: {error.strerror}. Nothing was started."
            ) from error
        self._control = ControlSocket(place.control, nudge)

    def close(self) -> None:
        """Hear nothing any more; whoever still waits is told so."""
        self._control.close()
        self._notes.close()
        for issuer in self._issuers.values():
            issuer.answer(refused(Refusal.STOPPING, _SAYS[Refusal.STOPPING]))

    def told(self) -> dict[str, Any] | None:
        """The open hand-off, as `status` shows it."""
        handoff = self._now.handoff
        if handoff is None:
            return None
        return {
            "commandId": handoff.command_id,
            "generation": handoff.generation,
            "openedAt": self._opened_at_ms,
        }

    def attend(self) -> int | None:
        """Take what came; the monotonic moment (ms) of the next look."""
        for announcement in self._control.take():
            self._open(announcement)
        if self._now.restart is not None:
            self._read_notes()
        self._step(TimePassed())
        moment = next_moment_ms(self._now)
        return min(moment or 2**63, _now_ms() + _LOOK_EVERY_MS) if self._now.restart else moment

    def after(self, wait_status: int, *, is_stopping: bool) -> list[str] | None:
        """The command has ended: the words of its next start, or None when that was all."""
        for announcement in self._control.take():
            self._open(announcement)
        self._read_notes()
        self._step(Exited(status_in_words(wait_status), succeeded=wait_status == 0, is_stopping=is_stopping))
        if self._ended or self._next is None:
            return None
        restart, self._next = self._next, None
        self.restarts += 1
        return relaunched(self._argv, restart.session_id)

    def could_not_start(self, why: str) -> None:
        """The next start failed."""
        self._step(CannotStart(why))

    # Shell of the decisions --------------------------------------------------------------------------------

    def _open(self, announcement: Announcement) -> None:
        number = next(self._numbers)
        ends_at_ms = _now_ms() + self._timeout_ms
        handoff = Handoff(number, announcement.command_id, announcement.generation, ends_at_ms)
        self._opened_at_ms = time.time_ns() // 1_000_000
        if announcement.waits:
            self._issuers[number] = announcement
        self._step(Announced(handoff))
        if not announcement.waits:
            announcement.answer({"state": "announced", **_named(handoff)})

    def _read_notes(self) -> None:
        for note in self._notes.read():
            if note.get("note") == COMPACTED:
                self._step(Compacted())
            elif note.get("note") == SESSION and names_session(note.get("sessionId")):
                self._step(SessionKnown(note["sessionId"]))

    def _step(self, event: Event) -> None:
        before = self._now.handoff
        self._now, acts = decide(self._now, event, _now_ms(), self._rules)
        for act in acts:
            self._do(act)
        if self._now.handoff != before:
            self._changed()

    def _do(self, act: Act) -> None:
        match act:
            case Refuse(handoff, refusal, detail):
                self._tell(handoff, _refusal(refusal, detail))
            case Launch(restart):
                self._publish(decision_payload(restart))
                self._next = restart
            case Recover(restart, session_id):
                self._tell(restart.handoff, _recovered(restart, session_id))
                self._drain()
            case GoOffline(handoff, refusal, detail):
                self._publish(offline_payload(handoff, refusal, detail))
                self._tell(handoff, _refusal(refusal, detail))
            case _:
                self._ended = True

    def _tell(self, handoff: Handoff, answer: Mapping[str, Any]) -> None:
        issuer = self._issuers.pop(handoff.number, None)
        if issuer is not None:
            issuer.answer({**answer, **_named(handoff)})


def decision_payload(restart: Restart) -> dict[str, Any]:
    """The timeline message about a restart, as a relay gets it (without `from`)."""
    words = f"with session {restart.session_id}" if restart.session_id else "fresh"
    return {
        "kind": "timeline",
        "body": f"The command ended during hand-off {restart.handoff.command_id} and starts again {words}.",
        "payload": {
            "event": "provider.restart_decision",
            "reason": restart.reason,
            "decision": str(restart.via),
            **_named(restart.handoff),
            "sessionId": restart.session_id,
        },
    }


def offline_payload(handoff: Handoff, refusal: Refusal, detail: str) -> dict[str, Any]:
    """The timeline message that nobody works here any more (without `from`)."""
    return {
        "kind": "timeline",
        "body": f"The command is not running any more, since hand-off {handoff.command_id}: {detail}.",
        "payload": {
            "event": "provider.offline",
            "reason": str(refusal),
            "detail": detail,
            **_named(handoff),
        },
    }


def _named(handoff: Handoff) -> dict[str, Any]:
    return {"commandId": handoff.command_id, "generation": handoff.generation}


def _recovered(restart: Restart, session_id: str | None) -> dict[str, Any]:
    return {"state": "recovered", "via": str(restart.via), "sessionId": session_id}


def _refusal(refusal: Refusal, detail: str) -> dict[str, Any]:
    return refused(str(refusal), f"{_SAYS[refusal]}{f' {detail[:1].upper()}{detail[1:]}.' if detail else ''}")


def _now_ms() -> int:
    return time.monotonic_ns() // 1_000_000
