"""Where the state directory lies: one answer for daemons, commands and producers.

Producers import this in every hook, so it loads no configuration file and no parser of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from outbox.errors import ConfigError

VARIABLE = "OUTBOX_STATE_DIR"
ALIAS = "AGENT_RELAY_RUNNER_OUTBOX_DIR"


class Configured(Protocol):
    """Anything that knows a state directory from the flags, the environment or a file: `Settings`."""

    @property
    def configured_state_dir(self) -> str | None:
        """The path, or None when none of them names one."""


def state_dir(settings: Configured | None, environ: Mapping[str, str]) -> Path:
    """The state directory, absolute. It need not exist, and looking creates nothing.

    The first of: what `settings` say (`--state-dir`, OUTBOX_STATE_DIR or its alias, the file);
    OUTBOX_STATE_DIR; AGENT_RELAY_RUNNER_OUTBOX_DIR; the first of $STATE_DIRECTORY (systemd.exec);
    $XDG_STATE_HOME/relay-outbox; ~/.local/state/relay-outbox. Relative XDG paths are passed over (XDG Base
    Directory Specification 0.8). It is never a temporary folder by itself.

    Raises ConfigError when none of them is known.
    """
    return located(settings, environ)[0]


def located(settings: Configured | None, environ: Mapping[str, str]) -> tuple[Path, str]:
    """`state_dir`, and what named it ("settings", or the variable)."""
    if settings is not None and settings.configured_state_dir:
        return _absolute(settings.configured_state_dir), "settings"
    for name in (VARIABLE, ALIAS):
        if given := environ.get(name, "").strip():
            return _absolute(expand_home(given, environ)), name
    if given := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return _absolute(given), "STATE_DIRECTORY"
    for name, below in (("XDG_STATE_HOME", "relay-outbox"), ("HOME", ".local/state/relay-outbox")):
        if (base := Path(environ.get(name, ""))).is_absolute():
            return base / below, name
    raise ConfigError(
        "No state directory: none is set, and HOME is unknown. Nothing was stored or started. "
        f"Set {VARIABLE} or --state-dir to a folder of your own."
    )


def expand_home(path: str, environ: Mapping[str, str]) -> str:
    """`path` with a leading `~/` replaced by HOME, as a shell would have done.

    Raises ConfigError when HOME is unknown.
    """
    if path != "~" and not path.startswith("~/"):
        return path
    home = environ.get("HOME", "")
    if not Path(home).is_absolute():
        raise ConfigError(
            f'The path "{path}" starts with ~, and HOME is unknown; nothing was changed; write it in full'
        )
    return home + path[1:]


def _absolute(path: str) -> Path:
    return Path(path).absolute()
