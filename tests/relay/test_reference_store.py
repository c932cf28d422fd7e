"""The reference relay's file: group commits, failures that keep nothing, and a log that stays bounded."""

import asyncio

import apsw
import httpx
import pytest
from reference_calls import BATCH, MESSAGES, event

from relay_client.reference import Relay, Store
from relay_client.reference.ledger import Event, Verdict


@pytest.fixture
def store(tmp_path):
    """An open file."""
    store = Store(str(tmp_path / "relay.sqlite"))
    yield store
    store.close()


def kept(key):
    """An event to keep."""
    times = {"occurred_at_ms": 1, "received_at_ms": 2}
    place = {"path": MESSAGES, "agent": "builder", "stream": None, "seq": None, "attempt": None}
    return Event(key=key, **place, **times, body=b"{}", digest=key.encode())


def keys(store):
    """The keys in the file."""
    return [row["key"] for row in store.ledger.events(0, None, 1000, 2**20)]


def commits(ledger):
    """Counts the commits of a connection from now on."""
    counted = []
    ledger.db.set_commit_hook(lambda: bool(counted.append(1)))
    return counted


def test_what_arrives_together_shares_a_commit(store):
    """Several in one turn of the loop cost one flush, and each gets its own result, in order."""

    async def submit():
        count = commits(store._durable)
        works = [lambda ledger, key=key: ledger.keep(kept(key)) for key in ("a", "b", "a")]
        results = await asyncio.gather(*map(store.submit, works))
        return [result.verdict for result in results], len(count)

    assert asyncio.run(submit()) == ([Verdict.STORED, Verdict.STORED, Verdict.DUPLICATE], 1)
    assert keys(store) == ["a", "b"]


def test_a_failure_keeps_nothing_of_the_group(store):
    """All who share the transaction learn of it, and the next one works."""

    def fail(ledger):
        raise apsw.FullError("no room")

    async def submit():
        group = [store.submit(lambda ledger: ledger.keep(kept("lost"))), store.submit(fail)]
        results = await asyncio.gather(*group, return_exceptions=True)
        await store.submit(lambda ledger: ledger.keep(kept("after")))
        return [type(result) for result in results]

    assert asyncio.run(submit()) == [apsw.FullError, apsw.FullError]
    assert keys(store) == ["after"]


def test_commits_that_are_answered_are_flushed(store):
    """FULL where somebody waits; the log alone goes without a flush."""
    assert store._durable.db.pragma("synchronous") == 2
    assert store._quick.db.pragma("synchronous") == 1
    assert store.ledger.db.pragma("journal_mode") == "wal"

    async def note():
        written, flushed = asyncio.Event(), commits(store._durable)
        store._quick.db.set_commit_hook(lambda: bool(written.set()))
        store.note(lambda ledger: ledger.log("{}", keep_last=10))
        await written.wait()
        return flushed

    assert asyncio.run(note()) == []
    assert len(store.ledger.requests(0, 10)) == 1


def test_the_log_keeps_its_last_entries(store):
    """It is cut every thousand entries, so that the file stays bounded."""

    async def fill():
        for _ in range(3000):
            store.note(lambda ledger: ledger.log("{}", keep_last=100))
        store.commit()

    asyncio.run(fill())
    assert [row["n"] for row in store.ledger.requests(0, 10_000)] == list(range(2901, 3001))


def test_a_full_disk_is_a_503_and_heals_by_itself(store):
    """Nothing of it is stored, the client is told so, and with room again the same requests are taken."""
    pages = store._durable.db.pragma("page_count")
    batch = {"messages": [event(f"b-{number}", body="x" * 5000) for number in range(20)]}

    async def exchange():
        transport = httpx.ASGITransport(Relay(store))
        async with httpx.AsyncClient(transport=transport, base_url="http://relay.test") as http:
            store._durable.db.pragma("max_page_count", pages)
            full = [await http.post(BATCH, json=batch), await http.get("/api/health")]
            store._durable.db.pragma("max_page_count", 10_000)
            return [*full, await http.post(BATCH, json=batch)]

    full, health, taken = asyncio.run(exchange())
    assert (full.status_code, full.json()["code"]) == (503, "storage")
    assert (health.status_code, taken.status_code) == (200, 200)
    assert len(keys(store)) == 20


def test_two_events_of_different_agents_share_no_key(store):
    """A key belongs to one event of the account, whatever the agent."""

    async def submit():
        first = await store.submit(lambda ledger: ledger.keep(kept("one")))
        other = Event(**{name: getattr(kept("one"), name) for name in Event.__slots__} | {"digest": b"other"})
        return first, await store.submit(lambda ledger: ledger.keep(other))

    first, second = asyncio.run(submit())
    assert (first.verdict, second.verdict) == (Verdict.STORED, Verdict.KEY_REUSED)
    assert second.n == first.n
