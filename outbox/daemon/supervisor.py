"""The daemon: one process that delivers the events of all agents of a state directory until it is told to stop.

The main thread hears wake-ups and signals and polls; pumps run in the engine's threads, the local socket in one of
its own.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from outbox.daemon.compose import Log, build_engine
from outbox.daemon.flush import FlushReport, run_flush
from outbox.delivery.engine import Engine
from outbox.errors import OutboxError, StoreError, UsageError
from outbox.event import Draft, accept, check_agent, uuid7
from outbox.library import read_rules
from outbox.policy import HOUR_MS, expiry_horizon_ms
from outbox.setting_keys import Settings, describe_changes
from outbox.store.create import create_outbox
from outbox.store.directory import StateDirectory
from outbox.store.dropping import expire
from outbox.store.enqueue import Receipt, enqueue
from outbox.store.file import open_outbox
from outbox.store.inspect import read_status
from outbox.store.people import pause, resume
from outbox.store.place import default_socket, leave_place, take_place, write_private
from outbox.store.rules import encode_rules
from outbox.store.wake import bind_wake_socket

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HOUSEKEEPING_S = 60.0
_CLOCK_STEP_MS = 60_000
_RELOAD_WAIT_S = 5.0


class Daemon:
    """One state directory's daemon. `run` returns when it has stopped."""

    def __init__(
        self, settings: Settings, state: StateDirectory, reload: Callable[[], Settings], version: str, log: Log
    ) -> None:
        """Nothing is started yet; `reload` reads the configuration anew."""
        self.settings = settings
        self.state = state
        self.version = version
        self.log = log
        self.socket_path = Path(settings.daemon.socket) if settings.daemon.socket else default_socket(state)
        self.engine: Engine = build_engine(settings, state, log=log)
        self._reload = reload
        self._signals: deque[int] = deque()
        self._stopping = threading.Event()
        self._at_once = threading.Event()
        self._flush_mutex = threading.Lock()
        self._seen: dict[Path, tuple[int, ...]] = {}
        self._quiet_until_ms = 0
        self._clock_offset_ms = 0

    # Life --------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until SIGTERM or `stop`; the exit status. Raises StoreHeld when another daemon is there."""
        now_ms = self._wall_ms()
        take_place(self.state, self.version, self.socket_path, now_ms)
        try:
            self._quiet_until_ms = now_ms + HOUR_MS
            self._clock_offset_ms = self._offset_ms()
            wake = bind_wake_socket(self.state.wake_socket)
            read_end, write_end = socket.socketpair()
            with wake, read_end, write_end:
                self._serve(wake, read_end, write_end)
        finally:
            self.state.wake_socket.unlink(missing_ok=True)
            leave_place(self.state)
        return 0

    def _serve(self, wake: socket.socket, read_end: socket.socket, write_end: socket.socket) -> None:
        for end in (wake, read_end, write_end):
            end.setblocking(False)
        previous = signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)
        handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        self._kick = write_end
        from outbox.api.server import LocalServer  # noqa: PLC0415 - starlette only where it is served

        server = LocalServer(self, self.socket_path)
        server.start()
        try:
            self._start_engine()
            self.log(
                "serving",
                {
                    "relay": self.settings.require_relay_url(),
                    "state": str(self.state.path),
                    "socket": str(self.socket_path),
                    "pid": os.getpid(),
                    "agents": len(self._seen),
                },
            )
            self._listen(wake, read_end)
            self._shut_down()
        finally:
            server.stop()
            for number, handler in handlers.items():
                signal.signal(number, handler)
            signal.set_wakeup_fd(previous)

    def _start_engine(self) -> None:
        write_private(self.state.rules_file, encode_rules(self.settings.limits(), self.settings.bounds()))
        self.engine.start(self.settings.delivery.workers)
        self._seen.clear()
        self._scan()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signals.append(number)

    def _listen(self, wake: socket.socket, read_end: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            selector.register(read_end, selectors.EVENT_READ)
            next_scan = next_care = 0.0
            while not self._stopping.is_set():
                ready = selector.select(max(0.0, min(next_scan, next_care) - time.monotonic()))
                for key, _ in ready:
                    self._drain(wake if key.fileobj is wake else read_end, is_wake=key.fileobj is wake)
                self._handle_signals()
                now = time.monotonic()
                if now >= next_scan:
                    next_scan = now + self.settings.daemon.poll_interval_s
                    self._poll()
                if now >= next_care:
                    next_care = now + _HOUSEKEEPING_S
                    self._keep_house()

    def _drain(self, source: socket.socket, *, is_wake: bool) -> None:
        names: set[str] = set()
        while True:
            try:
                data = source.recv(4_096)
            except BlockingIOError:
                break
            if is_wake:
                names.add(data.decode("utf-8", "replace"))
            elif not data:
                break
        for name in names:
            path = self.state.agents / Path(name).name
            if path.suffix == ".sqlite" and path.exists():
                self.engine.wake(path)

    def _handle_signals(self) -> None:
        while self._signals:
            number = self._signals.popleft()
            if number == signal.SIGHUP:
                self._reload_settings()
            else:
                self.log("stopping", {"signal": signal.Signals(number).name})
                self._stopping.set()

    # Looking -----------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        self._scan()
        gate = self.engine.delivery.gate
        if gate.relay.reason in {"no_token", "unauthorized"} and self.engine.delivery.tokens.refresh():
            gate.retry_now()
        self.engine.nudge()
        if abs(self._offset_ms() - self._clock_offset_ms) > _CLOCK_STEP_MS:
            self._clock_offset_ms = self._offset_ms()
            self._quiet_until_ms = self._wall_ms() + HOUR_MS
            self.log("clock_stepped", {"detail": "nothing grows too old for an hour"})

    def _scan(self) -> None:
        """Find files with something new in them, however they came there; a lost wake-up costs one interval."""
        for path in self.state.outbox_files():
            signature = _signature(path)
            if self._seen.get(path) != signature:
                self._seen[path] = signature
                self.engine.wake(path)

    def _keep_house(self) -> None:
        horizon_ms = expiry_horizon_ms(self.settings.bounds(), self._wall_ms(), self._quiet_until_ms)
        if horizon_ms is None:
            return
        for path in self.state.outbox_files():
            try:
                with self.engine.delivery.files.borrow(path) as box:
                    gone = expire(box, horizon_ms, now_ms=self._wall_ms(), log=self.log)
            except StoreError:
                continue
            if gone:
                self.engine.wake(path)

    def _wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    def _offset_ms(self) -> int:
        return self._wall_ms() - time.monotonic_ns() // 1_000_000

    # Changing ----------------------------------------------------------------------------------------------

    def _reload_settings(self) -> None:
        try:
            new = self._reload()
            new.require_relay_url()
            engine = build_engine(new, self.state, log=self.log)
        except OutboxError as error:
            self.log("reload_refused", {"level": "error", "detail": str(error)})
            return
        changes = describe_changes(self.settings, new)
        self.log("reloaded", {"changes": changes or ["nothing"]})
        old = self.engine
        if not old.stop(_RELOAD_WAIT_S):
            old.delivery.client.abort()
            old.stop(_RELOAD_WAIT_S)
        _dismiss(old)
        self.settings, self.engine = new, engine
        self._start_engine()

    def stop(self, *, at_once: bool = False) -> None:
        """Stop as on SIGTERM (from any thread)."""
        self._signals.append(signal.SIGTERM)
        if at_once:
            self._at_once.set()
        self._kick.send(b"x")

    def _shut_down(self) -> None:
        """The flush until its deadline, then the end; a second signal ends the waiting."""
        engine = self.engine
        end = time.monotonic() + self.settings.daemon.flush_timeout_s
        paths = [path for path in self.state.outbox_files() if not engine.rests(path, int(end * 1_000))]
        report = FlushReport(0, 0, 0)
        if paths and not self._second_signal():
            with self._flush_mutex:
                report = run_flush(engine, self.state, paths, end, enough=self._second_signal)
        engine.delivery.deadline = 0.0
        engine.delivery.client.abort()
        engine.stop(0.5)
        left = self._left()
        _dismiss(engine)
        self.log(
            "stopped",
            {
                "delivered": report.delivered,
                "left": sum(left.values()),
                "agents_with_events_left": len(left),
                "detail": "all delivered" if not left else "what is left goes out with the next start or flush",
            },
        )

    def _second_signal(self) -> bool:
        return self._at_once.is_set() or bool(self._signals)

    def _left(self) -> dict[str, int]:
        left: dict[str, int] = {}
        for path in self.state.outbox_files():
            try:
                box = open_outbox(self.state, path)
            except StoreError:
                continue
            status = read_status(box)
            box.close()
            if status.waiting:
                left[status.agent] = status.waiting
        return left

    # What the local socket asks ----------------------------------------------------------------------------

    def enqueue(self, agent: str, drafts: Sequence[Draft]) -> list[Receipt | OutboxError]:
        """Take events for an agent; returns after the commit."""
        path = self._outbox_of(check_agent(agent))
        now_ms = self._wall_ms()
        with self.engine.delivery.files.borrow(path) as box:
            events = [
                accept(
                    draft, limits=box.limits, agent=agent, now_ms=now_ms, new_key=uuid7(now_ms, os.urandom(10))
                )
                for draft in drafts
            ]
            results = enqueue(box, events, now_ms=now_ms)
        self.engine.wake(path)
        return results

    def _outbox_of(self, agent: str) -> Path:
        path = self.state.outbox_path(agent)
        if not os.path.lexists(path):
            limits, bounds = read_rules(self.state)
            create_outbox(self.state, agent, limits, bounds, self._wall_ms())
        return path

    def flush(self, agent: str | None, timeout_s: float) -> FlushReport:
        """Flush one agent or all; one flush at a time."""
        end = time.monotonic() + timeout_s
        with self._flush_mutex:
            return run_flush(self.engine, self.state, self._paths(agent), end, enough=self._stopping.is_set)

    def pause(self, agent: str | None) -> int:
        """Pause one agent or all; returns how many."""
        return self._with_each(agent, lambda box: pause(box, self._wall_ms()))

    def resume(self, agent: str | None) -> int:
        """Go on with one agent or all, and give the relay's paths another chance."""
        self.engine.delivery.gate.forgive()
        return self._with_each(agent, resume)

    def _with_each(self, agent: str | None, act: Callable[[Any], None]) -> int:
        paths = self._paths(agent)
        for path in paths:
            with self.engine.delivery.files.borrow(path) as box:
                act(box)
            self.engine.forget_wait(path)
        return len(paths)

    def _paths(self, agent: str | None) -> list[Path]:
        if agent is None:
            return list(self.state.outbox_files())
        path = self.state.outbox_path(check_agent(agent))
        if not path.exists():
            raise UsageError(f"There is no outbox of {agent!r} here. Nothing was changed.", code="unknown_agent")
        return [path]


def _dismiss(engine: Engine) -> None:
    engine.resign()
    engine.delivery.files.close()
    engine.delivery.gate.close_state()
    engine.delivery.client.close()


def _signature(path: Path) -> tuple[int, ...]:
    parts: list[int] = []
    for name in (path, path.with_name(path.name + "-wal")):
        try:
            status = name.stat()
        except FileNotFoundError:
            continue
        parts += (status.st_ino, status.st_size, status.st_mtime_ns)
    return tuple(parts)
