"""The command `outbox`, in this process or as one of its own, away from the settings of this machine."""

import os
import subprocess
import sys

from outbox.cli import main
from outbox.settings import KEYS

OTHER_VARIABLES = ("OUTBOX_CONFIG", "OUTBOX_AGENT", "STATE_DIRECTORY", "XDG_STATE_HOME", "XDG_CONFIG_HOME")


def environment(home, **variables):
    """An environment with nothing of ours in it but `variables`; the state directory is HOME's own."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("OUTBOX_", "AGENT_RELAY_")) and name not in OTHER_VARIABLES
    }
    return kept | {"HOME": str(home), "OUTBOX_STATE_DIR": str(home / "state"), "TZ": "UTC", **variables}


def in_process(monkeypatch, home):
    """Make this process see such an environment, and a free disk of any size."""
    for name in {variable for key in KEYS.values() for variable in (key.variable, *key.aliases)}:
        monkeypatch.delenv(name, raising=False)
    for name in OTHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("OUTBOX_STATE_DIR", str(home / "state"))


def command(capsys, *words):
    """`main(words)`: the exit status, and what stands on stdout and stderr."""
    capsys.readouterr()
    status = main(words)
    told = capsys.readouterr()
    return status, told.out, told.err


def process(env, *words, stdin=b"", timeout=60):
    """`python -m outbox` with these words, to its end."""
    return subprocess.run(
        [sys.executable, "-m", "outbox", *words],
        input=stdin,
        env=env,
        capture_output=True,
        timeout=timeout,
        check=False,
    )
