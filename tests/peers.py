"""The programs that tests talk to, each as a process or thread of its own, on loopback with a free port."""

import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path

RELAY_CASES = Path(__file__).parent / "cases" / "relay"


@dataclass(frozen=True)
class FakeRelay:
    """A scripted relay under way."""

    url: str
    port: int
    log: Path
    process: subprocess.Popen

    def requests(self):
        """All requests it has read so far, oldest first, as its log has them."""
        lines = self.log.read_text(encoding="utf-8").splitlines() if self.log.exists() else []
        return [json.loads(line) for line in lines]


@contextlib.contextmanager
def fake_relay(script="http.json", case="H01", *, host="127.0.0.1", port=0):
    """Play one case of a script in tests/cases/relay (a name or a path), or a dict: one's own `{"steps": …}`.

    Ends the process it started. A case with `refuse_first_s` refuses connections for so long; of every other
    the relay takes connections when this returns.
    """
    with tempfile.TemporaryDirectory(prefix="fake-relay-") as folder:
        log = Path(folder) / "requests.jsonl"
        path, case_name = _script(script, case, Path(folder))
        command = [sys.executable, str(RELAY_CASES / "fake_relay.py"), str(path), case_name]
        command += ["--host", host, "--port", str(port), "--log", str(log)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                yield _listening(process, log, refuses=_refuses(path, case_name))
            finally:
                process.kill()


def _script(script, case, folder):
    if isinstance(script, dict):
        path = folder / "script.json"
        path.write_text(json.dumps({"cases": [{"case": "own", **script}]}), encoding="utf-8")
        return path, "own"
    return RELAY_CASES / script, case


def _refuses(path, case_name):
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return any(case["case"] == case_name and case.get("refuse_first_s") for case in cases)


def _listening(process, log, *, refuses):
    word, host, port = process.stdout.readline().split()
    assert word == "listening"
    relay = FakeRelay(f"http://{f'[{host}]' if ':' in host else host}:{port}", int(port), log, process)
    if not refuses:
        _until_it_takes_connections(host, int(port))
    return relay


def _until_it_takes_connections(host, port):
    # It says "listening" a moment before it does.
    ends = time.monotonic() + 10
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError:
            assert time.monotonic() < ends, "the fake relay takes no connections"
            time.sleep(0.005)
        else:
            return


class ThreadServer:
    """A server inside the test: `handle(connection)` runs in a thread for each one, which is then closed."""

    def __init__(self, handle, *, tls=None, host="127.0.0.1"):
        self.connections = 0
        self._handle, self._tls = handle, tls
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self.port = self._listener.getsockname()[1]
        self._open = set()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self):
        """End it and everything it serves."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(10)
        self._listener.close()
        for connection in list(self._open):
            with contextlib.suppress(OSError):
                socket.socket.shutdown(connection, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                self._open.add(connection)
                thread = threading.Thread(target=self._serve, args=(connection,), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _serve(self, connection):
        spoken_to = connection
        with contextlib.suppress(OSError, ValueError):
            if self._tls:
                spoken_to = self._tls.wrap_socket(connection, server_side=True)
                self._open.add(spoken_to)
            self._handle(spoken_to)
        for each in {connection, spoken_to}:
            self._open.discard(each)
            each.close()


@contextlib.contextmanager
def thread_server(handle, *, tls=None, host="127.0.0.1"):
    """Serve with `handle(connection)` until the block ends; gives the server (`port`, `connections`)."""
    server = ThreadServer(handle, tls=tls, host=host)
    try:
        yield server
    finally:
        server.close()


def read_http_request(connection):
    """One request as (head, body), both bytes; None at the end of the connection. Reads nothing beyond it."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        byte = connection.recv(1)
        if not byte:
            return None
        head += byte
    found = re.search(rb"(?i)\r\ncontent-length: *([0-9]+)", head)
    left, body = int(found[1]) if found else 0, b""
    while len(body) < left:
        piece = connection.recv(left - len(body))
        if not piece:
            return None
        body += piece
    return head, body


def http_response(status=200, body=b'{"ok":true}', *fields):
    """The bytes of one response with a length; `fields` are whole lines."""
    lines = [b"HTTP/1.1 %d Some Words" % status, b"content-length: %d" % len(body)]
    lines += [field.encode() if isinstance(field, str) else field for field in fields]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body


def tunnelling_proxy(asked, *, refuse_with=None):
    """A handler for `thread_server`: an HTTP proxy that serves CONNECT and notes each head in `asked`."""

    def handle(connection):
        head, _ = read_http_request(connection)
        asked.append(head.decode())
        if refuse_with:
            connection.sendall(refuse_with)
            return
        host, port = head.split(b" ")[1].decode().rsplit(":", 1)
        with socket.create_connection((host.strip("[]"), int(port)), timeout=10) as target:
            connection.sendall(b"HTTP/1.1 200 Connected\r\n\r\n")
            back = threading.Thread(target=_pump, args=(target, connection), daemon=True)
            back.start()
            _pump(connection, target)
            back.join(10)

    return handle


def _pump(source, sink):
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            socket.socket.shutdown(end, socket.SHUT_RDWR)
