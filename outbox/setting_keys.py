"""Every setting: its name, type, range and default, and the values they make together. Pure.

The keys are the fields of the section classes; config/outbox.toml explains each, and a test holds the two
together. How files, variables and flags become such values is settings.py's.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outbox.bounds import DROP_OLDEST, REFUSE, Bounds
from outbox.errors import ConfigError
from outbox.event import BUILT_IN_KINDS, Limits
from outbox.gap import GAP_KIND
from outbox.printable import MASK
from outbox.setting_types import (
    Choice,
    EndpointUrl,
    FilePath,
    Flag,
    HostPort,
    Names,
    RelayPath,
    RelayUrl,
    Seconds,
    SecretFile,
    SecretUrl,
    SettingType,
    Size,
    Text,
    Token,
    Whole,
    Words,
    without_secrets,
)

BUILT_IN = "built-in"

_KIB, _MIB, _GIB = 2**10, 2**20, 2**30
_HOUR_S, _DAY_S, _CENTURY_S = 3600, 86_400, 36_525 * 86_400


def _key(default: Any, of: SettingType, *, restart: bool = False) -> Any:
    """A setting: its default and type. `restart`: a running daemon cannot take over another value."""
    return field(default=default, repr=not isinstance(of, Token), metadata={"type": of, "restart": restart})


@dataclass(frozen=True, slots=True)
class RelaySettings:
    """`[relay]`: where events go, as whom, and how long to wait for it."""

    url: str | None = _key(None, RelayUrl())
    token: str | None = _key(None, Token())
    token_file: str | None = _key(None, SecretFile())
    token_command: tuple[str, ...] = _key((), Words())
    token_command_timeout_s: float = _key(30.0, Seconds(0.1, _HOUR_S))
    trust_env: bool = _key(default=True, of=Flag())
    ca_file: str | None = _key(None, FilePath())
    client_cert: str | None = _key(None, FilePath())
    client_key: str | None = _key(None, FilePath())
    idempotency_header: str = _key("quoted", Choice(("quoted", "bare", "off")))
    key_scope: str = _key("none", Choice(("none", "agent")))
    connect_timeout_s: float = _key(5.0, Seconds(0.001, _HOUR_S))
    request_timeout_s: float = _key(30.0, Seconds(0.001, _HOUR_S))
    max_retry_after_s: float = _key(3600.0, Seconds(0, 7 * _DAY_S))
    max_connections: int = _key(32, Whole(1, 1000))


@dataclass(frozen=True, slots=True)
class RelayPaths:
    """`[relay.paths]`: what is called where, below `relay.url`."""

    messages: str = _key(BUILT_IN_KINDS["session-message"], RelayPath())
    batch: str = _key(BUILT_IN_KINDS["session-message-batch"], RelayPath())
    insights: str = _key(BUILT_IN_KINDS["insight"], RelayPath())
    archives: str = _key(BUILT_IN_KINDS["continuation-archive"], RelayPath())
    mcp: str = _key(BUILT_IN_KINDS["mcp-tool-call"], RelayPath())
    health: str = _key("/api/health", RelayPath())
    spec: str = _key("/api/spec", RelayPath())


@dataclass(frozen=True, slots=True)
class OAuthSettings:
    """`[relay.oauth]`: a token endpoint, and who we are there; without `token_url` none is asked."""

    token_url: str | None = _key(None, EndpointUrl())
    client_id: str | None = _key(None, Text())
    client_secret: str | None = _key(None, Token())
    client_secret_file: str | None = _key(None, SecretFile())
    refresh_token_file: str | None = _key(None, SecretFile())
    scope: str | None = _key(None, Text())
    resource: str | None = _key(None, Text())
    auth: str = _key("basic", Choice(("basic", "post")))


@dataclass(frozen=True, slots=True)
class RuntimeTokenSettings:
    """`[relay.runtime_token]`: a token of its own for each agent, from the relay; without `path` none."""

    path: str | None = _key(None, RelayPath(optional=True))


@dataclass(frozen=True, slots=True)
class BoundsSettings:
    """`[bounds]`: how much an outbox may hold; the engine takes it as `Settings.bounds()`."""

    max_events: int = _key(100_000, Whole(1, 10**9))
    max_bytes: int = _key(512 * _MIB, Size(1, 2**50))
    max_age_s: float = _key(0.0, Seconds(0, _CENTURY_S))
    max_dead: int = _key(10_000, Whole(1, 10**9))
    min_free_disk_bytes: int = _key(256 * _MIB, Size(0, 2**50))
    overflow: str = _key(DROP_OLDEST, Choice((DROP_OLDEST, REFUSE)))
    receipt_window_s: float = _key(7.0 * _DAY_S, Seconds(0, _CENTURY_S))
    receipt_max_bytes: int = _key(64 * _MIB, Size(0, 2**50))
    retire_after_s: float = _key(30.0 * _DAY_S, Seconds(0, _CENTURY_S))


@dataclass(frozen=True, slots=True)
class EventSettings:
    """`[events]`: what an event may be; producers meet it as `Settings.limits()`."""

    max_payload_bytes: int = _key(8 * _MIB, Size(1, 512 * _MIB))
    max_nesting: int = _key(500, Whole(1, 500))
    message_body_max_chars: int = _key(0, Whole(0, 10**9))


@dataclass(frozen=True, slots=True)
class DeliverySettings:
    """`[delivery]`: how often and how much at a time."""

    max_attempts: int = _key(12, Whole(1, 1000))
    backoff_initial_s: float = _key(1.0, Seconds(0.001, _HOUR_S))
    backoff_max_s: float = _key(60.0, Seconds(0.001, _DAY_S))
    max_stuck_s: float = _key(1.0 * _DAY_S, Seconds(1, 365 * _DAY_S))
    workers: int = _key(32, Whole(1, 1000))
    batch_max_items: int = _key(100, Whole(1, 10_000))
    batch_max_bytes: int = _key(_MIB, Size(_KIB, _GIB))
    max_rate_per_s: int = _key(0, Whole(0, 10**6))


@dataclass(frozen=True, slots=True)
class McpSettings:
    """`[mcp]`: which buffered tool calls may be repeated, and how long one may take."""

    idempotent: bool = _key(default=False, of=Flag())
    safe_to_repeat: tuple[str, ...] = _key((), Names())
    timeout_s: float = _key(120.0, Seconds(0.001, _DAY_S))
    buffer: tuple[str, ...] = _key((), Names())


@dataclass(frozen=True, slots=True)
class NotifySettings:
    """`[notify]`: whom the daemon tells when a person should look."""

    command: tuple[str, ...] = _key((), Words())
    url: str | None = _key(None, SecretUrl())
    alert_after_s: float = _key(900.0, Seconds(0.1, 365 * _DAY_S))
    min_interval_s: float = _key(60.0, Seconds(0.1, 7 * _DAY_S))


@dataclass(frozen=True, slots=True)
class SidecarSettings:
    """`[sidecar]`: how `outbox run` ends its command, and when it starts it again."""

    kill_after_s: float = _key(20.0, Seconds(0, _HOUR_S))
    handoff_timeout_s: float = _key(120.0, Seconds(0.1, _DAY_S))
    settle_s: float = _key(5.0, Seconds(0.1, _HOUR_S))
    max_restarts: int = _key(5, Whole(1, 1000))


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """`[daemon]`: the process itself."""

    state_dir: str | None = _key(None, FilePath(), restart=True)
    socket: str | None = _key(None, FilePath(), restart=True)
    socket_group: str | None = _key(None, Text(), restart=True)
    http: str | None = _key(None, HostPort(), restart=True)
    http_token: str | None = _key(None, Token())
    http_token_file: str | None = _key(None, SecretFile())
    http_allow_remote: bool = _key(default=False, of=Flag(), restart=True)
    flush_timeout_s: float = _key(5.0, Seconds(0, _HOUR_S))
    poll_interval_s: float = _key(2.0, Seconds(0.01, _HOUR_S))
    max_open_files: int = _key(64, Whole(1, 100_000))
    allow_network_fs: bool = _key(default=False, of=Flag(), restart=True)
    log_format: str = _key("auto", Choice(("auto", "json", "lines")))
    log_level: str = _key("info", Choice(("debug", "info", "warning", "error")))


@dataclass(frozen=True, slots=True)
class Settings:
    """All settings. `origins` says for each key where its value came from; it is no part of what is equal."""

    relay: RelaySettings = RelaySettings()
    relay_oauth: OAuthSettings = OAuthSettings()
    relay_runtime_token: RuntimeTokenSettings = RuntimeTokenSettings()
    relay_paths: RelayPaths = RelayPaths()
    bounds_section: BoundsSettings = BoundsSettings()
    events: EventSettings = EventSettings()
    delivery: DeliverySettings = DeliverySettings()
    mcp: McpSettings = McpSettings()
    notify: NotifySettings = NotifySettings()
    sidecar: SidecarSettings = SidecarSettings()
    daemon: DaemonSettings = DaemonSettings()
    kinds: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    files: tuple[Path, ...] = field(default=(), compare=False)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Each key with its value, in the order of the file."""
        for section, attribute in SECTIONS.items():
            values = getattr(self, attribute)
            yield from ((f"{section}.{own.name}", getattr(values, own.name)) for own in fields(values))
        yield from ((f"kinds.{kind}.path", path) for kind, path in sorted(self.kinds.items()))

    def value(self, name: str) -> Any:
        """The value of one key ("relay.url")."""
        section, _, own = name.rpartition(".")
        return getattr(getattr(self, SECTIONS[section]), own)

    def limits(self) -> Limits:
        """What producers check before they accept an event."""
        return Limits(
            max_payload_bytes=self.events.max_payload_bytes,
            max_nesting=self.events.max_nesting,
            message_body_max_chars=self.events.message_body_max_chars or None,
            custom_kinds=tuple(sorted(self.kinds)),
            key_scope=self.relay.key_scope,
        )

    def bounds(self) -> Bounds:
        """How much one agent's outbox may hold."""
        section = self.bounds_section
        return Bounds(
            max_events=section.max_events,
            max_bytes=section.max_bytes,
            max_age_ms=_ms(section.max_age_s) or None,
            max_dead=section.max_dead,
            min_free_disk_bytes=section.min_free_disk_bytes,
            overflow=section.overflow,
            receipt_window_ms=_ms(section.receipt_window_s),
            receipt_max_bytes=section.receipt_max_bytes,
        )

    def kind_paths(self) -> Mapping[str, str]:
        """Where each kind of event goes; a batch is held by what holds its messages."""
        paths = self.relay_paths
        return {
            "session-message": paths.messages,
            "session-message-batch": paths.messages,
            "insight": paths.insights,
            "continuation-archive": paths.archives,
            "mcp-tool-call": paths.mcp,
            GAP_KIND: paths.messages,
            **self.kinds,
        }

    @property
    def configured_state_dir(self) -> str | None:
        """The state directory that a flag, a variable or a file named; `state_dir()` knows the rest."""
        return self.daemon.state_dir

    def require_relay_url(self) -> str:
        """The relay's address, for `serve` and `flush`; raises ConfigError when none is set."""
        if self.relay.url is None:
            origin = self.origins.get("relay.url", BUILT_IN)
            raise ConfigError(
                f'relay.url = "" ({origin}): no relay is set. Nothing was started; what waits stays on disk. '
                "Set relay.url or OUTBOX_RELAY_URL to its address, such as http://127.0.0.1:4850; outbox "
                "serve and outbox flush take it as --relay, too."
            )
        return self.relay.url


SECTIONS = {
    "relay": "relay",
    "relay.oauth": "relay_oauth",
    "relay.runtime_token": "relay_runtime_token",
    "relay.paths": "relay_paths",
    "bounds": "bounds_section",
    "events": "events",
    "delivery": "delivery",
    "mcp": "mcp",
    "notify": "notify",
    "sidecar": "sidecar",
    "daemon": "daemon",
}


@dataclass(frozen=True, slots=True)
class Key:
    """One setting: "relay.url". `aliases` are variables of other programs that mean the same."""

    name: str
    type: SettingType
    default: Any
    variable: str
    aliases: tuple[str, ...] = ()
    restart: bool = False
    flag: str = ""


_VARIABLES = {"daemon.state_dir": "OUTBOX_STATE_DIR"}
_ALIASES = {
    "relay.url": ("AGENT_RELAY_URL",),
    "relay.token": ("AGENT_RELAY_TOKEN",),
    "events.message_body_max_chars": ("AGENT_RELAY_MESSAGE_BODY_MAX_CHARS",),
    "daemon.state_dir": ("AGENT_RELAY_RUNNER_OUTBOX_DIR",),
}
_FLAGS = {
    "relay.url": "--relay",
    "relay.token_file": "--token-file",
    "daemon.state_dir": "--state-dir",
    "daemon.socket": "--socket",
    "daemon.http": "--http",
}


def _keys() -> Iterator[Key]:
    defaults = Settings()
    for section, attribute in SECTIONS.items():
        for own in fields(getattr(defaults, attribute)):
            name = f"{section}.{own.name}"
            yield Key(
                name=name,
                type=own.metadata["type"],
                default=own.default,
                variable=_VARIABLES.get(name, "OUTBOX_" + name.replace(".", "_").upper()),
                aliases=_ALIASES.get(name, ()),
                restart=own.metadata["restart"],
                flag=_FLAGS.get(name, "the command line"),
            )


KEYS: Mapping[str, Key] = MappingProxyType({key.name: key for key in _keys()})


def describe_changes(old: Settings, new: Settings) -> list[str]:
    """What a reload changes, one line a key: "relay.url: "A" -> "B""; secrets masked.

    A key that a running daemon cannot take over says so.
    """
    before, after = dict(old.items()), dict(new.items())
    lines = []
    for name in dict.fromkeys((*before, *after)):
        if before.get(name) != after.get(name):
            change = f"{shown(name, before.get(name))} -> {shown(name, after.get(name))}"
            later = " (takes effect at the next start)" if name in KEYS and KEYS[name].restart else ""
            lines.append(f"{name}: {change}{later}")
    return lines


def type_of(name: str) -> SettingType | None:
    """The type of a key, also of `kinds.NAME.path`; None when there is no such key."""
    if name in KEYS:
        return KEYS[name].type
    return RelayPath() if kind_of(name) is not None else None


def kind_of(name: str) -> str | None:
    """NAME of `kinds.NAME.path`, without the quotes that a dot in it needs; None for another key."""
    if not (name.startswith("kinds.") and name.endswith(".path")):
        return None
    return name[len("kinds.") : -len(".path")].strip('"')


def masked(name: str, value: Any) -> Any:
    """The value, or a mask in place of a secret that is set, or of what may be one in an address."""
    of = type_of(name)
    if value is None or not isinstance(of, Token | EndpointUrl):
        return value
    return MASK if isinstance(of, Token) else without_secrets(value)


def shown(name: str, value: Any) -> str:
    """A value as TOML would have it, secrets masked; "not set" without one."""
    of = type_of(name)
    if value is None or of is None:
        return "not set"
    return MASK if isinstance(of, Token) else of.write(masked(name, value))


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
