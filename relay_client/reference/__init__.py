"""The reference relay: a real HTTP server on a real SQLite file that keeps the relay contract.

It is the embedded default for newcomers (`outbox relay`), the peer of the integration tests, and an example
of how a relay keeps its promises: what it answered 2xx to is on disk, a key is stored once for ever, and the
text of each event is kept as it came. `relay_client/openapi.json` describes what it serves. Beside that,
under `/api/reference/`, it lets tests look and interfere (with a token it was started with, if any):

    GET    events?agent=A&after=N&limit=L   events as received, their text byte for byte
    GET    summary                          per agent: counts, repeats, and whether all came in order
    GET    archives?agentId=A               continuation archives, put together
    GET    requests?after=N&limit=L         the last 100,000 requests: status answered, headers, keys, hashes
    POST   revocations {"token": T}         revoke a token ("revoked": false takes it back)
    GET, POST, DELETE faults                rules that make it misbehave

A fault rule is `{"match": {…}, "times": N, "action": {…}}`; the first that fits and is not used up counts.
What may be matched: `method`, `path`, `agent`, `token`, `bodyContains`, `kind` (a message's, or one's in a
batch). What may be asked for:

    {"status": S, "headers": {…}, "body": …}    this answer; nothing is stored
    {"delayS": T}                               the answer comes so much later (the event is stored at once)
    {"close": true}                             the connection is dropped without an answer; nothing is stored
    {"hang": T}                                 the same, after a silence
    {"storeThenClose": true}                    stored, then dropped without an answer
    {"perItem": {"match": {…}, "status": S, "body": {…}}}  so for the items that fit, the others are stored
    {"wrongCount": true}                        all of a batch is stored, and answered with a result too few
    {"revoke": T}                               this token is revoked before the request is looked at
"""

from relay_client.reference.app import Relay
from relay_client.reference.server import serve
from relay_client.reference.store import Store, StoreUnusable

__all__ = ["Relay", "Store", "StoreUnusable", "serve"]
