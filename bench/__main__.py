"""`make bench`: what a durable enqueue costs against its limit, as a ratio in one run.

`python -m bench hook` is about a call of a hook, in hook.py.

The limit is bare apsw inserting the same rows into the same schema with the same settings, a durable commit
each. Rounds alternate, so that a machine whose speed drifts slows both; medians are compared.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import apsw

from bench import hook
from outbox import Outbox

_ROUNDS = 7
_EVENTS = 300
_PAYLOAD = {"from": "builder", "to": "lead", "kind": "note", "body": "x" * 420}


def _through_the_library(folder: Path) -> float:
    with Outbox.open("builder", state_dir=folder, allow_network_fs=True) as outbox:
        return _per_second(lambda: outbox.enqueue("session-message", _PAYLOAD))


def _bare(folder: Path) -> float:
    with Outbox.open("builder", state_dir=folder, allow_network_fs=True) as outbox:
        outbox.enqueue("session-message", _PAYLOAD)
    path = next((folder / "agents").glob("*.sqlite"))
    connection = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READWRITE)
    names = [name for _, name, *_ in connection.execute("PRAGMA table_info(events)")]
    row = list(connection.execute("SELECT * FROM events").fetchone())
    insert = f"INSERT INTO events VALUES ({', '.join('?' * len(names))})"
    connection.execute("PRAGMA synchronous=FULL")
    seq, key = names.index("seq"), names.index("key")

    def once() -> None:
        row[seq] += 1
        row[key] = f"bare-{row[seq]}"
        connection.execute("BEGIN IMMEDIATE")
        connection.execute(insert, row)
        connection.execute("COMMIT")

    try:
        return _per_second(once)
    finally:
        connection.close()


def _per_second(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    for _ in range(_EVENTS):
        act()
    return _EVENTS / (time.perf_counter() - begun)


def main() -> None:
    """Run the rounds and print the table."""
    found: dict[str, list[float]] = {"library": [], "bare apsw": []}
    for _ in range(_ROUNDS):
        for name, measure in (("library", _through_the_library), ("bare apsw", _bare)):
            with tempfile.TemporaryDirectory(prefix="bench-") as folder:
                found[name].append(measure(Path(folder)))
    print(f"durable enqueue, one producer, {_EVENTS} events a round, {_ROUNDS} rounds")
    for name, rates in found.items():
        print(f"  {name:<10} {statistics.median(rates):>8,.0f}/s   ({min(rates):,.0f} to {max(rates):,.0f})")
    ratios = [library / bare for library, bare in zip(found["library"], found["bare apsw"], strict=True)]
    print(f"  ratio      {statistics.median(ratios):>8.2f}     ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    hook.main() if sys.argv[1:] == ["hook"] else main()
