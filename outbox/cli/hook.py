"""`outbox hook install` and `uninstall`: our hooks into a runner's settings, and out of them.

A call by a runner, `outbox hook RUNNER`, does not come here: that is hook_run's.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from difflib import unified_diff
from pathlib import Path

from outbox.capture.hook_install import PLACES, installed, uninstalled
from outbox.cli.output import clean, emit_json, say
from outbox.errors import ConfigError, StoreError, UsageError
from outbox.event_checks import check_agent

EXAMPLE = """\
outbox hook install claude-code
outbox hook uninstall codex --project"""

_NOTES = {
    "claude-code": "Sessions that run already go on without them.",
    "codex": "Codex asks once, in /hooks, whether they are to be trusted; releases that still hide hooks "
    "need codex_hooks = true below [features] in config.toml.",
    "gemini": "Releases that still hide hooks need enableHooks: true below tools in the same file.",
    "copilot": "Sessions that run already go on without them.",
    "opencode": "OpenCode loads it at its next start.",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What to do, for which runner."""
    acts = parser.add_subparsers(dest="act", required=True, metavar="install|uninstall|RUNNER")
    for act, about in (
        ("install", "put our hooks into a runner's settings; what else stands there stays"),
        ("uninstall", "take exactly these out again"),
    ):
        below = acts.add_parser(act, help=about, description=f"{about[0].upper()}{about[1:]}.")
        below.add_argument("runner", choices=sorted(PLACES), help="whose settings")
        below.add_argument("--project", action="store_true", help="those of the project in this folder")
        below.add_argument("--yes", action="store_true", help="write without asking")
        below.add_argument("--dry-run", action="store_true", help="show the difference, and change nothing")
    options = acts.choices["install"]
    options.add_argument("--agent", metavar="A", help="whose events (default: $OUTBOX_AGENT, or the runner)")
    options.add_argument("--record", metavar="EVENTS", help="record these too, which else are ignored")
    options.add_argument("--redact", metavar="WORDS", help="prefixes of your own tokens; -NAME: no such")


def run(args: argparse.Namespace) -> int:
    """Show the difference, ask, write; 0 also when there was nothing to change."""
    path = _settings_path(args.runner, project=args.project)
    before = _read(path)
    try:
        after = _wanted(args, before)
    except UsageError as error:
        raise ConfigError(
            f"The settings {str(path)!r} cannot be changed: {error}. They were left as they are. "
            f"Correct them, then: outbox hook {args.act} {args.runner}"
        ) from None
    if after == before:
        return _done(args, path, changed=False)
    if not args.json:
        say(*(clean(line.rstrip("\n")) for line in _difference(before, after, path)))
    if args.dry_run:
        return _done(args, path, changed=False)
    if not (args.yes or _agreed(path)):
        return _done(args, path, changed=False)
    if _read(path) != before:  # the runner writes there too, and the question takes its time
        raise ConfigError(
            f"The settings {str(path)!r} were changed meanwhile, and were left as they are now. To see the "
            f"difference from them: outbox hook {args.act} {args.runner}"
        )
    _write(path, after)
    return _done(args, path, changed=True)


def _wanted(args: argparse.Namespace, before: str | None) -> str | None:
    if args.act == "uninstall":
        return None if before is None else uninstalled(args.runner, before)
    plugin = Path(installed.__code__.co_filename).with_name("hook_opencode.js").read_text("utf-8")
    return installed(args.runner, before, _command(args), plugin)


def _command(args: argparse.Namespace) -> list[str]:
    """How the runner is to call us: by a path that holds whatever PATH it has."""
    program = Path(sys.argv[0]).absolute()
    words = [str(program)] if program.name == "outbox" else [sys.executable, "-m", "outbox"]
    words += ["hook", args.runner]
    if args.agent is not None:
        words.append(f"--agent={check_agent(args.agent)}")
    for name in ("record", "redact"):
        if value := getattr(args, name):
            words.append(f"--{name}={value}")
    if args.state_dir is not None:
        words.append(f"--state-dir={Path(args.state_dir).absolute()}")
    return words


def _settings_path(runner: str, *, project: bool) -> Path:
    if project:
        return Path.cwd() / PLACES[runner].project
    home = os.environ.get("HOME", "")
    if not Path(home).is_absolute():
        raise ConfigError("HOME is unknown, so the runner's settings are too. Nothing was changed. Set HOME.")
    below = PLACES[runner].user
    if below.startswith(".config/") and Path(os.environ.get("XDG_CONFIG_HOME", "")).is_absolute():
        return Path(os.environ["XDG_CONFIG_HOME"]) / below.removeprefix(".config/")
    return Path(home) / below


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode()
    except FileNotFoundError:
        return None
    except UnicodeDecodeError:
        raise ConfigError(f"The settings {str(path)!r} are not UTF-8. They were left as they are.") from None


def _difference(before: str | None, after: str | None, path: Path) -> list[str]:
    old, new = (before or "").splitlines(), (after or "").splitlines()
    names = ("/dev/null" if before is None else str(path), "/dev/null" if after is None else str(path))
    return list(unified_diff(old, new, *names, lineterm=""))


def _agreed(path: Path) -> bool:
    if sys.stdin is None or not sys.stdin.isatty():
        raise UsageError(
            f"{path} was not changed: there is no terminal to ask at. To write it without a question: --yes"
        )
    sys.stdout.write("Write this? [y/N] ")
    sys.stdout.flush()
    return sys.stdin.readline().strip().lower() in {"y", "yes"}


def _write(path: Path, text: str | None) -> None:
    """Replace the file as a whole, with the mode it had; None removes it. Raises StoreError."""
    target = path.resolve()  # a link to a file elsewhere stays one
    draft = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if text is None:
            path.unlink()
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        mode = target.stat().st_mode & 0o7777 if target.exists() else None
        # never wider than the old file, where tokens may stand; flushed, since no other copy is left
        fd = os.open(
            draft, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o666 if mode is None else mode
        )
        with os.fdopen(fd, "wb") as file:
            file.write(text.encode())
            file.flush()
            os.fsync(fd)
        if mode is not None:
            draft.chmod(mode)
        draft.replace(target)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise StoreError(
            f"The settings {str(path)!r} cannot be written: {error.strerror}. They were left as they are. "
            "Give yourself leave to write there, and do it again."
        ) from error


def _done(args: argparse.Namespace, path: Path, *, changed: bool) -> int:
    if args.json:
        emit_json({"path": str(path), "changed": changed})
    elif not changed:
        say(f"{clean(str(path))} was not changed.")
    elif args.act == "install":
        say(
            f"{clean(str(path))} calls outbox now. {_NOTES[args.runner]}",
            "To see that it works: start a session, then outbox status. To undo it: "
            f"outbox hook uninstall {args.runner}{' --project' if args.project else ''}",
        )
    else:
        say(f"{clean(str(path))} does not call outbox any more. What was recorded stays.")
    return 0
