"""`outbox` as a process of another user, who is in a group or not; its own home is a folder of its own."""

import os
import subprocess
import sys
from pathlib import Path

from command_line import environment
from processes import ROOT

UID, GID = 65534, 65534
IS_ROOT = os.geteuid() == 0
GROUP = str(GID if IS_ROOT else os.getgid())

# Everything is loaded before the user changes: the interpreter may lie where only root can go.
_PROGRAM = """
HEAVY = ("app", "server", "metrics", "patience", "guard", "problems", "requests", "events_in", "served")
import importlib, os, pkgutil, sys
import http.client, encodings.idna, concurrent.futures, select, uuid, difflib, secrets, datetime, locale
import outbox.cli, outbox.store, outbox.daemon.flush, outbox.cli.by_socket_view
for name in ("enqueue", "flush", "status", "list_events", "show", "dead_act", "hook_run", "parser"):
    importlib.import_module(f"outbox.cli.{name}")
for package in (outbox.store, outbox.capture, outbox.api):
    for found in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
        if found.name.rpartition(".")[2] not in HEAVY and ".mcp" not in found.name:
            importlib.import_module(found.name)
uid, gid, words = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
if uid:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
if words[0] == "--python":
    exec(words[1])
else:
    status = outbox.cli.main(words)
    sys.stdout.flush()
    os._exit(status)
"""


def home_of_another(folder):
    """A home of that user."""
    home = Path(folder)
    home.mkdir(parents=True, exist_ok=True)
    if IS_ROOT:
        os.chown(home, UID, GID)
    return home


def by_another(home, socket, *words, in_group=True, stdin=b"", **variables):
    """`outbox WORDS` by another user whose only pointer is OUTBOX_SOCKET."""
    env = environment(home)
    del env["OUTBOX_STATE_DIR"]
    env |= {"OUTBOX_SOCKET": str(socket), **variables}
    who = [str(UID), str(GID if in_group else GID - 1)] if IS_ROOT else ["0", "0"]
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, *who, *words],
        input=stdin,
        env=env,
        cwd=ROOT,
        capture_output=True,
        timeout=60,
        check=False,
    )
