"""Files are flipped, cut, emptied, exchanged and mixed among agents by chance; the outbox goes on."""

import contextlib
import os
import random
import shutil

import apsw
import pytest
from damage_scene import OWN_PAGE, PAGE, Aftermath, Damaged, picture

from outbox.store.damage import damages
from outbox.store.salvage import set_aside


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The picture of three agents' files, and what has arrived of them."""
    return picture(tmp_path_factory.mktemp("made"))


def test_whatever_becomes_of_the_files(made, tmp_path, rounds, seed):
    """It starts, comes to rest, hurts no other agent, sends nothing as another's, and tells what is lost."""
    files, arrived = made
    for number in range(rounds(8)):
        chance = random.Random(seed + number)
        damaged = Damaged(files, tmp_path / "round", chance)
        for _ in range(chance.choice([1, 1, 2, 4])):
            damaged.act()
        print(f"--chaos-seed {seed + number}:", "; ".join(damaged.done))
        with contextlib.closing(Aftermath(damaged, arrived)) as after:
            after.go_on()
            after.check()
        shutil.rmtree(tmp_path / "round")


def cut(damaged, agent, size):
    """The end of its main file is missing."""
    os.truncate(damaged.files[agent], size)
    damaged.victims.add(agent)


def garble(damaged, agent, old):
    """A word of its schema is another."""
    path = damaged.files[agent]
    path.write_bytes(path.read_bytes().replace(old, b"!" * len(old)))
    damaged.victims.add(agent)


def a_log_beside_a_header(damaged):
    """Of the file nothing is left, and the log is another agent's."""
    damaged.foreign_log("agent-a", "agent-b")
    cut(damaged, "agent-a", 183)


def a_log_beside_an_unreadable_schema(damaged):
    """The rows are there, and the log is another agent's."""
    damaged.foreign_log("agent-a", "agent-b")
    garble(damaged, "agent-a", b"CREATE TABLE outbox")


def all_of_another_agent_and_cut(damaged):
    """Neither file nor log is its own, and the file cannot be read any more."""
    damaged.swap_all("agent-b", "agent-c")
    cut(damaged, "agent-b", 15 * 4096)


@pytest.mark.parametrize(
    "harm", [a_log_beside_a_header, a_log_beside_an_unreadable_schema, all_of_another_agent_and_cut]
)
def test_where_a_file_does_not_tell_whose_it_is_another_agents_rows_prove_nothing(made, tmp_path, harm):
    """Digests fit whatever agent asks: what lies beside tells that the rows are another's."""
    files, arrived = made
    damaged = Damaged(files, tmp_path / "harmed", random.Random(1))
    harm(damaged)
    with contextlib.closing(Aftermath(damaged, arrived)) as after:
        after.go_on()
        after.check()


def test_a_file_without_a_schema_tells_whose_it_is(made, tmp_path):
    """Agent and id stand in the row of the outbox, which is found without SQLite; nobody has to say it."""
    files, arrived = made
    damaged = Damaged(files, tmp_path / "harmed", random.Random(1))
    damaged.side("agent-a", "-wal").unlink()
    garble(damaged, "agent-a", b"CREATE TABLE outbox")
    with contextlib.closing(Aftermath(damaged, arrived)) as after:
        damage = set_aside(after.world.state, damaged.files["agent-a"], None, after.world.clock.wall_ms())
        assert damage.agent == "agent-a"
        assert damage in damages(after.world.state)


def rows_of_another_table(damaged):
    """A page of receipts stands where events were: rows that cannot become dead letters."""
    damaged._copy_page("agent-a", "agent-a", 6, 13)


def a_page_that_is_cut_away(damaged):
    """The head is read from nothing: a row that cannot be removed."""
    cut(damaged, "agent-b", 54_886)


def an_agent_that_is_no_text(damaged):
    """In the row that tells whose file it is."""
    with contextlib.closing(apsw.Connection(str(damaged.files["agent-c"]))) as db:
        db.execute("UPDATE outbox SET agent = x'00'")
    damaged.victims.add("agent-c")


@pytest.mark.parametrize("harm", [rows_of_another_table, a_page_that_is_cut_away, an_agent_that_is_no_text])
def test_what_stops_a_file_without_an_error_of_sqlite_is_damage(made, tmp_path, harm):
    """It is neither tried for ever nor told of without end: the file is set aside."""
    files, arrived = made
    damaged = Damaged(files, tmp_path / "harmed", random.Random(1))
    harm(damaged)
    with contextlib.closing(Aftermath(damaged, arrived)) as after:
        after.go_on()
        after.check()
        assert [damage.agent for damage in damages(after.world.state)] == list(damaged.victims)


@pytest.mark.parametrize("with_log", [True, False])
def test_no_page_of_its_own_makes_a_file_another_agents(made, tmp_path, with_log):
    """Any of them in the place of its own row: a kind, or the name of a table, is no agent."""
    files, arrived = made
    size_bytes = Damaged(files, tmp_path / "whole", random.Random(1)).files["agent-c"].stat().st_size
    for source in range(size_bytes // PAGE):
        damaged = Damaged(files, tmp_path / "harmed", random.Random(1))
        if not with_log:
            damaged.side("agent-c", "-wal").unlink()
            damaged.untold = True
        damaged._copy_page("agent-c", "agent-c", source, OWN_PAGE)
        print(damaged.done)
        with contextlib.closing(Aftermath(damaged, arrived)) as after:
            after.go_on()
            after.check()
            assert not after.refusals
        shutil.rmtree(tmp_path / "harmed")
