"""`outbox install`: the systemd units of this installation written, printed, or removed."""

from __future__ import annotations

import argparse
import difflib
import os
import sys
from pathlib import Path

from outbox.cli.install_files import (
    CHANGED,
    NEW,
    SAME,
    SYSTEM_FILES,
    USER_FILES,
    WANTS,
    UnitFile,
    unit_files,
)
from outbox.cli.output import clean, count, emit_json, say
from outbox.errors import StoreError, Unavailable, UsageError

EXAMPLE = """outbox install --user
outbox install --system --print"""

_REFUSED = 4
_RUNNING = Path("/run/systemd/system")  # sd_booted(3)
_HIDDEN = ("/home/", "/root/", "/run/user/")  # by ProtectHome=yes
_SAID = {
    NEW: "new",
    SAME: "is there already",
    "older": "replaces an older one",
    CHANGED: "was changed by hand",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """For whom, and what to do with the files."""
    whose = parser.add_mutually_exclusive_group(required=True)
    whose.add_argument("--system", action="store_true", help="a service for all agents of the host")
    whose.add_argument("--user", action="store_true", help="a service for the agents of this user")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--print", action="store_true", help="print the files, and write nothing")
    what.add_argument("--uninstall", action="store_true", help="remove them; events and settings stay")
    parser.add_argument(
        "--force", action="store_true", help="replace or remove also what was changed by hand"
    )
    parser.add_argument("--root", metavar="DIR", help="write below DIR, such as an image that is being built")
    parser.add_argument("--command", metavar="PATH", help="what the units start (default: this command)")


def run(args: argparse.Namespace) -> int:
    """Install; 0, or 4 when a changed file stands in the way: then nothing is written."""
    from outbox import __version__  # noqa: PLC0415 - only where files are made

    files = unit_files(_below(args), SYSTEM_FILES if args.system else USER_FILES, _words(args), __version__)
    if args.print:
        return _print(args, files)
    if args.root is None and not _RUNNING.is_dir():
        raise Unavailable(
            "No systemd runs here. Nothing was written or removed. To see the files: --print; to write them "
            "into an image: --root DIR; without systemd: outbox serve."
        )
    standings = [(file, file.standing()) for file in files]
    changed = [file for file, standing in standings if standing == CHANGED]
    if changed and not args.force:
        return _refuse(args, changed)
    for file, standing in standings:
        if args.uninstall:
            _remove(file.path)
        elif standing != SAME:
            _write(file)
    if args.uninstall:  # what `systemctl enable` made leads nowhere now
        for link in WANTS[args.user]:
            _remove(_below(args) / link)
    return _tell(args, standings)


def _below(args: argparse.Namespace) -> Path:
    root = Path(args.root or "/").absolute()
    if args.system:
        return root
    config = Path(os.environ.get("XDG_CONFIG_HOME", ""))
    if not config.is_absolute():
        config = Path.home() / ".config"
    return root / config.relative_to("/") if args.root else config


def _words(args: argparse.Namespace) -> list[str]:
    """What the units start: a program and the options that were given here. Raises UsageError."""
    if args.system and args.state_dir:
        raise UsageError(
            "--state-dir: the system service keeps its events in /var/lib/relay-outbox. Nothing was written. "
            "For another place use a drop-in with Environment=OUTBOX_STATE_DIR= and ReadWritePaths=."
        )
    options = [(name, getattr(args, name.replace("-", "_"))) for name in ("state-dir", "config")]
    return _program(args) + [
        f"--{name}={Path(value).absolute()}" for name, value in options if value is not None
    ]


def _program(args: argparse.Namespace) -> list[str]:
    if args.command:
        return [str(Path(args.command).absolute())]
    script = Path(sys.executable).with_name("outbox")
    if not script.is_file():
        raise UsageError(
            f"There is no command outbox beside {sys.executable!r}. Nothing was written. Install the package "
            "into a virtual environment, or name the command with --command."
        )
    needed = [script, Path(sys.executable), Path(sys.executable).resolve(), Path(__file__)]
    hidden = [path for path in needed if str(path).startswith(_HIDDEN)]
    if args.system and hidden:
        told = (
            f"{str(hidden[0])!r} lies in a home, which the system service cannot see. Install it for all: "
            "python3 -m venv /opt/relay-outbox && /opt/relay-outbox/bin/pip install . Or use --user."
        )
        if not args.print:
            raise UsageError(f"{told} Nothing was written.")
        say(clean(f"note: {told}"), to=sys.stderr)
    return [str(script)]


def _print(args: argparse.Namespace, files: list[UnitFile]) -> int:
    if args.json:
        emit_json({"files": [{"path": str(file.path), "text": file.text} for file in files]})
    else:
        say(*(f"### {clean(str(file.path))}\n{file.text}" for file in files))
    return 0


def _refuse(args: argparse.Namespace, changed: list[UnitFile]) -> int:
    """Show what is other than ours; nothing was written."""
    if args.json:
        emit_json({"files": [{"path": str(file.path), "standing": CHANGED} for file in changed]})
    else:
        for file in changed:
            there = file.path.read_text("utf-8", "replace").splitlines()
            lines = difflib.unified_diff(
                there, file.text.splitlines(), f"{file.path} (there)", f"{file.path} (ours)", lineterm="", n=1
            )
            say(*map(clean, lines))
    say(
        f"{count(len(changed), 'file was', 'files were')} changed by hand. Nothing was written or removed. "
        "Move your changes into a drop-in (systemctl edit), then use --force.",
        to=sys.stderr,
    )
    return _REFUSED


def _write(file: UnitFile) -> None:
    draft = file.path.with_name(f".{file.path.name}.{os.getpid()}")
    try:
        file.path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(file.text, "utf-8")
        draft.chmod(0o644)
        draft.replace(file.path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise _refused(file.path, "written", error) from error


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise _refused(path, "removed", error) from error


def _refused(path: Path, act: str, error: OSError) -> StoreError:
    return StoreError(
        f"{str(path)!r} cannot be {act}: {error.strerror}. Events are not affected; other files may be "
        "done already. Run it as root, or for yourself with --user."
    )


def _tell(args: argparse.Namespace, standings: list[tuple[UnitFile, str]]) -> int:
    if args.json:
        emit_json({"files": [{"path": str(file.path), "standing": now} for file, now in standings]})
        return 0
    if args.uninstall:
        gone = [file for file, standing in standings if standing != NEW]
        say(*(clean(f"removed  {file.path}") for file in gone))
        say(*_after_removal(args))
        return 0
    say(*(clean(f"{file.path}  ({_SAID[standing]})") for file, standing in standings))
    say("", *_next_steps(args))
    return 0


def _next_steps(args: argparse.Namespace) -> list[str]:
    if args.user:
        return [
            "Next:",
            "  put the relay's address and the file with its token (relay.url, relay.token_file) into",
            "  ~/.config/relay-outbox/outbox.toml",
            "  systemctl --user daemon-reload",
            "  systemctl --user enable --now outbox.service",
            "  loginctl enable-linger        # it runs also while you are not logged in",
        ]
    return [
        "Next:",
        "  systemd-sysusers && systemd-tmpfiles --create",
        "  put the relay's address (relay.url) into /etc/relay-outbox/outbox.toml;",
        '  its token into /etc/relay-outbox/token (chmod 600), and there: relay.token_file = "relay-token"',
        "  systemctl daemon-reload",
        "  systemctl enable --now outbox.socket outbox.service",
    ]


def _after_removal(args: argparse.Namespace) -> list[str]:
    own = " --user" if args.user else ""
    where = "~/.local/state/relay-outbox" if args.user else "/var/lib/relay-outbox"
    return [
        f"Events stay in {where}, settings and token where they are. What runs goes on until:",
        f"  systemctl{own} stop {'' if args.user else 'outbox.socket '}outbox.service",
        f"  systemctl{own} daemon-reload",
    ]
