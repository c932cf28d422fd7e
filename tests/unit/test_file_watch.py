"""How the daemon sees that there is something new in a file, and that all is quiet."""

import pytest

from outbox.daemon.watch import FileWatch
from outbox.errors import StoreError
from outbox.store.directory import StateDirectory


@pytest.fixture
def state(tmp_path):
    """A state directory, made."""
    return StateDirectory(tmp_path / "state").create()


def written(state, name, text):
    """A file of this name with this text."""
    path = state.agents / name
    path.write_text(text)
    return path


def test_a_new_a_longer_and_a_replaced_file_are_seen_once(state):
    """Each change is told with the next look, and not again; what is no outbox is passed over."""
    watch = FileWatch(state)
    assert watch.changed() == []
    path = written(state, "a-1.sqlite", "one")
    written(state, "a-1.sqlite-journal", "other")
    assert (watch.changed(), watch.changed(), watch.paths) == ([path], [], [path])
    written(state, "a-1.sqlite", "longer")
    assert (watch.changed(), watch.changed()) == ([path], [])
    written(state, "draft", "longer").replace(path)
    assert (watch.changed(), watch.changed()) == ([path], [])


def test_a_commit_is_seen_in_the_log(state):
    """An event lies there long before it is in the file itself; an empty log is as none."""
    path, watch = written(state, "a-1.sqlite", "one"), FileWatch(state)
    assert watch.changed() == [path]
    written(state, "a-1.sqlite-wal", "")
    assert watch.changed() == []
    written(state, "a-1.sqlite-wal", "frame")
    assert watch.changed() == [path]
    (state.agents / "a-1.sqlite-wal").write_text("")
    assert watch.changed() == [path]
    (state.agents / "a-1.sqlite-wal").unlink()
    assert watch.changed() == []


def test_it_is_quiet_after_three_looks_without_news(state):
    """Until the next news: a busy host does not close what it will open again in a moment."""
    watch = FileWatch(state)
    written(state, "a-1.sqlite", "one")
    for news, quiet in ((1, False), (0, False), (0, False), (0, True), (0, True)):
        assert (len(watch.changed()), watch.all_is_quiet) == (news, quiet)
    written(state, "a-1.sqlite", "longer")
    assert (len(watch.changed()), watch.all_is_quiet) == (1, False)


def test_a_look_that_fails_is_no_quiet_one_and_forgets_nothing(state):
    """What is known stays known, and what changed meanwhile is told by the next look."""
    path, watch = written(state, "a-1.sqlite", "one"), FileWatch(state)
    for _ in range(4):
        watch.changed()
    away = state.agents.rename(state.path / "away")
    state.agents.write_text("no folder")
    with pytest.raises(StoreError, match="cannot be read"):
        watch.changed()
    assert (watch.paths, watch.all_is_quiet) == ([path], False)
    state.agents.unlink()
    away.rename(state.agents)
    written(state, "a-1.sqlite", "longer")
    assert watch.changed() == [path]
