"""`python -m bench.profiled WHAT`: where the time of an event goes, by function, as shares of the whole.

A profile makes calls of Python look dearer than they are: it tells where to look, not how long it takes.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import pstats
import tempfile
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.stage import KIND, PAYLOAD, Relay, fill, open_outbox

_EVENTS = 10_000
_AT_ONCE = 1_000
_FLUSH_S = 60.0
_SHOWN = 45

Act = Callable[[], object]


def main() -> None:
    """Profile what was asked for, and print it."""
    parser = argparse.ArgumentParser(prog="python -m bench.profiled", description=__doc__)
    parser.add_argument("what", choices=_WHAT)
    parser.add_argument("--scratch", type=Path, help="where its files lie; on /dev/shm a flush costs nothing")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="bench-", dir=asked.scratch) as scratch:
        _WHAT[asked.what](Path(scratch) / "state")


def _enqueue(state: Path) -> None:
    with open_outbox(state) as outbox:
        outbox.enqueue(KIND, PAYLOAD)
        _profile(lambda: [outbox.enqueue(KIND, PAYLOAD) for _ in range(_EVENTS)])


def _lines(state: Path) -> None:
    line = json.dumps({"kind": KIND, "payload": PAYLOAD})
    with open_outbox(state) as outbox:
        outbox.enqueue_many([line])
        _profile(lambda: [outbox.enqueue_many([line] * _AT_ONCE) for _ in range(_EVENTS // _AT_ONCE)])


def _drain(state: Path, *, batches: bool) -> None:
    fill(state, _EVENTS)
    import_module("outbox.daemon.flush")  # what it loads is not what is looked at
    with Relay(batches=batches) as relay, open_outbox(state) as outbox:
        os.environ |= {"OUTBOX_RELAY_URL": relay.url, "OUTBOX_RELAY_TOKEN": "tok-bench", "HOME": str(state)}
        _profile(lambda: outbox.flush(_FLUSH_S))


def _profile(act: Act) -> None:
    profile = cProfile.Profile()
    profile.runcall(act)
    entries: Mapping[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined] # its stub lacks it
    whole_s = sum(own_s for _, _, own_s, _, _ in entries.values())
    print("share  its own  calls an event")
    dearest = sorted(entries.items(), key=lambda entry: -entry[1][3])
    for (file, _, function), (_, calls, own_s, all_s, _) in dearest[:_SHOWN]:
        share, own, each = all_s / whole_s, own_s / whole_s, calls / _EVENTS
        print(f"{share:5.0%}  {own:7.1%}  {each:8.2f}        {Path(file).stem}.{function}")


_WHAT: Mapping[str, Callable[[Path], None]] = {
    "enqueue": _enqueue,
    "lines": _lines,
    "singly": lambda state: _drain(state, batches=False),
    "grouped": lambda state: _drain(state, batches=True),
}


if __name__ == "__main__":
    main()
