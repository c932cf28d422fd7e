"""A token never reaches a log, a file or a dead letter, however a relay throws it back ([P12])."""

from __future__ import annotations

import json
import os
import subprocess
import sys

from peers import fake_relay

from outbox import Outbox

TOKEN = "tok-very-secret-7741"


def test_an_echoed_token_is_written_nowhere(tmp_path):
    """A relay that repeats the token in header and body: no file, log line or status holds it afterwards."""
    secret = tmp_path / "token"
    secret.write_text(TOKEN + "\n")
    state = tmp_path / "state"
    with Outbox.open("builder", state_dir=state) as box:
        box.enqueue("session-message", {"from": "builder", "body": "x", "n": 0})
    step = {
        "status": 422,
        "headers": [["content-type", "application/json"], ["www-authenticate", f'Bearer error="{TOKEN}"']],
        "body": json.dumps({"error": {"code": "validation_failed", "message": f"no good: {TOKEN}"}}),
        "repeat": "forever",
    }
    with fake_relay({"steps": [step], "events": []}) as relay:
        environ = {**os.environ, "OUTBOX_STATE_DIR": str(state), "OUTBOX_DAEMON_LOG_LEVEL": "debug"}
        command = [sys.executable, "-m", "outbox", "serve", "--relay", relay.url, "--token-file", str(secret)]
        daemon = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True)
        told = []
        for line in daemon.stderr:
            told.append(line)
            if "dead_letter" in line:
                break
        listed = subprocess.run(
            [sys.executable, "-m", "outbox", "dead", "list", "--json"],
            env=environ, capture_output=True, text=True, check=True,
        )  # fmt: skip
        daemon.terminate()
        told.append(daemon.communicate(timeout=20)[1])
        headers = [field for request in relay.requests() for field in request["headers"]]
        assert ["Authorization", f"Bearer {TOKEN}"] in headers
    written = "".join(told) + listed.stdout + listed.stderr
    written += "".join(path.read_bytes().decode("latin-1") for path in state.rglob("*") if path.is_file())
    assert "validation_failed" in written or "no good" in written
    assert TOKEN not in written
