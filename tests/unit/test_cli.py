"""The command itself: how words become a command, what is loaded, how errors end."""

import argparse
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import command, environment, in_process

from outbox import cli
from outbox.errors import StoreHeld

ROOT = Path(__file__).parent.parent.parent
GLOBAL_OPTIONS = {"--help", "-h", "--state-dir", "--config", "--json", "--version"}


@pytest.fixture(autouse=True)
def _own_place(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path)


def sections():
    """What docs/commands.md says about each command, by its name."""
    text = (ROOT / "docs" / "commands.md").read_text("utf-8")
    _, *parts = re.split(r"^## outbox (\S+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def options_of(parser):
    """Every option of a command and of its sub-commands, global ones excepted."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for below in action.choices.values():
                yield from options_of(below)
        yield from (name for name in action.option_strings if name not in GLOBAL_OPTIONS)


@pytest.mark.parametrize(
    ("words", "everywhere", "own"),
    [
        (["status"], [], ["status"]),
        (["--json", "status"], ["--json"], ["status"]),
        (["config", "show", "--json"], ["--json"], ["config", "show"]),
        (["--state-dir", "d", "why", "a"], ["--state-dir", "d"], ["why", "a"]),
        (["why", "a", "--state-dir=d"], ["--state-dir=d"], ["why", "a"]),
        (["why", "--", "--json"], [], ["why", "--", "--json"]),
        (["enqueue", "--agent", "--json"], [], ["enqueue", "--agent=--json"]),
        (["enqueue", "--agent"], [], ["enqueue", "--agent"]),
        (["status", "--config"], ["--config"], ["status"]),
    ],
)
def test_global_options_stand_anywhere(words, everywhere, own):
    """Before and after the command, but not behind `--`, and never in the place of an agent's name."""
    assert cli.hoist(words) == (everywhere, own)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_help_and_an_example(name, capsys):
    """Its help has one line about it and examples, and each example is one that it takes."""
    loaded = cli.load(name)
    about = cli.COMMANDS[name][1]
    assert "\n" not in about
    assert getattr(loaded, "HELP", about) == about, "the table and the module tell the same"
    status, told, errors = command(capsys, name, "--help")
    assert (status, errors) == (0, "")
    assert about[1:] in " ".join(told.split())
    examples = [line.strip() for line in loaded.EXAMPLE.splitlines()]
    assert examples
    for example in examples:
        assert f"  {example}\n" in told
        words = shlex.split(example.partition(" < ")[0])
        assert words[:2] == ["outbox", name]
        cli.parser_of(name, loaded).parse_args(words[2:])


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_stands_in_the_documentation(name):
    """docs/commands.md has it, with its examples, and with each of its options."""
    loaded = cli.load(name)
    section = sections()[name]
    for example in loaded.EXAMPLE.splitlines():
        assert f"\n{example.strip()}\n" in section
    missing = [option for option in options_of(cli.parser_of(name, loaded)) if option not in section]
    assert missing == []


def test_the_documentation_has_no_command_that_is_not_there():
    """What a later release brings is not documented before."""
    assert list(sections()) == list(cli.COMMANDS)


def test_the_help_lists_every_command_and_loads_none(tmp_path):
    """`outbox --help` imports no command, and none of what they need."""
    code = "import sys; from outbox.cli import main; main(['--help']); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(tmp_path), capture_output=True, text=True, check=True
    )
    for name, (_, about) in cli.COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(about)}$", done.stdout, re.MULTILINE)
    loaded = set(done.stderr.split())
    assert {module for module, _ in cli.COMMANDS.values()} & loaded == set()
    assert {
        "asyncio",
        "httpx",
        "structlog",
        "starlette",
        "rich",
        "tenacity",
        "relay_client",
    } & loaded == set()


@pytest.mark.parametrize(
    "words", [("status",), ("why", "a"), ("dead", "list"), ("pause",), ("enqueue", "--help")]
)
def test_commands_that_send_nothing_are_light(tmp_path, words):
    """They load neither the client nor the daemon nor what draws on terminals."""
    code = "import sys; from outbox.cli import main; main(sys.argv[1:]); print(*sys.modules, file=sys.stderr)"
    done = subprocess.run(
        [sys.executable, "-c", code, *words],
        env=environment(tmp_path),
        capture_output=True,
        text=True,
        check=True,
    )
    heavy = {"asyncio", "httpx", "structlog", "starlette", "rich", "tenacity", "relay_client", "uvicorn"}
    assert heavy & set(done.stderr.split()) == set()


def test_without_a_command_the_help_is_shown(capsys):
    """On stderr, exit 2: a script that forgot the command learns it."""
    status, told, errors = command(capsys)
    assert (status, told) == (2, "")
    assert errors.startswith("usage: outbox COMMAND")
    assert command(capsys, "--help")[:2] == (0, errors)


def test_an_unknown_command_names_the_nearest(capsys):
    """Exit 2, one line."""
    status, told, errors = command(capsys, "statsu", "--json")
    assert (status, told) == (2, "")
    assert errors.count("\n") == 1
    assert 'Did you mean "status"?' in errors
    assert "Commands are serve, " in command(capsys, "xyzzy")[2]


def test_an_unknown_option_names_the_nearest(capsys):
    """Exit 2, one line."""
    status, told, errors = command(capsys, "enqueue", "--agnet=b")
    assert (status, told, errors.count("\n")) == (2, "", 1)
    assert 'unrecognized arguments: --agnet=b. Nothing was done. Did you mean "--agent"?' in errors


@pytest.mark.parametrize(
    "words", [("status", "--nonsense"), ("why",), ("skip", "a", "b"), ("dead",), ("status", "--js")]
)
def test_wrong_words_are_a_usage_error(words, capsys):
    """Exit 2, one line that names the command's help, and nothing on stdout."""
    status, told, errors = command(capsys, *words)
    assert (status, told) == (2, "")
    assert errors.count("\n") == 1
    assert f"outbox {words[0]}" in errors
    assert "--help" in errors


def test_the_version_is_told_before_and_after_a_command(capsys):
    """The same line each time."""
    told = command(capsys, "--version")
    assert told[0] == 0
    assert re.fullmatch(r"relay-outbox [0-9.]+\n", told[1])
    assert command(capsys, "status", "--version") == told


@pytest.mark.parametrize(
    ("raised", "status", "said"),
    [
        (StoreHeld("it is held"), 6, "it is held\n"),
        (KeyboardInterrupt(), 130, ""),
        (PermissionError(13, "Permission denied", "/x"), 4, "/x: Permission denied"),
    ],
)
def test_how_errors_end(monkeypatch, capsys, raised, status, said):
    """Each with its own exit status, and no traceback."""

    def run(_args):
        raise raised

    monkeypatch.setattr("outbox.cli.status.run", run)
    found, told, errors = command(capsys, "status")
    assert (found, told) == (status, "")
    assert said in errors
    assert "Traceback" not in errors


def test_nobody_reads_what_is_printed(tmp_path):
    """A closed pipe ends the command quietly, with the status that shells give."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "outbox", "--help"],
            env=environment(tmp_path),
            stdout=write_end,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


def test_closed_streams_do_not_undo_an_enqueue(tmp_path):
    """A caller that closed stdout and stderr still gets exit 0 for an event that is stored."""
    words = "enqueue --agent a --kind insight --payload 1"
    done = subprocess.run(
        ["sh", "-c", f'exec "$0" -m outbox {words} >&- 2>&-', sys.executable],
        env=environment(tmp_path),
        check=False,
    )
    assert done.returncode == 0
    told = subprocess.run(
        [sys.executable, "-m", "outbox", "status", "--json"],
        env=environment(tmp_path),
        capture_output=True,
        check=True,
    )
    assert b'"waiting": 1,' in told.stdout
