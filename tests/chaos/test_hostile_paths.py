"""An agent's events never leave the state directory: not by the agent's name, and not by a link in it."""

import os
import re

import pytest
from command_line import in_process, process
from hypothesis import given
from hypothesis import strategies as st
from runs import serve_environment, serve_running, status_of, until

from outbox import Outbox, StoreError
from outbox.store.directory import StateDirectory, file_name

AGENT = "builder"
FOLDERS = ["agents", "damaged", "tokens", "hooks", "sidecars"]


@pytest.fixture
def outside(tmp_path):
    """A folder that is nobody's business, with a file in it."""
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "kept").write_text("not yours\n")
    return folder


@pytest.fixture
def state(tmp_path, monkeypatch):
    """A state directory with an outbox of somebody else in it."""
    in_process(monkeypatch, tmp_path)
    state = StateDirectory(tmp_path / "state")
    with Outbox.open("somebody-else") as box:
        box.enqueue("insight", 1)
    return state


def looked_at(folder):
    """What lies in a folder, with its bytes."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@given(st.text(min_size=1, max_size=200), st.text(min_size=1, max_size=200))
def test_a_name_is_a_name_of_a_file_whatever_the_agent_is_called(one, other):
    """No part of it is a path, it is short enough, and two agents never share it."""
    name = file_name(one)
    assert re.fullmatch(r"[a-z0-9_-]{0,40}-[0-9a-f]{32}\.sqlite", name)
    assert (name == file_name(other)) == (one == other)


@pytest.mark.parametrize("target", ["kept", "missing", ".", "outbox"])
def test_a_link_in_the_place_of_an_outbox(state, outside, target):
    """It is refused in words, what it leads to is left alone, and others go on."""
    if target == "outbox":
        with Outbox.open(AGENT, state_dir=outside / "state") as box:
            box.enqueue("insight", 2)
        target = StateDirectory(outside / "state").outbox_path(AGENT)
    before = looked_at(outside)
    state.outbox_path(AGENT).symlink_to(outside / target)
    with pytest.raises(StoreError, match=r"no regular file|left alone") as refused, Outbox.open(AGENT) as box:
        box.enqueue("insight", 1)
    assert str(refused.value).isprintable()
    assert looked_at(outside) == before
    with Outbox.open("somebody-else") as box:
        assert box.enqueue("insight", 2).seq == 2


@pytest.mark.parametrize("side", ["-wal", "-shm", "-journal"])
@pytest.mark.parametrize("target", ["kept", "missing"])
def test_a_link_in_the_place_of_a_log(state, outside, side, target):
    """SQLite follows none there: nothing is written through it, and no event is accepted by half."""
    with Outbox.open(AGENT) as box:
        box.enqueue("insight", 1)
    path = state.outbox_path(AGENT)
    path.with_name(path.name + side).unlink(missing_ok=True)
    path.with_name(path.name + side).symlink_to(outside / target)
    before = looked_at(outside)
    accepted = 0
    try:
        with Outbox.open(AGENT) as box:
            accepted = box.enqueue("insight", 2).seq
    except StoreError as error:
        refusal = str(error)
        assert refusal.isprintable()
    assert looked_at(outside) == before
    if accepted:
        assert status_of(state.path, AGENT).waiting >= 1


@pytest.mark.parametrize("name", FOLDERS)
def test_a_link_in_the_place_of_a_folder(state, outside, name):
    """Nothing is stored by way of it; the message says what to do; no daemon serves from it either."""
    if name == "agents":
        (state.path / name).rename(outside / "moved")
    (state.path / name).symlink_to(outside, target_is_directory=True)
    before = looked_at(outside)
    with (
        pytest.raises(StoreError, match=f"{name}.* is a link.*Nothing was") as refused,
        Outbox.open(AGENT) as box,
    ):
        box.enqueue("insight", 1)
    assert refused.value.exit_status != 0
    done = process(serve_environment(state.path.parent, "http://127.0.0.1:9"), "serve")
    assert done.returncode == StoreError.exit_status
    assert b"Traceback" not in done.stderr
    assert looked_at(outside) == before


def test_a_state_directory_may_itself_be_a_link(tmp_path, monkeypatch):
    """Where the whole lies is the operator's own choice."""
    in_process(monkeypatch, tmp_path)
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / "state").symlink_to(tmp_path / "elsewhere")
    with Outbox.open(AGENT) as box:
        assert box.enqueue("insight", 1).seq == 1
    assert os.listdir(tmp_path / "elsewhere" / "agents")  # noqa: PTH208 - that something lies there


def test_a_daemon_among_links(state, outside):
    """One link among the outboxes: said in the log, not followed; the others are served."""
    state.outbox_path(AGENT).symlink_to(outside / "kept")
    before = looked_at(outside)
    with serve_running(state.path.parent, "http://127.0.0.1:9") as daemon:
        said = until(lambda: [line for line in daemon.lines() if "file_trouble" in line])
        assert said
        assert "no regular file" in said[0]
        assert not [line for line in daemon.lines() if "Traceback" in line]
    assert looked_at(outside) == before
