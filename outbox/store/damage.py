"""What is told of a file that was set aside: a report beside the evidence, and its one log line."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outbox.store.directory import StateDirectory

_UNTOLD = ".untold"
_REPORT = ".json"


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged file: where it is now, and what became of its events.

    `lost` are events that were to be sent and are gone; where `counted` is false there may be more.
    """

    agent: str
    file: str
    moved_to: str  # from the state directory
    fault: str
    at_ms: int
    queued: int = 0
    lost: int = 0
    dead: int = 0
    dead_lost: int = 0
    outcome_unknown: int = 0
    damaged_rows: int = 0
    counted: bool = False
    gap_seq: int | None = None  # where the relay is told of the lost, and of those `told_again`
    told_again: tuple[str, ...] = ()  # `moved_to` of earlier damages, whose gap was lost itself

    def moved_at(self) -> tuple[int, int, str]:
        """What orders the damages of one file, also those of one second."""
        return self.at_ms, len(self.moved_to), self.moved_to

    def sentence(self) -> str:
        """What happened, and what it means for the events."""
        said = [
            f'The file of agent "{self.agent}" is damaged ({self.fault}).',
            f"It was moved to {self.moved_to}; {self._queued()}.",
        ]
        if self.outcome_unknown or self.damaged_rows:
            said.append(
                f"{self.outcome_unknown + self.damaged_rows:,} more became dead letters: outbox dead list."
            )
        if self.dead_lost:
            said.append(f"{self.dead_lost:,} dead letters of {self.dead + self.dead_lost:,} are lost.")
        if self.lost:
            said.append("The relay is told of the lost ones.")
        said.append("The other agents are not affected.")
        return " ".join(said)

    def _queued(self) -> str:
        all_of_them = self.queued + self.lost + self.outcome_unknown + self.damaged_rows
        if not self.counted:
            lost = f", at least {self.lost:,} are lost" if self.lost else ""
            return (
                f"{self.queued:,} events were readable and are queued again{lost}; how many it held is not "
                "known"
            )
        if not all_of_them:
            return "nothing waited in it"
        return f"{self.queued:,} of {all_of_them:,} events were readable and are queued again"

    def encode(self) -> str:
        """The report as JSON text."""
        return json.dumps({**dataclasses.asdict(self), "detail": self.sentence()}, ensure_ascii=True)


_TYPES = {
    **dict.fromkeys(("agent", "file", "moved_to", "fault"), str),
    **dict.fromkeys(("at_ms", "queued", "lost", "dead", "dead_lost", "outcome_unknown", "damaged_rows"), int),
    "counted": bool,
}


def decode(text: str) -> Damage:
    """The opposite of `Damage.encode`; raises ValueError."""
    try:
        raw = json.loads(text)
        fields = {field.name: raw[field.name] for field in dataclasses.fields(Damage)}
        damage = Damage(**{**fields, "told_again": tuple(fields["told_again"])})
    except (TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"no report of a damaged file: {error}") from error
    if [type(fields[name]) for name in _TYPES] != list(_TYPES.values()):
        raise ValueError("no report of a damaged file: a field has another type")
    return damage


def untold_name(evidence: str) -> str:
    """The name of a report that nobody has read yet."""
    return f"{evidence}{_REPORT}{_UNTOLD}"


def tell_damages(state: StateDirectory, log: Callable[[str, dict[str, Any]], None]) -> int:
    """Log each file that was set aside, by whomever, once for all; returns how many there were to tell of."""
    told = 0
    for path in _named(state, _UNTOLD):
        with contextlib.suppress(OSError, ValueError):
            damage = decode(path.read_text("utf-8"))
            path.rename(path.with_name(path.name.removesuffix(_UNTOLD)))  # whoever succeeds in this logs it
            log("damaged_file", _fields(damage))
            told += 1
    return told


def _fields(damage: Damage) -> dict[str, Any]:
    return {
        "level": "error",
        "agent": damage.agent,
        "file": damage.file,
        "moved_to": damage.moved_to,
        "salvaged": damage.queued,
        "lost": damage.lost,
        "counted": damage.counted,
        "detail": damage.sentence(),
    }


def damages(state: StateDirectory) -> Iterator[Damage]:
    """What is known of the files that were set aside, oldest first."""
    for ending in (_REPORT, _UNTOLD):
        for path in _named(state, ending):
            with contextlib.suppress(OSError, ValueError):
                yield decode(path.read_text("utf-8"))


def untold_gaps(state: StateDirectory, file: str) -> dict[str, tuple[int, int]]:
    """The gaps of earlier damages of this file by `moved_to`: seq, and how many events each tells of.

    One that was lost and told again stands for both; whether one has reached the relay is not known here.
    """
    found: dict[str, tuple[int, int]] = {}
    for damage in sorted(damages(state), key=lambda damage: damage.moved_at()):
        if damage.file == file and damage.gap_seq is not None:
            again = sum(found.pop(name, (0, 0))[1] for name in damage.told_again)
            found[damage.moved_to] = (damage.gap_seq, damage.lost + again)
    return found


def damaged_files(state: StateDirectory) -> list[Path]:
    """The damaged database files that are kept, without their side files and reports."""
    return [path for path in _named(state, "") if ".sqlite" in path.suffixes and path.suffix == ".sqlite"]


def _named(state: StateDirectory, ending: str) -> list[Path]:
    try:
        return sorted(path for path in state.damaged.iterdir() if path.name.endswith(ending))
    except OSError:
        return []
