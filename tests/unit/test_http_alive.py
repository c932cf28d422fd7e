"""Whether the process lives is answered whatever else is asked, and however slow the disk is."""

import socket
import threading
from contextlib import ExitStack

from processes import wait_for

from outbox.api.client import LocalClient
from outbox.api.meter import Meter
from outbox.api.server import LocalServer
from outbox.errors import StoreError
from outbox.event import Limits


class SlowDisk:
    """Served by a daemon whose files answer nobody, until they are let."""

    def __init__(self):
        self.limits, self.meter = Limits(), Meter()
        self.let = threading.Event()
        self.asked = 0

    @property
    def state(self):
        """The files."""
        self.asked += 1
        assert self.let.wait(60)
        raise StoreError("Nothing can be read. Nothing was changed.")

    def hangs(self):
        """Never."""
        return ""


def test_callers_that_wait_for_the_disk_leave_room_for_it(tmp_path):
    """Eight ask how things stand, as an orchestrator whose probes have timed out; it restarts nobody."""
    daemon = SlowDisk()
    server = LocalServer(daemon, tmp_path / "o.sock")
    server.start()
    with ExitStack() as stack:
        stack.callback(server.stop)
        stack.callback(daemon.let.set)
        for _ in range(12):
            client = stack.enter_context(socket.socket(socket.AF_UNIX))
            client.connect(str(tmp_path / "o.sock"))
            client.sendall(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        wait_for(lambda: daemon.asked >= 8, 60)
        assert LocalClient(tmp_path / "o.sock").get("/livez", 10.0)[0] == 200
