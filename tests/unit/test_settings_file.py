"""The files of configuration, and the one we ship."""

import re
import tomllib
from pathlib import Path

import pytest

from outbox.errors import ConfigError
from outbox.settings import KEYS, Settings, load
from outbox.settings_file import default_files, find_files, read_file

SHIPPED = Path(__file__).parent.parent.parent / "config/outbox.toml"
SETTING = re.compile(r"#([a-z_]+ = .*)")


def shipped_keys():
    """Each commented-out key of the shipped file: its name, its value as written, and the line above."""
    section, above = "", ""
    for line in SHIPPED.read_text("utf-8").splitlines():
        if found := re.fullmatch(r"\[([a-z._]+)\]", line):
            section = found.group(1)
        elif found := SETTING.fullmatch(line):
            name, _, value = found.group(1).partition(" = ")
            yield f"{section}.{name}", value, above
        above = line


def test_the_shipped_file_has_every_key_and_no_other():
    """In the order of the code, so that `config show` and the file read alike."""
    assert [name for name, _, _ in shipped_keys()] == list(KEYS)


@pytest.mark.parametrize(
    ("name", "value", "above"), list(shipped_keys()), ids=[key[0] for key in shipped_keys()]
)
def test_the_shipped_file_has_the_default_and_a_sentence(name, value, above):
    """The value is the code's default in the code's spelling, and the line above it explains it."""
    assert value == KEYS[name].type.write(KEYS[name].default)
    assert above.startswith("# ")
    assert above.endswith(".")


def test_the_shipped_file_uncommented_changes_nothing(tmp_path):
    """An operator can start from it with every line switched on."""
    text = SETTING.sub(r"\1", SHIPPED.read_text("utf-8"))
    assert tomllib.loads(text).keys() == {name.partition(".")[0] for name in KEYS}
    file = tmp_path / "outbox.toml"
    file.write_text(text, "utf-8")
    settings = load({}, environ={}, config_path=str(file))
    assert settings == Settings()
    assert set(settings.origins) == set(KEYS)


def test_the_shipped_file_as_it_is_changes_nothing():
    """Copied without an edit it is the same as no file."""
    settings = load({}, environ={}, config_path=str(SHIPPED))
    assert settings == Settings()
    assert settings.origins == {}


def test_its_example_of_a_kind_works(tmp_path):
    """The lines that show how to write a kind of one's own are taken as they stand."""
    example = "\n".join(re.findall(r"(?m)^#   (.*)$", SHIPPED.read_text("utf-8")))
    file = tmp_path / "outbox.toml"
    file.write_text(example, "utf-8")
    assert load({}, environ={}, config_path=str(file)).kinds == {"build-report": "/api/build-reports"}


def test_which_file_is_read(tmp_path):
    """--config, else OUTBOX_CONFIG, else the first default there is, else none."""
    xdg = tmp_path / "xdg/relay-outbox/outbox.toml"
    named = tmp_path / "named.toml"
    environ = {"XDG_CONFIG_HOME": str(tmp_path / "xdg"), "OUTBOX_CONFIG": ""}
    assert list(default_files(environ)) == [xdg, Path("/etc/relay-outbox/outbox.toml")]
    assert xdg not in find_files(None, environ)
    xdg.parent.mkdir(parents=True)
    xdg.touch()
    assert find_files(None, environ) == (xdg,)
    assert find_files(None, environ | {"OUTBOX_CONFIG": str(named)}) == (named,)
    assert find_files("x.toml", environ | {"OUTBOX_CONFIG": str(named)}) == (Path("x.toml"),)


def test_the_default_files_without_xdg():
    """HOME stands in for a missing or relative XDG folder; without either only /etc is left."""
    etc = Path("/etc/relay-outbox/outbox.toml")
    home = Path("/home/me/.config/relay-outbox/outbox.toml")
    assert list(default_files({"HOME": "/home/me", "XDG_CONFIG_HOME": "relative"})) == [home, etc]
    assert list(default_files({})) == [etc]


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"a = \n", "line 1"),
        (b"\xff\xfe", "not UTF-8 (byte 1)"),
        (b"a = 1\na = 2\n", "line 2"),
        (b"a = " + b"9" * 5000, "TOML"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_the_place(content, told, tmp_path):
    """The line says which file and where in it."""
    file = tmp_path / "outbox.toml"
    file.write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        load({}, environ={}, config_path=str(file))
    assert str(file) in str(caught.value)
    assert told in str(caught.value)


def test_a_named_file_must_exist(tmp_path):
    """A slip in the name is no empty configuration."""
    for environ, given in (
        ({}, str(tmp_path / "no.toml")),
        ({"OUTBOX_CONFIG": str(tmp_path / "no.toml")}, None),
    ):
        with pytest.raises(ConfigError, match=r"no\.toml cannot be read: No such file"):
            load({}, environ=environ, config_path=given)
    with pytest.raises(ConfigError, match="Is a directory"):
        load({}, environ={}, config_path=str(tmp_path))


def test_a_byte_order_mark_is_no_fault(tmp_path):
    """Some editors write one."""
    file = tmp_path / "outbox.toml"
    file.write_bytes(b'\xef\xbb\xbf[relay]\r\nurl = "http://x"\r\n')
    assert read_file(file) == {"relay.url": "http://x"}
