"""Where a command works: its settings, its state directory, and the outboxes that it names."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from outbox.api.report import opened, outbox_files
from outbox.cli.output import clean, say
from outbox.errors import ConfigError, StoreError, UsageError
from outbox.event import check_agent
from outbox.settings import Settings, examine, load
from outbox.state_dir import state_dir
from outbox.store.directory import StateDirectory
from outbox.store.file import OutboxFile


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


def checked_agent(agent: str) -> str:
    """The name as given; raises UsageError, as a whole sentence, for one that no agent can have."""
    try:
        return check_agent(agent)
    except UsageError as error:
        raise UsageError(f"{error}. Nothing was changed. A name is 1 to 512 bytes of UTF-8.") from None


def existing(state: StateDirectory, agent: str) -> Path:
    """The file of this agent's outbox; raises UsageError, with the nearest name, when there is none."""
    path = state.outbox_path(checked_agent(agent))
    if os.path.lexists(path):
        return path
    raise UsageError(
        f"There is no outbox of {agent!r} below {str(state.path)!r}. Nothing was changed. "
        f"{_near(state, agent)}",
        code="unknown_agent",
    )


def _near(state: StateDirectory, agent: str) -> str:
    from difflib import get_close_matches  # noqa: PLC0415 - only a slip of the hand needs it

    names: list[str] = []
    for_each(state, None, lambda box: names.append(box.agent))
    near = get_close_matches(agent, names, 1)
    if near:
        return f"Did you mean {near[0]!r}?"
    return "All of them: outbox status" if names else "There is none of any agent yet."


def for_each(
    state: StateDirectory, agent: str | None, act: Callable[[OutboxFile], object]
) -> list[tuple[Path, StoreError]]:
    """Do something with an agent's outbox, or with all; the files that could not be used do not stop it.

    Raises UsageError or StoreError when it is one agent's and there is none, or it cannot be used.
    """
    if agent is not None:
        with opened(state, existing(state, agent)) as box:
            act(box)
        return []
    troubles: list[tuple[Path, StoreError]] = []
    for path in outbox_files(state):
        try:
            with opened(state, path) as box:
                act(box)
        except StoreError as error:
            troubles.append((path, error))
    return troubles


def tell_troubles(troubles: list[tuple[Path, StoreError]]) -> int:
    """Say on stderr which files could not be used; the worst exit status, 0 without any."""
    say(*(clean(str(error)) for _, error in troubles), to=sys.stderr)
    return max((error.exit_status for _, error in troubles), default=0)
