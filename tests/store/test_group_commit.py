"""Group commit: callers share a commit, each gets its own answer, and nobody is answered for by accident."""

import threading

import pytest
from boxes import NOW, event, fill
from processes import wait_for

from outbox.errors import StoreBusy, StoreFull, UsageError
from outbox.store.enqueue import enqueue_together
from outbox.store.group_commit import GroupCommit, Interrupted
from outbox.store.inspect import read_status


class Disk:
    """A commit that waits until it is let go on, and remembers what it was given."""

    def __init__(self, fault=None):
        self.given, self.free, self.fault = [], threading.Event(), fault

    def __call__(self, events):
        """The commit."""
        self.given.append(list(events))
        assert self.free.wait(20)
        if self.fault is not None:
            raise self.fault
        return [f"stored {one}" for one in events]


def together(group, disk, *calls):
    """Each call in a thread of its own, the first one in the middle of its commit when the others come."""
    answers = {}

    def call(events):
        try:
            answers[tuple(events)] = group.submit(events, disk)
        except BaseException as error:  # noqa: BLE001 - an interrupt too is an answer here
            answers[tuple(events)] = error

    threads = [threading.Thread(target=call, args=(events,)) for events in calls]
    for number, thread in enumerate(threads):
        thread.start()
        wait_for(lambda: len(disk.given) == 1 and len(group._waiting) == number + 1)  # noqa: B023 - at once
    disk.free.set()
    for thread in threads:
        thread.join(20)
    return answers


def test_what_arrives_during_a_commit_shares_the_next():
    """Three callers, two commits; in the order in which they came, each with its own results."""
    group, disk = GroupCommit(), Disk()
    answers = together(group, disk, ["a"], ["b", "c"], ["d"])
    assert disk.given == [["a"], ["b", "c", "d"]]
    assert answers == {
        ("a",): ["stored a"], ("b", "c"): ["stored b", "stored c"], ("d",): ["stored d"],
    }  # fmt: skip


def test_a_commit_holds_at_most_a_thousand_events():
    """A flood is cut; a larger call goes alone, whole."""
    group, disk = GroupCommit(), Disk()
    large = list(range(2_500))
    together(group, disk, ["a"], ["b"] * 900, ["c"] * 100, ["d"], large)
    assert [len(given) for given in disk.given] == [1, 1_000, 1, 2_500]


def test_a_failed_commit_is_everybodys():
    """Nobody is told that an event is stored that was in it."""
    group, disk = GroupCommit(), Disk(StoreFull("full"))
    answers = together(group, disk, ["a"], ["b"], ["c"])
    assert all(isinstance(answer, StoreFull) for answer in answers.values())
    assert len(answers) == 3


def test_an_interrupt_is_one_callers_own():
    """The others learn that it is not known whether their events are stored."""
    group, disk = GroupCommit(), Disk(KeyboardInterrupt())
    answers = together(group, disk, ["a"], ["b"], ["c"])
    kinds = [type(answer) for answer in answers.values()]
    assert kinds.count(KeyboardInterrupt) == 2
    assert kinds.count(Interrupted) == 1


class Broken(list):
    """Events at which Ctrl-C is pressed once, while those of several callers are put together."""

    was_pressed = False

    def __iter__(self):
        if not self.was_pressed:
            self.was_pressed = True
            raise KeyboardInterrupt
        return super().__iter__()


def test_an_interrupt_before_a_commit_leaves_nobody_without_an_answer():
    """Those whose events were just put together are stored, or told that it is not known."""
    group, disk = GroupCommit(), Disk()
    answers = together(group, disk, ["a"], Broken("b"), ["c"], ["d"])
    told = {events: answer for events, answer in answers.items() if isinstance(answer, BaseException)}
    assert {type(answer) for answer in told.values()} <= {KeyboardInterrupt, Interrupted}
    assert answers == {(one,): [f"stored {one}"] for one in "abcd"} | told
    assert not group._waiting


def test_what_was_interrupted_while_it_waited_is_not_stored_later():
    """Its caller was told, and may have given the event again."""
    group, given = GroupCommit(), []

    class Interrupts:
        def __enter__(self):
            raise KeyboardInterrupt

        def __exit__(self, *_):
            raise AssertionError

    def commit(events):
        given.append(events)
        return events

    turn, group._turn = group._turn, Interrupts()
    with pytest.raises(KeyboardInterrupt):
        group.submit(["interrupted"], commit)
    group._turn = turn
    assert group.submit(["next"], commit) == ["next"]
    assert given == [["next"]]


def test_a_signal_handler_inside_a_commit_answers_for_nobody_else():
    """It gets what the store says to a second commit of one thread; those who wait are not concerned."""
    group, told = GroupCommit(), []

    def commit(events):
        if events == ["outer"]:
            before = list(group._waiting)
            with pytest.raises(StoreBusy):
                group.submit(["handler"], busy)
            assert list(group._waiting) == before
        told.append(events)
        return events

    def busy(events):
        raise StoreBusy("in the middle of a commit")

    assert group.submit(["outer"], commit) == ["outer"]
    assert told == [["outer"]]


def test_events_of_an_interrupted_commit_are_stored_once(box):
    """Whether they were stored or not: the caller gets the receipt of its first and only event."""
    stored, missing = event({"n": 1}, idempotency_key="k-1"), event({"n": 2}, idempotency_key="k-2")
    stored, missing = stored._replace(key_given=False), missing._replace(key_given=False)
    (first,) = enqueue_together(box, [stored], now_ms=NOW)

    def interrupted(events, commit):
        raise Interrupted

    box.together.submit = interrupted
    again = enqueue_together(box, [stored, missing], now_ms=NOW)
    assert again == [first, first._replace(seq=2, idempotency_key="k-2")]
    assert read_status(box).waiting == 2


def test_many_threads_of_one_outbox(box):
    """Every event is stored once, each thread's in its order, and a refusal is its own thread's."""
    answers = {}

    def produce(name):
        own = [event({"name": name, "n": n}, idempotency_key=f"{name}-{n}") for n in range(20)]
        own.append(own[0]._replace(digest=b"another"))
        answers[name] = [enqueue_together(box, [one], now_ms=NOW)[0] for one in own]

    threads = [threading.Thread(target=produce, args=(f"t{number}",)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for *receipts, refused in answers.values():
        assert isinstance(refused, UsageError)
        assert sorted(receipts, key=lambda one: one.seq) == receipts
    assert sorted(one.seq for own in answers.values() for one in own[:-1]) == list(range(1, 161))
    assert fill(box, 1) == [161]
