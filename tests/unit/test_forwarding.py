"""The way to a daemon of another user, where the daemon or the own outbox is not what it should be."""

import contextlib
import socket
import threading

import pytest

from outbox import Outbox
from outbox.api.client import LocalClient
from outbox.api.forwarding import RemoteOutbox, forward
from outbox.api.hook_way import put_and_hand_over
from outbox.errors import Unavailable
from outbox.store.directory import StateDirectory

EVENT = b'{"kind": "insight", "payload": {}, "idempotencyKey": "k-1"}'


class Answering:
    """A client of something that answers lines of its own."""

    def __init__(self, *results):
        self.results = list(results)

    def post_lines(self, _path, _lines, _timeout_s=0):
        """Whatever was asked."""
        return self.results


NO_RESULTS = [5, "word", [], {}, {"seq": "1", "idempotencyKey": "k", "duplicate": False, "state": "waiting"}]


@pytest.mark.parametrize("result", NO_RESULTS)
def test_what_is_no_answer_of_a_daemon_settles_nothing(tmp_path, result):
    """Another service behind the socket: the event is kept in the own outbox, and the reason is told."""
    remote = RemoteOutbox("builder", Answering(result), tmp_path)
    (receipt,) = remote.enqueue_many([EVENT])
    assert (receipt.seq, remote.kept) == (1, 1)
    assert "no answer of a daemon" in remote.why
    state = StateDirectory(tmp_path)
    done = forward(state, state.outbox_path("builder"), Answering(result), 1.0)
    assert (done.left, done.receipts) == (1, {})
    assert "no answer of a daemon" in str(done.why)


def test_a_hooks_call_that_is_on_disk_is_not_told_as_lost(tmp_path):
    """Handing it over fails for the file's sake; the call was recorded before."""

    def put(folder):
        with Outbox.open("builder", state_dir=folder) as outbox:
            outbox.enqueue("insight", {})
        path = StateDirectory(folder).outbox_path("builder")
        path.write_bytes(b"damage" * 4_096)
        return "builder"

    environ = {"OUTBOX_SOCKET": str(tmp_path / "none.sock"), "HOME": str(tmp_path)}
    put_and_hand_over(environ, None, put, 0.0)


@pytest.mark.parametrize(("method", "is_known"), [("GET", True), ("POST", False)])
def test_whether_it_was_done_is_not_known(tmp_path, method, is_known):
    """The daemon had the request when it went: nobody says that nothing was changed."""

    def serve():
        connection, _ = listening.accept()
        with connection:
            connection.recv(65_536)

    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "s"))
        listening.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        with contextlib.closing(listening), pytest.raises(Unavailable) as caught:
            LocalClient(tmp_path / "s").value(method, "/v1/pause", {})
        thread.join()
    assert ("Nothing was changed" in str(caught.value)) is is_known
    assert ("is not known" in str(caught.value)) is not is_known
