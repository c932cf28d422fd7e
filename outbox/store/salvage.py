"""Setting a damaged file aside: a new one of the same agent takes its place, with all that could be read.

The order of the steps is what makes it safe. The file is hidden first, so that no commit goes into it any
more; under the lifecycle byte, held exclusively, it is copied, read, and a new file is made. From the moment
that one lies whole beside it, it is the outbox: whatever ends this process, the next one goes on from there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import apsw

from outbox.bounds import Bounds
from outbox.errors import StoreBusy, StoreDamaged, StoreError, StoreFull
from outbox.event import Limits
from outbox.store.aside import hidden_path, mended_path, report_path
from outbox.store.create import make_file, sync_file
from outbox.store.damage import Damage, decode, untold_gaps, untold_name
from outbox.store.directory import StateDirectory, file_name, is_regular, sync_folder
from outbox.store.faults import Misplaced, store_error
from outbox.store.locks import lifecycle_byte, owners_lock
from outbox.store.rebuild import EarlierGap, Rebuilt, rebuild
from outbox.store.rules import encode_rules
from outbox.store.wreck import OTHER_AGENT, Wreck, agent_of, fault_of, log_is_of, other_agent_in

_LONGEST_WAIT_S = 5.0
_SIDES = ("-wal", "-shm")
_FOREIGN_LOG = "the log beside it belongs to another agent"


def set_aside(state: StateDirectory, path: Path, agent: str | None, now_ms: int) -> Damage | None:
    """See whether the file at `path` is damaged, and if so put a new one in its place.

    When this returns a whole file stands there, be it that nothing was wrong with it or that another process
    was faster: open it anew. The damaged one lies in STATE/damaged, with its side files and a report, which
    is returned by the one who put the new file in its place.
    `agent` is needed where the file does not tell whose it is any more.

    Raises:
        StoreDamaged: it is damaged, and was left alone, since nobody can tell whose it is.
        StoreTooNew: it was written by a newer release; nothing was changed.
        StoreBusy: others have used it all the time; StoreFull: there is no room for the new file.
    """
    try:
        _hide(state, path)
        with _nobody_commits(state, path):
            if not os.path.lexists(mended_path(path)):
                if not os.path.lexists(hidden_path(path)):
                    return None
                if not _mended(_Case(state, path, agent, now_ms)):
                    return None
            return _swap(state, path)
    except OSError as error:
        kind = StoreFull if error.errno in {errno.ENOSPC, errno.EDQUOT} else StoreError
        raise kind(
            f"The damaged file {path.name} cannot be set aside: {error.strerror}. It was left alone; nothing "
            f"was stored. Make space below {str(state.path)!r}, or give its owner leave to write there."
        ) from error


def _hide(state: StateDirectory, path: Path) -> None:
    """From here on whoever has the file open learns at its next commit that it is gone."""
    if is_regular(path):
        if _left_over(path):
            with _nobody_commits(state, path):
                _remove_left_over(path)
        with contextlib.suppress(FileNotFoundError):
            path.rename(hidden_path(path))


def _left_over(path: Path) -> list[Path]:
    """What lies beside a file that is in its place, of a swap that went on without it."""
    return [left for left in (mended_path(path), report_path(path)) if os.path.lexists(left)]


def _remove_left_over(path: Path) -> None:
    """Nobody swaps meanwhile; if somebody has since we looked, and died, it is the outbox now."""
    if is_regular(path):
        for left in _left_over(path):
            left.unlink()


@contextmanager
def _nobody_commits(state: StateDirectory, path: Path) -> Iterator[None]:
    locks, byte = owners_lock(state.path), lifecycle_byte(path.name)
    if not locks.wait_exclusive(byte, _LONGEST_WAIT_S):
        raise StoreBusy(
            f"The damaged file {path.name} is just being set aside by another process. Nothing was stored; "
            "try again."
        )
    try:
        yield
    finally:
        locks.release(byte)


@dataclass(frozen=True, slots=True)
class _Case:
    """One file to look at; `agent` is whose it should be, where somebody knows."""

    state: StateDirectory
    path: Path
    agent: str | None
    now_ms: int


def _mended(case: _Case) -> bool:
    """Make the new file from the hidden one; False, and the file is back, when nothing is wrong with it.

    It is back too when this raises, whatever the reason.
    """
    path = case.path
    try:
        with _workplace(case.state, path) as folder:
            copy = folder / path.name
            _copy(path, copy)
            if fault := _fault(case, copy):
                _make(case, copy, fault)
                return True
    except BaseException:
        _unhide(path)
        raise
    _unhide(path)
    return False


def _unhide(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        hidden_path(path).rename(path)


@contextmanager
def _workplace(state: StateDirectory, path: Path) -> Iterator[Path]:
    """A private folder for the copy, always the same for a file, so that none is left for good."""
    if not state.damaged.is_dir():
        state.damaged.mkdir(mode=0o700)
        state.damaged.chmod(0o700)
        sync_folder(state.path)
    folder = _work_folder(state, path)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _work_folder(state: StateDirectory, path: Path) -> Path:
    return state.damaged / f".work-{path.stem}"


def _copy(path: Path, copy: Path) -> None:
    """The log is still beside the name that the file had; its index is made anew from it."""
    shutil.copyfile(hidden_path(path), copy)
    log = _side(path, "-wal")
    if is_regular(log):
        shutil.copyfile(log, _side(copy, "-wal"))


def _fault(case: _Case, copy: Path) -> str:
    """What is wrong; a log that is another agent's is left out of the copy from here on."""
    name, log = case.path.name, _side(copy, "-wal")
    fault = fault_of(copy, name)
    if not fault:
        return ""
    others = {path.name for path in case.state.outbox_files()} - {name}
    if log.exists() and (fault == OTHER_AGENT or log_is_of(copy, name, others)):
        log.unlink()
        fault = fault_of(copy, name)
        if fault != OTHER_AGENT and not other_agent_in(copy, name, others):
            return _FOREIGN_LOG
    is_whole = fault == OTHER_AGENT
    other = agent_of(copy) if is_whole else other_agent_in(copy, name, others)
    if is_whole or other:
        raise Misplaced(name, other, file_name(other))
    return fault


def _make(case: _Case, copy: Path, fault: str) -> None:
    """Write new file and report; the last rename makes them valid."""
    state, path = case.state, case.path
    draft, report = state.agents / f".draft-{path.name}", report_path(path)
    try:
        owner, rebuilt = _rebuilt(case, copy, draft, fault)
    except apsw.Error as error:
        raise store_error(error, path) from error
    sync_file(draft)
    moved_to = f"{state.damaged.name}/{_free_name(state, path, case.now_ms)}"
    damage = Damage(owner, path.name, moved_to, fault, case.now_ms, **dataclasses.asdict(rebuilt))
    _touch(report)
    report.write_text(damage.encode(), "utf-8")
    sync_file(report)
    draft.rename(mended_path(path))
    sync_folder(state.agents)


def _rebuilt(case: _Case, copy: Path, draft: Path, fault: str) -> tuple[str, Rebuilt]:
    """Whose file it is, and what became of its events."""
    path, rules, template = case.path, _rules_text(case.state), copy.with_name("template")
    _touch(template)
    make_file(template, "", "", rules, case.now_ms)
    wreck = Wreck(copy, path.name, template, mixed=fault == _FOREIGN_LOG)
    try:
        owner = wreck.agent or (case.agent if case.agent and file_name(case.agent) == path.name else None)
        if owner is None:
            raise StoreDamaged(
                f"The file {path.name} is damaged ({fault}) and does not tell whose it is. It was left "
                "alone; it is set aside with the next event of its agent. Other agents are not affected."
            )
        _touch(draft)
        gaps = untold_gaps(case.state, path.name)
        earlier = [EarlierGap(name, seq, count) for name, (seq, count) in gaps.items()]
        return owner, rebuild(wreck, draft, owner, rules=rules, earlier=earlier, now_ms=case.now_ms)
    finally:
        wreck.close()


def _free_name(state: StateDirectory, path: Path, now_ms: int) -> str:
    """A name with the time in it that no other has, nor any of its side files."""
    moment = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(now_ms / 1_000))
    names = (f"{path.stem}-{moment}{f'-{number}' if number else ''}.sqlite" for number in count())
    return next(name for name in names if not any(state.damaged.glob(f"{name}*")))


def _swap(state: StateDirectory, path: Path) -> Damage | None:
    """Move the evidence away and the new file into its place; what is done already is passed over."""
    report = report_path(path)
    damage = _read(report)  # None: it is in its place already
    moved_to = Path(damage.moved_to).name if damage else _free_name(state, path, time.time_ns() // 1_000_000)
    for source, name in (
        (hidden_path(path), moved_to),
        *((_side(path, side), moved_to + side) for side in _SIDES),
        (report, untold_name(moved_to)),
    ):
        target = state.damaged / name
        if os.path.lexists(source) and not os.path.lexists(target):
            source.rename(target)
    sync_folder(state.damaged)
    sync_folder(state.agents)
    mended_path(path).rename(path)
    sync_folder(state.agents)
    shutil.rmtree(_work_folder(state, path), ignore_errors=True)  # of one who died
    return damage


def _read(report: Path) -> Damage | None:
    try:
        return decode(report.read_text("utf-8"))
    except (OSError, ValueError):
        return None


def _rules_text(state: StateDirectory) -> str:
    try:
        return state.rules_file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return encode_rules(Limits(), Bounds())


def _side(path: Path, ending: str) -> Path:
    return path.with_name(path.name + ending)


def _touch(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600))
