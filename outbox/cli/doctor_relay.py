"""What the doctor asks the relay: health, and its own document; no event is sent, and none is counted."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Mapping
from typing import Any

from outbox.api.report import FOR_ALL, tokens_of
from outbox.cli.doctor_finding import Finding, failure, ok, warning
from outbox.cli.output import bytes_text, count
from outbox.daemon.compose import is_minted, relay_client, token_source
from outbox.errors import ConfigError
from outbox.setting_keys import Settings
from relay_client import Answer, RelayClient, TokenUnavailable, read_health, read_spec

_TIMEOUT_MS = 5_000
_SAFE = "Nothing is lost: events wait on disk, and go out by themselves when it is back."
_REFUSED = (401, 403)


def the_relay(settings: Settings, facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Reachable, token accepted, contract spoken. `facts` are what is known of it on disk.

    Without a setting the relay that a daemon delivers to is asked; its token is the daemon's own matter.
    """
    known = (facts.get("gate") or {}).get("url")
    configured = settings.relay.url is not None
    if not configured and not known:
        yield warning(
            "relay",
            "None is set: serve and flush would stop and say so.",
            "Set relay.url or OUTBOX_RELAY_URL.",
        )
        return
    settings = dataclasses.replace(
        settings, relay=dataclasses.replace(settings.relay, url=settings.relay.url or known)
    )
    try:
        client = relay_client(settings)
    except ConfigError as error:
        yield failure("relay", str(error))
        return
    try:
        yield from _asked(client, settings, facts, configured=configured)
    finally:
        client.close()


def _asked(
    client: RelayClient, settings: Settings, facts: Mapping[str, Any], *, configured: bool
) -> Iterator[Finding]:
    health = client.health(timeout_ms=_TIMEOUT_MS)
    yield _health(health, settings)
    if health.status is None:
        return
    if configured and is_minted(settings):
        token = None  # asking for one would take the daemon's place at whoever gives them out
        yield _as_known(facts)
    elif configured:
        token, finding = _token(settings)
        yield finding or _accepted(client, settings, token, facts)
    else:
        token = None
        yield _as_known(facts)
    yield _contract(client.spec(token=token, timeout_ms=_TIMEOUT_MS), settings, facts)


def _health(answer: Answer, settings: Settings) -> Finding:
    url, path = settings.relay.url, settings.relay_paths.health
    if read_health(answer):
        return ok("relay", f"{url} answers {path} ({answer.elapsed_ms} ms)")
    if answer.status is None:
        said = f"{url} does not answer: {answer.detail}. {_SAFE}"
        return failure("relay", said, "Check relay.url, the network, the proxy and the relay itself.")
    return warning(
        "relay",
        f"{url} answers {answer.status} to {path}: no sign that it works.",
        "Check relay.url and relay.paths.health; something else than a relay may answer there.",
    )


def _token(settings: Settings) -> tuple[str | None, Finding | None]:
    """The token, or what is wrong with it."""
    try:
        return token_source(settings).token(), None
    except TokenUnavailable as error:
        todo = "Put it in its place; that is noticed by itself."
        return None, failure(
            "token", f"There is none to send with: {error}. Events wait until there is.", todo
        )


def _accepted(
    client: RelayClient, settings: Settings, token: str | None, facts: Mapping[str, Any]
) -> Finding:
    """Whether the relay takes the token, as far as that can be told without sending an event.

    It is proven when the relay's document, or the list of its tools, is shown with the token and not without;
    a relay that shows them to everybody proves nothing, and what it said to the last event has to do.
    """
    source = token_source(settings).describe()
    if token is None:
        auth = tokens_of(facts, settings.relay.url).get(FOR_ALL, {})
        if auth.get("source") not in {None, "", source}:
            return _as_known(facts)  # that of a daemon or a flush, which was told by its own settings
        if auth.get("state") == "refused" or client.spec(timeout_ms=_TIMEOUT_MS).status in _REFUSED:
            said = "The relay asks for a token, and none is set. Events wait until there is one."
            return failure("token", said, "Set relay.token_file or OUTBOX_RELAY_TOKEN.")
        return ok("token", "none is set, and none was asked for so far")
    for ask in (client.spec, client.discover_tools):
        status = ask(token=token, timeout_ms=_TIMEOUT_MS).status
        if status == 401:
            said = f"The relay refuses the token ({source}). Events wait until there is another one."
            return failure("token", said, "Renew it; a changed file is noticed by itself.")
        if status is not None and status < 300 and ask(token=None, timeout_ms=_TIMEOUT_MS).status in _REFUSED:
            return ok("token", f"{source}, accepted")
    return _as_known(facts, source)


def _as_known(facts: Mapping[str, Any], source: str = "") -> Finding:
    """What the answer to the last event said of the token."""
    auth = facts.get("auth") or {}
    source = source or str(auth.get("source") or "the daemon's own")
    state = auth.get("state")
    if state == "refused":
        said = f"The relay refused the token ({source}) when an event was sent last. Events wait."
        return failure("token", said, "Renew it; a changed file is noticed by itself.")
    if state in {"failing", "stopped"}:
        said = f"No token can be had ({source}): {auth.get('detail') or 'no reason is known'}. Events wait."
        todo = "It is tried again by itself." if state == "failing" else "Mend it, then: outbox auth retry"
        return failure("token", said, todo)
    if state == "missing":
        return failure(
            "token", f"There was none to send with ({source}). Events wait.", "Put it in its place."
        )
    if state == "ok":
        return ok("token", f"{source}, accepted with the last event")
    return ok("token", f"{source}, not refused; whether it is accepted shows with the first event")


def _contract(answer: Answer, settings: Settings, facts: Mapping[str, Any]) -> Finding:
    """What the relay says of itself, and whether it takes batches."""
    said, path = read_spec(answer), settings.relay_paths.spec
    batch = facts.get(f"path:{settings.relay_paths.batch}") or {}
    if (batch.get("offUntil") or 0) > time.time() * 1_000:
        return warning(
            "contract",
            "The relay takes no batches: session messages go one by one, which is slower.",
            "If it should: check relay.paths.batch. It is asked again every hour, and after: outbox resume",
        )
    if said is None:
        return ok("contract", f"it has no {path}; batches of 100 messages and 1 MiB are tried, as usual")
    keys = (
        "honours keys of tool calls"
        if said.mcp_idempotency
        else "does not say that it honours keys of tool calls"
    )
    sizes = f"{count(said.batch_max_items, 'message')} and {bytes_text(said.batch_max_bytes)}"
    return ok("contract", f"{path}: batches of up to {sizes}; {keys}")
