"""How commands speak."""

import io
import json
import subprocess
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.cli import output
from outbox.errors import StoreHeld
from outbox.printable import has_unprintable, printable, quoted

NOW_MS = 1_796_040_000_000


@pytest.fixture
def utc(monkeypatch):
    """Local time is UTC for one test."""
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def test_numbers_and_their_nouns():
    """Thousands are set apart, one thing is no things."""
    assert output.number(10_234) == "10,234"
    assert [output.count(n, "event") for n in (0, 1, 1000)] == ["0 events", "1 event", "1,000 events"]
    assert output.count(2, "has", "have") == "2 have"


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (-5, "0 s"),
        (999, "0 s"),
        (40_000, "40 s"),
        (119_999, "119 s"),
        (120_000, "2 min"),
        (18 * 60_000, "18 min"),
        (3_600_000, "1 h"),
        (192 * 60_000, "3 h 12 min"),
        (47 * 3_600_000, "47 h"),
        (52 * 3_600_000, "2 days 4 h"),
        (7 * 86_400_000, "7 days"),
    ],
)
def test_ages(ms, text):
    """Two units at most, rounded down."""
    assert output.age(ms) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 bytes"),
        (1, "1 byte"),
        (1023, "1,023 bytes"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (2**29, "512 MiB"),
        (2**20 - 1, "1 MiB"),
        (2**40, "1 TiB"),
        (2**53, "8,192 TiB"),
    ],
)
def test_sizes(size, text):
    """In binary units, with one decimal where it says something."""
    assert output.bytes_text(size) == text


def test_local_times(utc):
    """The clock today, the date too on another day, and no crash outside the calendar."""
    assert output.local_time(NOW_MS, NOW_MS) == "12:00"
    assert output.local_time(NOW_MS - 29_000, NOW_MS, seconds=True) == "11:59:31"
    assert output.local_time(NOW_MS - 86_400_000, NOW_MS) == "2026-11-29 12:00"
    for beyond in (10**18, -(10**18), 2**70):
        assert output.local_time(beyond, NOW_MS) == f"{beyond} ms"


def test_a_table_is_aligned_by_what_a_terminal_shows():
    """Wide and combining characters count as the cells they take; numbers end at their right edge."""
    lines = output.table(
        [("builder", "412"), ("日本", "3"), ("e\u0301", "10,233")], ("agent", "waiting"), right=("waiting",)
    )
    assert lines == ["agent    waiting", "builder      412", "日本           3", "e\u0301         10,233"]


def test_a_table_cannot_be_broken_by_what_stands_in_it():
    """An agent's name with a line end stays one row."""
    lines = output.table([("a\nb\x1b[2J", "x")], ("agent", "state"))
    assert lines == ["agent        state", "a\\nb\\x1b[2J  x"]
    assert all(line.isprintable() for line in lines)


def test_long_lines_are_cut_on_a_terminal_only():
    """With a width the line fits and says that it goes on; in a pipe it is whole."""
    rows = [("日" * 50,)]
    assert output.table(rows, ("agent",))[1] == "日" * 50
    assert output.table(rows, ("agent",), width=10)[1] == "日" * 4 + "…"
    assert output.table([("a" * 10,)], ("agent",), width=10)[1] == "a" * 10


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self):
        """Yes."""
        return True


def test_colour_only_where_it_is_wanted():
    """On a terminal that can, unless NO_COLOR says no; never in a pipe."""
    colours = {"TERM": "xterm"}
    assert output.colour_wanted(Terminal(), colours)
    assert not output.colour_wanted(io.StringIO(), colours)
    assert not output.colour_wanted(Terminal(), colours | {"NO_COLOR": "1"})
    assert not output.colour_wanted(Terminal(), {"TERM": "dumb"})
    assert not output.colour_wanted(Terminal(), {})
    assert output.paint("x", "red", on=False) == "x"
    assert output.paint("x", "red", on=True) == "\x1b[31mx\x1b[0m"
    assert output.terminal_width(io.StringIO()) is None
    assert output.terminal_width(Terminal()) is None


def test_json_is_one_line_whatever_is_in_it(capsys):
    """Half a surrogate pair, line ends and integers of any size pass."""
    value = {"text": "\ud83d\n\u2028", "n": 2**70}
    output.emit_json(value)
    line = capsys.readouterr().out
    assert line.isascii()
    assert line.count("\n") == 1
    assert json.loads(line) == value
    with pytest.raises(ValueError, match="JSON"):
        output.emit_json(float("nan"))


def test_what_the_encoding_lacks_is_escaped():
    """A narrow terminal or a lone surrogate stops no command."""
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="latin-1")
    output.say("é█\ud83d", "second", to=stream)
    assert raw.getvalue() == b"\xe9\\u2588\\ud83d\nsecond\n"


def test_an_error_is_one_clean_line_with_its_exit_status(capsys):
    """What a file's name or a relay put into it cannot forge a second line."""
    assert output.fail(StoreHeld("held by pid 4711\nall is well\x1b[2J")) == 6
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "held by pid 4711\\nall is well\\x1b[2J\n"


def test_output_is_cheap_to_import():
    """Commands in a hook's path pay for no drawing and no parser."""
    code = (
        "import sys, outbox.cli.output;"
        "heavy = {'rich', 'asyncio', 'httpx', 'structlog', 'tomllib'};"
        "print(*sorted(heavy & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""


@given(st.text())
@settings(deadline=None)
def test_printable_text_is_one_line_and_stays_so(text):
    """No control character, no line end, no turn of direction, and nothing left to do the second time."""
    shown = printable(text)
    assert not has_unprintable(shown)
    assert len(shown.splitlines()) <= 1
    assert printable(shown) == shown
    shown.encode("utf-8")


def test_printable_keeps_what_people_write():
    """Letters, joined emoji and right-to-left scripts are no danger."""
    for text in ("Grüße", "👩‍👩‍👧", "שלום", "e\u0301", "back\\slash"):
        assert printable(text) == text
    assert printable("\n\r\t\x00\x9b\u202e\ud83d") == "\\n\\r\\t\\x00\\x9b\\u202e\\ud83d"
    assert quoted('a"\\\n') == '"a\\"\\\\\\n"'
