"""Tells a person: `notify.command` and `notify.url` are called with what the lookout sees, not too often.

In a thread of its own: whatever a command or an address does, no event waits for it.
"""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping

from outbox.daemon.alarms import Alarm, message
from outbox.daemon.logs import register_secret
from outbox.daemon.lookout import Lookout
from outbox.delivery.shared import Log
from outbox.setting_keys import NotifySettings, Settings
from outbox.store.directory import StateDirectory

_LOOK_EVERY_S = 15.0
_MOST_ALARMS = 100
_MOST_TRIES = 3
_STOP_WAIT_S = 1.0


class Target:
    """One command or address, what it was not told yet, and when it may be called again."""

    def __init__(self, name: str, call: Callable[[bytes], str]) -> None:
        """`call` takes JSON; it returns why it was not taken, "" when it was."""
        self.name = name
        self._call = call
        self._pending: list[Alarm] = []
        self._more = 0
        self._tries = 0
        self._next_s = 0.0
        self._trouble = ""

    def add(self, alarms: list[Alarm]) -> None:
        """Keep alarms for the next call: the oldest hundred, and how many more there were."""
        room = _MOST_ALARMS - len(self._pending)
        self._pending += alarms[:room]
        self._more += len(alarms[room:])

    def turn(self, interval_s: float, about: Mapping[str, str], log: Log) -> None:
        """Call, if there is something to tell and the last call is long enough ago."""
        if not self._pending or time.monotonic() < self._next_s:
            return
        told = sorted({alarm.alarm for alarm in self._pending})
        body = json.dumps(message(self._pending, self._more, **about)).encode()
        trouble = self._call(body)
        self._next_s = time.monotonic() + interval_s
        if trouble:
            self._not_told(trouble, log)
            return
        self._forget()
        self._trouble = ""
        log("notified", {"by": self.name, "alarms": told})

    def _not_told(self, trouble: str, log: Log) -> None:
        """Log it once for each fault. What is not taken after some tries is left to `outbox status`."""
        self._tries += 1
        if trouble != self._trouble:
            self._trouble = trouble
            log("notify_failed", {"level": "warning", "by": self.name, "detail": trouble})
        if self._tries >= _MOST_TRIES:
            self._forget()

    def _forget(self) -> None:
        self._pending, self._more, self._tries = [], 0, 0


class Notifier:
    """Calls whoever `[notify]` names. `use` starts it, once there is somebody to call, and takes a reload."""

    def __init__(self, state: StateDirectory, log: Log) -> None:
        """Nobody is called yet."""
        self._log = log
        self._about = {"host": socket.gethostname(), "stateDir": str(state.path)}
        self._lookout = Lookout(state)
        self._settings = Settings()
        self._targets: list[Target] = []
        self._mutex = threading.Lock()
        self._wake = threading.Event()
        self._over = False
        self._thread: threading.Thread | None = None

    def use(self, settings: Settings) -> None:
        """Go on with these settings."""
        register_secret(settings.notify.url)
        with self._mutex:
            if settings.notify != self._settings.notify:
                self._targets = _targets(settings.notify)
            self._settings = settings
            if self._targets and self._thread is None:
                self._thread = threading.Thread(target=self._run, name="notify", daemon=True)
                self._thread.start()
        self._wake.set()

    def stop(self) -> None:
        """No more calls; one that is under way is left to itself after a second."""
        self._over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(_STOP_WAIT_S)

    def _run(self) -> None:
        while not self._over:
            with self._mutex:
                settings, targets = self._settings, self._targets
            try:
                self._tell(settings, targets)
            except Exception as error:  # noqa: BLE001 - nothing that goes wrong here may end the telling
                self._log("notify_failed", {"level": "error", "by": "lookout", "detail": repr(error)})
            self._wake.wait(_pause_s(settings.notify))
            self._wake.clear()

    def _tell(self, settings: Settings, targets: list[Target]) -> None:
        alarms = self._lookout.look(settings) if targets else []
        for target in targets:
            target.add(alarms)
            target.turn(settings.notify.min_interval_s, self._about, self._log)


def _pause_s(notify: NotifySettings) -> float:
    return min(_LOOK_EVERY_S, notify.min_interval_s, notify.alert_after_s)


def _targets(notify: NotifySettings) -> list[Target]:
    targets: list[Target] = []
    if notify.command or notify.url:
        from outbox.daemon.notify_call import post, run_command  # noqa: PLC0415 - only where somebody is told

        if words := notify.command:
            targets.append(Target("command", lambda body: run_command(words, body)))
        if url := notify.url:
            targets.append(Target("url", lambda body: post(url, body)))
    return targets
