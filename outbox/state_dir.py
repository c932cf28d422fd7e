"""Where the state directory lies: one answer for daemons, commands and producers.

Producers import this in every hook, so it loads no configuration file and no parser of one.
"""

from __future__ import annotations

import os

from outbox.errors import ConfigError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path
    from typing import Protocol

    class Configured(Protocol):
        """Anything that knows a state directory from the flags, the environment or a file: `Settings`."""

        @property
        def configured_state_dir(self) -> str | None:
            """The path, or None when none of them names one."""


VARIABLE = "OUTBOX_STATE_DIR"
ALIAS = "AGENT_RELAY_RUNNER_OUTBOX_DIR"


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
    from pathlib import Path  # noqa: PLC0415 - a producer goes by `state_folder`, and does without

    if settings is not None and settings.configured_state_dir:
        return Path(absolute(settings.configured_state_dir)), "settings"
    folder, name = _from_environment(environ)
    return Path(folder), name


def state_folder(environ: Mapping[str, str]) -> str:
    """`state_dir` as a producer finds it, from the environment alone, and as text."""
    return _from_environment(environ)[0]


def _from_environment(environ: Mapping[str, str]) -> tuple[str, str]:
    for name in (VARIABLE, ALIAS):
        if given := environ.get(name, "").strip():
            return absolute(expand_home(given, environ)), name
    if given := environ.get("STATE_DIRECTORY", "").split(":")[0]:
        return absolute(given), "STATE_DIRECTORY"
    for name, below in (("XDG_STATE_HOME", "relay-outbox"), ("HOME", ".local/state/relay-outbox")):
        if (base := environ.get(name, "")).startswith("/"):
            return absolute(f"{base}/{below}"), name
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
    if not home.startswith("/"):
        raise ConfigError(
            f'The path "{path}" starts with ~, and HOME is unknown; nothing was changed; write it in full'
        )
    return home + path[1:]


def absolute(path: str | os.PathLike[str]) -> str:
    """What `Path.absolute` gives, as text: doubled slashes and single dots gone, `..` left as it is."""
    text = os.fspath(path)
    whole = text if text.startswith("/") else f"{os.getcwd()}/{text}"  # noqa: PTH109 - see above
    return "/" + "/".join(part for part in whole.split("/") if part not in ("", "."))
