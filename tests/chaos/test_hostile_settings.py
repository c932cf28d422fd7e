"""Files of configuration and environments as nobody should write them: faults in words, no secret in one."""

import os
import random
from pathlib import Path

import pytest
from command_line import in_process
from mutations import ODD_VALUES, UGLY, broken, is_safe

from outbox.cli import main
from outbox.settings import KEYS, Settings, examine, shown, unknown_variables

ROOT = Path(__file__).parents[2]
WRITTEN = [
    b"1", b"-1", b"0.5", b"1e400", b"inf", b"nan", b"true", b'""', b'"text"', b"[]", b'["a", 1]', b"{a = 1}",
    b"2026-01-01T00:00:00Z", b"07:32:00", b'"\\u0000"', b'"http://[::1"', b'"http://user:pw@host/"',
    b"9" * 30, b"0x10", b'"~/x"', b'"~nobody-here/x"', b'"../x"', b'"\\u001b[31m"', b"[[[[]]]]", b'"5s"',
]  # fmt: skip
TABLES = [b"relay", b"kinds", b"kinds.a b", b'"relay.token"', b"a.b.c"]
SECRETS = {"relay.token": "tok-very-secret-7741", "relay.oauth.client_secret": "hush-very-secret-88"}

SECRET_LINES = {name: f'{name} = "{secret}"'.encode() for name, secret in SECRETS.items()}


@pytest.fixture
def chance(seed):
    """What is broken, and how."""
    return random.Random(seed)


def require_told(report):
    """Settings of the right sort whatever was given, faults of one readable line each, no secret in them."""
    assert isinstance(report.settings, Settings)
    for fault in report.faults:
        assert is_safe(fault), fault
        assert not any(secret in fault for secret in SECRETS.values())
    for name in KEYS:
        assert isinstance(shown(name, report.settings.value(name)), str)


def a_file(chance):
    """Some keys with odd values, in tables or dotted; now and then bytes that are no TOML at all."""
    lines = [line for line in SECRET_LINES.values() if chance.random() < 0.5]
    for name in chance.sample(sorted(KEYS), chance.randrange(1, 6)):
        lines += [b"%s = %s" % (name.encode(), chance.choice(WRITTEN))]
    chance.shuffle(lines)
    if chance.random() < 0.2:
        lines.insert(0, b"[%s]" % chance.choice(TABLES))
    text = b"\n".join(lines)
    changed = broken(chance, text) if chance.random() < 0.4 else text
    return text if puts_a_secret_elsewhere(changed) else changed


def puts_a_secret_elsewhere(text):
    """Whether one stands under another key now, where it is no secret to anybody."""
    lines = text.splitlines()
    return any(
        secret.encode() in text and SECRET_LINES[name] not in lines for name, secret in SECRETS.items()
    )


def test_files_of_odd_values(chance, tmp_path, rounds):
    """Whatever stands in the file, reading it raises nothing."""
    file = tmp_path / "outbox.toml"
    faulty = 0
    for _ in range(rounds(20) * 20):
        file.write_bytes(a_file(chance))
        report = examine(environ={"HOME": str(tmp_path)}, config_path=str(file))
        require_told(report)
        faulty += bool(report.faults)
    assert faulty > 50


def test_our_own_file_with_something_broken(chance, tmp_path, rounds):
    """The commented file with bytes changed."""
    whole = (ROOT / "config" / "outbox.toml").read_bytes()
    whole = b"\n".join(line.removeprefix(b"# ") if b" = " in line else line for line in whole.split(b"\n"))
    file = tmp_path / "outbox.toml"
    for _ in range(rounds(10) * 4):
        file.write_bytes(broken(chance, whole))
        require_told(examine(environ={"HOME": str(tmp_path)}, config_path=str(file)))


def test_environments_of_odd_texts(chance, tmp_path, rounds):
    """Each variable that is read, with whatever an environment can hold."""
    variables = sorted({name for key in KEYS.values() for name in (key.variable, *key.aliases)})
    odd = [os.fsdecode(text.replace(b"\0", b"")) for text in [*UGLY, *WRITTEN]]
    odd += [str(value).replace("\0", "") for value in ODD_VALUES if value != "\ud800"]
    for _ in range(rounds(15) * 20):
        environ = {name: chance.choice(odd) for name in chance.sample(variables, chance.randrange(1, 8))}
        environ |= {KEYS[name].variable: secret for name, secret in SECRETS.items() if chance.random() < 0.3}
        environ |= {chance.choice(["OUTBOX_", "OUTBOX_RELAY_TOKN", "OUTBOX_X\x1b"]): "x"}
        require_told(examine(environ={"HOME": str(tmp_path), **environ}))
        assert all(isinstance(name, str) for name, _ in unknown_variables(environ))


@pytest.mark.parametrize(
    ("words", "status"),
    [(("config", "check"), 2), (("config", "show"), 2), (("serve",), 2), (("flush",), 2), (("status",), 0)],
)
def test_commands_tell_of_a_broken_file(chance, tmp_path, monkeypatch, capfd, words, status, rounds):
    """Words, and exit 2 of all but a look at what there is; the secrets in it are shown by none of them."""
    in_process(monkeypatch, tmp_path)
    file = tmp_path / "outbox.toml"
    for _ in range(rounds(10)):
        file.write_bytes(b'delivery.workers = "no"\n' + a_file(chance))
        assert main((*words, "--config", str(file))) == status
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err
    assert not any(secret in out + err for secret in SECRETS.values())
    assert is_safe((out + err).replace("\n", ""))
