"""A relay that only counts, so that it is not what limits a drain: `python -m bench.instant_relay`.

Bare HTTP/1.1 over sockets, a thread for each connection. It answers after `--latency-ms`, with a result for
each message; `--no-batches` has no batch path. With `--notes` it keeps who was heard when.
"""

from __future__ import annotations

import argparse
import json
import re
import socket
import threading
import time
from urllib.parse import unquote

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_AGENT = re.compile(rb"\r\noutbox-agent: *([^\r]*)", re.IGNORECASE)
_SENT = re.compile(rb'"sentNs": ?(\d+)')
_READ_BYTES = 1 << 18
_BATCH = b"POST /api/messages/batch "


class Counter:
    """What was heard so far; times are monotonic nanoseconds, which all processes of a host share."""

    def __init__(self, *, notes: bool) -> None:
        """Nothing yet."""
        self._mutex = threading.Lock()
        self._keeps_notes = notes
        self._count = {"events": 0, "requests": 0, "firstEvents": 0, "firstNs": 0, "lastNs": 0}
        self._notes: list[tuple[str, int, list[int]]] = []

    def hear(self, head: bytes, body: bytes, events: int) -> None:
        """Count a request that has come in whole."""
        now = time.monotonic_ns()
        with self._mutex:
            count = self._count
            if not count["requests"]:
                count["firstNs"], count["firstEvents"] = now, events
            count["requests"] += 1
            count["events"] += events
            count["lastNs"] = now
            if self._keeps_notes:
                agent = _AGENT.search(head)
                delays = [now - int(sent) for sent in _SENT.findall(body)]
                self._notes.append((unquote(agent[1].decode()) if agent else "", now, delays))

    def told(self, *, notes: bool) -> bytes:
        """The counts, or the notes, as JSON."""
        with self._mutex:
            return json.dumps(self._notes if notes else self._count).encode()


def serve(listener: socket.socket, counter: Counter, latency_s: float, *, batches: bool) -> None:
    """Answer every connection until the process ends."""
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        arguments = (connection, counter, latency_s, batches)
        threading.Thread(target=_converse, args=arguments, daemon=True).start()


def _converse(connection: socket.socket, counter: Counter, latency_s: float, batches: bool) -> None:
    buffer = bytearray()
    with connection:
        while True:
            while (end := buffer.find(b"\r\n\r\n")) < 0:
                if not _more(connection, buffer):
                    return
            head = bytes(buffer[:end])
            length = _LENGTH.search(head)
            whole = end + 4 + (int(length[1]) if length else 0)
            while len(buffer) < whole:
                if not _more(connection, buffer):
                    return
            body = bytes(buffer[end + 4 : whole])
            del buffer[:whole]
            connection.sendall(_answer(head, body, counter, latency_s, batches))


def _more(connection: socket.socket, buffer: bytearray) -> bool:
    try:
        data = connection.recv(_READ_BYTES)
    except OSError:
        return False
    buffer += data
    return bool(data)


def _answer(head: bytes, body: bytes, counter: Counter, latency_s: float, batches: bool) -> bytes:
    if head.startswith(b"GET "):
        return _asked(head.split(b" ", 2)[1], counter)
    is_batch = head.startswith(_BATCH)
    if is_batch and not batches:
        return _response(404, b'{"error": "no such path"}')
    events = body.count(b'"idempotencyKey"') if is_batch else 1
    counter.hear(head, body, events)
    if latency_s:
        time.sleep(latency_s)
    if not is_batch:
        return _response(201, b"{}")
    return _response(200, b'{"results":[' + b",".join([b'{"status":201}'] * events) + b"]}")


def _asked(path: bytes, counter: Counter) -> bytes:
    if path == b"/bench/count":
        return _response(200, counter.told(notes=False))
    if path == b"/bench/notes":
        return _response(200, counter.told(notes=True))
    if path == b"/api/health":
        return _response(200, b'{"status": "ok"}')
    return _response(404, b'{"error": "no such path"}')


def _response(status: int, body: bytes) -> bytes:
    head = b"HTTP/1.1 %d -\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % (status, len(body)) + body


def main() -> None:
    """Serve on a free port of loopback, and say which."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency-ms", type=float, default=0.0)
    parser.add_argument("--no-batches", action="store_true")
    parser.add_argument("--notes", action="store_true")
    asked = parser.parse_args()
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(f"listening {listener.getsockname()[1]}", flush=True)
    serve(listener, Counter(notes=asked.notes), asked.latency_ms / 1_000, batches=not asked.no_batches)


if __name__ == "__main__":
    main()
