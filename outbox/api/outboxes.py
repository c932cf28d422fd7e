"""The outboxes that a command or a request names: one agent's, or all of a state directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from outbox.api.report import opened, outbox_files
from outbox.errors import StoreError, UsageError
from outbox.event import check_agent
from outbox.store.directory import StateDirectory
from outbox.store.file import OutboxFile


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
