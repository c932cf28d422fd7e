"""Commands that look into damaged files: each says what can be read, or what is wrong, and ends."""

import random
import shutil

import pytest
from command_line import command, in_process
from damage_scene import AGENTS, PAGE, REFUSED, picture
from mutations import is_safe

VICTIM = AGENTS[2]
DEAD, WAITING = str(REFUSED + 1), str(REFUSED + 5)  # as seqs
ASKED = [
    ("status",), ("status", "--json"), ("why", VICTIM), ("list", VICTIM), ("list", VICTIM, "--json"),
    ("show", VICTIM, DEAD), ("show", VICTIM, WAITING), ("dead", "list"), ("dead", "list", "--json"),
    ("dead", "show", VICTIM, DEAD), ("export", "--agent", VICTIM), ("dead", "export", "--agent", VICTIM),
    ("dead", "replay", VICTIM, DEAD), ("skip", VICTIM, WAITING), ("pause", VICTIM), ("doctor",),
]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Files of three agents, without logs: what is in them stands in the main files."""
    files, _ = picture(tmp_path_factory.mktemp("made"))
    for log in (files / "agents").glob("*-wal"):
        log.unlink()
    return files


@pytest.fixture
def state(tmp_path, monkeypatch):
    """Where the commands look."""
    in_process(monkeypatch, tmp_path)
    monkeypatch.setenv("OUTBOX_RELAY_URL", "http://relay.test:4850")
    monkeypatch.setenv("OUTBOX_BOUNDS_MIN_FREE_DISK_BYTES", "0")
    return tmp_path / "state"


def flipped(path, chance):
    """Change some bytes that hold something; a few pages have most of them."""
    data = bytearray(path.read_bytes())
    for _ in range(chance.choice([1, 1, 1, 8])):
        page = chance.randrange(len(data) // PAGE) * PAGE
        spots = [at for at in range(page, page + PAGE) if data[at]]
        if spots:
            at = chance.choice(spots)
            data[at] ^= chance.choice([1 << chance.randrange(8), chance.randrange(1, 256)])
            print(path.name, at)
    path.write_bytes(data)


@pytest.mark.parametrize("words", ASKED, ids=" ".join)
def test_each_command_answers_on_sound_files(made, state, capsys, words):
    """What is asked below is a good question."""
    shutil.copytree(made, state)
    status, _, err = command(capsys, *words)
    assert status == (69 if words == ("doctor",) else 0), err


def test_commands_end_in_words_on_damaged_files(made, state, capsys, rounds, seed):
    """No traceback, nothing that steers a terminal; the exit status is one of ours."""
    chance = random.Random(seed)
    for _ in range(rounds(10)):
        shutil.copytree(made, state)
        flipped(next((state / "agents").glob(f"{VICTIM}-*.sqlite")), chance)
        for words in chance.sample(ASKED, 5):
            status, out, err = command(capsys, *words)
            assert status in {0, 2, 4, 5, 69}, (words, err)
            assert "Traceback" not in err
            assert all(is_safe(line) for line in (out + err).splitlines()), (words, out, err)
        shutil.rmtree(state)
