"""`outbox config show` and `outbox config check`."""

import argparse
import json

import pytest

from outbox.cli import config
from outbox.settings import KEYS


@pytest.fixture(autouse=True)
def bare_environment(monkeypatch, tmp_path):
    """Nothing of the machine's own settings reaches these tests."""
    for key in KEYS.values():
        for name in (key.variable, *key.aliases, "OUTBOX_CONFIG", "STATE_DIRECTORY", "XDG_STATE_HOME"):
            monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "xdg"))


def run(*words, **flags):
    """The command as the dispatcher calls it."""
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    args = parser.parse_args(words)
    vars(args).update({"state_dir": None, "config": None, "json": False} | flags)
    return config.run(args)


def test_show_says_each_value_and_where_it_comes_from(monkeypatch, tmp_path, capsys):
    """Every key, secrets masked, and where events are kept."""
    monkeypatch.setenv("OUTBOX_RELAY_TOKEN", "tok-5ecret")
    assert run("show", state_dir=str(tmp_path / "state")) == 0
    told = capsys.readouterr().out
    for name in KEYS:
        assert f"\n{name} " in told
    assert [line.split() for line in told.splitlines() if line.startswith("relay.token ")] == [
        ["relay.token", "********", "OUTBOX_RELAY_TOKEN"]
    ]
    assert "tok-5ecret" not in told
    assert f"State directory: {tmp_path / 'state'}" in told
    assert "No file of configuration; looked for" in told


def test_show_as_data(monkeypatch, tmp_path, capsys):
    """One line of JSON with the values as the engine reads them."""
    file = tmp_path / "outbox.toml"
    file.write_text('[bounds]\nmax_bytes = "1 KiB"\n[kinds.report]\npath = "/r"\n', "utf-8")
    monkeypatch.setenv("AGENT_RELAY_TOKEN", "tok-5ecret")
    assert run("show", config=str(file), json=True) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["settings"]["bounds.max_bytes"] == {"value": 1024, "from": str(file)}
    assert told["settings"]["kinds.report.path"] == {"value": "/r", "from": str(file)}
    assert told["settings"]["relay.token"] == {"value": "********", "from": "AGENT_RELAY_TOKEN"}
    assert told["settings"]["relay.url"] == {"value": None, "from": "built-in"}
    assert told["stateDir"] == {"value": str(tmp_path / ".local/state/relay-outbox"), "from": "HOME"}
    assert told["files"] == [str(file)]


def test_show_works_without_a_home(monkeypatch, capsys):
    """The missing folder is told in place of its name."""
    monkeypatch.delenv("HOME")
    assert run("show") == 0
    assert "HOME is unknown" in capsys.readouterr().out
    assert run("show", json=True) == 0
    assert json.loads(capsys.readouterr().out)["stateDir"] is None


def test_show_refuses_what_a_daemon_would_refuse(monkeypatch, capsys):
    """One line on stderr, exit 2."""
    monkeypatch.setenv("OUTBOX_DELIVERY_WORKERS", "none")
    assert run("show") == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith('delivery.workers = "none" (OUTBOX_DELIVERY_WORKERS) is no whole number')


def test_check_names_every_fault(tmp_path, capsys):
    """Exit 2, a line for each, and no note about what only the faults brought about."""
    file = tmp_path / "outbox.toml"
    file.write_text('[relay]\nurl = "ftp://x"\nurll = 1\n[delivery]\nworkers = 0\n', "utf-8")
    assert run("check", str(file)) == 2
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == ["fault", "fault", "fault", "Read", "3 faults"]
    assert run("check", str(file), json=True) == 2
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], len(told["faults"]), told["notes"]) == (False, 3, [])


def test_check_of_a_sound_file(tmp_path, capsys):
    """Exit 0 and a word for it; --config is the file when none is given."""
    file = tmp_path / "outbox.toml"
    file.write_text('[relay]\nurl = "http://relay"\n', "utf-8")
    assert run("check", config=str(file)) == 0
    assert capsys.readouterr().out.splitlines() == [f"Read: {file}.", "No fault."]


def test_check_notes_what_may_surprise(monkeypatch, tmp_path, capsys):
    """No faults: a folder producers cannot find, an open secret, a missing token file, a strange variable."""
    file = tmp_path / "outbox.toml"
    file.write_text('[relay]\ntoken = "tok-5ecret"\n[daemon]\nstate_dir = "/s"\n', "utf-8")
    file.chmod(0o644)
    monkeypatch.setenv("OUTBOX_RELAY_URLL", "http://x")
    assert run("check", str(file)) == 0
    told = capsys.readouterr().out
    assert "relay.url is not set" in told
    assert "set OUTBOX_STATE_DIR for them" in told
    assert "others can read it" in told
    assert (
        "OUTBOX_RELAY_URLL is no setting and is passed over; the nearest known one is OUTBOX_RELAY_URL."
        in told
    )
    file.chmod(0o600)
    monkeypatch.setenv("OUTBOX_RELAY_TOKEN_FILE", str(tmp_path / "later"))
    assert run("check", str(file)) == 0
    told = capsys.readouterr().out
    assert "others can read it" not in told
    assert "events wait until it can" in told


def test_the_command_says_what_it_is_for():
    """Help of one line, and an example that parses."""
    assert "\n" not in config.HELP
    parser = argparse.ArgumentParser()
    config.add_arguments(parser)
    for example in config.EXAMPLE.splitlines():
        program, command, *words = example.split()
        assert (program, command) == ("outbox", "config")
        parser.parse_args(words)
