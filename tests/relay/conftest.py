"""What the tests of the client share."""

import pytest

from relay_client import Origin, RelayClient


@pytest.fixture
def origin():
    """Where the requests of a test come from."""
    return Origin("builder", "5f0c9a52-6c1e-7b1a-8a53-0d2f4b6c8e10", seq=7, attempt=1)


@pytest.fixture
def connect():
    """Makes clients that know no proxy, and closes them."""
    clients = []

    def make(url, **options):
        client = RelayClient(url, **{"trust_env": False, **options})
        clients.append(client)
        return client

    yield make
    for client in clients:
        client.close()


@pytest.fixture
def post(origin):
    """Posts one event with what does not matter to the test filled in."""

    def send(client, body=b'{"n":0}', **options):
        given = {"token": "tok-abc12345", "key": "k-1", "origin": origin, **options}
        return client.post_event("/api/messages", body, **given)

    return send
