"""A stream of lines, driven chunk by chunk: what shares a commit, and when an answer leaves."""

import asyncio
import json
from types import SimpleNamespace

import pytest

from outbox.api.events_in import LineAnswers
from outbox.api.meter import Meter
from outbox.errors import StoreFull
from outbox.event import Limits
from outbox.store.enqueue import Receipt


class Store:
    """Counts commits, and numbers what it is given."""

    def __init__(self, refuses_from=None):
        self.commits = []
        self.limits, self.meter = Limits(), Meter()
        self._refuses_from = refuses_from

    def enqueue(self, agent, drafts):
        """One commit."""
        if self._refuses_from is not None and len(self.commits) >= self._refuses_from:
            raise StoreFull("Nothing fits. Not taken.")
        first = sum(self.commits) + 1
        self.commits.append(len(drafts))
        return [
            Receipt(first + at, f"k{first + at}", duplicate=False, state="waiting")
            for at in range(len(drafts))
        ]


def line(number):
    """One event."""
    return json.dumps({"kind": "insight", "payload": number}).encode() + b"\n"


def exchange(store, chunks):
    """What is sent, with the number of commits at that moment, for a request of these chunks."""
    waiting, sent = list(chunks), []

    async def receive():
        if not waiting:
            return {"type": "http.disconnect"}
        body = waiting.pop(0)
        return {"type": "http.request", "body": body, "more_body": bool(waiting)}

    async def send(message):
        sent.append((len(store.commits), message.get("body", b"")))

    asyncio.run(LineAnswers(store, "builder")(SimpleNamespace(), receive, send))
    return sent


def told(sent):
    """The results."""
    return [json.loads(text) for text in b"".join(body for _, body in sent).splitlines()]


def test_lines_of_one_chunk_share_a_commit():
    """What has gathered while the last commit ran goes into the next one together."""
    store = Store()
    sent = exchange(store, [line(0), b"".join(map(line, range(300))), line(9)])
    assert store.commits == [1, 300, 1]
    assert [one["seq"] for one in told(sent)] == list(range(1, 303))


def test_an_answer_leaves_after_its_commit():
    """Never before: an answer is a promise."""
    sent = exchange(store := Store(), [line(0), line(1)])
    assert [(commits, len(body.splitlines())) for commits, body in sent if body] == [(1, 1), (2, 1)]
    assert store.commits == [1, 1]


@pytest.mark.parametrize("cut", range(1, len(line(1)) + 1))
def test_a_line_cut_anywhere(cut):
    """Chunks end where they like."""
    text = line(1) + line(2)
    assert [one["line"] for one in told(exchange(Store(), [text[:cut], text[cut:]]))] == [1, 2]


def test_a_last_line_needs_no_end():
    """The end of the request ends it."""
    assert [one["line"] for one in told(exchange(Store(), [line(1), line(2).rstrip()]))] == [1, 2]


def test_nothing_is_taken_behind_a_store_that_refuses():
    """The lines at hand get the reason, and the answer ends; the refusals are counted."""
    store = Store(refuses_from=1)
    results = told(exchange(store, [line(1), line(2) + line(3), line(4)]))
    assert [one.get("seq", one.get("error", {}).get("code")) for one in results] == [1, "full", "full"]
    assert store.meter.read().refused == {"full": 2}
