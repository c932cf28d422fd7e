"""What an answer means for an event and the relay: the outcome table (docs/relay-contract.md), as a function.

Pure: the answer was read by relay_client.classify; evidence and budget are looked up by the pump.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from outbox.outcome import Reason
from relay_client import Reading, Sort


class Step(enum.Enum):
    """What becomes of the event."""

    ACK = enum.auto()
    RELEASE = enum.auto()
    BURY = enum.auto()
    SPLIT = enum.auto()  # a group: find the guilty one
    SINGLY = enum.auto()  # a group: the same messages go again one by one
    HALVE = enum.auto()  # a group: goes again at half its size


class Effect(enum.Enum):
    """What it says of the relay."""

    ACCEPTED = enum.auto()
    WORKS = enum.auto()
    CLOSE = enum.auto()
    HOLD_PATH = enum.auto()
    TOKEN = enum.auto()
    AGENT = enum.auto()  # nothing about the relay: only this agent waits


class Evidence(enum.Enum):
    """What would show that the relay works, so that the event is to blame."""

    NONE = enum.auto()
    ACCEPTANCE = enum.auto()  # it accepted another event since
    HEALTH = enum.auto()  # the same, or it answers health


@dataclass(frozen=True, slots=True)
class Verdict:
    """One row of the outcome table, applied."""

    step: Step
    effect: Effect
    reason: Reason | None = None
    counts: bool = False  # an attempt
    sent: bool = True
    hold: str = ""  # the reason that `why` shows


_EVIDENCE = {
    Sort.FAILED: Evidence.HEALTH,
    Sort.LOST: Evidence.HEALTH,
    Sort.NO_ENDPOINT: Evidence.HEALTH,
    Sort.BUSY: Evidence.ACCEPTANCE,
    Sort.GATEWAY: Evidence.ACCEPTANCE,
    Sort.NOT_A_RELAY: Evidence.ACCEPTANCE,
    Sort.REDIRECTED: Evidence.ACCEPTANCE,
    Sort.UNAUTHORIZED: Evidence.ACCEPTANCE,
}

_WAITS_THOUGH_UNSAFE = {Sort.UNAUTHORIZED, Sort.FORBIDDEN, Sort.UNREACHABLE, Sort.NO_ENDPOINT}


def evidence_wanted(reading: Reading) -> Evidence:
    """Which evidence decides about this answer."""
    return _EVIDENCE.get(reading.sort, Evidence.NONE)


def judge(reading: Reading, *, unsafe: bool, works: bool) -> Verdict:
    """The verdict on an event that was sent alone (or answered by its own item result).

    `works` says whether the wanted evidence is there. `unsafe` events whose outcome is unknown are buried:
    they are never repeated by themselves.
    """
    verdict = _judge_safe(reading, works=works)
    if unsafe and not reading.not_run and _outcome_unknown(reading):
        return Verdict(
            Step.BURY, verdict.effect, Reason.OUTCOME_UNKNOWN, counts=verdict.counts, hold=verdict.hold
        )
    return verdict


def _outcome_unknown(reading: Reading) -> bool:
    """Whether a call that must not be repeated may have had its effect, or not."""
    settled = {Sort.ACCEPTED, Sort.DUPLICATE, Sort.TOOL_ERROR, Sort.REFUSED, Sort.TOO_LARGE}
    if reading.sort in settled or reading.sort in _WAITS_THOUGH_UNSAFE:
        return reading.sort is Sort.NO_ENDPOINT and reading.status == 501
    return not (reading.sort is Sort.BUSY and reading.status in {429, 503})


def _judge_safe(reading: Reading, *, works: bool) -> Verdict:
    sort = reading.sort
    match sort:
        case Sort.ACCEPTED | Sort.DUPLICATE | Sort.TOOL_ERROR:
            return Verdict(Step.ACK, Effect.ACCEPTED)
        case Sort.REFUSED | Sort.TOO_LARGE | Sort.CONFLICT:
            return Verdict(Step.BURY, Effect.WORKS, Reason.REJECTED)
        case Sort.IN_PROGRESS:
            return Verdict(Step.RELEASE, Effect.WORKS, hold="in_progress")
        case Sort.UNAUTHORIZED:
            effect = Effect.AGENT if works else Effect.TOKEN
            return Verdict(Step.RELEASE, effect, hold="unauthorized")
        case Sort.FORBIDDEN:
            return Verdict(Step.RELEASE, Effect.WORKS, hold="forbidden")
        case Sort.NO_ENDPOINT:
            return Verdict(
                Step.RELEASE, Effect.HOLD_PATH, Reason.NO_ENDPOINT, counts=works, hold="no_endpoint"
            )
        case Sort.NOT_A_RELAY | Sort.REDIRECTED:
            return Verdict(Step.RELEASE, Effect.HOLD_PATH if works else Effect.CLOSE, hold=str(sort))
        case Sort.UNREACHABLE:
            return Verdict(Step.RELEASE, Effect.CLOSE, sent=False, hold="unreachable")
        case Sort.FAILED | Sort.LOST:
            return Verdict(
                Step.RELEASE,
                Effect.AGENT if works else Effect.CLOSE,
                Reason.EXHAUSTED,
                counts=works,
                hold=str(sort),
            )
        case _:
            return Verdict(Step.RELEASE, Effect.AGENT if works else Effect.CLOSE, hold=str(sort))


def judge_group(reading: Reading, *, works: bool) -> Verdict:
    """The verdict on a group of several messages that got one answer for all of them."""
    match reading.sort:
        case Sort.REFUSED | Sort.TOO_LARGE | Sort.CONFLICT:
            return Verdict(Step.SPLIT, Effect.WORKS)
        case Sort.UNCLEAR_BATCH:
            return Verdict(Step.SINGLY, Effect.WORKS)
        case Sort.FAILED | Sort.LOST if works:
            return Verdict(Step.HALVE, Effect.AGENT)
        case _:
            verdict = _judge_safe(reading, works=works)
            return Verdict(verdict.step, verdict.effect, sent=verdict.sent, hold=verdict.hold)
