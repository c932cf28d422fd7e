"""The engine of one agent inside `outbox run`, where no daemon answers: one without signals and place."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.daemon.compose import build_engine
from outbox.daemon.flush import FlushReport, dismiss
from outbox.daemon.logs import register_secret
from outbox.daemon.supervisor import Daemon
from outbox.errors import OutboxError, StoreError, UsageError
from outbox.event import Draft
from outbox.setting_keys import Settings
from outbox.store.directory import StateDirectory
from outbox.store.enqueue import Receipt

if TYPE_CHECKING:
    from outbox.api.server import LocalServer

_LOOK_EVERY_S = 0.2  # the one wake-up socket of a state directory is the daemon's: files are looked at
_WORKERS = 2  # one agent takes one turn at a time
_HOUSEKEEPING_S = 60.0
_LOOK_ENDS_WITHIN_S = 5.0


class OneAgent(StateDirectory):
    """A state directory in which only one agent's outbox is seen."""

    def __init__(self, path: Path, agent: str) -> None:
        """Remember whose."""
        super().__init__(path)
        self.agent = agent

    def outbox_files(self) -> Iterator[Path]:
        """That agent's file, when it is there."""
        path = self.outbox_path(self.agent)
        if os.path.lexists(path):
            yield path


def _silent(_event: str, _fields: Mapping[str, Any]) -> None:
    """The terminal is the command's: what there is to know stands in `outbox status`."""


class Companion(Daemon):
    """Delivers one agent's events, and serves the local socket for it, until `end`."""

    def __init__(
        self, settings: Settings, state: StateDirectory, agent: str, version: str, listening: socket.socket
    ) -> None:
        """Nothing is started yet; `listening` is bound and listens, its name is the caller's to remove."""
        delivery = replace(settings.delivery, workers=min(_WORKERS, settings.delivery.workers))
        own = replace(settings, delivery=delivery)
        super().__init__(own, OneAgent(state.path, agent), lambda: own, version, _silent, sockets=[listening])
        self.agent = agent
        self._listening = listening
        self._server: LocalServer | None = None
        self._over = threading.Event()
        self._looking = threading.Thread(target=self._look, name="look", daemon=True)

    @contextlib.contextmanager
    def running(self) -> Iterator[Companion]:
        """Deliver and serve while the block runs; raises ConfigError when a setting cannot be used."""
        self.engine = build_engine(self.settings, self.state, log=self.log, on_token=register_secret)
        try:
            self._start_engine()
            self._looking.start()
            yield self
        finally:
            self._over.set()
            self._flushed.set()
            self._notifier.stop()
            self._looking.join(_LOOK_ENDS_WITHIN_S)
            if self._server is not None:
                self._server.stop()
            dismiss(self.engine, 0.5)

    def _look(self) -> None:
        next_poll = next_care = 0.0
        while not self._over.wait(min(_LOOK_EVERY_S, self.settings.daemon.poll_interval_s)):
            # Whoever calls is served at the next look: no descriptor, or no thread, was free.
            with contextlib.suppress(OutboxError, OSError, RuntimeError):
                self._serve_if_asked()
            now = time.monotonic()
            with contextlib.suppress(OutboxError, OSError):  # the next look tells
                self._scan()
                if now >= next_poll:
                    next_poll = now + self.settings.daemon.poll_interval_s
                    self._poll()
                if now >= next_care:
                    next_care = now + _HOUSEKEEPING_S
                    self._expire()

    def _serve_if_asked(self) -> None:
        """The local HTTP is loaded for its first caller: most commands write the file, and call nobody."""
        if self._server is None and select.select([self._listening], [], [], 0)[0]:
            from outbox.api.server import LocalServer  # noqa: PLC0415 - see above

            server = LocalServer(self, self.socket_path, [self._listening])
            server.start()
            self._server = server

    def last_flush(self, timeout_s: float, enough: Callable[[], bool]) -> FlushReport:
        """Send what waits until the deadline, or until `enough`."""
        end = time.monotonic() + timeout_s
        with contextlib.suppress(StoreError):
            self._scan()
        return self._flush_until(end, list(self.state.outbox_files()), enough=enough).report()

    def enqueue(self, agent: str, drafts: Sequence[Draft]) -> list[Receipt | OutboxError]:
        """Take events of the one agent; raises UsageError for another's, which nobody here would deliver."""
        if agent != self.agent:
            raise UsageError(
                f"This sidecar delivers for {self.agent!r} alone. Nothing was stored. For {agent!r}: "
                "outbox enqueue --agent, or a daemon.",
                code="unknown_agent",
            )
        return super().enqueue(agent, drafts)

    def stop(self) -> None:
        """A sidecar ends with its command, so this is refused."""
        raise UsageError(
            f"This is the sidecar of {self.agent!r}: it ends with its command. Nothing was changed. "
            f"To end both: kill {os.getpid()}"
        )
