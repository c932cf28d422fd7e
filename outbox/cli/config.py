"""`outbox config`: what the settings are, where each comes from, and what is wrong with them."""

from __future__ import annotations

import argparse
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from outbox.cli.output import clean, count, emit_json, fail, say, table, terminal_width
from outbox.errors import ConfigError, OutboxError
from outbox.settings import BUILT_IN, Report, Settings, examine, load, masked, shown, unknown_variables
from outbox.settings_file import default_files, why_unreadable
from outbox.state_dir import located

HELP = "show the settings and where each comes from, or check a file of configuration"
EXAMPLE = "outbox config show\noutbox config check /etc/relay-outbox/outbox.toml"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The sub-commands `show` and `check`."""
    commands = parser.add_subparsers(dest="config_command", required=True, metavar="show|check")
    commands.add_parser("show", help="each setting, its value and where it comes from; secrets masked")
    check = commands.add_parser("check", help="name every fault; exit 0 without one, else 2")
    check.add_argument(
        "file", nargs="?", metavar="FILE", help="the file; default: the one that would be used"
    )


def run(args: argparse.Namespace) -> int:
    """Run `show` or `check`."""
    try:
        return _show(args) if args.config_command == "show" else _check(args)
    except OutboxError as error:
        return fail(error)


def _show(args: argparse.Namespace) -> int:
    settings = load(_flags(args), environ=os.environ, config_path=args.config)
    if args.json:
        emit_json(_as_data(settings))
        return 0
    rows = [
        (name, shown(name, value), settings.origins.get(name, BUILT_IN)) for name, value in settings.items()
    ]
    say(*table(rows, ("setting", "value", "from"), width=terminal_width(sys.stdout)), "")
    say(clean(_state_directory(settings)), clean(_files_read(settings)))
    return 0


def _check(args: argparse.Namespace) -> int:
    report = examine(_flags(args), environ=os.environ, config_path=args.file or args.config)
    notes = list(_notes(report, os.environ))
    if args.json:
        files = [str(file) for file in report.settings.files]
        emit_json({"ok": not report.faults, "files": files, "faults": report.faults, "notes": notes})
    else:
        say(*(f"fault: {fault}." for fault in report.faults), *(f"note: {clean(note)}." for note in notes))
        say(clean(_files_read(report.settings)), _verdict(len(report.faults)))
    return ConfigError.exit_status if report.faults else 0


def _flags(args: argparse.Namespace) -> dict[str, Any]:
    return {"daemon.state_dir": args.state_dir}


def _as_data(settings: Settings) -> dict[str, Any]:
    try:
        where, named_by = located(settings, os.environ)
        state: dict[str, Any] | None = {"value": str(where), "from": named_by}
    except ConfigError:
        state = None
    values = {
        name: {"value": masked(name, value), "from": settings.origins.get(name, BUILT_IN)}
        for name, value in settings.items()
    }
    return {"settings": values, "stateDir": state, "files": [str(file) for file in settings.files]}


def _state_directory(settings: Settings) -> str:
    try:
        where, named_by = located(settings, os.environ)
    except ConfigError as error:
        return str(error)
    return f"State directory: {where} (from {named_by})."


def _files_read(settings: Settings) -> str:
    if settings.files:
        return "Read: " + ", ".join(str(file) for file in settings.files) + "."
    return "No file of configuration; looked for " + ", ".join(map(str, default_files(os.environ))) + "."


def _verdict(faults: int) -> str:
    if faults:
        return (
            f"{count(faults, 'fault')}: a daemon would not start with this. A running one keeps what it has."
        )
    return "No fault."


def _notes(report: Report, environ: Mapping[str, str]) -> Iterator[str]:
    """What is no fault, and may still surprise."""
    settings = report.settings
    in_files = {clean(str(file)): file for file in settings.files}
    token_file, origins = settings.relay.token_file, settings.origins
    if settings.relay.url is None and not report.faults:
        yield "relay.url is not set: serve and flush will stop and say so"
    if token_file and (reason := why_unreadable(token_file)):
        yield f"relay.token_file = {token_file} cannot be read ({reason}): events wait until it can"
    if origins.get("daemon.state_dir") in in_files:
        yield "producers read no file, so daemon.state_dir does not reach them: set OUTBOX_STATE_DIR for them"
    for variable, near in unknown_variables(environ):
        hint = f"; the nearest known one is {near}" if near else ""
        yield f"the variable {variable} is no setting and is passed over{hint}"
    holder = in_files.get(origins.get("relay.token", ""))
    if holder and holder.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH):
        yield f"{holder} holds relay.token, and others can read it: make it 0600, or use relay.token_file"
