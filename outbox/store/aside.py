"""The names under which a damaged file waits to be replaced: where it is hidden, and where the new one lies.

While the path of an outbox names nothing, and one of these exists, it is being replaced, or whoever did so
died. Nobody makes a new file then; whoever comes next goes on (salvage.py).
"""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from pathlib import Path

_HIDDEN, _MENDED, _REPORT = ".aside-", ".mended-", ".report-"


def hidden_path(path: Path) -> Path:
    """Where the damaged file is, so that no commit goes into it any more; its log stays beside `path`."""
    return path.with_name(_HIDDEN + path.name)


def mended_path(path: Path) -> Path:
    """Where the new file is once it is whole: from then on it is the outbox, and the damaged one evidence."""
    return path.with_name(_MENDED + path.name)


def report_path(path: Path) -> Path:
    """Where the report of the new file lies until it is in its place."""
    return path.with_name(_REPORT + path.name)


def is_being_replaced(path: str | os.PathLike[str]) -> bool:
    """Whether the outbox at `path` is there, but not under its name."""
    if os.path.lexists(path):
        return False
    folder, slash, name = os.fspath(path).rpartition("/")
    return any(os.path.lexists(f"{folder}{slash}{prefix}{name}") for prefix in (_HIDDEN, _MENDED))


def named_by(name: str) -> str | None:
    """The name of the outbox file that a hidden or a mended one belongs to."""
    for prefix in (_HIDDEN, _MENDED):
        if name.startswith(prefix) and name.endswith(".sqlite"):
            return name.removeprefix(prefix)
    return None
