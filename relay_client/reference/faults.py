"""Faults on request: rules that make the relay misbehave, one request at a time.

Pure: rules are read from JSON, asked for in order, and forgotten with the process. Acting on one is the app's
part.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from relay_client.reference import json_text
from relay_client.reference.incoming import Incoming, Invalid
from relay_client.reference.replies import JSON, PROBLEM_JSON, Reply, json_bytes, problem

_REQUEST_FIELDS = ("method", "path", "agent", "token")
_TEXT_FIELDS = ("bodyContains", "kind")
_ACTION_FIELDS = frozenset(
    {
        "status",
        "headers",
        "body",
        "delayS",
        "close",
        "hang",
        "perItem",
        "wrongCount",
        "storeThenClose",
        "revoke",
    }
)


@dataclass(frozen=True, slots=True)
class Match:
    """What a request, or one item of it, must look like; what is None does not matter."""

    method: str | None = None
    path: str | None = None
    agent: str | None = None
    token: str | None = None
    body_contains: str | None = None
    kind: str | None = None

    def request(self, incoming: Incoming) -> bool:
        """Tell whether a request fits."""
        seen = (incoming.method, incoming.path, incoming.agent, incoming.token)
        wanted = (self.method, self.path, self.agent, self.token)
        fits = all(want is None or want == have for want, have in zip(wanted, seen, strict=True))
        return fits and self.body(incoming.body, incoming.value)

    def body(self, body: bytes, value: Any) -> bool:
        """Tell whether a body, or the text of one item of it, fits."""
        if self.body_contains is not None and self.body_contains.encode() not in body:
            return False
        return self.kind is None or self.kind in _kinds(value)


@dataclass(frozen=True, slots=True)
class PerItem:
    """Items of a request that are answered otherwise, and not stored."""

    match: Match
    status: int
    members: Mapping[str, Any]

    def result(self, item: json_text.Parsed) -> dict[str, Any] | None:
        """Return the result for an item that fits, None for another."""
        fits = self.match.body(item.text.encode(), item.value)
        return {"status": self.status, **self.members} if fits else None


@dataclass(frozen=True, slots=True)
class Fault:
    """What to do with one request. The default is nothing out of the ordinary."""

    name: str = ""
    reply: Reply | None = None
    delay_s: float = 0.0
    hang_s: float = 0.0
    close: bool = False
    per_item: PerItem | None = None
    wrong_count: bool = False
    store_then_close: bool = False
    revoke: str | None = None


NO_FAULT = Fault()


@dataclass(slots=True)
class _Rule:
    match: Match
    fault: Fault
    source: Mapping[str, Any]
    times: int | None
    used: int = 0

    def fits(self, incoming: Incoming) -> bool:
        if self.times is not None and self.used >= self.times:
            return False
        item = self.fault.per_item.match if self.fault.per_item else None
        return self.match.request(incoming) and (item is None or item.body(incoming.body, incoming.value))


@dataclass(slots=True)
class Faults:
    """The rules, in the order they were given; the first that fits and is not used up counts."""

    _rules: list[_Rule] = field(default_factory=list)

    def add(self, value: Any) -> int:
        """Add one rule or a list of them; return how many there are now.

        Raises:
            Invalid: one of them is no rule; then none is added.
        """
        self._rules += [_read_rule(rule) for rule in (value if isinstance(value, list) else [value])]
        return len(self._rules)

    def clear(self) -> None:
        """Forget all rules."""
        self._rules.clear()

    def take(self, incoming: Incoming) -> Fault:
        """Return what to do with this request, and count the use of the rule that says so."""
        for rule in self._rules:
            if rule.fits(incoming):
                rule.used += 1
                return rule.fault
        return NO_FAULT

    def listing(self) -> list[dict[str, Any]]:
        """Return the rules as they were given, each with how often it was used."""
        return [{**rule.source, "used": rule.used} for rule in self._rules]


def _kinds(value: Any) -> set[str]:
    """Return the `kind` of a message, or of each in a batch."""
    messages = value.get("messages") if isinstance(value, dict) else None
    several = messages if isinstance(messages, list) else [value]
    kinds = [message.get("kind") for message in several if isinstance(message, dict)]
    return {kind for kind in kinds if isinstance(kind, str)}


def _read_rule(value: Any) -> _Rule:
    rule = _object(value, "rule", {"match", "times", "action"})
    times = rule.get("times")
    if times is not None and (not isinstance(times, int) or isinstance(times, bool) or times < 1):
        raise Invalid("times: must be a whole number from 1")
    match = _read_match(rule.get("match", {}), (*_REQUEST_FIELDS, *_TEXT_FIELDS))
    return _Rule(match, _read_action(rule.get("action")), rule, times)


def _read_match(value: Any, known: tuple[str, ...]) -> Match:
    match = _object(value, "match", set(known))
    for name, wanted in match.items():
        if not isinstance(wanted, str):
            raise Invalid(f"match.{name}: must be a string")
    names = {"bodyContains": "body_contains"}
    return Match(**{names.get(name, name): wanted for name, wanted in match.items()})


def _read_action(value: Any) -> Fault:
    action = _object(value, "action", set(_ACTION_FIELDS))
    if not action:
        raise Invalid("action: says nothing to do")
    per_item = action.get("perItem")
    revoke = action.get("revoke")
    if revoke is not None and not isinstance(revoke, str):
        raise Invalid("action.revoke: must be a token")
    return Fault(
        name=",".join(name for name in action if name not in ("headers", "body")),
        reply=_read_reply(action) if "status" in action else None,
        delay_s=_seconds(action, "delayS"),
        hang_s=_seconds(action, "hang"),
        close=action.get("close") is True,
        per_item=None if per_item is None else _read_per_item(per_item),
        wrong_count=action.get("wrongCount") is True,
        store_then_close=action.get("storeThenClose") is True,
        revoke=revoke,
    )


def _read_reply(action: Mapping[str, Any]) -> Reply:
    status = _status(action)
    given = action.get("headers", [])
    pairs = given.items() if isinstance(given, dict) else given
    headers = tuple((str(name), str(value)) for name, value in pairs)
    own_type = any(name.lower() == "content-type" for name, _ in headers)
    body = action.get("body")
    if body is None:
        empty = status < 400
        return (
            Reply(status, headers=headers)
            if empty
            else problem(status, "fault", "As asked.", headers=headers)
        )
    if isinstance(body, str):
        return Reply(status, body.encode(), None if own_type else "text/plain; charset=utf-8", headers)
    usual = JSON if status < 400 else PROBLEM_JSON
    return Reply(status, json_bytes(body), None if own_type else usual, headers)


def _read_per_item(value: Any) -> PerItem:
    per_item = _object(value, "perItem", {"status", "body", "match"})
    status = _status(per_item)
    default = {} if status < 400 else {"error": {"code": "fault", "message": "As asked."}}
    members = _object(per_item.get("body", default), "perItem.body", None)
    return PerItem(_read_match(per_item.get("match", {}), _TEXT_FIELDS), status, members)


def _object(value: Any, name: str, known: set[str] | None) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Invalid(f"{name}: must be an object")
    unknown = sorted(set(value) - known) if known is not None else []
    if unknown:
        raise Invalid(f"{name}: {', '.join(unknown)} not known")
    return value


def _status(action: Mapping[str, Any]) -> int:
    status = action.get("status")
    if not isinstance(status, int) or not 200 <= status <= 599:
        raise Invalid("status: must be a number from 200 to 599")
    return status


def _seconds(action: Mapping[str, Any], name: str) -> float:
    value = action.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 3600:
        raise Invalid(f"action.{name}: must be seconds from 0 to 3600")
    return float(value)
