"""Looks at the outboxes of a state directory for what a person should know; what that is, alarms.py says."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outbox.api.explain import Explanation, explain
from outbox.api.report import FOR_ALL, opened
from outbox.daemon.alarms import Alarm, Known, Look, matter_of, news, stuck, token_stopped
from outbox.daemon.compose import is_minted
from outbox.daemon.watch import FileWatch
from outbox.errors import StoreDamaged, StoreError, StoreTooNew
from outbox.setting_keys import Settings
from outbox.store.damage import damages
from outbox.store.directory import StateDirectory
from outbox.store.inspect import OutboxStatus, dead_letters, read_status, totals
from outbox.store.relay_state import read_facts


class Lookout:
    """Remembers what it saw the last time. What is there at the start is known, and no news."""

    def __init__(self, state: StateDirectory) -> None:
        """Nothing is opened before the first look."""
        self._state = state
        self._watch = FileWatch(state)
        self._again: set[Path] = set()
        self._known: dict[Path, Known] = {}
        self._seen: dict[Path, OutboxStatus] = {}
        self._faults: dict[Path, str] = {}
        self._told: set[str] = set()
        self._began_ms = time.time_ns() // 1_000_000
        self._aside = set(damages(state))
        self._auth_state = _auth_of(state).get("state")

    def look(self, settings: Settings) -> list[Alarm]:
        """What is new since the last look."""
        now_ms = time.monotonic_ns() // 1_000_000
        alarms = self._set_aside() + (self._tokens() if is_minted(settings) else [])
        try:
            changed = self._watch.changed()
        except StoreError:  # the daemon says so itself
            return alarms
        present = set(self._watch.paths)
        again, self._again = self._again & present, set()
        for path in dict.fromkeys((*changed, *again)):
            alarms += self._look_at(path, now_ms)
        for gone in self._known.keys() - present:
            del self._known[gone], self._seen[gone]
        for gone in self._faults.keys() - present:
            del self._faults[gone]
        return alarms + self._stuck(settings, now_ms)

    def _look_at(self, path: Path, now_ms: int) -> list[Alarm]:
        try:
            with opened(self._state, path) as box:
                status = read_status(box)
                look = Look(status, totals(box), list(dead_letters(box)) if status.dead else [])
        except (StoreDamaged, StoreTooNew) as error:
            return self._fault(path, error)
        except StoreError:  # in use, or just removed
            self._again.add(path)
            return []
        self._faults.pop(path, None)
        self._seen[path] = status
        before = self._known.get(path)
        self._known[path], alarms = news(before, look, began_ms=self._began_ms, now_ms=now_ms)
        return alarms

    def _fault(self, path: Path, error: StoreError) -> list[Alarm]:
        if self._faults.get(path) == error.code:
            return []
        self._faults[path] = error.code
        return [Alarm("damaged_file", None, error.code, str(error))]

    def _tokens(self) -> list[Alarm]:
        auth = _auth_of(self._state)
        before, self._auth_state = self._auth_state, auth.get("state")
        return token_stopped(str(before), auth)

    def _set_aside(self) -> list[Alarm]:
        """Files that were put aside since the last look, by whomever."""
        before, self._aside = self._aside, set(damages(self._state))
        new = sorted(self._aside - before, key=lambda damage: damage.at_ms)
        return [Alarm("damaged_file", damage.agent, damage.fault, damage.sentence()) for damage in new]

    def _stuck(self, settings: Settings, now_ms: int) -> list[Alarm]:
        """Heads that do not get on; each matter once, until it is mended."""
        horizon_ms = now_ms - round(settings.notify.alert_after_s * 1_000)
        late = [
            status
            for path, status in self._seen.items()
            if status.head and status.paused_at_ms is None and self._known[path].head_since_ms <= horizon_ms
        ]
        matters = self._matters(late, settings) if late else {}
        told, self._told = self._told, set(matters)
        return [stuck(waiting, why) for matter, (waiting, why) in matters.items() if matter not in told]

    def _matters(
        self, late: list[OutboxStatus], settings: Settings
    ) -> dict[str, tuple[list[OutboxStatus], Explanation]]:
        facts, now_ms = read_facts(self._state.relay_state), time.time_ns() // 1_000_000
        found: dict[str, tuple[list[OutboxStatus], Explanation]] = {}
        for status in late:
            why = explain(status, facts, daemon_running=True, now_ms=now_ms, paths=settings.kind_paths())
            found.setdefault(matter_of(status, why), ([], why))[0].append(status)
        return found


def _auth_of(state: StateDirectory) -> Mapping[str, Any]:
    """What is known of the tokens as a whole."""
    return read_facts(state.relay_state).get(FOR_ALL) or {}
