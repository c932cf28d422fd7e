"""`Retry-After` (RFC 9110, section 10.2.3): how long an answer asks to wait. Pure."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
_MONTH = f"(?P<month>{'|'.join(_MONTHS)})"
_TIME = r"(?P<hour>[0-9]{2}):(?P<minute>[0-9]{2}):(?P<second>[0-9]{2})"
_SHORT_DAY = "(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_LONG_DAY = "(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day"
_DATES = tuple(
    re.compile(form)
    for form in (
        rf"{_SHORT_DAY}, (?P<day>[0-9]{{2}}) {_MONTH} (?P<year>[0-9]{{4}}) {_TIME} GMT",
        rf"{_LONG_DAY}, (?P<day>[0-9]{{2}})-{_MONTH}-(?P<year>[0-9]{{2}}) {_TIME} GMT",
        rf"{_SHORT_DAY} {_MONTH} (?P<day>[0-9 ][0-9]) {_TIME} (?P<year>[0-9]{{4}})",
    )
)
_DIGITS_OF_ANY_SANE_WAIT = 12


def parse_retry_after(values: str, now_ms: int, ceiling_ms: int) -> int | None:
    """The wait in milliseconds that a `Retry-After` field asks for, at most `ceiling_ms`; None for none.

    Seconds, or an HTTP date in any of its three forms (RFC 9110, section 5.6.7). What cannot be read, is
    negative, is a date that has passed, or was sent twice counts as absent. 0 is a readable wait.
    """
    value = values.strip(" \t")
    if re.fullmatch(r"[0-9]+", value):
        if len(value.lstrip("0")) > _DIGITS_OF_ANY_SANE_WAIT:
            return ceiling_ms
        return min(int(value) * 1000, ceiling_ms)
    date_ms = _http_date_ms(value, now_ms)
    if date_ms is None or date_ms <= now_ms:
        return None
    return min(date_ms - now_ms, ceiling_ms)


def _http_date_ms(value: str, now_ms: int) -> int | None:
    for form in _DATES:
        if found := form.fullmatch(value):
            return _epoch_ms(found, now_ms)
    return None


def _epoch_ms(found: re.Match[str], now_ms: int) -> int | None:
    year = int(found["year"])
    if len(found["year"]) == 2:
        year = _full_year(year, now_ms)
    try:
        midnight = datetime(year, _MONTHS.index(found["month"]) + 1, int(found["day"]), tzinfo=UTC)
    except ValueError:
        return None
    hour, minute, second = int(found["hour"]), int(found["minute"]), int(found["second"])
    if hour > 23 or minute > 59 or second > 60:  # 60 is a leap second
        return None
    since_epoch = midnight - datetime(1970, 1, 1, tzinfo=UTC)
    return (since_epoch + timedelta(hours=hour, minutes=minute, seconds=second)) // timedelta(milliseconds=1)


def _full_year(two_digits: int, now_ms: int) -> int:
    """RFC 9110, section 5.6.7: more than 50 years ahead means the last year that ended in these digits."""
    this_year = (datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=now_ms)).year
    year = this_year - this_year % 100 + two_digits
    return year - 100 if year > this_year + 50 else year
