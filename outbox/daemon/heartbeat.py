"""The daemon's pulse: systemd hears it only while the engine really works; its watchdog ends a hung one.

A pulse needs two to be alive: the main thread, which sends it, and the engine, which it looks at first.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from outbox.daemon.sd_notify import WATCHDOG, ServiceLink, extend, ready, reloading, status_line, stopping
from outbox.delivery.engine import Engine
from outbox.delivery.shared import Log
from outbox.setting_keys import Settings

_PULSES_A_WATCHDOG = 4
_PULSE_S = 2.0  # at most: systemd shows what we told last
_EXTEND_S = 30.0
_CALLS_A_TURN = 4  # what the relay says of itself, health, a token or an MCP discovery, and the event
_TURN_SLACK_S = 60.0  # a locked file, a slow disk


class Heartbeat:
    """Tells systemd how the daemon is. Used by the main thread only."""

    def __init__(self, link: ServiceLink, log: Log) -> None:
        """Nothing is told yet."""
        self._link = link
        self._log = log
        self._status = ""
        self._stuck = ""
        self._next_s = 0.0

    @property
    def next_s(self) -> float:
        """The monotonic second of the next pulse."""
        return self._next_s

    def ready(self, status: str) -> None:
        """Started, or reloaded."""
        self._status = status
        self._link.tell(ready(status))

    def reloading(self) -> None:
        """A reload begins; `ready` ends it, also a refused one."""
        self._link.tell(reloading(time.monotonic_ns() // 1_000))

    def stopping(self, flush_timeout_s: float) -> None:
        """The last flush begins."""
        self._status = f"stopping: flushes for up to {flush_timeout_s:g} s; what is left stays on disk"
        self._next_s = 0.0
        self._link.tell(stopping(self._status, _EXTEND_S))

    def ended(self, status: str) -> None:
        """The last word."""
        self._link.tell(status_line(status), extend(_EXTEND_S))

    def beat(self, engine: Engine, settings: Settings, status: Callable[[], str]) -> None:
        """One pulse, when it is time for it and the engine is alive; an engine that is not is logged once."""
        if self._is_time() and self._is_alive(engine, settings):
            told = [] if (now := status()) == self._status else [status_line(now)]
            self._status = now
            self._tell_pulse(*told)

    def beat_in_flush(self, engine: Engine, settings: Settings) -> None:
        """The same while the last flush is on: systemd is to wait for it as long as it goes on."""
        if self._is_time() and self._is_alive(engine, settings):
            self._tell_pulse(extend(_EXTEND_S))

    def _tell_pulse(self, *more: str) -> None:
        pulse = (WATCHDOG,) if self._link.watchdog_s else ()
        if pulse or more:
            self._link.tell(*pulse, *more)

    def _is_time(self) -> bool:
        now_s = time.monotonic()
        if now_s < self._next_s:
            return False
        watchdog_s = self._link.watchdog_s
        self._next_s = now_s + min(_PULSE_S, (watchdog_s or math.inf) / _PULSES_A_WATCHDOG)
        return True

    def _is_alive(self, engine: Engine, settings: Settings) -> bool:
        stuck = engine.stuck(longest_turn_ms(settings))
        if stuck and stuck != self._stuck:
            wanted = "its watchdog will restart it" if self._link.watchdog_s else "restart the daemon"
            self._log("engine_stuck", {"level": "error", "detail": f"{stuck}; events stay on disk; {wanted}"})
        self._stuck = stuck
        return not stuck


def longest_turn_ms(settings: Settings) -> int:
    """How long one turn of a pump can take while all is well: every call in it ends by its timeout."""
    relay = settings.relay
    call_s = relay.connect_timeout_s + max(relay.request_timeout_s, settings.mcp.timeout_s)
    return round((_CALLS_A_TURN * call_s + _TURN_SLACK_S) * 1_000)
