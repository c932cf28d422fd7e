"""Files of seed runners that wait to be taken in: found where their variable points, told, never adopted."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from outbox.state_dir import ALIAS, expand_home
from outbox.store.seed import seed_files


def seeds_found(environ: Mapping[str, str]) -> list[Path]:
    """What looks like a seed runner's outbox in the folder that AGENT_RELAY_RUNNER_OUTBOX_DIR names."""
    folder = environ.get(ALIAS, "").strip()
    return seed_files(Path(expand_home(folder, environ)).absolute()) if folder else []


def seed_advice(path: Path) -> str:
    """What to do about one."""
    take_in = f"outbox import --agent AGENT {shlex.quote(str(path))}"
    return (
        f"{path} is a seed runner's outbox, and is not delivered from here. Once its runner has stopped, and "
        f"unless that was done: {take_in}; remove it when all is delivered."
    )
