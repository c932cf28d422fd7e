"""`outbox doctor`: looks at everything that can be wrong, and says what to do. Changes nothing."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator

from outbox.cli import doctor_files, doctor_folders, doctor_host, doctor_relay
from outbox.cli.doctor_finding import Finding, Level, failure, warning
from outbox.cli.output import clean, colour_wanted, count, emit_json, paint, say
from outbox.cli.seeds import seed_advice, seeds_found
from outbox.cli.where import now_ms
from outbox.errors import ConfigError, StoreDamaged, StoreError, Unavailable
from outbox.settings import examine
from outbox.state_dir import state_dir
from outbox.store.directory import StateDirectory
from outbox.store.place import RunningDaemon, running_daemon
from outbox.store.relay_state import read_facts

EXAMPLE = "outbox doctor\noutbox doctor --json"

_COLOURS = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILURE: "red"}
_INDENT = " " * 25


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None of its own."""


def run(args: argparse.Namespace) -> int:
    """Look; 0 when all works, 5 when a file is damaged or too new, 69 when something else fails."""
    found: list[Finding] = []
    for finding in findings(args):
        found.append(finding)
        if not args.json:
            say(*_lines(finding, colour=colour_wanted(sys.stdout, os.environ)))
    if args.json:
        emit_json({"findings": [_as_data(finding) for finding in found], "worst": str(_worst(found))})
    else:
        say(_summary(found))
    return exit_status(found)


def findings(args: argparse.Namespace) -> Iterator[Finding]:
    """Everything that is looked at, in this order."""
    report = examine({"daemon.state_dir": args.state_dir}, environ=os.environ, config_path=args.config)
    settings = report.settings
    yield doctor_host.software()
    yield from doctor_host.configuration(report, os.environ)
    yield from doctor_host.notification(settings)
    try:
        state = StateDirectory(state_dir(settings, os.environ))
    except ConfigError as error:
        yield failure("directory", str(error))
        return
    daemon, facts = _daemon_of(state), read_facts(state.relay_state)
    yield from doctor_folders.directories(state)
    yield doctor_folders.file_system(state, settings)
    yield doctor_folders.disk(state, settings)
    yield from doctor_host.clock(state, daemon, time.time())
    yield doctor_host.descriptors(settings, daemon)
    yield from doctor_host.the_daemon(daemon, doctor_files.waiting_in(state))
    yield from doctor_relay.the_relay(settings, facts)
    yield from doctor_files.held_back(state, settings, now_ms())
    yield from doctor_files.outboxes(state)
    yield from doctor_files.relay_facts(state)
    yield from doctor_files.leftovers(state)
    yield from (warning("seed files", seed_advice(path)) for path in seeds_found(os.environ))


def _daemon_of(state: StateDirectory) -> RunningDaemon | None:
    try:
        return running_daemon(state)
    except (StoreError, OSError):  # the state directory is out of reach: that is told for itself
        return None


def exit_status(found: list[Finding]) -> int:
    """0, or why something fails: damage first, since a person has to look at the files."""
    if any(finding.damage for finding in found):
        return StoreDamaged.exit_status
    return Unavailable.exit_status if _worst(found) is Level.FAILURE else 0


def _worst(found: list[Finding]) -> Level:
    return max((finding.level for finding in found), default=Level.OK)


def _lines(finding: Finding, *, colour: bool) -> Iterator[str]:
    level = paint(f"{finding.level!s:<8}", _COLOURS[finding.level], on=colour)
    yield f"{level} {finding.check:<15} {clean(finding.said)}"
    if finding.todo:
        yield _INDENT + clean(finding.todo)


def _as_data(finding: Finding) -> dict[str, str]:
    return {
        "check": finding.check,
        "level": str(finding.level),
        "said": finding.said,
        "todo": finding.todo,
    }


def _summary(found: list[Finding]) -> str:
    failures = sum(finding.level is Level.FAILURE for finding in found)
    warnings = sum(finding.level is Level.WARNING for finding in found)
    if not failures and not warnings:
        return "All is well. Nothing was changed."
    return f"{count(failures, 'failure')}, {count(warnings, 'warning')}. Nothing was changed."
