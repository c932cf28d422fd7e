"""Where the state directory lies."""

import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from outbox.errors import ConfigError
from outbox.settings import load
from outbox.state_dir import located, state_dir

LAYERS = [
    ("OUTBOX_STATE_DIR", "/own", "/own"),
    ("AGENT_RELAY_RUNNER_OUTBOX_DIR", "/alias", "/alias"),
    ("STATE_DIRECTORY", "/var/lib/relay-outbox:/var/lib/other", "/var/lib/relay-outbox"),
    ("XDG_STATE_HOME", "/xdg", "/xdg/relay-outbox"),
    ("HOME", "/home/me", "/home/me/.local/state/relay-outbox"),
]


@pytest.mark.parametrize("first", range(len(LAYERS)))
def test_the_first_that_is_set_names_it(first):
    """E14: each source stands in when all before it are missing or empty."""
    environ = {name: "" if n < first else value for n, (name, value, _) in enumerate(LAYERS)}
    name, _, path = LAYERS[first]
    assert located(None, environ) == (Path(path), name)
    assert located(load({}, environ=environ), environ)[0] == Path(path)


def test_a_flag_and_a_file_stand_where_the_layers_have_them(tmp_path):
    """A flag comes before all variables, a file after OUTBOX_STATE_DIR and before systemd's."""
    environ = {name: value for name, value, _ in LAYERS}
    assert state_dir(load({"daemon.state_dir": "/flag"}, environ=environ), environ) == Path("/flag")
    file = tmp_path / "outbox.toml"
    file.write_text('[daemon]\nstate_dir = "/file"\n', "utf-8")
    assert state_dir(load({}, environ=environ, config_path=str(file)), environ) == Path("/own")
    del environ["OUTBOX_STATE_DIR"], environ["AGENT_RELAY_RUNNER_OUTBOX_DIR"]
    assert state_dir(load({}, environ=environ, config_path=str(file)), environ) == Path("/file")


def test_without_a_home_it_says_what_to_set():
    """Never a temporary folder instead."""
    for environ in ({}, {"HOME": ""}, {"HOME": "relative"}, {"TMPDIR": tempfile.gettempdir()}):
        with pytest.raises(ConfigError, match=r"HOME is unknown.*OUTBOX_STATE_DIR"):
            state_dir(None, environ)


def test_relative_xdg_folders_are_passed_over_and_others_made_absolute(tmp_path, monkeypatch):
    """XDG says so; what a person wrote into our own variable counts from the working folder."""
    monkeypatch.chdir(tmp_path)
    assert state_dir(None, {"XDG_STATE_HOME": "x", "HOME": "/h"}) == Path("/h/.local/state/relay-outbox")
    assert state_dir(None, {"OUTBOX_STATE_DIR": "state"}) == tmp_path / "state"
    assert state_dir(None, {"OUTBOX_STATE_DIR": "~/state", "HOME": "/h"}) == Path("/h/state")
    assert not list(tmp_path.iterdir())


def test_producers_pay_for_no_configuration():
    """Finding the folder and reading bounds loads no parser and none of the settings."""
    code = (
        "import sys, outbox.state_dir, outbox.bounds; outbox.state_dir.state_dir(None, {'HOME': '/h'});"
        "print(*sorted({'tomllib', 'difflib', 'outbox.settings', 'outbox.setting_types'} & set(sys.modules)))"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == ""
