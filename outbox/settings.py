"""How the layers become the settings: built-in < file < drop-ins < environment < flags.

Only `load` and `examine` look at files; the rest is pure. The settings themselves stand in setting_keys.py.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outbox import settings_file
from outbox.errors import ConfigError
from outbox.event import BUILT_IN_KINDS
from outbox.printable import printable
from outbox.setting_keys import (
    BUILT_IN,
    KEYS,
    SECTIONS,
    Key,
    Settings,
    describe_changes,
    kind_of,
    masked,
    shown,
    type_of,
)
from outbox.setting_types import FilePath, SecretFile, Unfit, relay_url
from outbox.state_dir import expand_home

__all__ = [
    "BUILT_IN",
    "KEYS",
    "Given",
    "Key",
    "Report",
    "Settings",
    "describe_changes",
    "environment_layers",
    "examine",
    "load",
    "masked",
    "relay_url",
    "resolve",
    "shown",
    "unknown_variables",
]

_GAP_KIND = "outbox-gap"
_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_NO_SETTINGS = {"OUTBOX_CONFIG", "OUTBOX_AGENT", "OUTBOX_SOCKET", "OUTBOX_SIDECAR"}  # known, and no keys
_EXCLUSIVE = ("relay.token", "relay.token_file", "relay.token_command", "relay.oauth.token_url")
_EXCLUSIVE_SECRETS = ("relay.oauth.client_secret", "relay.oauth.client_secret_file")


@dataclass(frozen=True, slots=True)
class Given:
    """What one layer says about a key: the raw value, who said it, and where its relative paths start."""

    raw: Any
    source: str
    folder: Path | None = None


Layer = Mapping[str, Given]


@dataclass(frozen=True, slots=True)
class Report:
    """What became of some layers: the settings (those at fault have their default), and every fault."""

    settings: Settings
    faults: tuple[str, ...] = ()


def load(
    argv_overrides: Mapping[str, Any] = MappingProxyType({}),
    *,
    environ: Mapping[str, str],
    config_path: str | None = None,
) -> Settings:
    """The settings for one start.

    `argv_overrides` has dotted keys ("relay.url"); None means that the flag was not given. `config_path` is
    `--config`. A relative path in a file starts from that file's folder, elsewhere from the working folder.

    Raises ConfigError, one line that names the setting, its value (secrets masked) and who set it.
    """
    report = examine(argv_overrides, environ=environ, config_path=config_path)
    if report.faults:
        others = len(report.faults) - 1
        more = f" {others} more: outbox config check." if others else ""
        raise ConfigError(f"{report.faults[0]}. Nothing was started or changed.{more}")
    return report.settings


def examine(
    argv_overrides: Mapping[str, Any] = MappingProxyType({}),
    *,
    environ: Mapping[str, str],
    config_path: str | None = None,
) -> Report:
    """As `load`, but raises nothing and tells every fault."""
    faults: list[str] = []
    try:
        files = settings_file.find_files(config_path, environ)
    except ConfigError as error:
        files, faults = (), [str(error)]
    layers = [_file_layer(file, faults) for file in files]
    layers += environment_layers(environ)
    flags = {name: raw for name, raw in argv_overrides.items() if raw is not None}
    layers.append({name: Given(raw, KEYS[name].flag) for name, raw in flags.items()})
    report = resolve(layers, environ=environ, files=files)
    return Report(report.settings, (*faults, *report.faults, *_missing_files(report.settings)))


def _file_layer(file: Path, faults: list[str]) -> Layer:
    try:
        given = settings_file.read_file(file)
    except ConfigError as error:
        faults.append(str(error))
        return {}
    source, folder = printable(str(file)), file.absolute().parent
    return {name: Given(raw, source, folder) for name, raw in given.items()}


def environment_layers(environ: Mapping[str, str]) -> tuple[Layer, Layer]:
    """What the environment says: by the aliases, then by our own names, which win. Empty is not set."""
    by_alias, by_name = {}, {}
    for key in KEYS.values():
        for variable in key.aliases:
            if environ.get(variable, "").strip():
                by_alias[key.name] = Given(environ[variable], variable)
        if environ.get(key.variable, "").strip():
            by_name[key.name] = Given(environ[key.variable], key.variable)
    return by_alias, by_name


def unknown_variables(environ: Mapping[str, str]) -> Iterator[tuple[str, str | None]]:
    """Variables that look like settings and are none, each with the nearest that is one."""
    known = {key.variable for key in KEYS.values()} | _NO_SETTINGS
    for name in sorted(environ):
        if name.startswith("OUTBOX_") and name not in known:
            yield name, _nearest(name, known)


def resolve(layers: Sequence[Layer], *, environ: Mapping[str, str], files: tuple[Path, ...] = ()) -> Report:
    """Make one set of values of the layers, the last one given winning.

    A wrong value is a fault also where a later layer overrides it. The sources of the token exclude each
    other, and so do those of the client secret: the later layer's one stands.
    """
    faults: list[str] = []
    values: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for layer in layers:
        read = dict(_read_layer(layer, environ, faults))
        for exclusive in (_EXCLUSIVE, _EXCLUSIVE_SECRETS):
            named = [name for name in exclusive if read.get(name)]
            if len(named) > 1:
                faults.append(_both(named, layer))
            for name in exclusive if named else ():
                values.pop(name, None)
                origins.pop(name, None)
        values |= read
        origins |= {name: layer[name].source for name in read}
    settings = _build(values, origins, files)
    return Report(settings, (*faults, *_contradictions(settings)))


def _read_layer(layer: Layer, environ: Mapping[str, str], faults: list[str]) -> Iterator[tuple[str, Any]]:
    for name, given in layer.items():
        of = type_of(name)
        if of is None:
            faults.append(_unknown(name, given.source))
            continue
        try:
            _check_kind(kind_of(name))
            value = of.read(given.raw)
            credential = _credential(value, environ) if isinstance(of, SecretFile) else None
            yield name, credential or (_placed(value, given, environ) if isinstance(of, FilePath) else value)
        except Unfit as error:
            faults.append(f"{_given(name, given)} {error}")


def _credential(name: str | None, environ: Mapping[str, str]) -> str | None:
    """Where systemd put a credential of this name ($CREDENTIALS_DIRECTORY, systemd.exec(5)), if it did."""
    folder = environ.get("CREDENTIALS_DIRECTORY", "")
    if not folder or not name or "/" in name:
        return None
    path = Path(folder, name)
    return str(path) if settings_file.is_there(path) else None


def _placed(path: str | None, given: Given, environ: Mapping[str, str]) -> str | None:
    if path is None:
        return None
    try:
        expanded = expand_home(path, environ)
    except ConfigError:
        raise Unfit("starts with ~, and HOME is unknown; write it in full") from None
    return str(Path(given.folder, expanded) if given.folder else Path(expanded).absolute())


def _build(values: Mapping[str, Any], origins: Mapping[str, str], files: tuple[Path, ...]) -> Settings:
    sections: dict[str, Any] = {}
    defaults = Settings()
    for section, attribute in SECTIONS.items():
        of = type(getattr(defaults, attribute))
        own = {own.name: values.get(f"{section}.{own.name}", own.default) for own in fields(of)}
        sections[attribute] = of(**own)
    kinds = {kind: path for name, path in values.items() if (kind := kind_of(name)) is not None}
    return Settings(**sections, kinds=kinds, origins=origins, files=files)


def _check_kind(kind: str | None) -> None:
    if kind is None:
        return
    if kind in BUILT_IN_KINDS or kind == _GAP_KIND:
        raise Unfit("names a kind of the contract; its path is a key of [relay.paths]")
    if not _KIND.fullmatch(kind):
        raise Unfit("names no kind; a kind is made of letters, digits, dots, dashes and underscores")


def _contradictions(settings: Settings) -> Iterator[str]:
    delivery, relay = settings.delivery, settings.relay
    if delivery.backoff_initial_s > delivery.backoff_max_s:
        first, last = "delivery.backoff_initial_s", "delivery.backoff_max_s"
        yield f"{_cited(settings, first)} is longer than {_cited(settings, last)}"
    oauth = settings.relay_oauth
    if oauth.token_url and not oauth.client_id:
        yield f"{_cited(settings, 'relay.oauth.token_url')} needs relay.oauth.client_id beside it"
    if settings.relay_runtime_token.path and not (relay.token or relay.token_file):
        cited = _cited(settings, "relay.runtime_token.path")
        yield f"{cited} needs a bootstrap token: relay.token_file or relay.token"
    if relay.client_key and not relay.client_cert:
        yield f"{_cited(settings, 'relay.client_key')} needs relay.client_cert beside it"


def _missing_files(settings: Settings) -> Iterator[str]:
    """Files that must be there at the start. A token file need not: it is waited for."""
    for name in ("relay.ca_file", "relay.client_cert", "relay.client_key"):
        path = settings.value(name)
        if path and (reason := settings_file.why_unreadable(path)):
            yield f"{_cited(settings, name)} cannot be read: {reason}"


def _given(name: str, given: Given) -> str:
    of = type_of(name)
    return f"{name} = {of.show(given.raw) if of else '?'} ({given.source})"


def _cited(settings: Settings, name: str) -> str:
    return f"{name} = {shown(name, settings.value(name))} ({settings.origins.get(name, BUILT_IN)})"


def _both(names: Sequence[str], layer: Layer) -> str:
    each = " and ".join(_given(name, layer[name]) for name in names)
    return f"{each} are {'both' if len(names) == 2 else 'all'} set; keep one"


def _unknown(name: str, source: str) -> str:
    if name in SECTIONS or name == "kinds":
        return f"{name} in {source} is a section; write [{name}] above its keys"
    near = _nearest(name, KEYS)
    return f"unknown key {name} in {source}" + (f"; the nearest known one is {near}" if near else "")


def _nearest(name: str, known: Collection[str]) -> str | None:
    """The known name most like it: one with the same last part in another section, else by spelling."""
    last = name.rpartition(".")[2]
    moved = [other for other in known if other.rpartition(".")[2] == last]
    return next(iter(moved or difflib.get_close_matches(name, known, n=1)), None)
