"""A bounded number of open files, never closed under whoever works with one."""

import threading

import pytest
from boxes import NOW, fill, make_box, roomy, seqs

from outbox.errors import StoreClosed, StoreError
from outbox.event import Limits
from outbox.store import open_files
from outbox.store.create import create_outbox
from outbox.store.open_files import OpenFiles


@pytest.fixture
def paths(state):
    """Four outboxes that nobody has open."""
    boxes = [make_box(state, f"agent-{n}") for n in range(4)]
    for box in boxes:
        box.close(checkpoint=True)
    return [box.path for box in boxes]


@pytest.fixture
def files(state):
    """At most two open files."""
    made = OpenFiles(state, most=2)
    yield made
    made.close()


def borrowed(files, path):
    """The file behind a path, already given back."""
    with files.borrow(path) as box:
        return box


def test_a_file_stays_open_for_the_next_borrower(files, paths):
    """The same one, as long as there is room."""
    assert borrowed(files, paths[0]) is borrowed(files, paths[0])


def test_the_least_recently_used_is_closed_first(files, paths):
    """And with a checkpoint, so that it needs no log on disk."""
    first, second = borrowed(files, paths[0]), borrowed(files, paths[1])
    assert borrowed(files, paths[0]) is first
    borrowed(files, paths[2])
    assert (first.closed, second.closed) == (False, True)
    assert not paths[1].with_name(paths[1].name + "-wal").exists()


def test_a_borrowed_file_is_not_closed(files, paths):
    """However many others are needed meanwhile."""
    with files.borrow(paths[0]) as box:
        for path in paths[1:]:
            borrowed(files, path)
        fill(box, 1)
        files.close()
        assert seqs(box) == [1]
    assert box.closed


def test_a_replaced_file_is_opened_anew(state, files, paths):
    """The next borrower gets the file that the path names now; the last holder of the old one closes it."""
    with files.borrow(paths[0]) as old:
        paths[0].rename(paths[0].with_name("moved"))
        create_outbox(state, "agent-0", Limits(), roomy(), NOW)
        with files.borrow(paths[0]) as new:
            assert new is not old
            assert fill(new, 1) == [1]
        with pytest.raises(StoreClosed):
            fill(old, 1)
        assert not old.closed
    assert old.closed
    assert borrowed(files, paths[0]) is new


def test_a_closed_file_is_opened_anew(files, paths):
    """Whoever closed it."""
    first = borrowed(files, paths[0])
    first.close()
    assert borrowed(files, paths[0]) is not first


def test_a_file_that_is_gone_is_an_error_each_time(files, paths):
    """And the old one is not worked with any longer."""
    first = borrowed(files, paths[0])
    paths[0].unlink()
    for _ in range(2):
        with pytest.raises(StoreError, match="no file"), files.borrow(paths[0]):
            pass
    assert first.closed


def test_two_threads_that_open_together_get_one_file(files, paths, monkeypatch):
    """The slower one's is closed again, and nobody waits for another file's opening."""
    together = threading.Barrier(2)
    real = open_files.open_outbox

    def slow(*args):
        box = real(*args)
        together.wait(10)
        return box

    monkeypatch.setattr(open_files, "open_outbox", slow)
    got = []
    threads = [threading.Thread(target=lambda: got.append(borrowed(files, paths[0]))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got[0] is got[1]
    assert not got[0].closed
