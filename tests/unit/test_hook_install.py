"""`outbox hook install` and `uninstall`: what comes into a settings file, what stays, what is left."""

import json
import re
import sys
from pathlib import Path

import pytest
from command_line import command, in_process

from outbox.capture.hook_install import PLACES
from outbox.capture.hook_table import RUNNERS

CONFIG = Path(__file__).parent.parent.parent / "config" / "hooks"
SHARED = ("claude-code", "codex", "gemini")
SETTINGS = [
    "{}",
    "{ }",
    "{\n}\n",
    '{"a": 1}',
    '{\n  "a": [1, 2],\n  "b": {"c": null}\n}\n',
    '{\n\t"hooks": {},\n\t"a": 1\n}',
    '{\r\n    "a": 1\r\n}\r\n',
    '{"hooks": {"SessionEnd": []}}',
    '{"hooks":{"SessionStart":[{"hooks":[{"type":"command","command":"say hello"}]}]}}',
    (
        '{\n    "hooks": {\n        "SessionEnd": [\n            {"matcher": "", "hooks": []}\n        ]\n'
        '    },\n    "z": "\\u00e9 é {}"\n}\n'
    ),
    ' \n{"n": 12345678901234567890, "f": 1.50, "dup": 1, "dup": 2}\n\n',
]


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    """A home folder of one's own, which is where the commands stand too."""
    in_process(monkeypatch, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["/opt/outbox/bin/outbox"])
    return tmp_path


def settings_of(home, runner, text=None):
    """The settings file of a runner, with this text in it."""
    path = home / PLACES[runner].user
    if text is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    return path


def commands_in(value):
    """Each event with the commands it calls."""
    return {
        event: [handler["command"] for group in groups for handler in group["hooks"]]
        for event, groups in value["hooks"].items()
    }


@pytest.mark.parametrize("runner", SHARED)
@pytest.mark.parametrize("text", SETTINGS)
def test_in_and_out_again_leaves_the_file_byte_for_byte(capsys, home, runner, text):
    """All that stood there stands there in between too, and afterwards nothing else does."""
    path = settings_of(home, runner, text)
    assert command(capsys, "hook", "install", runner, "--yes")[0] == 0
    between = json.loads(path.read_text("utf-8"))
    before = json.loads(text)
    assert {name: value for name, value in between.items() if name != "hooks"} == {
        name: value for name, value in before.items() if name != "hooks"
    }
    ours = {
        event
        for event, calls in commands_in(between).items()
        if f"/opt/outbox/bin/outbox hook {runner}" in calls
    }
    assert len(ours) > 5
    for event, groups in before.get("hooks", {}).items():
        assert between["hooks"][event][: len(groups)] == groups
    assert command(capsys, "hook", "uninstall", runner, "--yes")[0] == 0
    assert path.read_bytes() == text.encode()


@pytest.mark.parametrize("runner", sorted(PLACES))
def test_a_file_that_was_not_there_is_made_and_goes_again(capsys, home, runner):
    """Twice in is as once; twice out too."""
    path = settings_of(home, runner)
    command(capsys, "hook", "install", runner, "--yes")
    first = path.read_bytes()
    status, told, _ = command(capsys, "hook", "install", runner, "--yes")
    assert (status, told, path.read_bytes()) == (0, f"{path} was not changed.\n", first)
    command(capsys, "hook", "uninstall", runner, "--yes")
    assert not path.exists()
    assert command(capsys, "hook", "uninstall", runner, "--yes")[0] == 0


@pytest.mark.parametrize("runner", sorted(PLACES))
def test_no_event_is_registered_that_must_not_be(capsys, home, runner):
    """Neither WorktreeCreate, nor what decides, nor what is ignored; and each that is has its row."""
    command(capsys, "hook", "install", runner, "--yes")
    text = settings_of(home, runner).read_text("utf-8")
    assert not re.search(r"WorktreeCreate|PreToolUse|preToolUse|BeforeTool|PermissionRequest", text)
    if runner != "opencode":
        rules = {event: RUNNERS[runner].events[event] for event in json.loads(text)["hooks"]}
        assert not [event for event, rule in rules.items() if rule.ignored]


@pytest.mark.parametrize("runner", sorted(PLACES))
def test_the_files_to_be_copied_are_what_is_installed(capsys, home, runner):
    """config/hooks shows the entries with the command as a person would write it."""
    command(capsys, "hook", "install", runner, "--yes", "--project")
    (path,) = (home / name for name in [PLACES[runner].project])
    copy = CONFIG / f"{runner}{path.suffix}"
    assert path.read_text("utf-8").replace("/opt/outbox/bin/outbox", "outbox") == copy.read_text("utf-8")


def test_what_the_user_changed_meanwhile_stays(capsys, home):
    """A hook of theirs behind ours, and one beside ours in its group."""
    path = settings_of(home, "claude-code", '{"a": 1}')
    command(capsys, "hook", "install", "claude-code", "--yes")
    value = json.loads(path.read_text("utf-8"))
    value["hooks"]["Stop"].append({"hooks": [{"type": "command", "command": "say stop"}]})
    value["hooks"]["SessionEnd"][0]["hooks"].append({"type": "command", "command": "say end"})
    path.write_text(json.dumps(value, indent=2))
    command(capsys, "hook", "uninstall", "claude-code", "--yes")
    left = commands_in(json.loads(path.read_text("utf-8")))
    assert left == {"Stop": ["say stop"], "SessionEnd": ["say end"]}


def test_options_go_along_and_a_second_install_replaces_the_first(capsys, home):
    """Whose events, what else is recorded, what else is secret, where the state lies."""
    path = settings_of(home, "codex", "{}")
    command(capsys, "hook", "install", "codex", "--yes")
    words = ["--agent", "my agent", "--record", "PreToolUse", "--redact", "acme_", "--state-dir", "s"]
    command(capsys, "hook", "install", "codex", "--yes", *words)
    (called,) = {
        name for names in commands_in(json.loads(path.read_text("utf-8"))).values() for name in names
    }
    assert called == (
        "/opt/outbox/bin/outbox hook codex '--agent=my agent' --record=PreToolUse --redact=acme_ "
        f"--state-dir={home}/s"
    )
    command(capsys, "hook", "uninstall", "codex", "--yes")
    assert path.read_text("utf-8") == "{}"


def test_comments_stay_where_the_runner_takes_them(capsys, home):
    """Gemini's settings may have some; what is inside strings is none."""
    text = '{\n  // mine\n  "a": "http://x", /* { */\n  "b": 2 // last\n}\n'
    path = settings_of(home, "gemini", text)
    assert command(capsys, "hook", "install", "gemini", "--yes")[0] == 0
    assert "// mine" in path.read_text("utf-8")
    command(capsys, "hook", "uninstall", "gemini", "--yes")
    assert path.read_text("utf-8") == text
    assert command(capsys, "hook", "install", "claude-code", "--yes")[0] == 0


@pytest.mark.parametrize("act", ["install", "uninstall"])
@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1',
        "[]",
        '{"hooks": []}',
        '{"hooks": {"Stop": {}}}',
        '{"hooks": {"Stop": [1]}}',
        '{"a": 1,}',
        "\ud83d",
    ],
)
def test_settings_that_cannot_be_understood_are_refused_untouched(capsys, home, act, text):
    """No guess at what was meant: the file stays, and the error names it."""
    path = settings_of(home, "claude-code", "x")
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    before = path.read_bytes()
    status, out, err = command(capsys, "hook", act, "claude-code", "--yes")
    assert (status, out) == (2, "")
    assert str(path) in err
    assert "left as they are" in err
    assert path.read_bytes() == before


def test_the_difference_is_shown_first_and_nothing_is_written_unasked(capsys, home, monkeypatch):
    """--dry-run shows it; without a terminal there is nobody to ask; a "no" changes nothing."""
    path = settings_of(home, "claude-code", "{}\n")
    status, out, _ = command(capsys, "hook", "install", "claude-code", "--dry-run")
    assert status == 0
    assert out.startswith(f"--- {path}\n+++ {path}\n@@")
    assert '"command": "/opt/outbox/bin/outbox hook claude-code",' in out
    status, out, err = command(capsys, "hook", "install", "claude-code")
    assert status == 2
    assert "--yes" in err

    class Terminal:
        def isatty(self):
            return True

        def readline(self):
            return "n\n"

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert "was not changed" in command(capsys, "hook", "install", "claude-code")[1]
    assert path.read_text("utf-8") == "{}\n"
    monkeypatch.setattr(Terminal, "readline", lambda self: "y\n")
    assert "calls outbox now" in command(capsys, "hook", "install", "claude-code")[1]
    assert path.read_text("utf-8") != "{}\n"


def test_what_the_runner_writes_while_it_is_asked_stays(capsys, home, monkeypatch):
    """The difference that was agreed to is another one then: nothing is written, and that is said."""
    path = settings_of(home, "claude-code", "{}\n")

    class Terminal:
        def isatty(self):
            return True

        def readline(self):
            path.write_text('{"model": "opus"}\n', "utf-8")
            return "y\n"

    monkeypatch.setattr(sys, "stdin", Terminal())
    status, _, err = command(capsys, "hook", "install", "claude-code")
    assert status == 2
    assert "changed meanwhile" in err
    assert path.read_text("utf-8") == '{"model": "opus"}\n'


def test_the_draft_is_never_wider_than_the_settings(capsys, home, monkeypatch):
    """Tokens may stand in them: nobody else can read them while they are written."""
    path = settings_of(home, "claude-code", "{}\n")
    path.chmod(0o600)
    modes = []
    chmod = Path.chmod

    def seen(draft, mode):
        modes.append(draft.stat().st_mode & 0o777)
        chmod(draft, mode)

    monkeypatch.setattr(Path, "chmod", seen)
    command(capsys, "hook", "install", "claude-code", "--yes")
    assert modes == [0o600]


def test_mode_and_links_stay(capsys, home):
    """Settings that are a link to a folder of dotfiles are written there."""
    real = home / "dotfiles" / "claude.json"
    real.parent.mkdir()
    real.write_text("{}")
    real.chmod(0o640)
    path = settings_of(home, "claude-code")
    path.parent.mkdir()
    path.symlink_to(real)
    command(capsys, "hook", "install", "claude-code", "--yes")
    assert path.is_symlink()
    assert real.stat().st_mode & 0o777 == 0o640
    assert "hook claude-code" in real.read_text("utf-8")
    assert [file.name for file in real.parent.iterdir()] == ["claude.json"]


def test_data_for_programs(capsys, home):
    """--json: where the settings lie, and whether they were changed."""
    path = settings_of(home, "codex")
    for changed in (True, False):
        status, out, _ = command(capsys, "hook", "install", "codex", "--yes", "--json")
        assert (status, json.loads(out)) == (0, {"path": str(path), "changed": changed})


def test_help_is_no_call_of_a_runner(capsys):
    """`outbox hook --help` is for a person, and goes to stdout."""
    status, out, _ = command(capsys, "hook", "--help")
    assert status == 0
    assert "uninstall" in out
