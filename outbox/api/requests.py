"""What a request of the local HTTP asks: the parts of its path, its parameters, its body; all checked."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from urllib.parse import unquote_to_bytes

from starlette.requests import ClientDisconnect, Request

from outbox.errors import UsageError
from outbox.event import check_agent
from outbox.outcome import Reason
from outbox.store.dead import Choice

JSON_TYPES = ("", "application/json")
SILENCE_S = 30.0  # of a client in the middle of its request

_MOST_ACT_BYTES = 1024 * 1024
_MOST_FLUSH_S = 3_600.0
_MOST_INTEGER = 2**63 - 1
_is_whole = re.compile(r"[0-9]{1,18}").fullmatch
_UNCHANGED = "Nothing was changed"


def media_type(request: Request) -> str:
    """The type of the body, without its parameters; "" when none is named."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def require_json(request: Request) -> None:
    """Refuse what a form of a web page can send, and whatever else is no JSON; raises UsageError."""
    if media_type(request) not in JSON_TYPES:
        raise UsageError(
            f"A body of the type {media_type(request)!r} is not read here. {_UNCHANGED}. Send JSON with the "
            "header Content-Type: application/json.",
            code="media_type",
        )


def segment(request: Request, name: str) -> str:
    """A part of the path, decoded once; raises UsageError for what is not UTF-8."""
    return _decoded(request.path_params[name], name)


def agent_in(request: Request) -> str:
    """The agent that the path names; raises UsageError."""
    return _checked(segment(request, "agent"))


def agent_of(part: bytes) -> str:
    """The agent that this part of a path names; raises UsageError."""
    return _checked(_decoded(part, "agent"))


def _decoded(part: str | bytes, name: str) -> str:
    try:
        return unquote_to_bytes(part).decode("utf-8")
    except UnicodeDecodeError:
        raise UsageError(f"The {name} in the path is not UTF-8. {_UNCHANGED}.") from None


def _checked(agent: str) -> str:
    try:
        return check_agent(agent)
    except UsageError as error:
        raise UsageError(f"{error}. {_UNCHANGED}. A name is 1 to 512 bytes of UTF-8.") from None


async def whole_body(request: Request, most_bytes: Callable[[bytes], int]) -> bytes:
    """The body; `most_bytes` says how large one that begins so may be.

    Raises UsageError when it is larger (what is too much is not kept), or the client falls silent or goes.
    """
    parts: list[bytes] = []
    size, most = 0, most_bytes(b"")
    chunks = request.stream().__aiter__()
    while True:
        try:
            chunk = await asyncio.wait_for(anext(chunks), SILENCE_S)
        except StopAsyncIteration:
            return b"".join(parts)
        except TimeoutError:
            raise UsageError(
                f"The request stopped in its middle for {SILENCE_S:.0f} s. {_UNCHANGED}; send it again.",
                code="too_slow",
            ) from None
        except ClientDisconnect:  # it may have been half closed, and hear of it
            raise UsageError(f"The request ended in its middle. {_UNCHANGED}; send it again.") from None
        size += len(chunk)
        parts.append(chunk)
        if size > most and size > (most := most_bytes(b"".join(parts[:2]))):
            parts.clear()
            raise UsageError(
                f"The request is larger than {most:,} bytes. {_UNCHANGED}; send parts.", code="too_large"
            )


async def asked(request: Request, fields: Iterable[str]) -> dict[str, Any]:
    """The JSON object that an act is asked with, with no other members than `fields`; raises UsageError."""
    require_json(request)
    body = await whole_body(request, lambda _: _MOST_ACT_BYTES)
    try:
        value = json.loads(body.decode("utf-8") or "{}", parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"The request is not JSON: {error}. {_UNCHANGED}.", code="not_json") from None
    if not isinstance(value, dict):
        raise UsageError(f"The request is no JSON object. {_UNCHANGED}.")
    _only(value, fields, "The request")
    return value


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def parameters(request: Request, names: Iterable[str]) -> dict[str, str]:
    """The parameters behind the question mark, each of them known and given once; raises UsageError."""
    given = request.query_params.multi_items()
    values = dict(given)
    _only(values, names, "The address")
    if len(values) != len(given):
        raise UsageError(f"A parameter of the address is given twice. {_UNCHANGED}.")
    return values


def _only(given: Mapping[str, Any], names: Iterable[str], what: str) -> None:
    known = list(names)
    for name in given:
        if name not in known:
            has = f"known are {', '.join(known)}" if known else "nothing is asked with it"
            raise UsageError(f"{what} has {name[:40]!r}, which is not known. {_UNCHANGED}; {has}.")


def agent_or_all(given: Mapping[str, Any]) -> str | None:
    """The agent that is meant, or None for all; raises UsageError."""
    agent = given.get("agent")
    if agent is None:
        return None
    if not isinstance(agent, str):
        raise UsageError(f"agent is a text, or null for all. {_UNCHANGED}.")
    return _checked(agent)


def timeout_s(given: Mapping[str, Any]) -> float:
    """How long a flush may take; raises UsageError."""
    value = given.get("timeoutS", 10)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= _MOST_FLUSH_S:
        raise UsageError(f"timeoutS is a number of seconds from 0 to {_MOST_FLUSH_S:.0f}. {_UNCHANGED}.")
    return float(value)


def whole_number(given: Mapping[str, str], name: str, usual: int, most: int) -> int:
    """A whole number from 0 to `most` of the address; raises UsageError."""
    text = given.get(name)
    if text is None:
        return usual
    if not _is_whole(text) or int(text) > most:
        raise UsageError(f"{name} is a whole number from 0 to {most:,}. {_UNCHANGED}.")
    return int(text)


def one_of(given: Mapping[str, str], name: str, known: Mapping[str, Any]) -> str | None:
    """A parameter that has one of the known values; raises UsageError."""
    text = given.get(name)
    if text is not None and text not in known:
        raise UsageError(f"{name} is one of {', '.join(known)}. {_UNCHANGED}.")
    return text


def choice_in(given: Mapping[str, Any], *, required: bool) -> Choice:
    """Which dead letters are meant; with `required` something has to be chosen, if only `all`.

    Raises UsageError.
    """
    choice = Choice(
        _list_of(given, "seqs", _is_seq, "whole numbers"),
        _list_of(given, "reasons", lambda one: one in set(Reason), "reasons of dead letters"),
        _list_of(given, "kinds", lambda one: isinstance(one, str), "texts"),
        _moment(given, "failedBefore"),
        _moment(given, "failedAfter"),
    )
    everything = given.get("all", False)
    if not isinstance(everything, bool):
        raise UsageError(f"all is true or false. {_UNCHANGED}.")
    if choice.seqs and given.get("agent") is None:
        raise UsageError(f"Whose? {_UNCHANGED}. Numbers are an agent's own: name it in agent.")
    if required and choice == Choice() and given.get("agent") is None and not everything:
        raise UsageError(
            f"Which dead letters? {_UNCHANGED}. Name agent, seqs, reasons, kinds, failedBefore or "
            "failedAfter, or say all."
        )
    return choice


def _list_of(
    given: Mapping[str, Any], name: str, fits: Callable[[Any], bool], what: str
) -> tuple[Any, ...] | None:
    values = given.get(name)
    if values is None:
        return None
    if not isinstance(values, list) or not values or not all(map(fits, values)):
        raise UsageError(f"{name} is a list of {what}, not empty. {_UNCHANGED}.")
    return tuple(int(value) if isinstance(value, float) else value for value in values)


def _is_seq(value: Any) -> bool:
    """A whole number; 7.0 is one too (JSON Schema 2020-12, core 4.2.3)."""
    if isinstance(value, float):
        return value.is_integer() and 0 <= value <= _MOST_INTEGER
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST_INTEGER


def _moment(given: Mapping[str, Any], name: str) -> int | None:
    value = given.get(name)
    if value is not None and not _is_seq(value):
        raise UsageError(f"{name} is a moment in epoch milliseconds. {_UNCHANGED}.")
    return None if value is None else int(value)
