"""From settings to the parts that deliver: client, token source, gate, engine. Here alone they meet."""

from __future__ import annotations

import random
import resource
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Literal, cast

from outbox.delivery.clock import Clock
from outbox.delivery.engine import Engine
from outbox.delivery.gate import Gate
from outbox.delivery.grouping import Size
from outbox.delivery.minted import MintedTokens
from outbox.delivery.parcel import Routes
from outbox.delivery.rate import Rate
from outbox.delivery.shared import Delivery, Log, silent
from outbox.delivery.token_state import FOR_ALL
from outbox.delivery.tokens import AgentToken, HostToken, Tokens
from outbox.errors import ConfigError
from outbox.policy import Schedule
from outbox.setting_keys import Settings
from outbox.store.directory import StateDirectory
from outbox.store.open_files import OpenFiles
from outbox.store.relay_state import RelayState
from outbox.store.token_cache import TokenCache
from relay_client import (
    Minter,
    NoToken,
    OAuthClient,
    OAuthTokens,
    RefreshTokenFile,
    RelayClient,
    RuntimeTokens,
    StaticToken,
    TokenCommand,
    TokenEndpoint,
    TokenFile,
    TokenSource,
    secret_from,
)

_DESCRIPTORS_A_FILE = 3  # the database, its log, and the log's index
_OTHER_DESCRIPTORS = 64  # the relay's state, locks, local clients, what a flush opens one by one


class ToldTokens:
    """A token source that tells of each token it hands out, so that it can be masked in logs."""

    def __init__(self, source: TokenSource, tell: Callable[[str | None], None]) -> None:
        """Wrap `source`."""
        self._source = source
        self._tell = tell
        self.refresh, self.describe, self.fingerprint = source.refresh, source.describe, source.fingerprint

    def token(self) -> str | None:
        """The token to send now; raises TokenUnavailable."""
        token = self._source.token()
        self._tell(token)
        return token


def token_source(settings: Settings, on_token: Callable[[str | None], None] | None = None) -> TokenSource:
    """Where a token is read: a value, a file, or nowhere. Those that are asked for are `minter`'s."""
    relay = settings.relay
    source: TokenSource = NoToken()
    if relay.token is not None:
        source = StaticToken(relay.token)
    elif relay.token_file is not None:
        source = TokenFile(Path(relay.token_file))
    return source if on_token is None else ToldTokens(source, on_token)


def is_minted(settings: Settings) -> bool:
    """Whether tokens are asked for, and not only read."""
    relay = settings.relay
    asked = relay.token_command or settings.relay_oauth.token_url or settings.relay_runtime_token.path
    return bool(asked)


def minter(
    settings: Settings,
    state: StateDirectory,
    instance_id: str,
    tell: Callable[[str | None], None] = lambda _secret: None,
) -> Minter | None:
    """Whoever gives out tokens, as configured; None where they are only read. Raises ConfigError."""
    relay, oauth = settings.relay, settings.relay_oauth
    if words := relay.token_command:
        return TokenCommand(words, timeout_s=relay.token_command_timeout_s)
    if oauth.token_url and oauth.client_id:
        return OAuthTokens(
            _endpoint(settings, oauth.token_url),
            OAuthClient(
                oauth.client_id,
                secret_from(oauth.client_secret, oauth.client_secret_file),
                oauth.scope,
                oauth.resource,
                cast("Literal['basic', 'post']", oauth.auth),
            ),
            _refresh_token(oauth.refresh_token_file, state),
            tell=tell,
        )
    if path := settings.relay_runtime_token.path:
        endpoint = _endpoint(settings, f"{settings.require_relay_url()}{path}")
        return RuntimeTokens(endpoint, token_source(settings), instance_id, tell=tell)
    return None


def token_origin(settings: Settings, state: StateDirectory) -> str:
    """Where tokens come from, in words without them; nothing is asked. Raises ConfigError."""
    asked = minter(settings, state, "")
    if asked is None:
        return token_source(settings).describe()
    asked.close()
    return asked.describe()


def _refresh_token(path: str | None, state: StateDirectory) -> RefreshTokenFile | None:
    return None if path is None else RefreshTokenFile(path, state.tokens / "refresh.json")


def _endpoint(settings: Settings, url: str) -> TokenEndpoint:
    relay = settings.relay
    try:
        return TokenEndpoint(
            url,
            timeout_ms=round(relay.request_timeout_s * 1_000),
            connect_timeout_ms=round(relay.connect_timeout_s * 1_000),
            ca_file=relay.ca_file,
            client_cert=relay.client_cert,
            client_key=relay.client_key,
            trust_env=relay.trust_env,
        )
    except ValueError as error:
        raise ConfigError(f"{error}. Nothing was started; what waits stays on disk.") from error


def instance_of(facts: RelayState) -> str:
    """The name of this outbox at the relay, the same for every process that sends from it."""
    known = facts.read().get("instance")
    if isinstance(known, str):
        return known
    made = str(uuid.uuid4())
    facts.write({"instance": made})
    return made


def routes_of(settings: Settings) -> Routes:
    """Where each kind of event goes."""
    paths = settings.relay_paths
    return Routes(
        messages=paths.messages,
        batch=paths.batch,
        mcp=paths.mcp,
        kinds=settings.kind_paths(),
        mcp_idempotent=settings.mcp.idempotent,
        safe_to_repeat=frozenset(settings.mcp.safe_to_repeat),
    )


def schedule_from(settings: Settings) -> Schedule:
    """When to try again, as configured."""
    section = settings.delivery
    return Schedule(
        initial_ms=round(section.backoff_initial_s * 1_000),
        max_ms=round(section.backoff_max_s * 1_000),
        max_attempts=section.max_attempts,
    )


def relay_client(settings: Settings) -> RelayClient:
    """The client of the configured relay; raises ConfigError when a setting cannot be used."""
    relay, paths = settings.relay, settings.relay_paths
    try:
        return RelayClient(
            settings.require_relay_url(),
            paths={"health": paths.health, "spec": paths.spec, "mcp": paths.mcp},
            idempotency_header=cast("Literal['quoted', 'bare', 'off']", relay.idempotency_header),
            connect_timeout_ms=round(relay.connect_timeout_s * 1_000),
            request_timeout_ms=round(relay.request_timeout_s * 1_000),
            mcp_timeout_ms=round(settings.mcp.timeout_s * 1_000),
            max_connections=relay.max_connections,
            ca_file=relay.ca_file,
            client_cert=relay.client_cert,
            client_key=relay.client_key,
            trust_env=relay.trust_env,
        )
    except ValueError as error:
        raise ConfigError(f"{error}. Nothing was started; what waits stays on disk.") from error


def idle_files(settings: Settings, descriptors: int) -> int:
    """How many outbox files may stay open unused, at least one, when the process may have `descriptors`.

    There must be enough left for every worker to use one more, and a connection.
    """
    busy = settings.delivery.workers * (_DESCRIPTORS_A_FILE + 1)
    room = (descriptors - _OTHER_DESCRIPTORS - busy) // _DESCRIPTORS_A_FILE
    return max(1, min(settings.daemon.max_open_files, room))


def _idle_files_here(settings: Settings) -> int:
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = descriptors == resource.RLIM_INFINITY
    return settings.daemon.max_open_files if unlimited else idle_files(settings, descriptors)


def tokens_of(
    settings: Settings,
    state: StateDirectory,
    facts: RelayState,
    *,
    log: Log,
    clock: Clock,
    rng: random.Random,
    on_token: Callable[[str | None], None] | None = None,
) -> Tokens:
    """The tokens of all agents, as configured; nothing is asked before one is wanted. Raises ConfigError."""
    tell = on_token or _untold
    asked = minter(settings, state, instance_of(facts), tell) if is_minted(settings) else None
    if asked is None:
        host = HostToken(token_source(settings, on_token))
        _forget_other_sources(facts, host.describe())
        return host
    _forget_other_sources(facts, asked.describe())
    return MintedTokens(
        asked,
        schedule=schedule_from(settings),
        clock=clock,
        rng=rng,
        facts=facts,
        cache=TokenCache(state),
        log=log,
        tell=tell,
    )


def _forget_other_sources(facts: RelayState, source: str) -> None:
    """What is known of tokens from elsewhere is of no use to anybody."""
    known = facts.read()
    if (known.get(FOR_ALL) or {}).get("source", source) != source:
        facts.write({name: None for name in known if name == FOR_ALL or name.startswith("token:")})


def agent_token(
    settings: Settings,
    state: StateDirectory,
    agent: str,
    *,
    log: Log = silent,
    on_token: Callable[[str | None], None] | None = None,
) -> AgentToken:
    """One agent's token, for who speaks to the relay beside the daemon, and shares it. Raises ConfigError."""
    if not is_minted(settings):
        return AgentToken(HostToken(token_source(settings, on_token)), agent)
    facts, rng = RelayState(state.relay_state), random.Random()  # noqa: S311 - jitter is no secret
    tokens = tokens_of(settings, state, facts, log=log, clock=Clock(), rng=rng, on_token=on_token)
    return AgentToken(tokens, agent)


def _untold(_secret: str | None) -> None:
    """Nobody masks anything."""


def build_engine(
    settings: Settings,
    state: StateDirectory,
    *,
    log: Log = silent,
    clock: Clock | None = None,
    on_token: Callable[[str | None], None] | None = None,
) -> Engine:
    """Everything that delivers the events of a state directory; nothing is sent before it is woken."""
    clock = clock or Clock()
    rng = random.Random()  # noqa: S311 - jitter is no secret
    client = relay_client(settings)
    schedule = schedule_from(settings)
    facts = RelayState(state.relay_state)
    gate = Gate(
        url=settings.require_relay_url(),
        schedule=schedule,
        clock=clock,
        rng=rng,
        state=facts,
        most=settings.delivery.workers,
        max_stuck_ms=round(settings.delivery.max_stuck_s * 1_000),
    )
    gate.on_change = log
    gate.save()  # of another relay nothing is known any more: what is noted from now on stays
    tokens = tokens_of(settings, state, facts, log=log, clock=clock, rng=rng, on_token=on_token)
    gate.token_from = "" if is_minted(settings) else tokens.describe()
    return Engine(
        Delivery(
            client=client,
            tokens=tokens,
            gate=gate,
            files=OpenFiles(state, _idle_files_here(settings)),
            routes=routes_of(settings),
            schedule=schedule,
            size=Size(settings.delivery.batch_max_items, settings.delivery.batch_max_bytes),
            clock=clock,
            rng=rng,
            max_retry_after_ms=round(settings.relay.max_retry_after_s * 1_000),
            log=log,
            rules=(settings.limits(), settings.bounds()),
            rate=Rate(settings.delivery.max_rate_per_s, clock) if settings.delivery.max_rate_per_s else None,
        )
    )
