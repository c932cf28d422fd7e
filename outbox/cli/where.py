"""Where a command works: its settings, its state directory, and the outboxes that it names."""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from outbox.api.outboxes import checked_agent, existing, for_each
from outbox.cli.output import clean, say
from outbox.errors import ConfigError, StoreError
from outbox.settings import Settings, examine, load
from outbox.state_dir import state_dir
from outbox.store.directory import StateDirectory

__all__ = [
    "checked_agent",
    "existing",
    "for_each",
    "now_ms",
    "settings_of",
    "settings_to_look",
    "state_of",
    "tell_troubles",
]


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings of a command that acts; raises ConfigError for any fault in them."""
    return load(_flags(args), environ=os.environ, config_path=args.config)


def settings_to_look(args: argparse.Namespace) -> Settings:
    """The settings of a command that only looks: a fault in them does not keep it from doing so.

    Raises ConfigError when it is not certain where to look.
    """
    report = examine(_flags(args), environ=os.environ, config_path=args.config)
    if report.faults and "daemon.state_dir" not in report.settings.origins:
        raise ConfigError(f"{report.faults[0]}. Correct it, or say where to look with --state-dir.")
    if report.faults:
        say(clean(f"note: {report.faults[0]}. See: outbox config check"), to=sys.stderr)
    return report.settings


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags of this command give; `relay` and `token_file` are only some commands' own."""
    return {
        "daemon.state_dir": args.state_dir,
        "relay.url": getattr(args, "relay", None),
        "relay.token_file": getattr(args, "token_file", None),
    }


def state_of(settings: Settings) -> StateDirectory:
    """The state directory; nothing is made."""
    return StateDirectory(state_dir(settings, os.environ))


def now_ms() -> int:
    """The wall clock, epoch milliseconds."""
    return time.time_ns() // 1_000_000


def tell_troubles(troubles: list[tuple[Path, StoreError]]) -> int:
    """Say on stderr which files could not be used; the worst exit status, 0 without any."""
    say(*(clean(str(error)) for _, error in troubles), to=sys.stderr)
    return max((error.exit_status for _, error in troubles), default=0)
