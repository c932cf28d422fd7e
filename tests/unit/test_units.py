"""The unit files, and `outbox install`, which writes them. systemd itself judges them: systemd-analyze."""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from command_line import command, in_process

from outbox.cli.install_files import (
    SYSTEM_FILES,
    TEMPLATE_COMMAND,
    USER_FILES,
    is_sealed,
    quoted,
    seal,
    template_folder,
    with_command,
)
from outbox.errors import UsageError

ROOT = Path(__file__).parent.parent.parent
SYSTEMD = ROOT / "systemd"
COMMAND = str(Path(sys.executable).with_name("outbox"))
UNITS = ["outbox.service", "outbox.socket", "outbox-flush@.service"]


@pytest.fixture(autouse=True)
def _own_place(monkeypatch, tmp_path):
    in_process(monkeypatch, tmp_path)
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)


def analyze(*words):
    """`systemd-analyze` with these words, without a manager of a user to ask."""
    with tempfile.TemporaryDirectory(prefix="xdg-") as folder:
        env = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "XDG_RUNTIME_DIR": folder, "HOME": folder}
        return subprocess.run(
            ["systemd-analyze", *words], capture_output=True, text=True, env=env, timeout=60, check=False
        )


def installed(capsys, root, *words):
    """`outbox install` below a folder: the exit status, and the texts."""
    return command(capsys, "install", "--root", str(root), "--command", COMMAND, *words)


def written(capsys, root, whose):
    """The units as they are installed, and one instance of the template unit."""
    assert installed(capsys, root, whose)[0] == 0
    (folder,) = {path.parent for path in root.rglob("outbox.service")}
    template = folder / "outbox-flush@.service"
    (folder / "outbox-flush@builder.service").write_text(template.read_text("utf-8"), "utf-8")
    return [str(path) for path in sorted(folder.iterdir()) if path != template]


# What systemd says -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", ["--system", "--user"])
def test_systemd_has_nothing_to_say_about_the_units(capsys, tmp_path, whose):
    """`verify` without a word: it ends with 0 also where it does not know a key."""
    units = written(capsys, tmp_path, whose)
    done = analyze(*(["--user"] if whose == "--user" else []), "verify", *units)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


@pytest.mark.parametrize("example", sorted((SYSTEMD / "examples").iterdir()), ids=lambda path: path.name)
def test_systemd_has_nothing_to_say_about_the_examples(capsys, tmp_path, example):
    """Each drop-in, where it belongs."""
    units = written(capsys, tmp_path, "--system")
    name = "outbox.service"
    if example.name == "agent-flush.conf":
        name = "agent.service"
        agent = Path(units[0]).with_name(name)
        agent.write_text("[Service]\nExecStart=/bin/sleep infinity\n", "utf-8")
        units.append(str(agent))
    folder = Path(units[0]).parent / f"{name}.d"
    folder.mkdir()
    (folder / example.name).write_text(example.read_text("utf-8"), "utf-8")
    done = analyze("verify", *units)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_wrong_key_would_be_noticed(tmp_path):
    """The tests above can fail."""
    unit = tmp_path / "wrong.service"
    unit.write_text("[Service]\nExecStart=/bin/true\nWatchdogSecs=1\n", "utf-8")
    done = analyze("verify", str(unit))
    assert (done.returncode, "WatchdogSecs" in done.stderr) == (0, True)


@pytest.mark.parametrize("name", ["outbox.service", "outbox-flush@builder.service"])
def test_the_units_are_hardened(capsys, tmp_path, name):
    """An exposure of 1.2 or better, as systemd counts it."""
    (unit,) = [path for path in written(capsys, tmp_path, "--system") if path.endswith(f"/{name}")]
    done = analyze("security", "--offline=true", "--threshold=12", "--no-pager", unit)
    assert done.returncode == 0, done.stdout
    assert float(re.search(r"Overall exposure level for \S+: ([\d.]+)", done.stdout)[1]) <= 1.2


def test_the_socket_has_its_folder_to_itself():
    """The service makes no runtime directory, which would be removed with the socket in it when it stops."""
    socket = (SYSTEMD / "outbox.socket").read_text("utf-8")
    assert "ListenStream=/run/relay-outbox/outbox.sock" in socket
    for name in UNITS:
        assert "RuntimeDirectory" not in (SYSTEMD / name).read_text("utf-8")


def test_service_and_flush_are_hardened_alike():
    """They do the same work, so they get the same."""
    parts = [(SYSTEMD / name).read_text("utf-8").split("# Hardening\n")[1] for name in (UNITS[0], UNITS[2])]
    assert parts[0].split("\n\n")[0].strip() == parts[1].strip()


def test_every_example_stands_in_the_documentation():
    """Whoever looks for a drop-in finds it; the pages' links are held elsewhere."""
    page = (ROOT / "docs" / "systemd.md").read_text("utf-8")
    names = [path.name for path in (SYSTEMD / "examples").iterdir()]
    assert [name for name in names if f"systemd/examples/{name})" not in page] == []


# Installing ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("whose", "files"), [("--system", SYSTEM_FILES), ("--user", USER_FILES)], ids=["system", "user"]
)
def test_all_files_are_written_for_this_command(capsys, tmp_path, whose, files):
    """Every file of systemd/ has its place, and starts what was installed."""
    status, told, _ = installed(capsys, tmp_path / "image", whose)
    assert status == 0
    found = {
        path.relative_to(tmp_path / "image") for path in (tmp_path / "image").rglob("*.*") if path.is_file()
    }
    assert len(found) == len(files)
    assert all(str(path) in told for path in found)
    assert "daemon-reload" in told
    for path in found:
        text = (tmp_path / "image" / path).read_text("utf-8")
        assert TEMPLATE_COMMAND not in text
        assert is_sealed(text)
    service = next(path for path in found if path.name == "outbox.service")
    assert f"\nExecStart={COMMAND} serve\n" in (tmp_path / "image" / service).read_text("utf-8")
    assert "is there already" in installed(capsys, tmp_path / "image", whose)[1]


def test_every_unit_is_installed():
    """A new file in systemd/ is not forgotten."""
    there = {str(path.relative_to(SYSTEMD)) for path in SYSTEMD.rglob("*") if path.is_file()}
    assert {name for name in there if not name.startswith("examples/")} == {*SYSTEM_FILES, *USER_FILES}


def test_a_changed_file_is_kept(capsys, tmp_path):
    """It is shown against ours, and nothing at all is written; `--force` replaces it."""
    installed(capsys, tmp_path, "--system")
    unit, other = (tmp_path / SYSTEM_FILES[name] for name in ("outbox.service", "outbox.socket"))
    changed = unit.read_text("utf-8").replace("WatchdogSec=60s", "WatchdogSec=9s")
    unit.write_text(changed, "utf-8")
    other.unlink()
    status, told, errors = installed(capsys, tmp_path, "--system")
    assert (status, unit.read_text("utf-8"), other.exists()) == (4, changed, False)
    assert "-WatchdogSec=9s\n+WatchdogSec=60s" in told
    assert "1 file was changed by hand. Nothing was written" in errors
    assert installed(capsys, tmp_path, "--system", "--uninstall")[0] == 4
    assert installed(capsys, tmp_path, "--system", "--force")[0] == 0
    assert "WatchdogSec=60s" in unit.read_text("utf-8")


def test_an_older_file_of_ours_is_replaced(capsys, tmp_path):
    """An upgrade needs no force as long as nobody has changed it."""
    unit = tmp_path / SYSTEM_FILES["outbox.socket"]
    unit.parent.mkdir(parents=True)
    unit.write_text(seal("[Socket]\nListenStream=/run/older\n", "0.0.1"), "utf-8")
    status, told, _ = installed(capsys, tmp_path, "--system", "--json")
    assert status == 0
    standings = {Path(row["path"]).name: row["standing"] for row in json.loads(told)["files"]}
    assert (standings["outbox.socket"], standings["outbox.service"]) == ("older", "new")
    assert "/run/older" not in unit.read_text("utf-8").partition("\n")[2]


def test_what_was_installed_is_removed(capsys, tmp_path):
    """With the link that `enable` made; a file of somebody else beside it stays."""
    installed(capsys, tmp_path, "--user")
    (folder,) = {path.parent for path in tmp_path.rglob("outbox.service")}
    (folder / "default.target.wants").mkdir()
    (folder / "default.target.wants" / "outbox.service").symlink_to(folder / "outbox.service")
    (folder / "agent.service").write_text("", "utf-8")
    assert installed(capsys, tmp_path, "--user", "--uninstall")[0] == 0
    assert [path.name for path in sorted(folder.rglob("*"))] == ["agent.service", "default.target.wants"]


def test_print_writes_nothing(capsys, tmp_path):
    """It shows every file with its place, whatever this host is like; as data too."""
    status, told, _ = command(capsys, "install", "--user", "--print")
    assert status == 0
    assert [f"### {tmp_path}/.config/{place}\n" in told for place in USER_FILES.values()] == [True, True]
    (row, _) = json.loads(command(capsys, "install", "--user", "--print", "--json")[1])["files"]
    assert row["path"] == f"{tmp_path}/.config/systemd/user/outbox.service"
    assert row["text"] in told
    assert not (tmp_path / ".config").exists()


def test_without_systemd_nothing_is_written(capsys, tmp_path, monkeypatch):
    """It says so, and what else there is."""
    monkeypatch.setattr("outbox.cli.install._RUNNING", tmp_path / "gone")
    status, _, errors = command(capsys, "install", "--user")
    assert status == 69
    assert "No systemd runs here. Nothing was written" in errors
    assert "--print" in errors
    assert not (tmp_path / ".config").exists()


def test_options_are_passed_on(capsys, tmp_path):
    """The service reads the same settings and keeps its events where the commands look."""
    words = ("--config", "own.toml", "--state-dir", str(tmp_path / "my events"))
    told = command(capsys, "install", "--user", "--print", *words)[1]
    assert f'serve "--state-dir={tmp_path}/my events" --config={Path.cwd()}/own.toml\n' in told
    assert f'flush "--state-dir={tmp_path}/my events" --config={Path.cwd()}/own.toml --agent %I' in told
    status, _, errors = command(capsys, "install", "--system", "--print", "--state-dir", "x")
    assert (status, "ReadWritePaths=" in errors) == (2, True)


def test_a_command_in_a_home_is_no_system_service(capsys, tmp_path, monkeypatch):
    """The service could not see it; said before, not by a service that fails. `--print` only notes it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "outbox").touch()
    monkeypatch.setattr("sys.executable", str(folder / "python"))
    monkeypatch.setattr("outbox.cli.install._HIDDEN", (f"{tmp_path}/",))
    status, _, errors = command(capsys, "install", "--system", "--root", str(tmp_path / "image"))
    assert (status, "Nothing was written" in errors, (tmp_path / "image").exists()) == (2, True, False)
    status, told, errors = command(capsys, "install", "--system", "--print")
    assert (status, errors[:5], "ProtectHome=yes" in told) == (0, "note:", True)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("/opt/relay-outbox/bin/outbox", "/opt/relay-outbox/bin/outbox"),
        ("/opt/my outbox", '"/opt/my outbox"'),
        ("/opt/100% sure", '"/opt/100%% sure"'),
    ],
)
def test_words_are_quoted_for_units(word, line):
    """What systemd reads is what was meant."""
    assert quoted(word) == line
    assert with_command(f"ExecStart={TEMPLATE_COMMAND} serve\n", [word]) == f"ExecStart={line} serve\n"


def test_systemd_finds_a_command_with_other_characters(tmp_path):
    """The quoting is systemd's own: it looks for the file that is meant."""
    program = tmp_path / "my 100% outbox"
    program.write_text("#!/bin/sh\n", "utf-8")
    program.chmod(0o755)
    unit = tmp_path / "one.service"
    unit.write_text(f"[Service]\nExecStart={quoted(str(program))} serve\n", "utf-8")
    assert analyze("verify", str(unit)).stderr == ""
    program.unlink()
    assert "100%" in analyze("verify", str(unit)).stderr


@pytest.mark.parametrize("word", ["/opt/$HOME", '/opt/"x"', "/opt/it's", "/opt/\\x", "/opt/\n"])
def test_a_word_that_no_unit_can_carry_is_refused(word):
    """It would be something else there, or make the unit one that cannot be started."""
    with pytest.raises(UsageError, match="Nothing was written"):
        quoted(word)


# Carrying --------------------------------------------------------------------------------------------------


def test_the_wheel_carries_the_units():
    """So that an installed package has them; here they are those of the checkout."""
    assert template_folder() == SYSTEMD
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    assert 'systemd = "share/relay-outbox/systemd"' in text


def test_an_installed_package_finds_its_units(tmp_path, monkeypatch):
    """By the list of its files, wherever the scheme of the installation put its data."""
    site, data = tmp_path / "site", tmp_path / "share" / "relay-outbox" / "systemd"
    info = site / "relay_outbox-9.dist-info"
    info.mkdir(parents=True)
    data.mkdir(parents=True)
    (data / "outbox.service").touch()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: relay-outbox\nVersion: 9\n", "utf-8")
    (info / "RECORD").write_text("../share/relay-outbox/systemd/outbox.service,,\n", "utf-8")
    monkeypatch.setattr("outbox.cli.install_files.__file__", str(site / "outbox" / "cli" / "x.py"))
    monkeypatch.syspath_prepend(str(site))
    assert template_folder() == data
