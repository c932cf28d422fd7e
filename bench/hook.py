"""`outbox hook` as a whole process beside a bare `python -c pass`."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench.figure import Figure, Row, Size, Target, ratio
from bench.rounds import interleaved
from bench.stage import environment

_CALL = (
    b'{"session_id":"s","transcript_path":"/none","cwd":"/srv","hook_event_name":"PostToolUse",'
    b'"tool_name":"Bash","tool_input":{"command":"ls"},"tool_response":{"stdout":"src\\n","stderr":""}}'
)
_BARE, _HOOK = "python -c pass", "outbox hook"
_MOST_OF_BARE = 4.0


def measure(size: Size, scratch: Path) -> Iterator[Figure]:
    """Whole processes, from start to end; each round has several of each, since a process is short."""
    home = scratch / "hook"
    home.mkdir()
    environ = environment(home, {"daemon.state_dir": str(home / "state")})
    words = {
        _BARE: [sys.executable, "-c", "pass"],
        "its imports alone": [sys.executable, "-c", "import outbox.cli.hook_run"],
        _HOOK: [str(Path(sys.executable).with_name("outbox")), "hook", "claude-code"],
    }
    _spent_ms(words[_HOOK], environ)
    contestants = {name: lambda own=own: _spent_ms(own, environ) for name, own in words.items()}
    found = interleaved(contestants, size.pick(size.rounds * 5, 2))
    yield Figure(
        "A call of a hook",
        "The whole process, started anew for each call of a runner, with a state directory that is there.",
        [Row(name, times, "ms") for name, times in found.items()],
        [
            Target(
                "hook: process, of python -c pass",
                ratio(found[_HOOK], found[_BARE]),
                "times",
                _MOST_OF_BARE,
                at_least=False,
            )
        ],
        base=_BARE,
    )


def _spent_ms(words: Sequence[str], environ: Mapping[str, str]) -> float:
    begun = time.perf_counter()
    subprocess.run(words, input=_CALL, env=environ, capture_output=True, check=True)
    return (time.perf_counter() - begun) * 1_000
