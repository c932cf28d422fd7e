"""The daemon's log lines."""

import io
import json
import logging
import sys
import time

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from outbox.daemon import logs


@pytest.fixture(autouse=True)
def as_before(monkeypatch):
    """Logging is the process's own: each test leaves it as it was."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    monkeypatch.setattr(logs, "_secrets", {})
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def the_line(capsys):
    """The only line there is on stderr."""
    text = capsys.readouterr().err
    assert text.endswith("\n")
    assert len(text.splitlines()) == 1
    return text[:-1]


def test_a_readable_line(capsys):
    """Time and level, then the event and its words, as a person greps them."""
    logs.configure("lines", "info")
    structlog.get_logger().info("delivered", agent="builder", seq=10234, kind="session-message", ms=12)
    line = the_line(capsys)
    time.strptime(line[:19], "%Y-%m-%d %H:%M:%S")
    assert line[19:] == " info event=delivered agent=builder seq=10234 kind=session-message ms=12"


def test_values_that_are_no_words_are_quoted(capsys):
    """So that a line can be taken apart again."""
    logs.configure("lines", "info")
    structlog.get_logger().info(
        "x", a="two words", b="", c='say "hi"', d="back\\slash", e=None, f=True, g=["é"]
    )
    assert the_line(capsys).partition("event=x ")[2] == (
        r'a="two words" b="" c="say \"hi\"" d="back\\slash" e=null f=true g="[\"é\"]"'
    )


def test_a_json_line(capsys):
    """Event, ISO time and level first, values as data, whatever they are."""
    logs.configure("json", "info")
    structlog.get_logger().warning(
        "gate_closed", agent="\ud83d", retry_in_s=23, why=OSError("refused"), at=None
    )
    entry = json.loads(the_line(capsys))
    assert list(entry)[:3] == ["event", "time", "level"]
    assert entry["time"].endswith("Z")
    del entry["time"]
    assert entry == {
        "event": "gate_closed",
        "level": "warning",
        "agent": "\ud83d",
        "retry_in_s": 23,
        "why": "refused",
        "at": None,
    }


@pytest.mark.parametrize("form", ["json", "lines"])
def test_a_hostile_answer_makes_one_clean_line(form, capsys):
    """H23: an error text with line ends and terminal codes forges nothing."""
    logs.configure(form, "info")
    body = "bad\x1b[2J\nINFO outbox: all delivered\x07\u202e\u2028\x9b"
    structlog.get_logger().warning("dead_letter", agent=body, detail=[body], more={body: body})
    assert the_line(capsys).isprintable()


@given(st.dictionaries(st.text(), st.text()), st.text(), st.sampled_from(["json", "lines"]))
@settings(deadline=None)
def test_any_text_makes_one_clean_line(fields, event, form):
    """Whatever a producer or a relay wrote, names of fields included."""
    stream, before = io.StringIO(), sys.stderr
    sys.stderr = stream
    try:
        logs.configure(form, "info")
        structlog.get_logger().info(
            event, **{name: value for name, value in fields.items() if name != "event"}
        )
    finally:
        sys.stderr = before
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert len(text.splitlines()) == 1
    assert "\x1b" not in text


@pytest.mark.parametrize("form", ["json", "lines"])
def test_secrets_are_masked_wherever_they_stand(form, capsys):
    """By the name of the field, and by the text itself: in values, lists, tables, errors and tracebacks."""
    logs.configure(form, "info")
    logs.register_secret("tok-5ecret")
    logs.register_secret("tok-5ecret-and-longer")
    log = structlog.get_logger()
    log.info(
        "sent", headers={"Authorization": "Bearer unregistered-1"}, token="unregistered-2", access_token=5
    )
    log.info("sent", urls=["http://x?t=tok-5ecret"], raw=b"tok-5ecret", detail="tok-5ecret-and-longer")
    try:
        int("tok-5ecret")
    except ValueError as error:
        log.exception("crashed", why=error)
    logging.getLogger("library").warning("used %s", "tok-5ecret")
    text = capsys.readouterr().err
    assert len(text.splitlines()) == 4
    assert "5ecret" not in text
    assert "unregistered" not in text
    assert "longer" not in text
    assert "token_file" not in text


def test_what_is_no_secret_is_not_masked(capsys):
    """A file's name, a time without one, and text too short to be a token."""
    logs.configure("json", "info")
    logs.register_secret("abc")
    logs.register_secret("")
    logs.register_secret(None)
    structlog.get_logger().info("abc", token_file="/etc/token", token=None)
    entry = json.loads(the_line(capsys))
    assert (entry["event"], entry["token_file"], entry["token"]) == ("abc", "/etc/token", None)


def test_a_secret_that_is_told_again_is_masked_all_the_while(capsys):
    """A token is told before each request: no line that another thread writes meanwhile shows it."""
    logs.configure("lines", "info")
    logs.register_secret("tok-5ecret")

    class Told(str):
        """Writes a line whenever it is looked for, or put, among the secrets."""

        __slots__ = ()

        def __hash__(self):
            logs.log_line("x", {"a": str(self)})
            return super().__hash__()

    logs.register_secret(Told("tok-5ecret"))
    lines = capsys.readouterr().err
    assert "event=x" in lines
    assert "tok-5ecret" not in lines


def test_renewed_secrets_do_not_pile_up():
    """A daemon that renews its token for years remembers the last ones."""
    for n in range(1000):
        logs.register_secret(f"token-{n}")
    assert len(logs._secrets) == 64
    assert "token-999" in logs._secrets


def test_levels_and_a_reload(capsys):
    """Below the level nothing is written; another configure counts from then on, for known loggers too."""
    log = structlog.get_logger()
    logs.configure("lines", "warning")
    log.info("no")
    logging.getLogger("library").warning("yes")
    logs.configure("lines", "debug")
    log.debug("yes")
    logging.getLogger("library").info("no")
    assert [" event=" in line and "no" not in line for line in capsys.readouterr().err.splitlines()] == [
        True,
        True,
    ]


def test_what_libraries_log_is_in_our_form(capsys):
    """Also when their arguments do not fit."""
    logs.configure("lines", "info")
    logging.getLogger("uvicorn.error").error("broken %d", "pipe\n")
    assert the_line(capsys).partition(" ")[2].partition(" ")[2] == (
        'error event=library name=uvicorn.error message="broken %d"'
    )


@pytest.mark.parametrize(
    ("form", "journal", "terminal", "json_wanted"),
    [
        ("auto", "8:1", False, True),
        ("auto", "8:1", True, False),
        ("auto", "", False, False),
        ("auto", None, False, False),
        ("json", None, True, True),
        ("lines", "8:1", False, False),
    ],
)
def test_the_form_of_its_own_accord(form, journal, terminal, json_wanted, capsys, monkeypatch):
    """JSON for the journal, lines for a person."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    if journal is None:
        monkeypatch.delenv("JOURNAL_STREAM", raising=False)
    else:
        monkeypatch.setenv("JOURNAL_STREAM", journal)
    logs.configure(form, "info")
    structlog.get_logger().info("x")
    assert the_line(capsys).startswith("{") is json_wanted


def test_a_closed_stderr_stops_nothing(monkeypatch):
    """A log that cannot be written is no reason to stop delivering."""
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure("lines", "info")
    structlog.get_logger().info("delivered")
    assert "event=delivered" in stream.getvalue()
    stream.close()
    structlog.get_logger().info("delivered")
