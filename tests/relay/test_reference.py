"""The reference relay as a process, over real HTTP: what it keeps, answers, and remembers."""

import concurrent.futures
import json
import signal
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import apsw
import httpx
import pytest
from reference_calls import (
    ARCHIVES,
    BATCH,
    INSIGHTS,
    MESSAGES,
    MINT,
    TOKEN,
    chunk,
    client,
    event,
    origin,
    post_text,
)

from relay_client.reference.process import RelayProcess


@pytest.fixture(scope="module")
def relay(tmp_path_factory):
    """The relay that the tests of this file share; each has agents of its own."""
    db = tmp_path_factory.mktemp("relay") / "relay.sqlite"
    with RelayProcess(db, [TOKEN, "second-token"], options=["--path", "/api/reviews"]) as process:
        yield process


@pytest.fixture
def http(relay):
    """A connection with the host's token."""
    with client(relay.url) as http:
        yield http


# What is kept


def test_a_message_is_kept_with_where_it_comes_from(relay, http):
    """One event: its text, its origin decoded, its times, and an id in the answer."""
    agent = "rev iewer/ü%"
    headers = {**origin("rev%20iewer/%C3%BC%25", seq=7, attempt=2), "Idempotency-Key": '"m-1"'}
    answer = http.post(MESSAGES, json=event("m-1"), headers=headers)
    [kept] = relay.events(agent)
    assert answer.status_code == 201
    assert answer.json() == {"id": str(kept["n"])}
    assert (kept["seq"], kept["attempt"], kept["path"]) == (7, 2, MESSAGES)
    assert (kept["key"], kept["occurredAt"]) == ("m-1", 1790000000123)
    assert kept["receivedAt"] > 0


@pytest.mark.parametrize(
    ("name", "start"),
    [
        ("numbers", '{"n":1e400,"digits":' + "9" * 5000 + ","),
        ("strings", '{"half":"\\ud83d","raw":"\u2028 é","a":1,"a":2,'),
        ("space", '{ "spaced" :\t[1,\r\n 2 ] , '),
        ("deep", '{"deep":' + "[" * 500 + "]" * 500 + ","),
    ],
)
def test_text_is_kept_byte_for_byte(relay, http, name, start):
    """Whatever is inside an event's JSON comes back as it was written, sent singly or in a batch."""
    single, batched = (f'{start}"occurredAt" :0, "idempotencyKey":"{name}-{n}" }}' for n in (1, 2))
    assert post_text(http, MESSAGES, f"\n{single} ", **origin(name)).status_code == 201
    batch = '{"x": [1], "messages" : [ ' + batched + " ]}"
    assert post_text(http, BATCH, batch, **origin(name, seq=2)).status_code == 200
    assert [kept["body"] for kept in relay.events(name)] == [single, batched]


def test_insights_and_custom_kinds_are_kept_under_their_path(relay, http):
    """A path named at the start takes events as an insight's does."""
    for number, path in enumerate((INSIGHTS, "/api/reviews")):
        assert http.post(path, json=event(f"kinds-{number}"), headers=origin("kinds")).status_code == 201
    assert [kept["path"] for kept in relay.events("kinds")] == [INSIGHTS, "/api/reviews"]


def test_no_path_but_those_named_takes_events(http):
    """A path nobody named is a 404 with a code, a wrong method a 405 that says which is right."""
    missing = http.post("/api/elsewhere", json=event("elsewhere"))
    wrong = http.get(MESSAGES)
    assert (missing.status_code, missing.json()["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.headers["allow"]) == (405, "POST")


def test_the_file_is_private(relay, tmp_path):
    """The file and its companions are readable by their owner only [P12]."""
    with RelayProcess(tmp_path / "relay.sqlite") as own, client(own.url, token=None) as http:
        assert http.post(MESSAGES, json=event("private")).status_code == 201
        modes = {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert modes == {0o600}


# Keys


def test_a_known_key_is_a_duplicate_wherever_it_comes_from(relay, http):
    """The same event again, from another agent and by the batch path, is stored once and answered 409."""
    text = json.dumps(event("dup-1"))
    first = post_text(http, MESSAGES, text, **origin("dup"))
    again = post_text(http, MESSAGES, text, **origin("dup-other"))
    batch = post_text(http, BATCH, f'{{"messages":[{text}]}}', **origin("dup"))
    assert (first.status_code, again.status_code, batch.status_code) == (201, 409, 207)
    assert again.json()["code"] == "duplicate"
    assert again.headers["content-type"] == "application/problem+json"
    assert batch.json()["results"][0]["error"]["code"] == "duplicate"
    assert relay.summary()["dup"]["duplicates"] == 2
    assert "dup-other" not in relay.summary()


@pytest.mark.parametrize(("path", "fields"), [(MESSAGES, {"n": 1}), (INSIGHTS, {})], ids=["text", "path"])
def test_a_key_used_for_another_event_is_refused(relay, http, path, fields):
    """Another text, or the same text at another path, under a known key is `key_reused`, and not kept."""
    key = f"reused-{path}"
    assert http.post(MESSAGES, json=event(key), headers=origin(key)).status_code == 201
    answer = http.post(path, json=event(key, **fields), headers=origin(key))
    assert (answer.status_code, answer.json()["code"]) == (409, "key_reused")
    assert len(relay.events(key)) == 1


@pytest.mark.parametrize("header", ['"header-key"', "header-key"])
def test_the_key_in_the_header_agrees_with_the_body(relay, http, header):
    """Quoted or bare it is the body's key; another one is refused, and nothing kept."""
    body = event("header-key")
    assert http.post(MESSAGES, json=body, headers={"Idempotency-Key": header}).status_code in (201, 409)
    other = http.post(MESSAGES, json=event("other"), headers={"Idempotency-Key": header})
    assert (other.status_code, other.json()["code"]) == (422, "validation_failed")
    assert "other" not in [kept["key"] for kept in relay.events()]


# What is refused


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ('{"occurredAt":0,"idempotencyKey":"x"', 400, "malformed"),
        ('{"occurredAt":NaN,"idempotencyKey":"x"}', 400, "malformed"),
        (b'{"occurredAt":0,"idempotencyKey":"x","t":"\xff"}', 400, "malformed"),
        ('\ufeff{"occurredAt":0,"idempotencyKey":"x"}', 400, "malformed"),
        ('{"occurredAt":0,"idempotencyKey":"x"} {}', 400, "malformed"),
        ("[" * 100_000, 400, "malformed"),
        ("", 400, "malformed"),
        ("[]", 422, "validation_failed"),
        ('{"idempotencyKey":"x"}', 422, "validation_failed"),
        ('{"occurredAt":true,"idempotencyKey":"x"}', 422, "validation_failed"),
        ('{"occurredAt":9223372036854775808,"idempotencyKey":"x"}', 422, "validation_failed"),
        ('{"occurredAt":0}', 422, "validation_failed"),
        ('{"occurredAt":0,"idempotencyKey":""}', 422, "validation_failed"),
        ('{"occurredAt":0,"idempotencyKey":"caf\\u00e9"}', 422, "validation_failed"),
    ],
)
def test_a_body_that_is_no_event_is_refused(http, text, status, code):
    """What is no JSON is `malformed`; JSON that lacks what the contract wants is `validation_failed`."""
    answer = post_text(http, MESSAGES, text)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


def test_headers_that_are_no_numbers_are_refused(http):
    """A sequence number or an attempt that is no whole number is a mistake of the sender, and named."""
    answer = http.post(MESSAGES, json=event("headers"), headers={"Outbox-Seq": "seven"})
    assert answer.status_code == 422
    assert "Outbox-Seq" in answer.json()["detail"]


def test_a_body_above_the_limit_is_refused_and_the_connection_lives(relay, http):
    """17 MiB are answered 413 without being kept in memory, and the next request works."""
    answer = http.post(MESSAGES, json=event("big", body="x" * (17 * 2**20)))
    assert (answer.status_code, answer.json()["code"]) == (413, "too_large")
    large = http.post(MESSAGES, json=event("large", body="x" * (15 * 2**20)), headers=origin("large"))
    assert large.status_code == 201
    assert len(relay.events("large")) == 1


def test_another_media_type_is_refused(http):
    """A form is not JSON, even where its bytes are."""
    answer = http.post(MESSAGES, content=json.dumps(event("form")), headers={"Content-Type": "text/plain"})
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")


def test_a_page_of_another_origin_is_refused(http):
    """A browser that another site's page makes post here is turned away."""
    answer = http.post(MESSAGES, json=event("page"), headers={"Origin": "https://page.example"})
    assert (answer.status_code, answer.json()["code"]) == (403, "foreign_origin")


# Batches


def test_a_batch_has_a_result_for_each_message_in_order(relay, http):
    """Good messages are kept in their order; a bad one between them and a repeat get their own answers."""
    http.post(MESSAGES, json=event("batch-0"), headers=origin("batch"))
    messages = [event("batch-1"), {"no": "key"}, event("batch-0"), event("batch-2"), event("batch-1")]
    answer = http.post(BATCH, json={"messages": messages}, headers=origin("batch", seq=2))
    assert answer.status_code == 207
    assert [result["status"] for result in answer.json()["results"]] == [201, 422, 409, 201, 409]
    kept = relay.events("batch")
    assert [(row["key"], row["seq"], row["item"]) for row in kept] == [
        ("batch-0", 1, 0),
        ("batch-1", 2, 0),
        ("batch-2", 2, 3),
    ]


def test_a_batch_that_is_stored_whole_is_answered_200(http):
    """200 says that nothing in it needs a second look."""
    answer = http.post(BATCH, json={"messages": [event("whole-1"), event("whole-2")]})
    assert answer.status_code == 200
    assert [result["status"] for result in answer.json()["results"]] == [201, 201]


def test_a_batch_above_the_limits_is_refused_whole(relay, http):
    """The limits are those of the document, and nothing of such a batch is kept."""
    limits = http.get("/api/spec").json()["x-outbox"]["batch"]
    many = http.post(BATCH, json={"messages": [event(f"many-{n}") for n in range(limits["maxItems"] + 1)]})
    heavy = http.post(BATCH, json={"messages": [event("heavy", body="x" * limits["maxBytes"])]})
    assert [(answer.status_code, answer.json()["code"]) for answer in (many, heavy)] == [
        (413, "too_large")
    ] * 2
    assert not {"many-0", "heavy"} & {kept["key"] for kept in relay.events()}


@pytest.mark.parametrize("body", ["[]", '{"messages":{}}', "{}", '{"messages":null}'])
def test_a_batch_without_a_list_is_refused(http, body):
    """There is nothing to have results for."""
    answer = post_text(http, BATCH, body)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")


# Continuation archives


def test_an_archive_is_put_together_from_its_chunks(relay, http):
    """Chunk 0 gets a generation, the others carry it; an escaped pair cut in two is whole again."""
    first = post_text(http, ARCHIVES, json.dumps(chunk("arch", 0, 2, "one \ud83d")))
    generation = first.json()["archive"]["generation"]
    assert (first.status_code, generation) == (201, 1)
    second = post_text(http, ARCHIVES, json.dumps(chunk("arch", 1, 2, "\ude00 two", generation=generation)))
    assert second.json()["archive"] == {"generation": 1}
    [archive] = relay.archives("arch")
    assert (archive["complete"], archive["text"]) == (True, "one \U0001f600 two")


def test_a_repeated_chunk_names_its_generation(http):
    """The 409 for a known key says what the first answer said, so that a lost one costs nothing."""
    body = chunk("arch-again", 0, 3, "one")
    first, again = http.post(ARCHIVES, json=body), http.post(ARCHIVES, json=body)
    assert (again.status_code, again.json()["code"]) == (409, "duplicate")
    assert again.json()["archive"] == first.json()["archive"]


def test_each_new_archive_of_an_agent_is_a_new_generation(http):
    """Generations count up for each agent and segment."""
    generations = [
        http.post(ARCHIVES, json={**chunk("gens", 0, 1, "t"), "idempotencyKey": f"gens-{n}"})
        for n in range(3)
    ]
    assert [answer.json()["archive"]["generation"] for answer in generations] == [1, 2, 3]


@pytest.mark.parametrize(
    ("fields", "status", "code"),
    [
        ({"generation": None}, 422, "validation_failed"),
        ({"generation": 99}, 422, "validation_failed"),
        ({"chunkIndex": 5}, 422, "validation_failed"),
        ({"totalChunks": 4}, 409, "chunk_conflict"),
        ({"chunkIndex": 0}, 409, "chunk_conflict"),
        ({"text": 1}, 422, "validation_failed"),
        ({"agentId": "\ud83d"}, 422, "validation_failed"),
    ],
    ids=lambda value: json.dumps(value) if isinstance(value, dict) else None,
)
def test_a_chunk_that_fits_nowhere_is_refused(http, fields, status, code):
    """Without its generation, outside its archive, or in the place of another chunk."""
    agent = f"odd-{'-'.join(fields)}-{'-'.join(map(ascii, fields.values()))}"
    http.post(ARCHIVES, json=chunk(agent, 0, 3, "one"))
    body = json.dumps({**chunk(agent, 1, 3, "two", generation=1), **fields})
    answer = post_text(http, ARCHIVES, body)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


# Tokens


@pytest.mark.parametrize("path", [MESSAGES, BATCH, INSIGHTS, ARCHIVES, "/api/mcp", MINT])
def test_no_token_or_an_unknown_one_is_turned_away(relay, path):
    """401 with the challenge of RFC 6750, which names an error only where a token was shown."""
    with client(relay.url, token=None) as http:
        missing = http.post(path, json=event("nobody"))
        unknown = http.post(path, json=event("nobody"), headers={"Authorization": "Bearer guess"})
    assert [answer.status_code for answer in (missing, unknown)] == [401, 401]
    assert "error=" not in missing.headers["www-authenticate"]
    assert 'error="invalid_token"' in unknown.headers["www-authenticate"]
    assert unknown.json()["code"] == "invalid_token"


def test_health_and_the_document_need_no_token(relay):
    """Whoever asks may know that it works, and how to speak to it."""
    with client(relay.url, token=None) as http:
        assert http.get("/api/health").json() == {"status": "ok"}
        assert http.get("/api/spec").json()["x-outbox"]["mcpIdempotency"] is True
        assert http.get("/api/reference/events").status_code == 401


def test_a_minted_token_delivers_but_mints_no_other(relay, http):
    """The bootstrap token is the only one that mints."""
    answer = http.post(MINT, json={"agentId": "builder", "instanceId": "i-1"})
    assert answer.status_code == 201
    with client(relay.url, token=answer.json()["token"]) as minted:
        assert minted.post(MESSAGES, json=event("minted")).status_code == 201
        refused = minted.post(MINT, json={"agentId": "builder", "instanceId": "i-2"})
    assert (refused.status_code, refused.json()["code"]) == (403, "insufficient_scope")


def test_a_minted_token_expires(tmp_path):
    """After the time it was told, and with an answer that says so."""
    own = RelayProcess(tmp_path / "r.sqlite", [TOKEN], options=["--runtime-token-ttl-s", "0"])
    with own, client(own.url) as http:
        minted = http.post(MINT, json={"agentId": "builder", "instanceId": "i-1"}).json()
        answer = http.post(
            MESSAGES, json=event("expired"), headers={"Authorization": f"Bearer {minted['token']}"}
        )
    assert answer.status_code == 401
    assert "expired" in answer.json()["detail"]


@pytest.mark.parametrize("body", [{}, {"agentId": "a"}, {"agentId": "", "instanceId": "i"}, {"agentId": 1}])
def test_nothing_is_minted_for_nobody(http, body):
    """An agent and an instance are needed."""
    answer = http.post(MINT, json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "validation_failed")


def test_a_revoked_token_stays_revoked_until_that_is_taken_back(tmp_path):
    """Over a restart too; reading back goes on, so that a test can look."""
    relay = RelayProcess(tmp_path / "r.sqlite", [TOKEN])
    with relay:
        relay.revoke(TOKEN)
        relay.kill()
        relay.start()
        with client(relay.url) as http:
            refused = http.post(MESSAGES, json=event("revoked"))
            relay.revoke(TOKEN, revoked=False)
            taken = http.post(MESSAGES, json=event("revoked"))
        assert (refused.status_code, taken.status_code) == (401, 201)
        assert [kept["key"] for kept in relay.events()] == ["revoked"]


def test_a_relay_without_tokens_asks_for_none(tmp_path):
    """The demo's relay takes whoever comes; a token shown is no harm."""
    with RelayProcess(tmp_path / "r.sqlite") as own:
        for key, token in (("free-1", None), ("free-2", "whatever")):
            with client(own.url, token=token) as http:
                assert http.post(MESSAGES, json=event(key)).status_code == 201


# Reading back


def test_the_summary_tells_order_by_seq_and_place(relay, http):
    """In order: seq never goes back inside a stream; a stream of its own starts anew."""
    for number, seq in enumerate((1, 2, 2, 5)):
        http.post(MESSAGES, json=event(f"ordered-{number}"), headers=origin("ordered", seq))
    http.post(MESSAGES, json=event("ordered-new"), headers=origin("ordered", 1, stream="another"))
    for number, seq in enumerate((2, 1)):
        http.post(MESSAGES, json=event(f"mixed-{number}"), headers=origin("mixed", seq))
    summary = relay.summary()
    assert summary["ordered"] == {
        "agent": "ordered",
        "count": 5,
        "distinctKeys": 5,
        "duplicates": 0,
        "firstSeq": 1,
        "lastSeq": 5,
        "inOrder": True,
    }
    assert summary["mixed"]["inOrder"] is False


def test_events_are_read_in_pages(http):
    """`after` and `limit` walk through everything once."""
    for number in range(5):
        http.post(MESSAGES, json=event(f"page-{number}"), headers=origin("pages", number))
    keys, after = [], 0
    while True:
        query = {"agent": "pages", "limit": 2, "after": after}
        page = http.get("/api/reference/events", params=query).json()
        if not page["events"]:
            break
        assert len(page["events"]) <= 2
        keys += [kept["key"] for kept in page["events"]]
        after = page["next"]
    assert keys == [f"page-{number}" for number in range(5)]
    assert http.get("/api/reference/events", params={"after": "x"}).status_code == 422


def test_every_request_is_in_the_log(relay, http):
    """Refused ones too: status, keys, a fingerprint of the token, and a hash to tell equal bodies by."""
    headers = {**origin("logged", 3, 2), "Idempotency-Key": '"logged-1"', "traceparent": "00-a-b-01"}
    for _ in range(2):
        http.post(MESSAGES, json=event("logged-1"), headers=headers)
    http.post(MESSAGES, json=event("logged-2"), headers={**headers, "Authorization": "Bearer wrong"})
    log = [entry for entry in relay.requests() if entry["agent"] == "logged"]
    assert [entry["status"] for entry in log] == [201, 409, 401]
    assert [entry["keys"] for entry in log] == [["logged-1"], ["logged-1"], ["logged-2"]]
    assert log[0]["bodySha256"] == log[1]["bodySha256"] != log[2]["bodySha256"]
    assert log[0]["token"] == log[1]["token"] != log[2]["token"]
    assert log[0]["headers"]["traceparent"] == "00-a-b-01"
    assert (log[0]["seq"], log[0]["attempt"]) == ("3", "2")
    assert TOKEN not in json.dumps(log)


# The process


def test_what_was_answered_survives_kill_9(tmp_path):
    """Every 2xx is there after the kill, in its order, and its key is known [P1 of a relay]."""
    relay = RelayProcess(tmp_path / "relay.sqlite", [TOKEN])
    stored = {worker: [] for worker in range(4)}

    def deliver(worker):
        with client(relay.url) as http:
            for number in range(10_000):
                key = f"{worker}-{number}"
                try:
                    answer = http.post(MESSAGES, json=event(key), headers=origin(f"w{worker}", number))
                except httpx.TransportError:
                    return
                assert answer.status_code == 201
                stored[worker].append(key)
                if number == 25:
                    enough.release()

    enough = threading.Semaphore(0)
    with relay, concurrent.futures.ThreadPoolExecutor(4) as pool:
        workers = [pool.submit(deliver, worker) for worker in stored]
        for _ in stored:
            assert enough.acquire(timeout=60)
        relay.kill()
        for worker in workers:
            worker.result()
        relay.start()
        for worker, keys in stored.items():
            kept = [row["key"] for row in relay.events(f"w{worker}")]
            assert kept[: len(keys)] == keys
            assert len(kept) - len(keys) in (0, 1)
        assert all(agent["inOrder"] for agent in relay.summary().values())
        with client(relay.url) as http:
            again = http.post(MESSAGES, json=event(stored[0][0]), headers=origin("w0", 0))
        assert (again.status_code, again.json()["code"]) == (409, "duplicate")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_stops_cleanly(tmp_path, number):
    """Exit 0 and nothing said, with a connection open and a request hanging; the file is left whole."""
    db = tmp_path / "relay.sqlite"
    command = [sys.executable, "-m", "relay_client.reference", "--port", "0", "--db", str(db)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().split()[1]
            with client(url, token=None) as http, client(url, token=None) as idle:
                idle.post(MESSAGES, json=event("stop"))
                rule = {"match": {"bodyContains": "hang"}, "action": {"hang": 600}}
                idle.post("/api/reference/faults", json=rule)
                hung = threading.Thread(target=post_until_cut, args=(http,))
                hung.start()
                while idle.get("/api/reference/faults").json()["rules"][0]["used"] == 0:
                    pass
                process.send_signal(number)
                assert process.wait(30) == 0
                hung.join(30)
        finally:
            process.kill()
        assert process.stderr.read() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["relay.sqlite"]


def post_until_cut(http):
    """Send a request that never gets an answer."""
    with pytest.raises(httpx.TransportError):
        http.post(MESSAGES, json=event("hang"))


def run_reference(*arguments):
    """Run the command to its end."""
    command = [sys.executable, "-m", "relay_client.reference", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_taken_port_is_said_plainly(tmp_path):
    """Exit 69, one line that tells what to do, and no file made."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = run_reference("--port", port, "--db", str(tmp_path / "r.sqlite"))
    assert done.returncode == 69
    assert done.stderr.count("\n") == 1
    assert "--port" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("sort", ["another program's", "newer", "no database"])
def test_a_file_that_is_not_its_own_is_left_alone(tmp_path, sort):
    """Exit 5, and not one byte of the file changed."""
    db = tmp_path / "r.sqlite"
    if sort == "no database":
        db.write_bytes(b"This is a letter, and longer than the hundred bytes of a header. " * 10)
    else:
        other = apsw.Connection(str(db))
        other.execute("CREATE TABLE t (x)")
        if sort == "newer":
            other.pragma("application_id", 0x524C5931)
            other.pragma("user_version", 999)
        other.close()
    before = db.read_bytes()
    done = run_reference("--port", "0", "--db", str(db))
    assert (done.returncode, done.stdout) == (5, "")
    assert str(db) in done.stderr
    assert db.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["r.sqlite"]


def test_it_binds_loopback_unless_told(relay):
    """Nobody outside the machine reaches a relay that was started without thinking."""
    assert relay.url.startswith("http://127.0.0.1:")
    assert "default: loopback" in run_reference("--help").stdout


def test_tokens_come_from_files(tmp_path):
    """One a line; a process list shows none of them."""
    tokens = Path(tmp_path / "tokens")
    tokens.write_text("from-file-1\nfrom-file-2\n")
    own = RelayProcess(tmp_path / "r.sqlite", options=["--token-file", str(tokens)])
    with own:
        for number in (1, 2):
            with client(own.url, token=f"from-file-{number}") as http:
                assert http.post(MESSAGES, json=event(f"file-{number}")).status_code == 201
        with client(own.url, token=None) as http:
            assert http.post(MESSAGES, json=event("file-none")).status_code == 401
