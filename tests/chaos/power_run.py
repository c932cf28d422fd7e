"""A run of an outbox's life at random: what it did stands in the disk's log beside what the disk did.

Notes in the log: "commit" (what the file holds from here on), "promise" (all of it so far survives a power
cut), "accepted", "sent" and "answered" (unsafe calls), "damaged" and "mended".
"""

import os
import threading
import zlib
from dataclasses import dataclass

import apsw
from boxes import NOW, ack, bury, contents, event, first, release, roomy, tool_call, trouble
from power_import import Elsewhere
from processes import wait_for

from outbox.event import Limits
from outbox.outcome import Blocked, Reason
from outbox.store import file as open_file
from outbox.store.connection import Transaction
from outbox.store.create import create_outbox
from outbox.store.dead import discard, replay
from outbox.store.directory import StateDirectory
from outbox.store.dropping import expire
from outbox.store.enqueue import Receipt, enqueue, enqueue_together
from outbox.store.file import open_outbox
from outbox.store.people import is_paused, pause, resume, skip
from outbox.store.relay_state import RelayState
from outbox.store.retiring import retire
from outbox.store.salvage import set_aside
from outbox.store.sending import claim, note_blocked, recover, settle

AGENTS = ("builder", "reviewer", "tester")
_TABLES_BY_CHECKSUM = ("events", "dead")
_CHECKPOINTS = (
    apsw.SQLITE_CHECKPOINT_PASSIVE,
    apsw.SQLITE_CHECKPOINT_RESTART,
    apsw.SQLITE_CHECKPOINT_TRUNCATE,
)
_LONG_AFTER = NOW + 30 * 86_400_000


@dataclass(frozen=True)
class Note:
    """Something that the run itself says."""

    what: str
    agent: str
    value: object = None


def held(box):
    """What an outbox file holds, apart from its own id and what is computed from it."""
    tables = contents(box)
    own = list(tables["outbox"][0])
    del own[2:5]  # its id, when it was made, its rules
    tables["outbox"] = [tuple(own)]
    for table in _TABLES_BY_CHECKSUM:
        tables[table] = [row[:10] + row[11:] for row in tables[table]]
    return repr(_short(tables))


def _short(value):
    """The same, with long texts by their checksum."""
    if isinstance(value, dict):
        return {name: _short(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [_short(one) for one in value]
    if isinstance(value, str | bytes) and len(value) > 40:
        return zlib.crc32(value if isinstance(value, bytes) else value.encode())
    return value


class Run:
    """One run. `act` does one thing at random."""

    def __init__(self, disk, chance, monkeypatch, elsewhere):
        """The state directory does not exist yet; the folder `elsewhere` is not on the disk."""
        self._disk, self._chance = disk, chance
        self._state = StateDirectory(f"{disk.root}/state")
        self._boxes, self._claims, self._number = {}, {}, 0
        self.acts = []
        monkeypatch.setattr(open_file, "_FREE_PAGES_KEPT", 4)
        monkeypatch.setattr(open_file, "_LOG_KEPT_BYTES", 20_000)
        monkeypatch.setattr(os, "urandom", chance.randbytes)  # ids make rows longer or shorter
        monkeypatch.setattr(Transaction, "__exit__", self._noting(Transaction.__exit__))
        self._elsewhere = Elsewhere(elsewhere, disk.root, chance, monkeypatch, self._accepted)
        self._state.create()
        self._relay_state = RelayState(self._state.relay_state)

    def play(self, acts):
        """So many acts; then everything is closed."""
        for _ in range(acts):
            self.act()
        for agent in tuple(self._boxes):
            self._close(agent)
        self._relay_state.close()

    def _noting(self, real):
        def exits(transaction, kind, error, trace):
            box = transaction._connection
            with box.mutex:
                real(transaction, kind, error, trace)
                is_own = box.folder == str(self._state.agents)  # no copy, and not elsewhere
                if is_own and error is None and transaction._synchronous:
                    self._note("commit", box.agent, held(box))

        return exits

    def _note(self, what, agent, value=None):
        self._disk.note(Note(what, agent, value))

    def _promise(self, box):
        self._note("promise", box.agent)

    # Choosing ----------------------------------------------------------------------------------------------

    def act(self):
        """One act, of the sender or of anybody else."""
        agent = self._chance.choice(AGENTS)
        box = self._box(agent)
        taken = self._claims.get(agent)
        names = ["enqueue"] * 5 + ["again", "together", "many", "replay", "discard", "skip", "person"]
        names += ["import"] * 2 + ["keep", "tidy", "reopen", "fact", "salvage", "retire"]
        names += ["settle"] * 12 if taken else ["claim"] * 8 + ["unsafe"] * 4 + ["expire"]
        name = self._chance.choice(names)
        self.acts.append((name, agent, len(self._disk.log)))
        getattr(self, f"_{name}")(box)

    def _box(self, agent):
        if agent not in self._boxes:
            bounds = roomy(max_events=60, max_dead=12, max_bytes=300_000)
            is_new = not self._state.outbox_path(agent).exists()
            create_outbox(self._state, agent, Limits(), bounds, NOW)
            box = self._boxes[agent] = open_outbox(self._state, self._state.outbox_file(agent))
            box.checkpoint_pages = self._chance.choice((0, 6, 30, 1_000))
            if is_new:
                self._note("commit", agent, held(box))
                self._promise(box)
            box.become_sender()
            recover(box, now_ms=NOW)
        return self._boxes[agent]

    def _close(self, agent):
        box = self._boxes.pop(agent)
        self._claims.pop(agent, None)
        box.resign_sender()
        box.close(checkpoint=self._chance.random() < 0.5)

    def _event(self):
        self._number += 1
        size = self._chance.choice((0, 0, 10, 300, 3_000, 3_000, 9_000))
        fields = {"idempotency_key": f"key-{self._number}"}
        if self._chance.random() < 0.25:
            return tool_call(**fields)
        if self._chance.random() < 0.2:
            fields |= {"mode": "coalesce", "dedupe_key": self._chance.choice("ab")}
        return event({"n": self._number, "body": "x" * size}, **fields)

    # Producers ---------------------------------------------------------------------------------------------

    def _enqueue(self, box, most=3):
        events = [self._event() for _ in range(self._chance.randint(1, most))]
        self._accepted(box, enqueue(box, events, now_ms=NOW))

    def _again(self, box):
        """A producer that lost its answer."""
        if keys := [row[0] for row in box.rows("SELECT key FROM events WHERE kind = 'mcp-tool-call'")]:
            results = enqueue(box, [tool_call(idempotency_key=keys[-1])], now_ms=NOW)
            assert results[0].duplicate

    def _many(self, box):
        self._enqueue(box, 40)

    def _together(self, box):
        def produce(one):
            self._accepted(box, enqueue_together(box, [one], now_ms=NOW))

        threads = [threading.Thread(target=produce, args=(self._event(),)) for _ in range(3)]
        with box.mutex:  # the first commits alone, the others together, so that a run can be played again
            for number, thread in enumerate(threads, 1):
                thread.start()
                wait_for(lambda number=number: box.together._leads and len(box.together._waiting) == number)
        for thread in threads:
            thread.join()

    def _accepted(self, box, results):
        receipts = [one for one in results if isinstance(one, Receipt) and not one.duplicate]
        if not receipts:  # a commit that changes nothing flushes nothing: what was known was promised before
            return
        with box.mutex:
            self._promise(box)
            self._note("accepted", box.agent, [(one.seq, one.idempotency_key) for one in receipts])

    def _import(self, box):
        """From another host, in several commits; each of them is kept as a whole."""
        events = [self._event() for _ in range(self._chance.randint(1, 9))]
        self._elsewhere.take_in(box.agent, events)

    # The sender --------------------------------------------------------------------------------------------

    def _claim(self, box):
        self._claims[box.agent] = claim(box, first(self._chance.randint(1, 8)), unsafe=False, now_ms=NOW)

    def _unsafe(self, box):
        def one_call(rows):
            return [row for row in first(1)(rows) if row.shape == "tool"]

        taken = self._claims[box.agent] = claim(box, one_call, unsafe=True, now_ms=NOW)
        if taken:
            self._promise(box)
            self._note("sent", box.agent, [row.key for row in taken.rows])

    def _settle(self, box):
        taken = self._claims.pop(box.agent)
        if self._chance.random() < 0.15:  # the sender dies
            unknown = recover(box, now_ms=NOW)
            self._promise(box)
            if taken.unsafe:
                assert unknown == [row.seq for row in taken.rows]
            return
        how = [
            lambda row: ack(row, result="y" * self._chance.choice((1, 500))),
            ack,
            lambda row: bury(row, Reason.OUTCOME_UNKNOWN if taken.unsafe else Reason.REJECTED),
            lambda row: release(row, attempts=row.attempts + 1, why=trouble("failed", detail="z" * 200)),
        ]
        settlements = [self._chance.choice(how)(row) for row in taken.rows]
        if taken.unsafe:
            self._note("answered", box.agent, [row.key for row in taken.rows])
        blocked = Blocked("retry", NOW, NOW + 1_000, "") if self._chance.random() < 0.3 else None
        settle(box, taken, settlements, now_ms=NOW, blocked=blocked)

    def _expire(self, box):
        expire(box, NOW + 1, now_ms=NOW, most=self._chance.randint(1, 5))

    # Persons -----------------------------------------------------------------------------------------------

    def _replay(self, box):
        if letters := box.rows("SELECT seq, key FROM dead"):
            seq, key = self._chance.choice(letters)
            self._note("answered", box.agent, [key])  # a person takes it upon them
            replay(box, seq, NOW)
            self._promise(box)

    def _discard(self, box):
        if seqs := [row[0] for row in box.rows("SELECT seq FROM dead")]:
            discard(box, self._chance.choice(seqs), NOW)
            self._promise(box)

    def _skip(self, box):
        sql = "SELECT seq FROM events, outbox WHERE seq > claimed_through AND events.kind <> 'outbox-gap'"
        if seqs := [row[0] for row in box.rows(sql)]:
            skip(box, self._chance.choice(seqs), NOW)
            self._promise(box)

    def _person(self, box):
        if is_paused(box):
            resume(box)
        else:
            pause(box, NOW)
        self._promise(box)

    # The daemon --------------------------------------------------------------------------------------------

    def _keep(self, box):
        note_blocked(box, Blocked("closed", NOW, NOW + self._chance.randint(1, 9), ""))

    def _fact(self, box):
        self._relay_state.write({f"fact-{self._chance.randint(1, 30)}": {"learned": "x" * 200}})

    def _tidy(self, box):
        if self._chance.random() < 0.5:
            box.give_space_back()
        else:
            box.checkpoint(self._chance.choice(_CHECKPOINTS))

    def _reopen(self, box):
        self._close(box.agent)
        self._box(box.agent)

    def _salvage(self, box):
        """An index goes bad: every row can still be read."""
        if box.agent in self._claims or self._chance.random() < 0.5:
            return
        (page,) = box.one("SELECT rootpage FROM sqlite_schema WHERE name = 'dead_by_key'")
        agent, path = box.agent, box.path
        box.resign_sender()
        box.checkpoint(apsw.SQLITE_CHECKPOINT_TRUNCATE)
        self._boxes.pop(agent).close()
        self._note("damaged", agent)
        self._disk.damage(path, (page - 1) * 4096, b"\xff" * 100)
        assert set_aside(self._state, path, agent, NOW) is not None
        self._note("commit", agent, held(self._box(agent)))
        self._note("promise", agent)
        self._note("mended", agent)

    def _retire(self, box):
        """Deliver and discard everything, and remove the file long after."""
        if box.agent in self._claims or self._chance.random() < 0.5:
            return
        resume(box)
        while taken := claim(box, first(100), unsafe=False, now_ms=NOW):
            settle(box, taken, [ack(row) for row in taken.rows], now_ms=NOW)
        for (seq,) in box.rows("SELECT seq FROM dead"):
            discard(box, seq, NOW)
        path = box.path
        self._close(box.agent)
        self._note("retiring", box.agent)
        assert retire(self._state, path, _LONG_AFTER)
        self._note("retired", box.agent)
