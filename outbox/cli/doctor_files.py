"""What the doctor looks at in the files: each is read from its first page to its last, none is changed."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from outbox.api.obstacle import Scope
from outbox.api.reasons import command_word
from outbox.api.report import opened, outbox_files, overview
from outbox.cli.doctor_finding import Finding, failure, ok, warning
from outbox.cli.output import count, number
from outbox.errors import StoreBusy, StoreDamaged, StoreError, StoreTooNew
from outbox.setting_keys import Settings
from outbox.store.damage import damages
from outbox.store.directory import StateDirectory
from outbox.store.faults import Misplaced
from outbox.store.file import OutboxFile
from outbox.store.inspect import read_waiting
from outbox.store.relay_state import read_facts
from outbox.store.verify import unsound_rows, verify_counters, verify_pages

_BUSY_TIMEOUT_MS = 2_000
_YOUNG_S = 60.0
_SIDES = ("-wal", "-shm", "-journal")
_OTHERS_GO_ON = "The other agents are not affected."
_HELD = {Scope.PERSON, Scope.RELAY, Scope.PATH, Scope.AGENT}
_MOST_NAMED = 5
_COPY_AND_TELL = "Keep a copy of the file, and report it. Its events are delivered as usual."


def waiting_in(state: StateDirectory) -> int:
    """How many events wait in all files that can be read."""
    total = 0
    for path in _files(state):
        try:
            with opened(state, path, busy_timeout_ms=_BUSY_TIMEOUT_MS) as box:
                total += read_waiting(box)
        except StoreError:
            continue
    return total


def outboxes(state: StateDirectory) -> Iterator[Finding]:
    """A line for each file with a fault, and one for those without."""
    try:
        paths = outbox_files(state)
    except StoreError as error:
        yield failure("files", str(error))
        return
    sound = 0
    for path in paths:
        findings = list(_outbox(state, path))
        sound += not findings
        yield from findings
    if sound or not paths:
        said = f"{count(sound, 'outbox', 'outboxes')}: pages sound, rows as they were stored, counters true"
        yield ok("files", said if paths else "no outbox yet")


def held_back(state: StateDirectory, settings: Settings, now_ms: int) -> Iterator[Finding]:
    """Whose events do not go although somebody sends, and why in a word; nothing when there is no such agent.

    A relay can answer health, and take no event all the same.
    """
    try:
        seen = overview(state, now_ms, relay_url=settings.relay.url, paths=settings.kind_paths())
    except StoreError:
        return  # told of the files
    held = [(line.agent, line.why.reason) for line in seen.outboxes if line.why and line.why.scope in _HELD]
    if held:
        who = "; ".join(f"{agent} ({reason})" for agent, reason in held[:_MOST_NAMED])
        more = f"; and {number(len(held) - _MOST_NAMED)} more" if len(held) > _MOST_NAMED else ""
        said = f"{count(len(held), 'agent is', 'agents are')} held back: {who}{more}."
        yield warning("delivery", said, f"For what, and what to do: outbox why {command_word(held[0][0])}")


def _outbox(state: StateDirectory, path: Path) -> Iterator[Finding]:
    try:
        with opened(state, path, busy_timeout_ms=_BUSY_TIMEOUT_MS) as box:
            yield from _contents(box)
    except StoreBusy as error:
        yield warning("files", f"{path.name} could not be looked at: {_first(error)}", "Try again later.")
    except StoreTooNew as error:
        yield failure("files", str(error), damage=True)
    except Misplaced as error:
        said, _, todo = str(error).partition(". ")
        yield failure("files", f"{said}.", todo, damage=True)
    except StoreDamaged as error:
        todo = (
            "The daemon sets it aside and queues again what can be read, as does the next event of its "
            f"agent. {_OTHERS_GO_ON}"
        )
        yield failure("files", _first(error), todo, damage=True)
    except StoreError as error:
        yield failure("files", str(error))


def _contents(box: OutboxFile) -> Iterator[Finding]:
    name = f"{box.path.name} ({box.agent})"
    if faults := verify_pages(box):
        todo = f"It is set aside, and what can be read queued again, once it is used. {_OTHERS_GO_ON}"
        yield failure("files", f"{name} is damaged: {'; '.join(faults)}.", todo, damage=True)
        return
    if rows := unsound_rows(box):
        seqs = ", ".join(f"{seq:,}" for seq in rows[:5]) + ("…" if len(rows) > 5 else "")
        todo = "When their turn comes they become dead letters (damaged), and what is behind them goes on."
        yield failure(
            "files", f"{name}: the stored text of seq {seqs} is not what was accepted.", todo, damage=True
        )
    if faults := verify_counters(box):
        said = f"{name}: its counters do not agree with its rows ({'; '.join(faults)})."
        yield failure("files", said, _COPY_AND_TELL, damage=True)


def _first(error: StoreError) -> str:
    return str(error).partition(". ")[0] + "."


def relay_facts(state: StateDirectory) -> Iterator[Finding]:
    """What is known of the relay; losing it costs time, and no event."""
    path = state.relay_state
    if path.exists() and path.stat().st_size and not read_facts(path):
        yield warning(
            "files",
            f"{path.name} cannot be read, or holds nothing.",
            "Nothing is to be done: it is put aside at the next start, and the relay learned anew.",
        )


# Leftovers -------------------------------------------------------------------------------------------------


def leftovers(state: StateDirectory) -> Iterator[Finding]:
    """What nobody needs any more, and what was set aside for a person to look at."""
    drafts = [path for path in _entries(state.agents) if _is_draft(path)]
    if drafts:
        yield _removable(drafts, "left by a process that was killed while it made an outbox")
    orphans = [path for path in _entries(state.agents) if _is_orphan(path)]
    if orphans:
        said = f"{_named(orphans)}: {'a log' if len(orphans) == 1 else 'logs'} without a file."
        todo = "It is put aside with the next event of its agent. If you moved the file: bring it back."
        yield warning("leftovers", said, todo)
    cut_short = [path for path in _entries(state.agents) if path.name.startswith((".aside-", ".mended-"))]
    if cut_short:
        said = f"{_named(cut_short)}: a damaged file is just being replaced, or that was cut short."
        yield warning(
            "leftovers", said, "Nothing is to be done: whoever uses the outbox next goes on with it."
        )
    known = sorted(damages(state), key=lambda damage: damage.at_ms)
    for damage in known:
        moved = shlex.quote(str(state.path / damage.moved_to))
        yield warning("leftovers", damage.sentence(), f"Once it was looked at: rm {moved}*")
    told = {Path(damage.moved_to).name for damage in known}
    others = [path for path in _entries(state.damaged) if not path.name.startswith(tuple(told) or ("\0",))]
    if others:
        yield warning(
            "leftovers",
            f"{_named(others)}: put aside, since it could not be used where it lay.",
            "Once it was looked at, it can be removed.",
        )


def _removable(paths: list[Path], why: str) -> Finding:
    return warning("leftovers", f"{_named(paths)}: {why}.", "Remove it: rm " + " ".join(map(str, paths[:5])))


def _named(paths: list[Path]) -> str:
    more = f" and {count(len(paths) - 1, 'other file')}" if len(paths) > 1 else ""
    return f"{paths[0]}{more}"


def _is_draft(path: Path) -> bool:
    """Made under a name of its own, and not by somebody who is still at it."""
    try:
        young = time.time() - path.lstat().st_mtime < _YOUNG_S
    except OSError:
        return False
    return path.name.startswith((".new-", ".draft-")) and not young


def _is_orphan(path: Path) -> bool:
    ending = next((side for side in _SIDES if path.name.endswith(side)), "")
    main = path.with_name(path.name.removesuffix(ending))
    return bool(ending) and not path.name.startswith(".") and not main.exists()


def _files(state: StateDirectory) -> list[Path]:
    try:
        return outbox_files(state)
    except StoreError:
        return []


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []
