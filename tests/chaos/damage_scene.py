"""Three agents' files as kill -9 leaves them, alike in all but whose they are; and what happens to files."""

import contextlib
import os
import shutil

from world import HOUR_MS, MINUTE_MS, Refuse, World, answer

from outbox import OutboxError
from outbox.gap import GAP_KIND
from outbox.store.damage import damages

AGENTS = ("agent-a", "agent-b", "agent-c")
PAGE = 4096
POINTERS = 5  # how a page of a table begins that names other pages (sqlite.org/fileformat2.html)
OWN_PAGE = 2  # counted from 0: where the row stands that says whose file it is
FIRST, LATER, AFTER = 30, 25, 3  # events handed over: copied into the main file, in the log, after the damage
DELIVERED, REFUSED = 6, 7  # how many of the first have arrived; the one that is a dead letter
TOLD_WITHIN_MS = 10 * MINUTE_MS


def picture(folder):
    """Make the files, and copy them while they are open: what a power cut or kill -9 would leave."""

    def behave(request):
        if any(message["n"] == REFUSED for message in request.messages):
            return answer(422, {"error": {"code": "validation_failed", "message": "no"}})
        if max(message["n"] for message in request.messages) > DELIVERED:
            raise Refuse
        return None

    with World(folder / "made", behave=behave) as world:
        for agent in AGENTS:
            world.enqueue(agent, FIRST, body=f"{agent} {'x' * 300}")
        world.run(MINUTE_MS, until=lambda: len(world.dead()) == len(AGENTS))
        for path in world.state.outbox_files():
            with world.engine.delivery.files.borrow(path) as box:
                box.checkpoint(3)
        for agent in AGENTS:
            for n in range(LATER):
                world.enqueue(agent, 1, first=FIRST + n, body=f"{agent} {'x' * 300}")
        shutil.copytree(folder / "made", folder / "picture", ignore=shutil.ignore_patterns("*.sock"))
        arrived = {agent: list(world.relay.stored[agent]) for agent in AGENTS}
    return folder / "picture", arrived


class Damaged:
    """A copy of the picture, and acts of chance upon the files of its victims."""

    def __init__(self, picture, folder, chance):
        shutil.copytree(picture, folder)
        self.chance, self.folder = chance, folder
        self.victims = set()
        self.misplaced = set()  # sound rows stand where others belong, and are read first
        self.done = []
        self.may_be_refused = False  # another agent's main file stands in the place of the victim's
        self.untold = False  # what is gone leaves no trace: a log, or a file with all it held
        paths = {path.name.split("-", 2)[1]: path for path in (folder / "agents").glob("*.sqlite")}
        self.files = {agent: paths[agent[-1]] for agent in AGENTS}

    def act(self):
        """One piece of damage."""
        victim, other = self.chance.sample(AGENTS, 2)
        acts = (
            *[self.flip, self.zero, self.cut, self.lengthen, self.foreign_pages, self.flip_at_rest] * 2,
            self.foreign_log, self.foreign_index, self.swap_logs, self.no_log, self.no_main,
            self.foreign_main, self.swap_mains, self.swap_all, self.moved_page, self.of_the_state,
        )  # fmt: skip
        with contextlib.suppress(FileNotFoundError):  # what an earlier act has taken away
            self.chance.choice(acts)(victim, other)

    def _note(self, *words, victims):
        self.victims |= set(victims)
        self.done.append(" ".join(map(str, words)))

    def _any_file(self, agent):
        """The main file most often, its log or the log's index."""
        side = self.chance.choice(["", "", "", "-wal", "-wal", "-shm"])
        self.untold |= side == "-wal"
        path = self.side(agent, side)
        return path if path.exists() else self.files[agent]

    def side(self, agent, ending):
        """A file beside the main one."""
        return self.files[agent].with_name(self.files[agent].name + ending)

    def flip(self, victim, _other):
        """Some bytes, or one bit, are others."""
        path = self._any_file(victim)
        size = path.stat().st_size
        number = self.chance.choice([1, 1, 5, 100]) if size else 0
        self._flip(path, victim, [self.chance.randrange(size) for _ in range(number)])

    def flip_at_rest(self, victim, _other):
        """One byte of what makes a file an outbox, where no log has it right: header, own row, tables."""
        path = self.files[victim]
        data = path.read_bytes()
        pages = [page for page in range(len(data) // PAGE) if b"CREATE" in data[page * PAGE :][:PAGE]]
        start = self.chance.choice([0, OWN_PAGE, *pages]) * PAGE
        spots = [at for at in range(start, start + PAGE) if data[at : at + 1].strip(b"\0")]
        self.side(victim, "-wal").unlink(missing_ok=True)
        self.untold = True
        if spots:
            self._flip(path, victim, [self.chance.choice(spots)])

    def _flip(self, path, victim, spots):
        data = bytearray(path.read_bytes())
        told = _told_of_itself(data)
        for at in spots:
            data[at] ^= 1 << self.chance.randrange(8)
            if path == self.files[victim] and data[at - at % PAGE] == POINTERS:
                self.misplaced.add(victim)
        path.write_bytes(data)
        if path == self.files[victim]:  # it may say that it is agent-q's, or a newer release's
            self.may_be_refused |= _told_of_itself(data) != told
        self._note("flip", path.name, *spots[:5], victims=[victim])

    def zero(self, victim, _other):
        """A stretch holds nothing, or noise."""
        path = self._any_file(victim)
        start = self.chance.randrange(max(1, path.stat().st_size))
        length = self.chance.choice([16, 512, PAGE, 5 * PAGE])
        noise = self.chance.random() < 0.5
        with path.open("r+b") as file:
            file.seek(start)
            file.write(self.chance.randbytes(length) if noise else bytes(length))
        self._note("zero", path.name, start, length, noise, victims=[victim])

    def cut(self, victim, _other):
        """The end is missing."""
        path = self._any_file(victim)
        size = self.chance.randrange(path.stat().st_size + 1)
        size -= size % PAGE if self.chance.random() < 0.5 else 0
        os.truncate(path, size)
        self._note("cut", path.name, size, victims=[victim])

    def lengthen(self, victim, _other):
        """There is more than there was."""
        path = self._any_file(victim)
        with path.open("ab") as file:
            file.write(self.chance.randbytes(self.chance.choice([1, PAGE, 3 * PAGE])))
        self._note("lengthen", path.name, victims=[victim])

    def foreign_pages(self, victim, other):
        """Pages of another agent's file stand in the same places: they are well formed."""
        pages = self.files[victim].stat().st_size // PAGE
        for _ in range(self.chance.choice([1, 2, 5])):
            self._copy_page(victim, other, *[self.chance.randrange(max(1, pages))] * 2)

    def moved_page(self, victim, _other):
        """A page of its own stands in a wrong place."""
        pages = max(1, self.files[victim].stat().st_size // PAGE)
        self._copy_page(victim, victim, self.chance.randrange(pages), self.chance.randrange(pages))

    def _copy_page(self, victim, other, source, target):
        with self.files[other].open("rb") as file:
            file.seek(source * PAGE)
            page = file.read(PAGE)
        with self.files[victim].open("r+b") as file:
            file.seek(target * PAGE)
            file.write(page)
        if other == victim:
            self.misplaced.add(victim)
        self.may_be_refused |= target == OWN_PAGE and other != victim  # now it says that it is another's
        self._note("page", other, source, "to", victim, target, victims=[victim])

    def foreign_log(self, victim, other):
        """The log of another agent lies beside the file."""
        self._replace(self.side(other, "-wal"), self.side(victim, "-wal"), victim)

    def foreign_index(self, victim, other):
        """The index of another log."""
        self._replace(self.side(other, "-shm"), self.side(victim, "-shm"), victim)

    def foreign_main(self, victim, other):
        """Another agent's file has the victim's name."""
        self.may_be_refused = True
        self._replace(self.files[other], self.files[victim], victim)

    def _replace(self, source, target, victim):
        self.untold = True
        if source.exists():
            shutil.copyfile(source, target)
        self._note("copy", source.name, "to", target.name, victims=[victim])

    def swap_logs(self, victim, other):
        """Two agents' logs have changed places."""
        self._swap(victim, other, ["-wal"])

    def swap_mains(self, victim, other):
        """Two agents' files, and not their logs."""
        self.may_be_refused = True
        self._swap(victim, other, [""])

    def swap_all(self, victim, other):
        """Everything of two agents."""
        self.may_be_refused = True
        self._swap(victim, other, ["", "-wal", "-shm"])

    def _swap(self, victim, other, endings):
        self.untold = True
        for ending in endings:
            one, two = self.side(victim, ending), self.side(other, ending)
            if one.exists() and two.exists():
                between = one.with_name("between")
                one.rename(between)
                two.rename(one)
                between.rename(two)
        self._note("swap", victim, other, endings, victims=[victim, other])

    def no_log(self, victim, _other):
        """The log, its index or both are gone."""
        self.untold = True
        for ending in self.chance.choice([["-wal"], ["-shm"], ["-wal", "-shm"]]):
            self.side(victim, ending).unlink(missing_ok=True)
        self._note("no log", victim, victims=[victim])

    def no_main(self, victim, _other):
        """The file is gone or empty, and its log is there."""
        self.untold = True
        if self.chance.random() < 0.5:
            self.files[victim].write_bytes(b"")
        else:
            self.files[victim].unlink(missing_ok=True)
            self.files[victim].touch(mode=0o600) if self.chance.random() < 0.3 else None
        self._note("no main", victim, victims=[victim])

    def of_the_state(self, _victim, _other):
        """What all agents share: nobody loses an event by it."""
        names = ["relay.sqlite", "relay.sqlite-wal", "rules.json", "owners.lock", "daemon.json"]
        path = self.folder / self.chance.choice(names)
        path.write_bytes(self.chance.choice([b"", self.chance.randbytes(5_000), b'{"limits": 3}']))
        self._note("noise in", path.name, victims=[])


def _told_of_itself(data):
    """How often an agent's name stands in its own row; the number of its format."""
    own_page = data[OWN_PAGE * PAGE :][:PAGE]
    return sum(own_page.count(agent.encode()) for agent in AGENTS), data[60:64]


class Aftermath:
    """The outbox goes on with what is left; `arrived` is what the relay had before."""

    def __init__(self, damaged, arrived):
        self.damaged, self.refusals = damaged, {}
        self.world = World(damaged.folder)
        for agent, stored in arrived.items():
            self.world.relay.stored[agent] += stored
            self.world.relay.keys |= {key for _, key in stored}

    def go_on(self):
        """New events of each agent, before and after the engine has met the damage; then all leaves."""
        self.world.wake()
        self.world.run(TOLD_WITHIN_MS)
        for agent in AGENTS:
            self._hand_over(agent)
        self.world.wake()
        self.world.run(TOLD_WITHIN_MS)
        self.world.run(HOUR_MS)

    def _hand_over(self, agent):
        try:
            self.world.enqueue(agent, AFTER, first=FIRST + LATER, body=f"{agent} new")
        except OutboxError as error:
            self.refusals[agent] = error

    def check(self):
        """What holds after any damage."""
        world, damaged = self.world, self.damaged
        everything = [*range(REFUSED), *range(REFUSED + 1, FIRST + LATER + AFTER)]
        reports = list(damages(world.state))
        assert {report.agent for report in reports} <= damaged.victims
        assert len(reports) <= 2 * len(damaged.victims)
        for agent in AGENTS:
            numbers = [n for n in world.numbers(agent) if n >= 0]
            assert len(numbers) == len(set(numbers)), agent
            assert agent in damaged.misplaced or numbers == sorted(numbers), agent
            if agent not in damaged.victims:
                assert numbers == everything
                assert agent not in self.refusals
            elif agent in self.refusals:
                assert damaged.may_be_refused
                assert "Nothing was stored" in str(self.refusals[agent]) or "left alone" in str(
                    self.refusals[agent]
                )
            else:
                assert numbers[-AFTER:] == everything[-AFTER:]
        self._nothing_is_another_agents()
        if not damaged.untold:
            self._what_is_lost_is_told(everything, reports)

    def _nothing_is_another_agents(self):
        for request in self.world.relay.requests:
            for message in request.messages:
                if message.get("kind") != GAP_KIND:
                    assert message["body"].split()[0] == request.agent

    def _what_is_lost_is_told(self, everything, reports):
        statuses = self.world.statuses()
        for agent in self.damaged.victims:
            missing = len(set(everything) - set(self.world.numbers(agent)))
            known = statuses[agent].dead
            about = [report for report in reports if report.agent == agent]
            if missing > known:
                assert about
                assert missing <= known + sum(report.lost + report.dead_lost for report in about) or not all(
                    report.counted for report in about
                )

    def close(self):
        """Close all that is open."""
        with contextlib.suppress(OutboxError):
            self.world.close()
