"""What an answer with a token means: of a token endpoint, of the relay's re-mint, of a command. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import httpx

from relay_client.auth import TokenUnavailable, checked
from relay_client.clean import one_line
from relay_client.minting import Grant
from relay_client.problem import NOT_JSON, parse_json, read_problem
from relay_client.retry_after import parse_retry_after

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_LONGEST_WAIT_MS = 3_600_000
_SHORTEST_MASKED = 4
_PASSING = frozenset({"temporarily_unavailable", "server_error", "slow_down", "authorization_pending"})
_OF_AGENT = frozenset({400, 403, 409, 410, 422})


def read_rotated(response: httpx.Response) -> str | None:
    """A new refresh token, whatever else is in the answer: the old one may be of no use any more.

    None also for one that could not be read back from a file.
    """
    value = parse_json(response.content) if response.is_success else None
    rotated = value.get("refresh_token") if isinstance(value, dict) else None
    try:
        return checked(rotated, "the refresh token") if isinstance(rotated, str) else None
    except TokenUnavailable:
        return None


def read_oauth(response: httpx.Response, place: str, secrets: Collection[str], *, now_ms: int) -> Grant:
    """RFC 6749 5.1 and 5.2. `secrets` are masked in what is told.

    Raises:
        TokenUnavailable: it gave none. It `stops` for every error code of the RFC: asking again with the same
            words cannot help. 429, 5xx and what is no OAuth answer may pass.
    """
    value = parse_json(response.content)
    told = value if isinstance(value, dict) else {}
    if not response.is_success or "access_token" not in told:
        code = str(told.get("error") or "")
        stops = response.status_code in {400, 401, 403} and bool(code) and code not in _PASSING
        raise _unavailable(response, place, _oauth_words(told), secrets, now_ms, stops=stops)
    if str(told.get("token_type") or "bearer").lower() != "bearer":
        raise TokenUnavailable(f"{place} gives tokens that are no bearer tokens", stops=True)
    token = told["access_token"]
    return Grant(checked(token if isinstance(token, str) else "", place), _after(told, now_ms))


def read_runtime(response: httpx.Response, place: str, secrets: Collection[str], *, now_ms: int) -> Grant:
    """The relay's own re-mint: 201 `{"token", "expiresAt"}`.

    Raises:
        TokenUnavailable: it gave none; a refusal of what was asked for concerns the one agent.
    """
    value = parse_json(response.content)
    told = value if isinstance(value, dict) else {}
    if not response.is_success or "token" not in told:
        problem = read_problem(response.content, value, response.headers)
        words = f"{problem.code} {problem.message}".strip()
        of_agent = response.status_code in _OF_AGENT
        raise _unavailable(response, place, words, secrets, now_ms, of_agent=of_agent)
    token = told["token"]
    return Grant(checked(token if isinstance(token, str) else "", place), _at_ms(told))


def read_printed(output: bytes, source: str) -> Grant:
    """What a command printed: a token, or `{"token", "expiresAt"}` (epoch milliseconds).

    Raises:
        TokenUnavailable: it is neither.
    """
    text = output.removeprefix(_BYTE_ORDER_MARK).decode("latin-1")
    if not text.lstrip().startswith("{"):
        return Grant(checked(text, source))
    told = parse_json(output.removeprefix(_BYTE_ORDER_MARK))
    if told is NOT_JSON:
        raise TokenUnavailable(f"{source}: prints what is neither a token nor JSON")
    token, until = told.get("token"), told.get("expiresAt")
    if not isinstance(token, str):
        raise TokenUnavailable(f'{source}: prints JSON without a text "token"')
    if until is not None and _at_ms(told) is None:
        raise TokenUnavailable(f"{source}: its expiresAt is no whole number of epoch milliseconds")
    return Grant(checked(token, source), _at_ms(told))


def masked(text: str, secrets: Collection[str]) -> str:
    """`text` with each secret in it replaced: a server may repeat what it was sent."""
    for secret in sorted(secrets, key=len, reverse=True):
        if len(secret) >= _SHORTEST_MASKED:
            text = text.replace(secret, "[secret]")
    return text


def _unavailable(
    response: httpx.Response,
    place: str,
    words: str,
    secrets: Collection[str],
    now_ms: int,
    *,
    stops: bool = False,
    of_agent: bool = False,
) -> TokenUnavailable:
    said = one_line(masked(words, secrets)) or ("no token in it" if response.is_success else "")
    asked_ms = parse_retry_after(response.headers.get("retry-after", ""), now_ms, _LONGEST_WAIT_MS)
    return TokenUnavailable(
        f"{place} answers {response.status_code}" + (f": {said}" if said else ""),
        stops=stops,
        of_agent=of_agent,
        retry_after_ms=asked_ms,
    )


def _oauth_words(told: Mapping[str, Any]) -> str:
    words = [told.get("error"), told.get("error_description")]
    return ", ".join(word for word in words if isinstance(word, str) and word)


def _after(told: Mapping[str, Any], now_ms: int) -> int | None:
    """`expires_in` is in seconds; some servers give it as text."""
    lifetime = told.get("expires_in")
    if isinstance(lifetime, str) and lifetime.isascii() and lifetime.isdigit():
        lifetime = int(lifetime[:12])
    if isinstance(lifetime, bool) or not isinstance(lifetime, int | float) or not 0 < lifetime < 10**12:
        return None
    return now_ms + round(lifetime * 1000)


def _at_ms(told: Mapping[str, Any]) -> int | None:
    at_ms = told.get("expiresAt")
    return at_ms if isinstance(at_ms, int) and not isinstance(at_ms, bool) and 0 < at_ms < 2**53 else None
