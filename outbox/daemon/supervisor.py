"""The daemon: one process that delivers the events of all agents of a state directory until told to stop.

The main thread hears wake-ups and signals and polls; pumps run in the engine's threads, the local socket in
one of its own.
"""

from __future__ import annotations

import contextlib
import math
import os
import selectors
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from outbox.api.binding import bind_loopback
from outbox.api.http_token import http_token
from outbox.api.meter import Meter
from outbox.daemon.activation import path_of
from outbox.daemon.compose import build_engine, relay_client, token_origin
from outbox.daemon.flush import Flush, dismiss, report_to_json, waiting
from outbox.daemon.heartbeat import Heartbeat, longest_turn_ms
from outbox.daemon.logs import register_secret
from outbox.daemon.notify import Notifier
from outbox.daemon.retire import Retirement
from outbox.daemon.sd_notify import ServiceLink
from outbox.daemon.watch import FileWatch
from outbox.delivery.engine import Engine
from outbox.delivery.shared import Log
from outbox.errors import OutboxError, StoreClosed, StoreDamaged, StoreError, UsageError
from outbox.event import Draft, Limits, accept, check_agent, uuid7
from outbox.measures import count
from outbox.policy import expiry_horizon_ms
from outbox.setting_keys import Settings, describe_changes
from outbox.store.create import create_outbox
from outbox.store.damage import tell_damages
from outbox.store.directory import StateDirectory
from outbox.store.dropping import expire
from outbox.store.enqueue import Receipt, enqueue_together
from outbox.store.file import OutboxFile
from outbox.store.people import pause, resume
from outbox.store.place import default_socket, leave_place, take_place, write_private
from outbox.store.rules import encode_rules
from outbox.store.wake import bind_wake_socket

if TYPE_CHECKING:
    from outbox.api.server import Tcp

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_HOUSEKEEPING_S = 60.0
_RELOAD_WAIT_S = 5.0
_STEP_S = 0.05
_FOR_EVER_MS = 2**63
_HINTS_AT_A_TIME = 1_000
_OF_TOKEN = ("no_token", "unauthorized", "token_recovery", "token_stopped")


class Daemon:
    """One state directory's daemon. `run` returns when it has stopped."""

    def __init__(
        self,
        settings: Settings,
        state: StateDirectory,
        reload: Callable[[], Settings],
        version: str,
        log: Log,
        *,
        link: ServiceLink = ServiceLink(),  # noqa: B008 - frozen, and means that nobody listens
        sockets: Sequence[socket.socket] = (),
    ) -> None:
        """Nothing is started yet; `reload` reads the configuration anew.

        `link` leads to systemd. `sockets` listen already, and are served in place of one of our own.
        """
        self.settings = settings
        self.state = state
        self.version = version
        self.log = log
        configured = Path(settings.daemon.socket) if settings.daemon.socket else default_socket(state)
        self.socket_path = path_of(sockets[0]) if sockets else configured
        self._sockets = list(sockets)
        self.meter = Meter()
        self._heart = Heartbeat(link, log)
        self.engine: Engine  # there while `run` runs
        self._reload = reload
        self._asked_to_stop: list[str] = []  # by whom; the second time ends the waiting
        self._asked_to_reload = threading.Event()
        self._flushed = threading.Event()
        self._flush_mutex = threading.Lock()
        self._flushes = 0
        self._kick: socket.socket
        self._http = ""
        self._watch = FileWatch(state)
        self._retirement = Retirement(state, log)
        self._notifier = Notifier(state, log)
        self._trouble = ""
        self._steps_told = 0

    # Life --------------------------------------------------------------------------------------------------

    def run(self) -> int:
        """Serve until SIGTERM or `stop`; the exit status.

        Raises:
            StoreHeld: another daemon is there.
            ConfigError: the local socket cannot be made where it is to lie.
        """
        take_place(self.state, self.version, self.socket_path, self._wall_ms())
        try:
            self.engine = build_engine(self.settings, self.state, log=self.log, on_token=register_secret)
            with bind_wake_socket(self.state.wake_socket) as wake, self._hearing() as kicked:
                self._serve(wake, kicked)
        finally:
            self.state.wake_socket.unlink(missing_ok=True)
            leave_place(self.state)
        return 0

    @contextlib.contextmanager
    def _hearing(self) -> Iterator[socket.socket]:
        """Signals are noted, and make what is yielded readable: the main thread's sleep ends."""
        kicked, self._kick = socket.socketpair()
        with kicked, self._kick:
            self._kick.setblocking(False)  # noqa: FBT003 - the socket's own signature
            previous = signal.set_wakeup_fd(self._kick.fileno(), warn_on_full_buffer=False)
            handlers = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
            try:
                yield kicked
            finally:
                for number, handler in handlers.items():
                    signal.signal(number, handler)
                signal.set_wakeup_fd(previous)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            self._asked_to_reload.set()
        else:
            self._asked_to_stop.append(signal.Signals(number).name)

    def _serve(self, wake: socket.socket, kicked: socket.socket) -> None:
        from outbox.api.server import LocalServer  # noqa: PLC0415 - starlette only where it is served

        server = LocalServer(
            self, self.socket_path, self._sockets, group=self.settings.daemon.socket_group, tcp=self._tcp()
        )
        server.start()
        try:
            self._start_engine()
            self.log(
                "serving",
                {
                    "relay": self.settings.require_relay_url(),
                    "state": str(self.state.path),
                    "socket": str(self.socket_path),
                    **({"http": self._http} if self._http else {}),
                    "pid": os.getpid(),
                    "agents": len(self._watch.paths),
                },
            )
            self._heart.ready(self._state_in_words())
            self._listen(wake, kicked)
            self._heart.stopping(self.settings.daemon.flush_timeout_s)
            flush = self._last_flush()
        finally:
            self._flushed.set()
            self._notifier.stop()
            server.stop()
            dismiss(self.engine, 0.5)
        self._tell_the_end(flush)

    def _tcp(self) -> Tcp | None:
        """Loopback, when it is asked for; raises ConfigError."""
        from outbox.api.server import Tcp  # noqa: PLC0415 - as above

        asked = self.settings.daemon.http
        if not asked:
            return None
        listening = bind_loopback(asked, allow_remote=self.settings.daemon.http_allow_remote)
        host = asked.rpartition(":")[0]
        self._http = f"{host}:{listening.getsockname()[1]}"
        try:
            register_secret(self._http_token())
        except BaseException:
            listening.close()
            raise
        return Tcp(listening, host, self._http_token)

    def _http_token(self) -> str:
        own = self.settings.daemon
        return http_token(self.state, own.http_token, own.http_token_file)

    def _start_engine(self) -> None:
        self.engine.delivery.count = self.meter.attempt
        rules = encode_rules(self.settings.limits(), self.settings.bounds())
        try:
            write_private(self.state.rules_file, rules)
        except StoreError as error:  # new outboxes begin with the old rules; a full disk stops no daemon
            self.log("file_trouble", {"level": "warning", "code": error.code, "detail": str(error)})
        self._notifier.use(self.settings)
        self.engine.start(self.settings.delivery.workers)
        self._watch = FileWatch(self.state)
        self._scan()

    def _listen(self, wake: socket.socket, kicked: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(wake, selectors.EVENT_READ)
            selector.register(kicked, selectors.EVENT_READ)
            next_scan = next_care = 0.0
            while not self._asked_to_stop:
                sleeps_until = min(next_scan, next_care, self._heart.next_s)
                selector.select(max(0.0, sleeps_until - time.monotonic()))
                _received(kicked)
                self._wake_those_named(_received(wake))
                if self._asked_to_reload.is_set():
                    self._asked_to_reload.clear()
                    self._heart.reloading()
                    self._reload_settings()
                    self._heart.ready(self._state_in_words())
                self._heart.beat(self.engine, self.settings, self._state_in_words)
                now = time.monotonic()
                if now >= next_scan:
                    next_scan = now + self.settings.daemon.poll_interval_s
                    self._poll()
                if now >= next_care:
                    next_care = now + _HOUSEKEEPING_S
                    self._keep_house()
        most = (
            f"what waits has {self.settings.daemon.flush_timeout_s:g} s to go out; a second signal ends that"
        )
        self.log("stopping", {"asked_by": self._asked_to_stop[0], "detail": most})

    def _state_in_words(self) -> str:
        """The line for `systemctl status`."""
        relay, agents = self.engine.delivery.gate.relay, len(self._watch.paths)
        where = f"{self.settings.require_relay_url()}, {count(agents, 'agent')}"
        if not relay.reason:
            return f"delivers to {where}"
        return f"waits for the relay ({relay.reason}: {relay.detail}): {where}; events stay on disk"

    def _wake_those_named(self, hints: set[bytes]) -> None:
        for hint in hints:
            path = self.state.agents / Path(os.fsdecode(hint)).name
            if path.suffix == ".sqlite" and path.exists():
                self.engine.wake(path)

    # Looking -----------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        self._scan()
        if self._watch.all_is_quiet:
            self.engine.delivery.files.close()
            self.engine.delivery.client.close_idle()
            self.engine.delivery.tokens.close()
        gate = self.engine.delivery.gate
        if gate.relay.reason in _OF_TOKEN and self.engine.delivery.tokens.look_again(gate.refused_token):
            gate.retry_now()
        self.engine.nudge()
        steady = self.engine.delivery.steady
        steady.lasts()
        if steady.steps != self._steps_told:
            self._steps_told = steady.steps
            self.log("clock_stepped", {"detail": "nothing grows too old for an hour"})

    def _scan(self) -> None:
        """Find files with something new in them, however it came there; a lost wake-up costs one interval."""
        tell_damages(self.state, self.log)
        try:
            changed = self._watch.changed()
        except StoreError as error:  # no descriptor is free, or the folder is out of reach: the next time
            self._tell_once(error)
            return
        self._trouble = ""
        for path in changed:
            self.engine.wake(path)

    def _tell_once(self, error: StoreError) -> None:
        if str(error) != self._trouble:
            self._trouble = str(error)
            self.log("file_trouble", {"level": "warning", "code": error.code, "detail": str(error)})

    def _keep_house(self) -> None:
        self._expire()
        if self.engine.delivery.steady.lasts():
            after_ms = round(self.settings.bounds_section.retire_after_s * 1_000)
            self._retirement.turn(self.engine, self._watch.paths, after_ms)

    def _expire(self) -> None:
        steady = self.engine.delivery.steady.lasts()
        horizon_ms = expiry_horizon_ms(self.settings.bounds(), self._wall_ms(), steady=steady)
        if horizon_ms is None:
            return
        for path in self._watch.paths:
            try:
                with self.engine.delivery.files.borrow(path) as box:
                    gone = expire(box, horizon_ms, now_ms=self._wall_ms(), log=self.log)
            except StoreError:
                continue
            if gone:
                self.engine.wake(path)

    def _wall_ms(self) -> int:
        return time.time_ns() // 1_000_000

    # Changing ----------------------------------------------------------------------------------------------

    def _reload_settings(self) -> None:
        """Go on with the configuration as it is now; with the old one when that cannot be used."""
        try:
            new = self._reload()
            relay_client(new).close()
            token_origin(new, self.state)
        except OutboxError as error:
            self.log("reload_refused", {"level": "error", "detail": str(error)})
            return
        old = self.engine
        _halt(old, time.monotonic() + _RELOAD_WAIT_S, lambda: bool(self._asked_to_stop))
        old.resign()
        old.delivery.files.close()  # the new engine may need the descriptors
        old.delivery.gate.close_state()  # the new gate begins with what the old one knew last
        changes = describe_changes(self.settings, new) or ["nothing"]
        engine = build_engine(new, self.state, log=self.log, on_token=register_secret)
        engine.delivery.steady = old.delivery.steady
        self.settings, self.engine = new, engine
        self.log("reloaded", {"changes": changes})  # whoever reads it can rely on what has changed
        self._start_engine()
        dismiss(old, 0.0)

    def stop(self) -> None:
        """Stop as on SIGTERM (from any thread)."""
        self._asked_to_stop.append("local socket")
        with contextlib.suppress(OSError):
            self._kick.send(b"x")

    def _last_flush(self) -> Flush:
        """The flush until its deadline; asked to stop a second time, there is no more waiting."""
        end = time.monotonic() + self.settings.daemon.flush_timeout_s
        self._scan()
        busy = [path for path in self._watch.paths if not self.engine.rests(path, _FOR_EVER_MS)]
        return self._flush_until(end, busy, enough=self._is_second_time)

    def _flush_until(self, end: float, paths: Sequence[Path], *, enough: Callable[[], bool]) -> Flush:
        """Send what waits there before all ends; flushes that others asked for have no say any more."""
        flush = Flush(self.engine, self.state, paths)
        with self._flush_mutex:
            self._flushes = -1
            self.engine.begin_flush(end)
        flush.wait(end, enough=enough)
        return flush

    def _is_second_time(self) -> bool:
        self._heart.beat_in_flush(self.engine, self.settings)
        return len(self._asked_to_stop) > 1

    def _tell_the_end(self, flush: Flush) -> None:
        report = flush.report()
        left = waiting(self.state, self._watch.paths)
        self._heart.ended(f"stopped: {sum(left.values())} left on disk")
        self.log(
            "stopped",
            {
                "delivered_at_the_end": report.delivered,
                "left": sum(left.values()),
                "agents_with_events_left": len(left),
                "detail": "what is left goes out with the next start or flush" if left else "all delivered",
            },
        )

    # What the local socket asks ----------------------------------------------------------------------------

    @property
    def limits(self) -> Limits:
        """What an event may be, by the settings of now."""
        return self.settings.limits()

    @property
    def least_free_bytes(self) -> int:
        """How much disk is to stay free, by the settings of now."""
        return self.settings.bounds_section.min_free_disk_bytes

    def hangs(self) -> str:
        """Why delivery does not go on by itself any more; "" while it does."""
        return self.engine.stuck(longest_turn_ms(self.settings))

    @property
    def kind_paths(self) -> Mapping[str, str]:
        """Where each kind of event goes, by the settings of now."""
        return self.settings.kind_paths()

    def enqueue(self, agent: str, drafts: Sequence[Draft]) -> list[Receipt | OutboxError]:
        """Take events for an agent; returns after the commit."""
        check_agent(agent)
        try:
            return self._enqueue(agent, drafts)
        except StoreDamaged:
            self.engine.delivery.files.mend(self.state.outbox_path(agent), agent)
        except StoreError as error:  # the file may be gone this very moment: then it is made anew
            if not isinstance(error, StoreClosed) and os.path.lexists(self.state.outbox_path(agent)):
                raise
        return self._enqueue(agent, drafts)

    def _enqueue(self, agent: str, drafts: Sequence[Draft]) -> list[Receipt | OutboxError]:
        path = self._outbox_of(agent)
        now_ms = self._wall_ms()
        with self.engine.delivery.files.borrow(path) as box:
            events = [
                accept(
                    draft,
                    limits=box.limits,
                    agent=agent,
                    now_ms=now_ms,
                    new_key=uuid7(now_ms, os.urandom(10)),
                )
                for draft in drafts
            ]
            results = enqueue_together(box, events, now_ms=now_ms)
        self.engine.wake(path)
        return results

    def _outbox_of(self, agent: str) -> Path:
        path = self.state.outbox_path(agent)
        if not os.path.lexists(path):
            settings = self.settings
            create_outbox(self.state, agent, settings.limits(), settings.bounds(), self._wall_ms())
        return path

    def flush(self, agent: str | None, timeout_s: float) -> dict[str, Any]:
        """Flush one agent or all; several at a time join. What is under way at the end goes on."""
        end = time.monotonic() + timeout_s
        engine = self.engine
        flush = Flush(engine, self.state, self._paths(agent))
        with self._hurried():
            flush.wait(end, enough=lambda: self._flushed.is_set() or engine is not self.engine)
        return report_to_json(flush.report())

    @contextlib.contextmanager
    def _hurried(self) -> Iterator[None]:
        """The engine hurries until the last flush has left; the daemon's own last flush ends with it."""
        with self._flush_mutex:
            if self._flushes >= 0:
                self._flushes += 1
                self.engine.begin_flush(math.inf)
        try:
            yield
        finally:
            with self._flush_mutex:
                if self._flushes > 0:
                    self._flushes -= 1
                    if not self._flushes:
                        self.engine.end_flush()

    def pause(self, agent: str | None) -> int:
        """Pause one agent or all; returns how many."""
        return self._with_each(agent, lambda box: pause(box, self._wall_ms()))

    def resume(self, agent: str | None) -> int:
        """Go on with one agent or all, and give the relay's paths another chance."""
        self.engine.delivery.gate.forgive()
        return self._with_each(agent, resume)

    def retry_tokens(self) -> None:
        """Forget why no token could be had, and try at once."""
        self.engine.delivery.tokens.retry()
        self.engine.delivery.gate.retry_now()
        for path in self._watch.paths:
            self.engine.forget_wait(path)
        self.engine.nudge()

    def _with_each(self, agent: str | None, act: Callable[[OutboxFile], object]) -> int:
        """How many there are; raises StoreError for one that cannot be used, after all the others."""
        paths, trouble = self._paths(agent), None
        for path in paths:
            try:
                with self.engine.delivery.files.borrow(path) as box:
                    act(box)
            except StoreError as error:
                trouble = error
            self.engine.forget_wait(path)
        if trouble is not None:
            raise trouble
        return len(paths)

    def _paths(self, agent: str | None) -> list[Path]:
        if agent is None:
            return list(self.state.outbox_files())
        path = self.state.outbox_path(check_agent(agent))
        if not path.exists():
            raise UsageError(
                f"There is no outbox of {agent!r} here. Nothing was changed. All of them: outbox status",
                code="unknown_agent",
            )
        return [path]


def _halt(engine: Engine, end: float, enough: Callable[[], bool]) -> None:
    """Let what is under way come to its end, until `end` or `enough`; then cut it off."""
    while not engine.stop(_STEP_S):
        if time.monotonic() >= end or enough():
            engine.delivery.client.abort()
            engine.delivery.tokens.abort()
            engine.stop(_RELOAD_WAIT_S)
            return


def _received(source: socket.socket) -> set[bytes]:
    """What lies there to be read, without waiting; the rest is read the next time."""
    found: set[bytes] = set()
    for _ in range(_HINTS_AT_A_TIME):
        try:
            data = source.recv(4_096, socket.MSG_DONTWAIT)
        except BlockingIOError:
            break
        if not data:
            break
        found.add(data)
    return found
