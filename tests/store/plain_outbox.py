"""The outbox as plain lists: what the store is compared with. Nothing of the store is used in here."""

from dataclasses import dataclass, field


@dataclass
class Item:
    """One event, or a gap."""

    seq: int
    key: str
    size: int = 0
    kind: str = ""
    payload: str = ""
    dedupe_key: str | None = None
    accepted_at_ms: int = 0
    occurred_at_ms: int = 0
    sends: int = 0
    attempts: int = 0
    crashes: int = 0
    lost: list = field(default_factory=list)  # of a gap: the events it stands for
    growing: bool = False
    progress: str | None = None

    @property
    def is_gap(self) -> bool:
        """Whether it stands for lost events."""
        return bool(self.lost)


@dataclass
class PlainOutbox:
    """One agent's outbox. Each act does what the design says, in the simplest way."""

    max_events: int
    max_bytes: int
    max_dead: int
    refuse: bool
    rows: list = field(default_factory=list)
    dead: list = field(default_factory=list)
    memory: dict = field(default_factory=dict)  # key -> (seq, kind, payload, state)
    claimed_through: int = 0
    unsafe: bool = False
    last_seq: int = 0
    accepted: int = 0
    delivered: int = 0
    dropped: int = 0

    # Looking

    def events(self):
        """What counts as waiting."""
        return [row for row in self.rows if not row.is_gap]

    def idle(self):
        """What waits and is not in flight."""
        return [row for row in self.events() if row.seq > self.claimed_through]

    def flying(self):
        """What is in flight, gaps too."""
        return [row for row in self.rows if row.seq <= self.claimed_through]

    def room(self, size, events):
        """Whether one more of this size fits beside these."""
        held = [*events, *self.dead]
        return len(held) < self.max_events and sum(row.size for row in held) + size <= self.max_bytes

    # Acts

    def enqueue(self, key, kind, payload, size, dedupe_key, now_ms, occurred_at_ms):
        """The result: ("taken", seq), ("duplicate", seq, state), "key_reused" or "full"."""
        known = self._known(key)
        if known:
            seq, known_kind, known_payload, state = known
            return (
                ("duplicate", seq, state) if (known_kind, known_payload) == (kind, payload) else "key_reused"
            )
        replaced = [row for row in self.idle() if dedupe_key and row.dedupe_key == dedupe_key]
        left = [row for row in self.events() if row not in replaced]
        if not self.room(size, left):
            flying = [row for row in self.flying() if not row.is_gap]
            alone = len(flying) < self.max_events and sum(row.size for row in flying) + size <= self.max_bytes
            if self.refuse or not alone:
                return "full"
        for row in replaced:
            self._remove(row, "replaced")
        while not self.room(size, self.events()):
            if self.dead:
                self._remember(self.dead.pop(0), "dropped")
            else:
                self._drop(self.idle()[0])
        self.last_seq += 1
        self.accepted += 1
        self.rows.append(Item(self.last_seq, key, size, kind, payload, dedupe_key, now_ms, occurred_at_ms))
        return ("taken", self.last_seq)

    def claim(self, number, unsafe):
        """The first rows are in flight; a gap among them does not grow any more."""
        taken = self.rows[:number]
        for row in taken:
            row.growing = False
        self.claimed_through, self.unsafe = taken[-1].seq, unsafe
        return taken

    def settle(self, outcomes):
        """`outcomes` maps a seq to ("ack" | "tool_error" | "bury" | "release", counted, sent)."""
        for row in self.flying():
            self._end(row, *outcomes.get(row.seq, ("release", False, False)))
        self.claimed_through = 0

    def crash(self):
        """The sender died; the seqs of what must not be repeated."""
        unknown = []
        for row in self.flying():
            if self.unsafe:
                unknown.append(row.seq)
                self._bury(row)
            else:
                row.sends, row.crashes = row.sends + 1, row.crashes + 1
                row.attempts += row.crashes >= 3
        self.claimed_through = 0
        return unknown

    def skip(self, row):
        """A person sets it aside."""
        self._bury(row)

    def replay(self, row):
        """A dead letter goes to the tail."""
        self.dead.remove(row)
        self.last_seq += 1
        row.seq, row.sends, row.attempts, row.crashes = self.last_seq, 0, 0, 0
        self.rows.append(row)

    def discard(self, row):
        """A dead letter goes for good."""
        self.dead.remove(row)
        self._remember(row, "discarded")

    def expire(self, horizon_ms):
        """What was accepted before the horizon goes; how many."""
        count = 0
        while self.idle() and self.idle()[0].accepted_at_ms < horizon_ms:
            self._drop(self.idle()[0])
            count += 1
        return count

    # Steps

    def _known(self, key):
        for row in self.events():
            if row.key == key:
                state = "in_flight" if row.seq <= self.claimed_through else "waiting"
                return (row.seq, row.kind, row.payload, state)
        for row in self.dead:
            if row.key == key:
                return (row.seq, row.kind, row.payload, "dead")
        return self.memory.get(key)

    def _remember(self, row, state):
        self.memory[row.key] = (row.seq, row.kind, row.payload, state)

    def _remove(self, row, state):
        self.rows.remove(row)
        self._remember(row, state)

    def _drop(self, row):
        self._remove(row, "dropped")
        self.dropped += 1
        gap = next((other for other in self.rows if other.growing), None)
        if gap is None:
            gap = Item(row.seq, "gap", growing=True)
            self.rows.append(gap)
        gap.lost.append(row)
        gap.seq = min(gap.seq, row.seq)
        self.rows.sort(key=lambda other: other.seq)

    def _bury(self, row):
        self.rows.remove(row)
        if not row.is_gap:
            self.dead.append(row)
            self.dead.sort(key=lambda other: other.seq)
            while len(self.dead) > self.max_dead:
                self._remember(self.dead.pop(0), "dropped")

    def _end(self, row, outcome, counted, sent):
        if outcome == "release":
            row.sends, row.attempts = row.sends + sent, row.attempts + counted
        elif outcome == "bury":
            self._bury(row)
        elif row.is_gap:
            self.rows.remove(row)
        else:
            self._remove(row, "delivered" if outcome == "ack" else "tool_error")
            self.delivered += outcome == "ack"
