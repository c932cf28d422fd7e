"""Many producers at once: through the daemon, as threads that share an Outbox, and in bulk."""

from __future__ import annotations

import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from bench import peers
from bench.figure import Figure, Row, Size, Target, ratio
from bench.local_clients import request
from bench.rounds import interleaved
from bench.stage import AGENT, KIND, PAYLOAD, Child, Daemon, Relay, connected, fill, open_outbox
from outbox.api.client import LocalClient

PRODUCERS, _PROCESSES = 32, 2
_LEAST_OF_A_COMMIT_EACH, _LEAST_BULK_PER_S = 4.0, 30_000
_DAEMON, _ALONE = "32 through the daemon", "1 through the daemon"
_EACH, _LONE = "32 with a commit each", "1 with a commit each"
_THREADS, _BULK, _BARE_BULK = "32 threads, one Outbox", "NDJSON, one connection", "bare apsw, 1,000 a commit"
_ANSWER = b'{"line"'


def measure(size: Size, scratch: Path) -> Iterator[Figure]:
    """Producers at once, and bulk."""
    folder = Path(tempfile.mkdtemp(dir=scratch))
    with ExitStack() as stack:
        relay = stack.enter_context(Relay())
        daemon = stack.enter_context(Daemon(folder / "state", relay.url))
        paused(daemon, folder / "state")
        yield _at_once(size, folder, daemon)
        yield _bulk(size, folder, daemon)


def paused(daemon: Daemon, state: Path) -> None:
    """Let nothing be delivered, which would take time from accepting."""
    fill(state, 1)
    LocalClient(daemon.socket).post("/v1/pause", {"agent": None})


def _at_once(size: Size, folder: Path, daemon: Daemon) -> Figure:
    each = size.pick(100, 5)
    bare = peers.bare_file(folder / "bare")
    through = [f"--socket={daemon.socket}"]
    found = interleaved(
        {
            _EACH: lambda: clients_per_s([f"--commit={bare}"], PRODUCERS, each),
            _LONE: lambda: clients_per_s([f"--commit={bare}"], 1, each * 4),
            _DAEMON: lambda: clients_per_s(through, PRODUCERS, each),
            _ALONE: lambda: clients_per_s(through, 1, each * 4),
            _THREADS: lambda: _threads(folder / "threads", each),
        },
        size.rounds,
    )
    times = ratio(found[_DAEMON], found[_EACH])
    return Figure(
        "Many producers at once",
        f"{PRODUCERS} producers in {_PROCESSES} processes, each with a connection of its own and one "
        "event under way: over HTTP to the daemon, which joins their commits, or with bare apsw and a "
        "commit each to one file.",
        [Row(name, rates, "/s") for name, rates in found.items()],
        [
            Target(
                "producers: 32 through the daemon, of a commit each",
                times,
                "times",
                _LEAST_OF_A_COMMIT_EACH,
                at_least=True,
            )
        ],
        base=_EACH,
    )


def clients_per_s(place: list[str], producers: int, events: int) -> float:
    """Events a second of so many producers at a place, from the first start to the last end."""
    processes = min(_PROCESSES, producers)
    words = [f"--producers={producers // processes}", f"--events={events}"]
    with ExitStack() as stack:
        clients = [
            stack.enter_context(Child([sys.executable, "-m", "bench.local_clients", *place, *words]))
            for _ in range(processes)
        ]
        for client in clients:
            client.line()
        for client in clients:
            client.tell("go")
        spans = [tuple(map(int, client.line().split())) for client in clients]
    return producers * events / (max(end for _, end in spans) - min(begun for begun, _ in spans)) * 1e9


def _threads(state: Path, events: int) -> float:
    with open_outbox(state) as outbox:

        def produce() -> None:
            for _ in range(events):
                outbox.enqueue(KIND, PAYLOAD)

        threads = [threading.Thread(target=produce) for _ in range(PRODUCERS)]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return PRODUCERS * events / (time.perf_counter() - begun)


# Bulk -------------------------------------------------------------------------------------------------------


def _bulk(size: Size, folder: Path, daemon: Daemon) -> Figure:
    events = size.pick(30_000, 1_000)
    found = interleaved(
        {
            _BARE_BULK: lambda: _bare_bulk(folder / "bare-bulk", events),
            _BULK: lambda: lines_per_s(daemon.socket, events),
            "library, enqueue_many of 1,000": lambda: _many(folder / "many", events),
        },
        size.rounds,
    )
    return Figure(
        "Bulk",
        f"{events:,} events. NDJSON: one request over the local socket; each line has been answered, after "
        "its commit, when the clock stops.",
        [Row(name, rates, "/s") for name, rates in found.items()],
        [Target("producers: NDJSON bulk", found[_BULK], "/s", _LEAST_BULK_PER_S, at_least=True)],
        base=_BARE_BULK,
    )


def lines_per_s(place: Path, events: int) -> float:
    """Events a second that one NDJSON request hands over, each answered after its commit."""
    line = json.dumps({"kind": KIND, "payload": PAYLOAD}).encode() + b"\n"
    asking = request(AGENT, line * events, "application/x-ndjson")
    with connected(place) as connection:
        sender = threading.Thread(target=connection.sendall, args=(asking,))
        begun = time.perf_counter()
        sender.start()
        answered, rest = 0, b""
        while answered < events:
            data = connection.recv(1 << 18)
            if not data:
                raise RuntimeError(f"the daemon answered {answered:,} of {events:,} lines, then {rest!r}")
            data = rest + data
            answered += data.count(_ANSWER)
            rest = data[-len(_ANSWER) + 1 :]
        spent_s = time.perf_counter() - begun
        sender.join()
    return events / spent_s


def _bare_bulk(state: Path, events: int) -> float:
    connection, row, insert = peers.bare_insert(peers.bare_file(state))
    with peers.closing(connection):
        first = row[0] + 1
        begun = time.perf_counter()
        for start in range(first, first + events, 1_000):
            connection.execute("BEGIN IMMEDIATE")
            many = ([seq, row[1], f"bare-{seq:031}", *row[3:]] for seq in range(start, start + 1_000))
            connection.executemany(insert, many)
            connection.execute("COMMIT")
        return events / (time.perf_counter() - begun)


def _many(state: Path, events: int) -> float:
    event = {"kind": KIND, "payload": PAYLOAD}
    with open_outbox(state) as outbox:
        begun = time.perf_counter()
        for _ in range(0, events, 1_000):
            outbox.enqueue_many([event] * 1_000)
        return events / (time.perf_counter() - begun)
