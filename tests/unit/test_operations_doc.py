"""The runbook: whatever the commands and the log can say stands in it, with what to do."""

import re
from pathlib import Path

import pytest
from test_docs import ARCHITECTURE, logged_events, table

from outbox import cli
from outbox.api import reasons
from outbox.api.obstacle import Scope
from outbox.outcome import Reason
from outbox.settings import KEYS

ROOT = Path(__file__).parent.parent.parent
OPERATIONS = (ROOT / "docs" / "operations.md").read_text("utf-8")


def section(heading):
    """What stands below a heading, to the next one of its rank."""
    found = re.search(
        rf"^(#+) {re.escape(heading)}\n(.*?)(?=^#{{1,3}} |\Z)", OPERATIONS, re.MULTILINE | re.DOTALL
    )
    return f"\n{found[2]}"


def rows(heading, header):
    """The rows of the table below a heading, by the names in their first cells."""
    named = {}
    for row in table(section(heading), header):
        for name in re.findall(r"`([^`]+)`", row[0]):
            named[name] = row[1:]
    return named


SCOPES = {
    Scope.RELAY: "The relay, for all agents",
    Scope.PATH: "One path of the relay",
    Scope.AGENT: "This agent alone",
}
"""Where the reasons of each scope stand; nothing, a person and nobody share a table."""


@pytest.mark.parametrize("scope", SCOPES, ids=str)
def test_every_reason_of_why_stands_in_the_runbook(scope):
    """In the table of what it concerns, each with what it means and what to do; and no other."""
    told = rows(SCOPES[scope], "reason")
    assert set(told) == set(reasons._TABLES[scope][0])
    assert [name for name, cells in told.items() if len(cells) != 2 or not all(cells)] == []


def test_every_reason_without_the_relay_stands_in_the_runbook():
    """A person's pause, no sender, and nothing in the way."""
    told = rows("A person, or nobody", "reason")
    assert set(told) == {"paused", "no_daemon", *reasons._TABLES[Scope.NOTHING][0]}


def test_every_reason_of_a_dead_letter_stands_in_the_runbook():
    """With what to do about it."""
    told = rows("Dead letters", "reason")
    assert set(told) == {str(reason) for reason in Reason}
    assert [name for name, cells in told.items() if not all(cells)] == []


def test_every_log_event_stands_in_the_runbook():
    """Those worth acting on with what to do, the others in the list of those that are not."""
    acting = rows("What the daemon logs", "event")
    nothing_to_do = section("What the daemon logs").partition("Nothing is to be done about")[2]
    named = set(acting) | set(re.findall(r"`(\w+)`", nothing_to_do))
    assert {event for event, _, _ in logged_events()} - named == set()
    loud = {
        row[0].strip("`")
        for row in table(ARCHITECTURE, "event")
        if {"warning", "error"} & {*re.findall(r"\w+", row[1])}
    }
    assert loud - set(acting) == set()


def test_every_setting_and_command_in_the_runbook_is_there():
    """What was renamed is missed here."""
    settings = set(re.findall(r"`((?:relay|bounds|delivery|daemon|mcp|notify|events)\.\w+)", OPERATIONS))
    assert sorted(settings - set(KEYS) - {"relay.paths"}) == []
    commands = set(re.findall(r"`outbox ([a-z]+)", OPERATIONS))
    assert commands
    assert sorted(commands - set(cli.COMMANDS)) == []


def test_every_file_trouble_stands_in_the_runbook():
    """By the code that `status` and the log give."""
    assert set(rows("Files", "trouble")) == {"damaged", "too_new", "busy", "held", "store"}


def test_every_command_line_of_the_runbook_can_be_typed():
    """With an agent and a seq in place of the words that stand for them, the command takes it."""
    lines = [line for line in re.findall(r"`(outbox [^`]+)`", OPERATIONS) if len(line.split()) > 2]
    assert len(lines) > 10
    for line in lines:
        _, name, *words = line.replace("AGENT", "builder").replace("SEQ", "1").split()
        cli.parser_of(name, cli.load(name)).parse_args(words)
