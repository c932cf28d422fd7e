"""What the demo plays on: a folder of its own, the reference relay and the daemon, each a process of its own.

Both end with the `with` block, by their process ids, whatever happens inside it.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Self

from outbox.errors import Unavailable
from outbox.store.directory import StateDirectory
from outbox.store.place import running_daemon
from relay_client.reference.process import RelayProcess

_READY_WITHIN_S = 30.0
_STOP_WITHIN_S = 20.0
_LOOK_EVERY_S = 0.05
_LAST_LOG_LINES = 5

# The peer is on this host, whatever proxies there are; nobody waits for a flush to a relay that is down.
_CONFIG = "[relay]\ntrust_env = false\n\n[daemon]\nflush_timeout_s = 1\n"


class Stage:
    """`with Stage() as stage:` has both processes running. Raises Unavailable when one does not start.

    The folder is removed at the end unless `keep_folder` is set by then.
    """

    def __init__(self) -> None:
        """Make the folder; nothing runs yet."""
        self.folder = Path(tempfile.mkdtemp(prefix="outbox-demo-"))
        self.keep_folder = False
        self.state_dir = self.folder / "state"
        self.token_file = self.folder / "token"
        self.relay_db = self.folder / "relay.sqlite"
        token = secrets.token_urlsafe(24)
        self.token_file.write_text(token + "\n", encoding="utf-8")
        self.token_file.chmod(0o600)
        self.relay = RelayProcess(self.relay_db, [token])
        self.daemon = DaemonProcess(self.folder)

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as on_failure:
            on_failure.callback(self.__exit__)
            self.start_relay()
            self.daemon.start(self.relay.url, self.token_file, self.state_dir)
            on_failure.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.daemon.stop()
        finally:
            self.relay.stop()
            if not self.keep_folder:
                shutil.rmtree(self.folder, ignore_errors=True)

    def start_relay(self) -> None:
        """Start the relay, from the second time on at the same port and with the same file."""
        try:
            self.relay.start()
        except RuntimeError as error:
            raise Unavailable(
                f"The demo cannot go on: {error}. Only its own events are concerned."
            ) from error


class DaemonProcess:
    """`outbox serve` as a child."""

    def __init__(self, folder: Path) -> None:
        """Its configuration and its log lie in `folder`."""
        self._config = folder / "outbox.toml"
        self._config.write_text(_CONFIG, encoding="utf-8")
        self._config.chmod(0o600)
        self.log_file = folder / "daemon.log"
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The child's process id, None while none runs."""
        return None if self._child is None else self._child.pid

    def start(self, relay_url: str, token_file: Path, state_dir: Path) -> None:
        """Start it and wait until it serves; raises Unavailable with the end of its log when it does not."""
        places = ("--token-file", token_file, "--state-dir", state_dir, "--config", self._config)
        with self.log_file.open("wb") as log:
            self._child = subprocess.Popen(  # noqa: S603 - our own module, no shell
                [sys.executable, "-m", "outbox", "serve", "--relay", relay_url, *places],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        deadline = time.monotonic() + _READY_WITHIN_S
        state = StateDirectory(state_dir)
        while True:
            daemon = running_daemon(state)
            if daemon is not None and daemon.pid == self.pid and daemon.socket.exists():
                return
            if self._child.poll() is not None or time.monotonic() > deadline:
                raise Unavailable(
                    f"The demo's daemon did not start: {self.last_words()}. Only its events are concerned."
                )
            time.sleep(_LOOK_EVERY_S)

    def last_words(self) -> str:
        """The last lines of its log."""
        lines = self.log_file.read_text("utf-8", "replace").splitlines()
        return " / ".join(lines[-_LAST_LOG_LINES:]) or "it said nothing"

    def stop(self) -> None:
        """End it with SIGTERM, and with SIGKILL when it takes too long."""
        child, self._child = self._child, None
        if child is None:
            return
        child.send_signal(signal.SIGTERM)
        try:
            child.wait(_STOP_WITHIN_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
