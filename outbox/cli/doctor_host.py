"""What the doctor looks at on the host: software, configuration, clock, descriptors, the daemon."""

from __future__ import annotations

import os
import platform
import re
import resource
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

from outbox import __version__
from outbox.api.client import LocalClient
from outbox.cli.doctor_finding import Finding, failure, ok, warning
from outbox.cli.output import age, count, number
from outbox.errors import Unavailable
from outbox.settings import Report, Settings, unknown_variables
from outbox.store.directory import StateDirectory
from outbox.store.place import RunningDaemon
from outbox.store.verify import sqlite_version

_SOUND_SQLITE = (3, 51, 3)
_FIRST_S, _LAST_S = 1_735_689_600, 4_102_444_800  # 2025-01-01 and 2100-01-01
_STEP_S = 60.0
ANSWER_WITHIN_S = 10.0
_DESCRIPTORS_A_FILE, _OTHER_DESCRIPTORS = 3, 32


def software() -> Finding:
    """The versions; SQLite before 3.51.3 can damage a file that several connections write to."""
    sqlite = sqlite_version()
    said = f"relay-outbox {__version__}, Python {platform.python_version()}, SQLite {sqlite}"
    if _numbers(sqlite) < _SOUND_SQLITE:
        return failure(
            "software",
            f"{said}: this SQLite can damage a file that several processes write to.",
            "Install apsw 3.51.3 or later: pip install --upgrade apsw",
        )
    return ok("software", said)


def configuration(report: Report, environ: Mapping[str, str]) -> Iterator[Finding]:
    """Every fault, and variables that look like settings and are none."""
    name, todo = "configuration", "A daemon would not start with this; a running one keeps what it has."
    for fault in report.faults:
        yield failure(name, f"{fault}.", f"{todo} Correct it, then: outbox config check")
    for variable, near in unknown_variables(environ):
        hint = f"; the nearest known one is {near}" if near else ""
        yield warning(
            name, f"The variable {variable} is no setting and is passed over{hint}.", "Correct or unset it."
        )
    if not report.faults:
        files = ", ".join(map(str, report.settings.files))
        yield ok(name, f"no fault; read: {files}" if files else "no fault; no file, the environment alone")


def notification(settings: Settings) -> Iterator[Finding]:
    """Whether the command that is to be called is there."""
    words = settings.notify.command
    if words and shutil.which(words[0]) is None:
        yield failure(
            "notify",
            f"notify.command: there is no program {words[0]}; nobody would be told of trouble.",
            "Give its whole path, or install it.",
        )
    elif words or settings.notify.url:
        yield ok("notify", "trouble is told " + (f"by {words[0]}" if words else "at notify.url"))


# Clock and descriptors -------------------------------------------------------------------------------------


def clock(state: StateDirectory, daemon: RunningDaemon | None, now_s: float) -> Iterator[Finding]:
    """Whether the wall clock can be right: the year, steps since the daemon began, files from the future."""
    name, todo = (
        "clock",
        "Set the clock, and keep it with NTP. Events carry the time at which they were accepted.",
    )
    findings = []
    if not _FIRST_S <= now_s < _LAST_S:
        findings.append(failure(name, f"The year {time.gmtime(now_s).tm_year} is not plausible.", todo))
    step_s = clock_step_s(daemon, now_s) if daemon else 0.0
    if abs(step_s) > _STEP_S:
        way = "forward" if step_s > 0 else "back"
        said = f"It was set {way} by {age(round(abs(step_s) * 1_000))} since the daemon started."
        findings.append(warning(name, said, todo))
    ahead_s = max((_touched_s(path) for path in _entries(state.agents)), default=0.0) - now_s
    if ahead_s > _STEP_S:
        said = (
            f"A file was written {age(round(ahead_s * 1_000))} in the future: the clock was set back since."
        )
        findings.append(warning(name, said, todo))
    yield from findings or [ok(name, time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(now_s)))]


def clock_step_s(daemon: RunningDaemon, now_s: float) -> float:
    """How far the wall clock went astray since a daemon started: its age by the wall, less its true age."""
    if not daemon.pid or not daemon.started_at_ms:
        return 0.0
    try:
        text = Path(f"/proc/{daemon.pid}/stat").read_text("ascii", "replace")
    except OSError:
        return 0.0
    began_s = int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")  # proc(5): starttime
    true_age_s = time.clock_gettime(time.CLOCK_BOOTTIME) - began_s
    return now_s - daemon.started_at_ms / 1_000 - true_age_s


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _touched_s(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def descriptors(settings: Settings, daemon: RunningDaemon | None) -> Finding:
    """How many files may be open, against how many the daemon would like to keep so."""
    limit = _limit_of(daemon) if daemon and daemon.pid else resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    whose = "the daemon" if daemon and daemon.pid else "a daemon started from here"
    if limit is None or limit == resource.RLIM_INFINITY:
        return ok("descriptors", "no limit is known")
    wanted = (
        _DESCRIPTORS_A_FILE * settings.daemon.max_open_files
        + settings.relay.max_connections
        + _OTHER_DESCRIPTORS
    )
    said = f"{whose} may open {number(limit)} files"
    if limit < wanted:
        return warning(
            "descriptors",
            f"{said}; for daemon.max_open_files and relay.max_connections it would take {number(wanted)}. It "
            "works with fewer, opening outboxes more often.",
            "Raise the limit (ulimit -n, LimitNOFILE=), or lower these settings.",
        )
    return ok("descriptors", said)


def _limit_of(daemon: RunningDaemon) -> int | None:
    try:
        text = Path(f"/proc/{daemon.pid}/limits").read_text("ascii", "replace")
    except OSError:
        return None
    found = re.search(r"^Max open files +(\d+)", text, re.MULTILINE)
    return int(found[1]) if found else None


# The daemon ------------------------------------------------------------------------------------------------


def the_daemon(daemon: RunningDaemon | None, waiting: int) -> Iterator[Finding]:
    """Whether one runs, answers, and is of our release."""
    name = "daemon"
    if daemon is None:
        if waiting:
            said = f"None runs, and {count(waiting, 'event waits', 'events wait')} on disk."
            yield warning(name, said, "To send them: outbox serve, or once: outbox flush")
        else:
            yield ok(name, "none runs; nothing waits")
        return
    try:
        LocalClient(daemon.socket).get("/v1/status", ANSWER_WITHIN_S)
    except Unavailable as error:
        yield failure(name, f"It runs (pid {daemon.pid or 'not known yet'}), and {_quiet(error)}", _RESTART)
        return
    yield _version(daemon) or ok(name, f"pid {daemon.pid}, {daemon.version}, answers at {daemon.socket}")


_RESTART = "If it stays so, restart it: systemctl restart outbox, or outbox stop and outbox serve."


def _quiet(error: Unavailable) -> str:
    return str(error).removeprefix("The daemon ").partition(". ")[0] + ". What waits stays on disk."


def _version(daemon: RunningDaemon) -> Finding | None:
    theirs, ours = _numbers(daemon.version), _numbers(__version__)
    if theirs < ours:
        return warning(
            "daemon",
            f"It is of release {daemon.version}, and {__version__} is installed.",
            "Restart it: systemctl restart outbox, or outbox stop and outbox serve.",
        )
    if theirs > ours:
        said = f"It is of release {daemon.version}; this command is older ({__version__})."
        return warning("daemon", said, "Use the command of the daemon's own installation.")
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])
