"""Self-resume as a table: from a situation and an event to the next situation and what is to be done."""

from dataclasses import replace

import pytest

from outbox.sidecar.launch import relaunched
from outbox.sidecar.resume import (
    Announced,
    CannotStart,
    Compacted,
    End,
    Exited,
    GoOffline,
    Handoff,
    Launch,
    Recover,
    Refusal,
    Refuse,
    Restart,
    Rules,
    SessionKnown,
    Situation,
    TimePassed,
    Via,
    decide,
    next_moment_ms,
)

RULES = Rules(settle_ms=5_000, max_restarts=2, long_run_ms=600_000)
FIRST = Handoff(1, "cmd-1", 3, ends_at_ms=120_000)
SECOND = Handoff(2, "cmd-2", None, ends_at_ms=130_000)
OPEN = Situation(handoff=FIRST)
KNOWN = replace(OPEN, is_compacted=True, session_id="s-1")
RESUMED = Restart(FIRST, Via.RESUME, "compaction_noted", "s-1", settles_at_ms=15_000)
FRESH = Restart(FIRST, Via.FRESH, "no_compaction", None, settles_at_ms=15_000)
NO_SESSION = replace(FRESH, reason="no_session")
SETTLING = Situation(restart=RESUMED, in_a_row=1, started_at_ms=10_000)
BADLY, WELL = Exited("exit status 1", succeeded=False), Exited("exit status 0", succeeded=True)
STOPPED = Exited("SIGTERM", succeeded=False, is_stopping=True)
FAILED = "it ended with exit status 1 right after its start"

TABLE = [
    # announcing
    (Situation(), Announced(FIRST), OPEN, ()),
    (OPEN, Announced(SECOND), replace(OPEN, handoff=SECOND), (Refuse(FIRST, Refusal.SUPERSEDED),)),
    (
        SETTLING,
        Announced(SECOND),
        replace(SETTLING, handoff=SECOND, restart=None),
        (Refuse(FIRST, Refusal.SUPERSEDED),),
    ),
    # noting
    (OPEN, Compacted(), replace(OPEN, is_compacted=True), ()),
    (OPEN, SessionKnown("s-1"), replace(OPEN, session_id="s-1"), ()),
    (
        SETTLING,
        SessionKnown("s-2"),
        replace(SETTLING, session_id="s-2", restart=None),
        (Recover(RESUMED, "s-2"),),
    ),
    # the command ends without a hand-off
    (Situation(), WELL, Situation(), (End(),)),
    (Situation(is_compacted=True, session_id="s-1"), BADLY, None, (End(),)),
    # the command ends in a hand-off
    (KNOWN, WELL, SETTLING, (Launch(RESUMED),)),
    (KNOWN, BADLY, SETTLING, (Launch(RESUMED),)),
    (OPEN, WELL, replace(SETTLING, restart=FRESH), (Launch(FRESH),)),
    (replace(OPEN, session_id="s-1"), WELL, replace(SETTLING, restart=FRESH), (Launch(FRESH),)),
    (replace(OPEN, is_compacted=True), WELL, replace(SETTLING, restart=NO_SESSION), (Launch(NO_SESSION),)),
    (KNOWN, STOPPED, replace(KNOWN, handoff=None), (Refuse(FIRST, Refusal.STOPPING), End())),
    (
        replace(KNOWN, in_a_row=2),
        WELL,
        replace(KNOWN, handoff=None, in_a_row=2),
        (GoOffline(FIRST, Refusal.TOO_MANY, "2 restarts in a row"), End()),
    ),
    # a restart proves itself, or does not
    (SETTLING, BADLY, replace(SETTLING, restart=None), (GoOffline(FIRST, Refusal.FAILED, FAILED), End())),
    (SETTLING, WELL, replace(SETTLING, restart=None), (Recover(RESUMED, "s-1"), End())),
    (SETTLING, STOPPED, replace(SETTLING, restart=None), (Refuse(FIRST, Refusal.STOPPING), End())),
    (SETTLING, CannotStart("gone"), None, (GoOffline(FIRST, Refusal.FAILED, "gone"), End())),
]


@pytest.mark.parametrize(("now", "event", "then", "acts"), TABLE)
def test_what_follows(now, event, then, acts):
    """Each line of the table, at a moment before any time is over."""
    got, done = decide(now, event, 10_000, RULES)
    assert done == acts
    assert then is None or got == then


def test_a_handoff_times_out():
    """At its moment, not before; what happens then finds it over: the command does not start again."""
    assert decide(KNOWN, TimePassed(), 119_999, RULES) == (KNOWN, ())
    then, acts = decide(KNOWN, TimePassed(), 120_000, RULES)
    assert (then.handoff, acts) == (None, (Refuse(FIRST, Refusal.TIMEOUT),))
    assert decide(KNOWN, WELL, 120_000, RULES)[1] == (Refuse(FIRST, Refusal.TIMEOUT), End())


def test_a_restart_settles():
    """It is recovered when it has lived for long enough, with the session that it went on with."""
    assert decide(SETTLING, TimePassed(), 14_999, RULES) == (SETTLING, ())
    then, acts = decide(SETTLING, TimePassed(), 15_000, RULES)
    assert (then.restart, acts) == (None, (Recover(RESUMED, "s-1"),))
    assert decide(SETTLING, BADLY, 15_000, RULES)[1] == (Recover(RESUMED, "s-1"), End())


def test_a_new_start_knows_nothing_of_the_old_one():
    """A compaction and a session count for the run in which they were noted."""
    then, _ = decide(KNOWN, WELL, 10_000, RULES)
    assert (then.is_compacted, then.session_id, then.handoff) == (False, None, None)


def test_a_long_run_begins_a_new_row():
    """Restarts are counted only while the command does not run for long."""
    tired = Situation(in_a_row=2, started_at_ms=10_000)
    assert decide(tired, TimePassed(), 609_999, RULES)[0].in_a_row == 2
    assert decide(tired, TimePassed(), 610_000, RULES)[0].in_a_row == 0


def test_never_more_than_the_bounded_number_of_restarts():
    """Whatever is announced, and however the command ends."""
    now, launches, moment_ms = Situation(), 0, 0
    for number in range(20):
        moment_ms += 10_000
        now, _ = decide(now, Announced(Handoff(number, "c", None, moment_ms + 120_000)), moment_ms, RULES)
        now, acts = decide(now, WELL, moment_ms, RULES)
        launches += sum(isinstance(act, Launch) for act in acts)
        if End() in acts:
            break
    assert launches == RULES.max_restarts


def test_the_next_moment():
    """The sooner of a hand-off's end and a restart's proof."""
    assert next_moment_ms(Situation()) is None
    assert next_moment_ms(OPEN) == 120_000
    assert next_moment_ms(replace(SETTLING, handoff=SECOND)) == 15_000


@pytest.mark.parametrize(
    ("argv", "resumed", "fresh"),
    [
        (["claude"], ["claude", "--resume", "s"], ["claude"]),
        (["claude", "--model", "opus"], ["claude", "--model", "opus", "--resume", "s"], None),
        (["claude", "--resume", "old", "-v"], ["claude", "-v", "--resume", "s"], ["claude", "-v"]),
        (["claude", "--resume=old"], ["claude", "--resume", "s"], ["claude"]),
        (
            ["claude", "--resume", "--verbose"],
            ["claude", "--verbose", "--resume", "s"],
            ["claude", "--verbose"],
        ),
        (["/bin/claude", "-c"], ["/bin/claude", "--resume", "s"], ["/bin/claude"]),
        (["claude", "-r", "old"], ["claude", "--resume", "s"], ["claude"]),
        (["claude", "--continue", "--", "--continue"], ["claude", "--resume", "s", "--", "--continue"], None),
        (["sh", "-c", "claude"], ["sh", "-c", "claude", "--resume", "s"], ["sh", "-c", "claude"]),
    ],
)
def test_the_words_of_another_start(argv, resumed, fresh):
    """With a session, and fresh; a session that the first start named is named no more."""
    assert relaunched(argv, "s") == resumed
    assert fresh is None or relaunched(argv, None) == fresh
