"""The command `outbox`: finds the command that is asked for, and imports it alone.

A command is a module with `EXAMPLE`, `add_arguments(parser)` and `run(args) -> exit status`; it raises
OutboxError for what a person can act on.
"""

from __future__ import annotations

import os
import sys

from outbox.errors import OutboxError, StoreError, UsageError

TYPE_CHECKING = False  # a hook is started for each call of a tool: what only checkers need is not loaded
if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence
    from typing import Protocol

    class Command(Protocol):
        """What the module of a command has."""

        EXAMPLE: str

        def add_arguments(self, parser: argparse.ArgumentParser) -> None:
            """The options of the command itself."""

        def run(self, args: argparse.Namespace) -> int:
            """Do it; the exit status."""


# Each command: its module, and one line about it. What comes in a later release is not listed.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "serve": ("outbox.cli.serve", "deliver the events of all agents, until stopped"),
    "stop": ("outbox.cli.stop", "stop the daemon, and wait until it is gone"),
    "run": ("outbox.cli.run", "run a command with a sidecar that delivers its agent's events"),
    "handoff": ("outbox.cli.handoff", "announce to outbox run --self-resume that its command hands over"),
    "enqueue": ("outbox.cli.enqueue", "put events on disk: JSON lines on stdin, or one by --kind"),
    "flush": ("outbox.cli.flush", "send what waits, until a deadline"),
    "status": ("outbox.cli.status", "how everything stands: relay, agents, dead letters"),
    "why": ("outbox.cli.why", "the one reason why an agent's events wait"),
    "list": ("outbox.cli.list_events", "what waits or is in flight, in the order in which it goes"),
    "show": ("outbox.cli.show", "one event with all that is known of it, wherever it is"),
    "skip": ("outbox.cli.skip", "set a waiting event aside, so that what is behind it goes on"),
    "dead": ("outbox.cli.dead", "the dead letters: list, show, replay, discard, export them"),
    "pause": ("outbox.cli.pause", "send nothing more of an agent, or of all"),
    "resume": ("outbox.cli.resume", "go on with an agent, or with all"),
    "auth": ("outbox.cli.auth", "how the tokens stand; ask for one at once"),
    "doctor": ("outbox.cli.doctor", "look at everything that can be wrong, and say what to do"),
    "config": (
        "outbox.cli.config",
        "show the settings and where each comes from, or check a file of configuration",
    ),
    "export": ("outbox.cli.export", "write all of an outbox as JSON lines, to be taken in elsewhere"),
    "import": (
        "outbox.cli.import_events",
        "take in an export, another outbox, events as JSON lines, or a seed runner's file",
    ),
    "mcp": ("outbox.cli.mcp", "stand between an agent's MCP client and the relay, on stdin and stdout"),
    "hook": (
        "outbox.cli.hook",
        "record what an agent runner's hooks tell; put them into its settings, and take them out",
    ),
    "install": ("outbox.cli.install", "write, print or remove the systemd units of this installation"),
    "relay": ("outbox.cli.relay", "run the reference relay, on a file of its own"),
    "demo": (
        "outbox.cli.demo",
        "watch a session go through an outage to the reference relay, all on this host",
    ),
}

_FLAGS = frozenset(("--json", "--version"))
_WITH_VALUE = frozenset(("--state-dir", "--config"))
_NO_RUNNERS = frozenset(("install", "uninstall", "-h", "--help"))
_BROKEN_PIPE = 141  # 128 + SIGPIPE, as shells have it
_INTERRUPTED = 130  # 128 + SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status. Raises nothing that a person can act on: that stands on stderr."""
    words = list(sys.argv[1:] if argv is None else argv)
    if (hook_words := hook_call(words)) is not None:
        from outbox.cli.hook_run import run_hook  # noqa: PLC0415 - a runner waits for it: nothing else is loaded

        status = run_hook(hook_words)
        if argv is None:
            os._exit(status)  # nothing of it is left to be written, and the interpreter's end takes its time
        return status
    from outbox.cli.output import OutputFailed, fail  # noqa: PLC0415 - a hook needs none of it

    _open_missing_streams()
    try:
        status = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
        return _BROKEN_PIPE
    except KeyboardInterrupt:
        return _INTERRUPTED
    except OutboxError as error:
        return fail(error)
    except OutputFailed as error:
        _forget_stdout()
        return fail(StoreError(str(error)))
    except OSError as error:
        what = f"{error.filename}: {error.strerror}" if error.filename else str(error)
        return fail(StoreError(f"The operating system refused: {what}. What is on disk stays as it is."))
    return status


def _run(words: list[str]) -> int:
    from outbox.cli.output import say  # noqa: PLC0415 - as above

    everywhere, own = hoist(words)
    if "--version" in everywhere:
        from outbox import __version__  # noqa: PLC0415 - asked for rarely

        say(f"relay-outbox {__version__}")
        return 0
    name, *rest = own or ["--help"]
    if name in {"-h", "--help"}:
        say(top_help(), to=sys.stdout if own else sys.stderr)
        return 0 if own else UsageError.exit_status
    if name not in COMMANDS:
        raise _unknown(name)
    command = load(name)
    try:
        args = parser_of(name, command).parse_args([*everywhere, *rest])
    except SystemExit as end:  # argparse has shown the help
        return int(end.code or 0)
    return command.run(args)


def hook_call(words: Sequence[str]) -> list[str] | None:
    """What stands behind `outbox hook` when a runner calls it; None for any other command. Pure."""
    if "hook" not in words:
        return None
    everywhere, own = hoist(words)
    if own[:1] != ["hook"] or (len(own) > 1 and own[1] in _NO_RUNNERS):
        return None
    return [*everywhere, *own[1:]]


def hoist(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """The global options, wherever they stand before a `--`, and all other words. Pure.

    The word after `--agent` is always its value, so that a name may start with a dash.
    """
    everywhere: list[str] = []
    own: list[str] = []
    left = iter(words)
    for word in left:
        if word == "--":
            own += [word, *left]
        elif word in _FLAGS or word.partition("=")[0] in _WITH_VALUE:
            everywhere.append(word)
            if word in _WITH_VALUE:
                everywhere += [value for value in [next(left, None)] if value is not None]
        elif word == "--agent" and (value := next(left, None)) is not None:
            own.append(f"--agent={value}")
        else:
            own.append(word)
    return everywhere, own


def load(name: str) -> Command:
    """The module of a command."""
    from importlib import import_module  # noqa: PLC0415 - as above

    command: Command = import_module(COMMANDS[name][0])
    return command


def parser_of(name: str, command: Command) -> argparse.ArgumentParser:
    """The parser of one command, global options included."""
    from outbox.cli.parser import new_parser  # noqa: PLC0415 - a hook does without argparse

    parser = new_parser(f"outbox {name}", COMMANDS[name][1], command.EXAMPLE)
    command.add_arguments(parser)
    everywhere = parser.add_argument_group("for every command")
    everywhere.add_argument("--state-dir", metavar="DIR", help="where the events are kept")
    everywhere.add_argument("--config", metavar="FILE", help="the file of configuration")
    everywhere.add_argument("--json", action="store_true", help="answer with data")
    everywhere.add_argument("--version", action="store_true", help="say which release this is")
    return parser


def top_help() -> str:
    """What `outbox --help` says."""
    width = max(map(len, COMMANDS))
    commands = [f"  {name:<{width}}  {about}" for name, (_, about) in COMMANDS.items()]
    return "\n".join(
        (
            "usage: outbox COMMAND [options]",
            "",
            "Keeps the events of agents on disk, and delivers them to a relay: in order, once in effect.",
            "",
            *commands,
            "",
            "for every command:",
            "  --state-dir DIR  where the events are kept (default: $OUTBOX_STATE_DIR, or a folder of yours)",
            "  --config FILE    the file of configuration (default: $OUTBOX_CONFIG, or the usual places)",
            "  --json           answer with data",
            "  --version        say which release this is",
            "",
            "exit status: 0 done, 2 usage, 3 not all delivered, 4 refused or full, 5 damaged,",
            "  6 another process holds it, 69 unavailable",
            "",
            "example:",
            "  outbox enqueue --agent builder < events.jsonl",
            "  outbox COMMAND --help",
        )
    )


def _unknown(name: str) -> UsageError:
    from difflib import get_close_matches  # noqa: PLC0415 - only a slip of the hand needs it

    near = get_close_matches(name, COMMANDS, 1)
    hint = f'Did you mean "{near[0]}"?' if near else f"Commands are {', '.join(COMMANDS)}."
    return UsageError(f'"{name}" is no command of outbox. Nothing was done. {hint} See: outbox --help')


def _open_missing_streams() -> None:
    """A stream that the caller closed must not end a command that has stored events already."""
    if sys.stdout is None:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - as long as the process
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - as long as the process


def _forget_stdout() -> None:
    """Nobody reads: keep the interpreter's last flush from complaining."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
