"""Many producers in one process, each with its own connection: `python -m bench.local_clients`.

They hand events to the daemon's socket, or commit them themselves with bare apsw (`--commit FILE`). It says
"ready", waits for a line on stdin, works, and says from when to when (monotonic nanoseconds).
"""

from __future__ import annotations

import argparse
import json
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from bench import peers
from bench.stage import AGENT, KIND, PAYLOAD, connected

_READ_BYTES = 65_536


def main() -> None:
    """Prepare, wait for the start, work, tell."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path)
    parser.add_argument("--commit", type=Path)
    parser.add_argument("--producers", type=int, required=True)
    parser.add_argument("--events", type=int, required=True, help="of each producer")
    asked = parser.parse_args()
    if asked.socket is not None:
        lines = [connected(asked.socket) for _ in range(asked.producers)]
        _started(lambda: _converse(lines, asked.events))
    else:
        _started(lambda: _commit(asked.commit, asked.producers, asked.events))


def _started(work: Callable[[], None]) -> None:
    print("ready", flush=True)
    sys.stdin.readline()
    begun = time.monotonic_ns()
    work()
    print(f"{begun} {time.monotonic_ns()}", flush=True)


# Through the daemon -----------------------------------------------------------------------------------------


def request(agent: str, body: bytes, media_type: str = "application/json") -> bytes:
    """The bytes of a request that hands over events."""
    head = (
        f"POST /v1/agents/{agent}/events HTTP/1.1\r\nHost: localhost\r\nContent-Type: {media_type}\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _converse(lines: list[socket.socket], events: int) -> None:
    """Each connection has one request under way until it has had so many answers."""
    event = json.dumps({"kind": KIND, "payload": PAYLOAD}).encode()
    asking = request(AGENT, event)
    left = {line.fileno(): events for line in lines}
    own = {line.fileno(): line for line in lines}
    poll = select.epoll()
    for line in lines:
        poll.register(line, select.EPOLLIN)
        line.sendall(asking)
    while left:
        for number, _ in poll.poll():
            answer = own[number].recv(_READ_BYTES)
            while not answer.endswith(b"}"):
                answer += own[number].recv(_READ_BYTES)
            if not answer.startswith(b"HTTP/1.1 200 "):
                raise RuntimeError(f"the daemon said {answer[:300]!r}")
            left[number] -= 1
            if left[number]:
                own[number].sendall(asking)
            else:
                del left[number]
                poll.unregister(number)


# A commit each ----------------------------------------------------------------------------------------------


def _commit(file: Path, producers: int, events: int) -> None:
    """Each producer a thread with a connection of its own: SQLite lets other threads run meanwhile."""
    threads = [
        threading.Thread(target=_commit_one, args=(file, f"{os.getpid()}-{number}", events))
        for number in range(producers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _commit_one(file: Path, name: str, events: int) -> None:
    connection, row, insert = peers.bare_insert(file)
    with peers.closing(connection):
        for number in range(events):
            row[0], row[2] = None, f"{name}-{number}"
            connection.execute("BEGIN IMMEDIATE")
            connection.execute(insert, row)
            connection.execute("COMMIT")


if __name__ == "__main__":
    main()
