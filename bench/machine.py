"""The machine a bench runs on, and what the kernel says of a process (Linux: /proc)."""

from __future__ import annotations

import os
import platform
import sys
import time
from pathlib import Path

import apsw

_KB = 1024
_MB = 1_000_000
_WHOLE_PROCESS = 2


def told(folder: Path) -> list[str]:
    """What the figures depend on, a line each."""
    return [
        f"date {time.strftime('%Y-%m-%d %H:%M %Z')}",
        f"{os.cpu_count()} cores, {_processor()}",
        f"kernel {platform.release()}, {_file_system(folder)}",
        f"Python {platform.python_version()}, SQLite {apsw.sqlite_lib_version()}",
    ]


def load() -> str:
    """The load averages of 1, 5 and 15 minutes."""
    return ", ".join(f"{value:.2f}" for value in os.getloadavg())


def memory_mb(pid: int, *, peak: bool = False) -> float:
    """Resident memory of a process, now or at its highest, in MB (10^6 bytes)."""
    name = "VmHWM:" if peak else "VmRSS:"
    lines = Path(f"/proc/{pid}/status").read_text("ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) * _KB / _MB


def processor_s(pid: int) -> float:
    """Seconds that a process has been on a processor, threads that ended included."""
    clock = (~pid << 3) | _WHOLE_PROCESS  # what clock_getcpuclockid(3) gives
    return time.clock_gettime(clock)


def descriptors(pid: int) -> int:
    """How many descriptors a process has open."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text("utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine() or sys.platform


def _file_system(folder: Path) -> str:
    """The type of the file system that the files of the bench lie on."""
    best, of = "", "unknown"
    place = str(folder.resolve())
    for line in Path("/proc/self/mounts").read_text("utf-8").splitlines():
        _, point, kind, *_ = line.split()
        inside = place == point or place.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best, of = point, kind
    return of
