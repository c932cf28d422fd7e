"""What the promises come to for one agent, as plain lists: what a whole run of the store is compared with."""

from dataclasses import dataclass, field

from store.plain_outbox import PlainOutbox


@dataclass
class PromisedOutbox(PlainOutbox):
    """The plain lists, and what a longer life adds: several events a call, age of memory, pause, mending."""

    now_ms: int = 0
    window_ms: int = 0
    paused: bool = False
    remembered_at_ms: dict = field(default_factory=dict)

    def enqueue_many(self, given):
        """The results of one call; what a later event of it took away says so already."""
        before = {row.seq: row.key for row in self.events()}
        results = []
        for one in given:
            results.append(self.enqueue(*one, self.now_ms, 0))
            if results[-1][0] == "taken":
                before[results[-1][1]] = one[0]
        left = {row.seq for row in self.events()}
        gone = {seq: self.memory[key][3] for seq, key in before.items() if seq not in left}
        return [_told(result, gone) for result in results]

    def forget(self):
        """What is remembered beyond the window goes; how many keys."""
        old = [key for key in self.memory if self.remembered_at_ms[key] < self.now_ms - self.window_ms]
        for key in old:
            del self.memory[key]
        return len(old)

    @property
    def is_finished(self):
        """Whether nothing of it is of use any more: its file may go."""
        horizon_ms = self.now_ms - self.window_ms
        remembers = any(self.remembered_at_ms[key] >= horizon_ms for key in self.memory)
        return not (self.paused or self.rows or self.dead or remembers)

    def mend(self):
        """A damaged file whose rows are all whole is replaced; how many calls have an unknown outcome now.

        Nothing is lost. What was in flight waits again; an unsafe call is a dead letter, beyond the bound
        too: what was whole is not thrown away while mending.
        """
        unknown = [row for row in self.flying() if self.unsafe and not row.is_gap]
        for row in unknown:
            self.rows.remove(row)
        self.dead = sorted([*self.dead, *unknown], key=lambda row: row.seq)
        self.claimed_through = 0
        return len(unknown)

    def _remember(self, row, state):
        super()._remember(row, state)
        self.remembered_at_ms[row.key] = self.now_ms


def _told(result, gone):
    """A result as (seq, duplicate, state), or the code of its error."""
    if isinstance(result, str):
        return result
    word, seq, *state = result
    return (seq, word == "duplicate", gone.get(seq, state[0] if state else "waiting"))
