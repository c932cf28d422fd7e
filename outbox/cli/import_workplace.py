"""Where `import` puts its copies of other files: a private folder, which goes with the import."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from outbox.store.directory import StateDirectory

_PREFIX = ".import-"
_YOUNG_S = 60  # its import may not have locked it yet


@contextmanager
def workplace(state: StateDirectory) -> Iterator[Path]:
    """The folder (mode 0700), locked while the import lives; those of killed imports are removed."""
    for folder in state.path.glob(f"{_PREFIX}*"):
        if _is_left(folder):
            shutil.rmtree(folder, ignore_errors=True)
    with TemporaryDirectory(prefix=_PREFIX, dir=state.path) as name:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield Path(name)
        finally:
            os.close(fd)


def _is_left(folder: Path) -> bool:
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return time.time() - os.fstat(fd).st_mtime > _YOUNG_S
    except BlockingIOError:
        return False
    finally:
        os.close(fd)
