"""`outbox hook` as a whole process beside a bare `python -c pass`: interleaved in one run, as ratios."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

_ROUNDS = 25
_CALL = (
    b'{"session_id":"s","transcript_path":"/none","cwd":"/srv","hook_event_name":"PostToolUse",'
    b'"tool_name":"Bash","tool_input":{"command":"ls"},"tool_response":{"stdout":"src\\n","stderr":""}}'
)


def _spent_s(words: Sequence[str], environ: Mapping[str, str]) -> float:
    begun = time.perf_counter()
    subprocess.run(words, input=_CALL, env=environ, capture_output=True, check=True)
    return time.perf_counter() - begun


def main() -> None:
    """Run the rounds and print the table."""
    bare = [sys.executable, "-c", "pass"]
    loaded = [sys.executable, "-c", "import outbox.cli.hook_run"]
    hook = [str(Path(sys.executable).with_name("outbox")), "hook", "claude-code"]
    found: dict[str, list[float]] = {"python -c pass": [], "its imports alone": [], "outbox hook": []}
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        environ = {**os.environ, "OUTBOX_STATE_DIR": folder}
        _spent_s(hook, environ)
        for _ in range(_ROUNDS):
            for name, words in zip(found, (bare, loaded, hook), strict=True):
                found[name].append(_spent_s(words, environ))
    print(f"a call of a hook as a whole process, {_ROUNDS} rounds, one after the other")
    for name, times in found.items():
        ratios = [spent / least for spent, least in zip(times, found["python -c pass"], strict=True)]
        print(
            f"  {name:<18} {statistics.median(times) * 1000:>7.1f} ms   "
            f"ratio {statistics.median(ratios):.2f}   (quickest {min(times) * 1000:.1f} ms, "
            f"ratio of the quickest {min(times) / min(found['python -c pass']):.2f})"
        )
