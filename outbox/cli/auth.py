"""`outbox auth`: how the tokens stand, and another try where asking for one was given up."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from outbox.api.client import LocalClient
from outbox.api.report import FOR_ALL, tokens_of
from outbox.cli.output import age, clean, emit_json, local_time, say, table, terminal_width
from outbox.cli.where import now_ms, settings_to_look, state_of
from outbox.errors import ConfigError, Unavailable
from outbox.setting_keys import Settings
from outbox.store.directory import StateDirectory
from outbox.store.place import RunningDaemon, running_daemon
from outbox.store.relay_state import RelayState, read_facts

EXAMPLE = """\
outbox auth status
outbox auth retry"""

_ABOUT = {
    "status": "where tokens come from, how they stand, until when they are good; no token is shown",
    "retry": "ask for a token at once, also where that was given up",
}
_STATES = {
    "": "not tried yet",
    "recovering": "being renewed",
}
_HEADERS = ("agent", "state", "good until", "got", "next try", "detail")
_FIELDS = ("state", "detail", "since", "failures", "expiresAt", "recoveredAt", "nextTryAt")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-commands."""
    commands = parser.add_subparsers(dest="auth_command", required=True, metavar="|".join(_ABOUT))
    for name, about in _ABOUT.items():
        example = f"example: outbox auth {name}"
        commands.add_parser(name, help=about, description=about, epilog=example, allow_abbrev=False)


def run(args: argparse.Namespace) -> int:
    """Tell, or try again."""
    settings = settings_to_look(args)
    return _status(args, settings) if args.auth_command == "status" else _retry(args, state_of(settings))


# Telling ---------------------------------------------------------------------------------------------------


def _status(args: argparse.Namespace, settings: Settings) -> int:
    state = state_of(settings)
    daemon = running_daemon(state)
    facts = tokens_of(read_facts(state.relay_state), settings.relay.url if daemon is None else None)
    shared = facts.pop(FOR_ALL, {})
    source = str(shared.get("source") or _configured(settings, state))
    agents = [{"agent": name.partition(":")[2], **_fields(fact)} for name, fact in sorted(facts.items())]
    if args.json:
        emit_json({"source": source, **_fields(shared), "agents": agents})
        return 0
    say(*(clean(line) for line in token_lines({**shared, "source": source}, now_ms())))
    rows = [_row(agent, now_ms()) for agent in agents]
    if rows:
        say(*table(rows, _HEADERS, width=terminal_width(sys.stdout)))
    return 0


def token_lines(auth: Mapping[str, Any], now: int) -> Iterator[str]:
    """One line about the token, and what to do about it where something is."""
    state = str(auth.get("state") or "")
    said = [f"token   {auth.get('source') or 'unknown'}, {_STATES.get(state, state)}"]
    until, next_at = auth.get("expiresAt"), auth.get("nextTryAt")
    if state == "ok" and until:
        said.append(f"good until {local_time(until, now)}")
    if state in {"failing", "stopped"} and auth.get("since"):
        said.append(f"since {local_time(auth['since'], now)}")
    if next_at:
        said.append(_in(next_at, now))
    detail = f": {auth['detail']}" if auth.get("detail") else ""
    yield ", ".join(said) + detail
    if state == "stopped":
        yield "        nobody asks for a token until it is mended: outbox auth retry"


def _in(at_ms: int, now: int) -> str:
    return f"next try in {age(at_ms - now)}" if at_ms - now >= 1_000 else "next try now"


def _row(agent: Mapping[str, Any], now: int) -> tuple[str, ...]:
    moments = (agent["expiresAt"], agent["recoveredAt"])
    until, got = (local_time(at_ms, now) if at_ms else "" for at_ms in moments)
    coming = _in(agent["nextTryAt"], now).removeprefix("next try ") if agent["nextTryAt"] else ""
    state = str(agent["state"] or "")
    return (
        clean(agent["agent"]),
        _STATES.get(state, state),
        until,
        got,
        coming,
        clean(agent["detail"] or ""),
    )


def _fields(fact: Mapping[str, Any]) -> dict[str, Any]:
    return {name: fact.get(name) or None for name in _FIELDS}


def _configured(settings: Settings, state: StateDirectory) -> str:
    """Where the tokens would come from, in words without them."""
    from outbox.daemon.compose import token_origin  # noqa: PLC0415 - only where nothing is known yet

    try:
        return token_origin(settings, state)
    except ConfigError as error:
        return str(error)


# Trying again ----------------------------------------------------------------------------------------------


def _retry(args: argparse.Namespace, state: StateDirectory) -> int:
    daemon = running_daemon(state)
    if daemon is not None:
        _ask(daemon)
    else:
        _clear(state)
    if args.json:
        emit_json({"retried": True, "daemon": daemon is not None})
    elif daemon is not None:
        say("Tokens are asked for again, at once. See: outbox auth status")
    else:
        say("What was given up is forgotten: the next outbox serve, or outbox flush, asks for a token.")
    return 0


def _ask(daemon: RunningDaemon) -> None:
    status, answer = LocalClient(daemon.socket).post("/v1/auth/retry", {})
    if status != 200:
        raise Unavailable(f"The daemon did not try again: {answer}. Events wait on disk. Restart it to try.")


def _clear(state: StateDirectory) -> None:
    if not state.relay_state.exists():
        return
    relay_state = RelayState(state.relay_state)
    try:
        relay_state.write(cleared(relay_state.read()))
    finally:
        relay_state.close()


def cleared(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of tokens that change when a person says try again. Pure."""
    afresh = {"state": "", "detail": "", "failures": 0, "nextTryAt": None}
    return {
        name: fact | afresh
        for name, fact in tokens_of(facts).items()
        if fact.get("state") in {"failing", "stopped", "recovering"}
    }
