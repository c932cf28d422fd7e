"""Evidence about one head: has the relay accepted another event since, or does it answer health?"""

from __future__ import annotations

from outbox.delivery.shared import Delivery
from outbox.delivery.verdict import Evidence, evidence_wanted
from outbox.outcome import Reason
from relay_client import Reading, Sort


class Witness:
    """Remembers what the relay had accepted when the head was sent last."""

    def __init__(self, delivery: Delivery) -> None:
        """Nothing was sent yet."""
        self._d = delivery
        self.agent = ""
        self._accepts: int | None = None
        self._elsewhere: int | None = None

    def forget(self) -> None:
        """Another event is the head, or another part of it goes next."""
        self._accepts = self._elsewhere = None

    def note_sending(self, path: str) -> None:
        """The head goes out for the first time: only what is accepted from now on is evidence."""
        if self._accepts is None:
            self.note(path)

    def note(self, path: str) -> None:
        """What was accepted by now is no evidence at the next attempt."""
        self._accepts = self._d.gate.accept_count(self._d.tokens.evidence(self.agent))
        self._elsewhere = self._d.gate.other_path_count(path)

    def proves(self, reading: Reading, path: str) -> bool:
        """Whether the relay provably works, so that this answer is the event's own fault.

        Health counts only while the blame budget of the path allows a verdict.
        """
        wanted = evidence_wanted(reading)
        if wanted is Evidence.NONE:
            return False
        before, before_elsewhere = self._accepts or 0, self._elsewhere or 0
        self.note(path)
        if reading.sort is Sort.NO_ENDPOINT:
            proven = (self._elsewhere or 0) > before_elsewhere
        else:
            proven = (self._accepts or 0) > before
        if proven or wanted is Evidence.ACCEPTANCE:
            return proven
        return not self._d.gate.verdict_wait_ms(path, Reason.EXHAUSTED) and self._d.healthy()
