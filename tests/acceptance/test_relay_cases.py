"""Every case of tests/cases/relay/http.json: a scripted relay process, the real engine, store and client.

Seconds are scaled: a back-off of one second is a twentieth here, and where a case waits for a limit of ours,
limit and delay are a tenth or less. Numbers of requests, order and fates are those of the case.
"""

import contextlib
import json
import socket
import time
from pathlib import Path

import pytest
from peers import fake_relay
from runs import (
    AGENT,
    TOKEN,
    arrived,
    deliveries,
    engine_running,
    hand_over,
    is_empty,
    left_in,
    letters_of,
    opened,
    serve_running,
    status_of,
    until,
)

CASES = {
    case["case"]: case
    for case in json.loads((Path(__file__).parents[1] / "cases" / "relay" / "http.json").read_text("utf-8"))[
        "cases"
    ]
}
WITHIN_S = 30
USUAL_LIMIT_S = 30
LIMITS_S = {"H20": 1, "H24": 0.5}  # 10 s and 5 s in the notes of these cases
SHORT_PAUSE_S = 0.5  # longer than the relay leaves an idle connection open


def scaled(case):
    """The case with its own delays made shorter, as the limits of LIMITS_S are."""
    steps = [dict(step) for step in case["steps"]]
    for step in steps:
        if step.get("delay_s") == 60:
            step["delay_s"] = 3
        if step.get("every_s") == 1.0:
            step["every_s"] = 0.1
    return {**case, "steps": steps, "refuse_first_s": case.get("refuse_first_s", 0) * 3 / 20}


def settings_of(name):
    """What the case says of our settings."""
    limit_s = LIMITS_S.get(name, USUAL_LIMIT_S)
    return {"delivery__max_attempts": CASES[name].get("attempts", 5), "relay__request_timeout_s": limit_s}


# What `check` asks for -------------------------------------------------------------------------------------


def faults(case, seen, state_dir):
    """Each way in which the run differs from the case's `check`; [] when it is right."""
    check = dict(case["check"])
    check.pop("within_s", None)
    status, letters = status_of(state_dir), letters_of(state_dir)
    numbers = {event["payload"]["n"] for event in case["events"]}
    answered = {delivery.n for delivery in seen if delivery.status in {200, 202, 204, 409}}
    kept = {payload["n"] for _, payload in letters} | {payload["n"] for payload in left_in(state_dir)}
    gaps = check.pop("gap_s", [])
    alike = check.pop("same", [])
    least, most = check.pop("requests", [0, len(seen)])
    check.pop("must_not", None)
    found = {
        "arrives": arrived(seen),
        "arrives_set": sorted({d.n for d in seen if d.status and 200 <= d.status < 300}),
        "pending": status.waiting,
        "set_aside": status.dead,
        "lost": len(numbers - answered - kept),
    }
    wrong = [f"{name}: {found[name]}, not {right}" for name, right in check.items() if found[name] != right]
    if not least <= len(seen) <= most:
        wrong.append(f"requests: {[d.n for d in seen]} are not {least} to {most}")
    wrong += [
        f"not the same: {group}" for group in alike if len({(seen[i].key, seen[i].body) for i in group}) > 1
    ]
    wrong += [f"gap: {gap}" for gap in gaps if seen[gap[1]].at_s - seen[gap[0]].at_s < gap[2]]
    return wrong + _unlike_keys(case, seen, status)


def _unlike_keys(case, seen, status):
    """What holds for all cases: one key and one text for an event, its own; every event is accounted for."""
    texts = {delivery.n: {(d.key, d.body) for d in seen if d.n == delivery.n} for delivery in seen}
    wrong = [f"event {n} went out as {len(forms)} texts" for n, forms in texts.items() if len(forms) > 1]
    if len({delivery.key for delivery in seen}) != len(texts):
        wrong.append("two events share a key")
    if status.delivered + status.dead + status.waiting != len(case["events"]):
        wrong.append(f"{status.delivered} delivered, {status.dead} dead, {status.waiting} waiting")
    return wrong


def play_in_process(case, relay, home):
    """Run the engine until the queue is empty."""
    name, pause_s = case["case"], case.get("pause_between_events_s", 0)
    state_dir = home / "state"
    within_s = case["check"].get("within_s", WITHIN_S)
    events = case["events"]
    hand_over(state_dir, events[:1] if pause_s else events)
    with engine_running(state_dir, relay.url, **settings_of(name)) as run:
        for event in events[1:] if pause_s else ():
            assert until(lambda: is_empty(state_dir), within_s)
            time.sleep(SHORT_PAUSE_S)  # the case is about a connection that has been idle for so long
            hand_over(state_dir, [event])
            run.wake()
        assert until(lambda: is_empty(state_dir), within_s), run.log
    return run


def play(name, home):
    """One case from its beginning to an empty queue: the deliveries, and the run with its log."""
    case = scaled(CASES[name])
    with fake_relay({key: case[key] for key in ("events", "steps", "refuse_first_s")}) as relay:
        run = play_in_process(case, relay, home)
        requests = relay.requests()
        seen = deliveries(relay, case["steps"], LIMITS_S.get(name, USUAL_LIMIT_S))
    assert all(request["headers"] for request in requests)
    assert faults(case, seen, home / "state") == []
    return run, requests, seen


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_as_its_check_says(name, tmp_path):
    """Arrivals, their order, numbers of requests, equal repeats, waits and fates: all that `check` names."""
    play(name, tmp_path)


# What the words of a case ask for beside its check ---------------------------------------------------------


@pytest.mark.parametrize("name", ["H09", "H10"])
def test_a_redirect_is_not_followed(name, tmp_path, monkeypatch):
    """No GET, no request without the event, and no name is looked up but the relay's own."""
    asked = []
    real = socket.getaddrinfo

    def noted(host, *rest, **options):
        asked.append(host)
        return real(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", noted)
    _, requests, _ = play(name, tmp_path)
    assert set(asked) <= {"127.0.0.1"}
    aside = ("/api/health", "/api/spec")
    assert [r for r in requests if r["method"] != "POST" and r["target"] not in aside] == []
    assert [r for r in requests if r["method"] == "POST" and "event 0" not in r["body"]] == []


@pytest.mark.parametrize(
    ("name", "number", "status", "said"),
    [("H11", 1, 413, "e413"), ("H12", 0, 400, "e400"), ("H16", 0, 500, "e500")],
)
def test_what_is_set_aside_is_kept_with_all_that_is_known(name, number, status, said, tmp_path):
    """Payload, kind, key, status and the relay's own reason stand with the dead letter."""
    _, _, seen = play(name, tmp_path)
    ((letter, payload),) = letters_of(tmp_path / "state")
    event = CASES[name]["events"][number]
    assert (letter.kind, letter.status) == ("session-message", status)
    assert said in letter.detail
    assert {**payload, **event["payload"]} == payload
    assert letter.key == next(delivery.key for delivery in seen if delivery.n == number)


def test_the_limit_of_attempts_is_exact(tmp_path):
    """H16: the fifth failure is the last, and the dead letter says so."""
    _, _, seen = play("H16", tmp_path)
    assert [delivery.n for delivery in seen] == [0, 0, 0, 0, 0, 1, 2]
    ((letter, _),) = letters_of(tmp_path / "state")
    assert (letter.attempts, letter.reason) == (5, "exhausted")


def test_a_refused_token_is_tried_by_one_event_only(tmp_path):
    """H15: the eight refusals all concern the first event, and the token goes along each time."""
    run, _, seen = play("H15", tmp_path)
    assert [delivery.n for delivery in seen] == [0] * 9 + [1, 2]
    assert {delivery.headers["authorization"] for delivery in seen} == {f"Bearer {TOKEN}"}
    assert [event for event, _ in run.log if event == "gate_closed"] == ["gate_closed"]


@pytest.mark.parametrize("name", ["H01", "H18", "H28"])
def test_the_relays_own_trouble_is_nobodys_attempt(name, tmp_path):
    """With a limit of one attempt: 408, 421, 423, 425, 502 and 503 put nothing among the dead letters."""
    case = CASES[name]
    steps = [step for step in case["steps"] if step["status"] != 599]  # a failure like any other
    with fake_relay({"events": case["events"], "steps": steps}) as relay:
        hand_over(tmp_path / "state", case["events"])
        with engine_running(tmp_path / "state", relay.url, delivery__max_attempts=1):
            assert until(lambda: is_empty(tmp_path / "state"))
    assert letters_of(tmp_path / "state") == []


# `outbox serve` as a process -------------------------------------------------------------------------------


@contextlib.contextmanager
def served(name, home, **settings):
    """A case played by a daemon of its own, to an empty queue: the daemon and the relay, both running."""
    case = scaled(CASES[name])
    with fake_relay({key: case[key] for key in ("events", "steps", "refuse_first_s")}) as relay:
        hand_over(home / "state", case["events"])
        with serve_running(home, relay.url, **settings_of(name), **settings) as daemon:
            assert until(lambda: is_empty(home / "state")), daemon.lines()
            yield daemon, relay
        seen = deliveries(relay, case["steps"], LIMITS_S.get(name, USUAL_LIMIT_S))
    assert faults(case, seen, home / "state") == []


@pytest.mark.parametrize("name", ["H03", "H15"])
def test_a_daemon_does_the_same(name, tmp_path):
    """`outbox serve` plays the case as the engine in a test does, and says nothing of a fault."""
    with served(name, tmp_path) as (daemon, _):
        pass
    assert not [line for line in daemon.lines() if "fault" in line or "Traceback" in line]


@pytest.mark.parametrize("log_format", ["lines", "json"])
def test_the_relays_words_forge_no_log_line(log_format, tmp_path):
    """H23: one clean line for the rejection, no control character, nothing that passes for another line."""
    with served("H23", tmp_path, daemon__log_format=log_format) as (daemon, _):
        pass
    raw = daemon.stderr.read_bytes()
    assert [byte for byte in raw if (byte < 0x20 and byte != 0x0A) or byte == 0x7F] == []
    lines = daemon.lines()
    assert len([line for line in lines if "dead_letter" in line]) == 1
    assert len([line for line in lines if "all delivered" in line and "outbox:" in line]) == 1
    assert not [line for line in lines if line.startswith("INFO")]
    if log_format == "json":
        assert all(isinstance(json.loads(line), dict) for line in lines)
    else:
        assert all(line[:4].isdigit() for line in lines)
    assert TOKEN.encode() not in raw


def test_an_error_page_of_20_mib_is_not_taken_into_memory(tmp_path):
    """H19: the daemon's memory does not grow by the page; what is kept of it, and the log, are cut short."""
    page = CASES["H19"]["steps"][0]
    page_kib = len(page["body_repeat"]["text"]) * page["body_repeat"]["times"] // 1024
    assert page_kib == 20 * 1024
    refused = {**page, "status": 422, "when": {"body_contains": "event 1"}}
    events = [{"kind": "session-message", "payload": {"n": n, "text": f"event {n}"}} for n in range(3)]
    state_dir = tmp_path / "state"
    script = {"events": events, "steps": [{**page, "when": {"body_contains": "event 0"}}, refused]}
    with fake_relay(script) as relay, serve_running(tmp_path, relay.url) as daemon:
        hand_over(state_dir, events[2:])  # so that what a delivery needs at all is in memory already
        assert until(lambda: is_empty(state_dir))
        before_kib = daemon.memory_kib()
        hand_over(state_dir, events[:2])
        assert until(lambda: is_empty(state_dir))
        assert daemon.memory_kib() - before_kib < page_kib // 4
    assert status_of(state_dir).delivered == 2
    ((letter, payload),) = letters_of(state_dir)
    assert (payload["n"], letter.reason, letter.status) == (1, "rejected", 422)
    assert 0 < len(letter.detail) <= 300
    with opened(state_dir) as box:
        (kept,) = box.one("SELECT answer FROM dead")
    assert 0 < len(kept) <= 2_048
    assert len(daemon.stderr.read_bytes()) < 20_000


def test_a_daemon_that_is_told_to_wait_stops_at_once(tmp_path):
    """A stop request ends a wait of an hour: exit 0, the event is kept, another agent was served."""
    steps = [
        {
            "status": 503,
            "headers": [["retry-after", "864000"]],
            "when": {"body_contains": "event 0"},
            "repeat": 9,
        }
    ]
    patient = {"kind": "session-message", "payload": {"n": 0, "text": "event 0"}}
    other = {"kind": "session-message", "payload": {"n": 1, "text": "event 1"}}
    with fake_relay({"events": [patient], "steps": steps}) as relay:
        hand_over(tmp_path / "state", [patient])
        with serve_running(tmp_path, relay.url, daemon__flush_timeout_s=600) as daemon:
            assert until(lambda: status_of(tmp_path / "state").blocked)
            hand_over(tmp_path / "state", [other], "other")
            assert until(lambda: is_empty(tmp_path / "state", "other"))
        assert (
            daemon.process.returncode == 0
        )  # within the 30 s of `serve_running`, though a flush may take 600 s
        assert [delivery.n for delivery in deliveries(relay, steps, USUAL_LIMIT_S)] == [0, 1]
    assert status_of(tmp_path / "state").waiting == 1
    assert status_of(tmp_path / "state").blocked.reason == "retry_after"
    assert AGENT in daemon.stderr.read_text("utf-8")
