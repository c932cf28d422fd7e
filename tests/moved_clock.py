"""A wall clock that is set while a process of ours runs: Python's answer in it, and nothing else, changes."""

from pathlib import Path

_NS = 10**9
_SITE = """
import os, time
from pathlib import Path
_file, _real_ns = Path(os.environ["CLOCK_OFFSET_FILE"]), time.time_ns
time.time_ns = lambda: _real_ns() + int(_file.read_text())
"""


class MovedClock:
    """The clock of those that are started with `environ`; at first it is right."""

    def __init__(self, folder):
        self._offset = Path(folder) / "offset"
        self._offset.write_text("0")
        (Path(folder) / "sitecustomize.py").write_text(_SITE)
        self.environ = {"PYTHONPATH": str(folder), "CLOCK_OFFSET_FILE": str(self._offset)}

    def set_back(self, by_s):
        """From now on it is so many seconds behind."""
        draft = self._offset.with_suffix(".new")
        draft.write_text(str(-by_s * _NS))
        draft.replace(self._offset)
