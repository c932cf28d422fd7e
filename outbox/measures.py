"""Numbers, ages, moments and sizes as a person reads them, in commands, messages and explanations."""

from __future__ import annotations

from datetime import datetime


def number(value: int) -> str:
    """10234 as "10,234"."""
    return f"{value:,}"


def count(value: int, one: str, many: str | None = None) -> str:
    """A number with its noun: "1 event", "10,234 events"."""
    return f"{number(value)} {one if value == 1 else many or one + 's'}"


def age(ms: int) -> str:
    """A length of time, rounded down: "40 s", "18 min", "3 h 12 min", "2 days 4 h"; never less than "0 s"."""
    seconds = max(ms, 0) // 1000
    if seconds < 120:
        return f"{seconds} s"
    minutes = seconds // 60
    if minutes < 60:
        return f"{minutes} min"
    hours = minutes // 60
    if hours < 48:
        return _two(hours, "h", minutes % 60, "min")
    return _two(hours // 24, "days", hours % 24, "h")


def _two(large: int, large_unit: str, small: int, small_unit: str) -> str:
    return f"{large} {large_unit}" + (f" {small} {small_unit}" if small else "")


def local_time(epoch_ms: int, now_ms: int, *, seconds: bool = False) -> str:
    """A moment in local time: "14:02", with `seconds` "14:02:31", on another day "2026-11-30 14:02"."""
    try:
        moment, today = (datetime.fromtimestamp(ms / 1000).astimezone() for ms in (epoch_ms, now_ms))
    except (OverflowError, OSError, ValueError):  # a producer's time may lie outside the calendar
        return f"{epoch_ms} ms"
    clock = f"{moment:%H:%M:%S}" if seconds else f"{moment:%H:%M}"
    return clock if moment.date() == today.date() else f"{moment.date().isoformat()} {clock}"


def bytes_text(size_bytes: int) -> str:
    """A size: "820 bytes", "1.5 KiB", "512 MiB"."""
    if size_bytes < 1024:
        return count(size_bytes, "byte")
    size = float(size_bytes)
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1023.95 or unit == "TiB":
            break
    return f"{size:,.1f}".removesuffix(".0") + f" {unit}"
