"""A relay, a daemon and producers of three sorts, all of which die by chance; what each was told is kept."""

import contextlib
import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import dataclass, field

from processes import QUICK, ROOT, DaemonProcess, dead_of, environment, outbox_command, status_of, wait_for

from outbox.capture.hook_faults import read_faults
from outbox.store.directory import StateDirectory
from relay_client.reference.process import RelayProcess

AGENTS = [f"agent-{n}" for n in range(12)]
LATEST_KILL_S = 0.6  # after the producers of a round were started: they have done most of their work by then
WITHIN_S = 60
# The relay keeps this to itself, so that no call of a tool may be repeated.
NO_SPEC = {"match": {"path": "/api/spec"}, "action": {"status": 404}}

_LIBRARY = """
import json, sys
from outbox import Outbox
for line in sys.stdin:
    agent, texts = json.loads(line)
    with Outbox.open(agent) as outbox:
        for text in texts:
            kind, payload = "session-message", {"from": agent, "body": text}
            if text.endswith("7"):
                kind, payload = "insight", {"body": text}
            elif text.endswith("9"):
                kind, payload = "mcp-tool-call", {"tool": "note_add", "arguments": {"body": text}}
            receipt = outbox.enqueue(kind, payload)
            print(json.dumps([agent, receipt.seq, receipt.idempotency_key, text]), flush=True)
"""


@dataclass
class Ledger:
    """What producers were told, and what they tried."""

    accepted: dict = field(default_factory=lambda: defaultdict(dict))  # agent -> key -> (seq, text)
    recorded: set = field(default_factory=set)  # (agent, text) of hooks that ended by themselves
    tried: dict = field(default_factory=lambda: defaultdict(dict))  # agent -> producer -> its texts, in order

    def receipt(self, agent, seq, key, text):
        """One event is on disk; the same again is the same."""
        assert self.accepted[agent].setdefault(key, (seq, text)) == (seq, text)


class Producer:
    """One process that hands over events; `finish` reads its receipts, whether it was killed or not."""

    def __init__(self, fleet, name, *words, stdin):
        self.fleet, self.name, self.words, self.stdin = fleet, name, words, stdin
        self.killed = False
        self.start()

    def start(self):
        """Begin, with all its input at hand."""
        with tempfile.TemporaryFile() as given:
            given.write(self.stdin.encode())
            given.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, *self.words],
                stdin=given,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=self.fleet.env,
                cwd=ROOT,
            )

    def kill(self):
        """End it in the middle of whatever it does."""
        self.killed = self.killed or self.process.poll() is None
        self.process.kill()

    def finish(self):
        """Wait for its end, and keep what it was told."""
        said, trouble = self.process.communicate(timeout=WITHIN_S)
        self.killed = self.killed and self.process.returncode != 0
        if not self.killed:
            assert (self.process.returncode, trouble) == (0, "")
        for line in said[: said.rfind("\n") + 1].splitlines():
            self.told(json.loads(line))


class Library(Producer):
    """A program with events of two agents; nobody repeats what it did not hear of."""

    def __init__(self, fleet, name, agents):
        works = [[agent, [f"{name}:{n}" for n in range(40)]] for agent in agents]
        for agent, texts in works:
            fleet.ledger.tried[agent][name] = texts
        super().__init__(
            fleet, name, "-c", _LIBRARY, stdin="".join(json.dumps(work) + "\n" for work in works)
        )

    def told(self, receipt):
        """One line of what it prints."""
        self.fleet.ledger.receipt(*receipt)


class Command(Producer):
    """`outbox enqueue` with keys of its own: after a kill somebody calls it with the same lines again."""

    def __init__(self, fleet, name, agent):
        self.agent = agent
        self.texts = [f"{name}:{n}" for n in range(120)]
        fleet.ledger.tried[agent][name] = self.texts
        lines = (
            {"kind": "session-message", "payload": {"from": agent, "body": text}, "idempotencyKey": text}
            for text in self.texts
        )
        words = ("-m", "outbox", "enqueue", "--agent", agent, "--json")
        super().__init__(fleet, name, *words, stdin="".join(json.dumps(line) + "\n" for line in lines))

    def told(self, receipt):
        """One line of what it prints."""
        text = self.texts[receipt["line"] - 1]
        self.fleet.ledger.receipt(self.agent, receipt["seq"], receipt["idempotencyKey"], text)


class Hook(Producer):
    """A hook of a runner: no receipt, but once it has ended with 0 its event is there."""

    def __init__(self, fleet, name, agent):
        self.agent = agent
        fleet.ledger.tried[agent][name] = [name]
        call = {"hook_event_name": "UserPromptSubmit", "session_id": "s", "prompt_id": name, "prompt": name}
        words = ("-m", "outbox", "hook", "claude-code", "--agent", agent)
        super().__init__(fleet, name, *words, stdin=json.dumps(call))

    def finish(self):
        """Its end is all it says."""
        super().finish()
        if not self.killed:
            self.fleet.ledger.recorded.add((self.agent, self.name))

    def told(self, line):
        """A hook prints nothing."""
        raise AssertionError(line)


class Fleet:
    """All of it, for as many rounds as are played."""

    def __init__(self, folder, chance):
        self.chance = chance
        self.state = StateDirectory(folder / "state")
        self.env = environment(folder, {**QUICK, "daemon.state_dir": str(self.state.path)})
        self.relay = RelayProcess(folder / "relay.sqlite", ["tok-daemon"])
        self.daemon = DaemonProcess(self.state.path, None, {"delivery.batch_max_items": "8"})
        self.ledger = Ledger()
        self.kills = defaultdict(int)
        self.left = []

    @contextlib.contextmanager
    def running(self):
        """Relay and daemon run; whatever happens, none is left."""
        with self.relay:
            self.relay.add_faults(NO_SPEC)
            self.daemon.url = self.relay.url
            with self.daemon:
                yield self

    def round(self, number):
        """Producers begin; some, the daemon and the relay die at moments of chance, and come again."""
        producers = self._begin(number)
        try:
            self._kill(producers)
            for producer in producers:
                producer.finish()
            for producer in producers:
                if producer.killed:
                    self._again(producer)
        finally:
            for producer in producers:
                producer.process.kill()
                producer.process.communicate()

    def _begin(self, number):
        chance = self.chance
        return [
            *(Library(self, f"r{number}-lib{n}", chance.sample(AGENTS, 2)) for n in range(2)),
            Command(self, f"r{number}-cmd", chance.choice(AGENTS)),
            *(Hook(self, f"r{number}-hook{n}", chance.choice(AGENTS)) for n in range(2)),
        ]

    def _kill(self, producers):
        victims = [
            (producer.kill, type(producer).__name__) for producer in producers if self.chance.random() < 0.5
        ]
        if self.chance.random() < 0.6:
            victims.append((self._daemon_dies, "daemon"))
        if self.chance.random() < 0.4:
            victims.append((self._relay_dies, "relay"))
        moments = sorted((self.chance.uniform(0, LATEST_KILL_S), n) for n in range(len(victims)))
        began = time.monotonic()
        for moment, n in moments:
            time.sleep(max(0, began + moment - time.monotonic()))
            kill, name = victims[n]
            kill()
            self.kills[name] += 1

    def _daemon_dies(self):
        self.daemon.kill()
        self.daemon.start()

    def _relay_dies(self):
        self.relay.kill()
        with self.daemon.frozen():  # it meets a dead relay or one with its fault
            self.relay.start()
            self.relay.add_faults(NO_SPEC)

    def _again(self, producer):
        """Those with keys of their own are called once more; the others have nobody who does."""
        if isinstance(producer, Command | Hook):
            producer.killed = False
            producer.start()
            producer.finish()

    def calm(self):
        """Nothing dies any more: everything leaves.

        Calls whose outcome is unknown may have spent the blame budget: a person says that they may go on.
        """
        assert outbox_command(self.state.path, "resume").returncode == 0
        known = [agent for agent in AGENTS if self.state.outbox_path(agent).exists()]
        try:
            wait_for(lambda: self._all_left(known), WITHIN_S)
        finally:
            print("left:", self.left)

    def _all_left(self, agents):
        waiting = [one for agent in agents if (one := status_of(self.state.path, agent)).waiting]
        self.left = [(one.agent, one.waiting, one.blocked) for one in waiting]
        return not waiting

    def check(self):
        """Hold what the relay has against what producers were told."""
        assert read_faults(self.state) is None
        assert not self.daemon.said("fault")
        arrived = defaultdict(list)
        for event in self.relay.events():
            body = json.loads(event["body"])
            text = body["params"]["arguments"]["body"] if event["path"] == "/api/mcp" else body["body"]
            assert event["path"] != "/api/mcp" or event["timesSeen"] == 1, event
            arrived[event["agent"]].append((event["key"], text))
        assert set(arrived) <= set(self.ledger.tried)
        for agent in self.ledger.tried:
            self._check_agent(agent, arrived[agent])

    def _check_agent(self, agent, arrived):
        letters = dead_of(self.state.path, agent) if self.state.outbox_path(agent).exists() else []
        assert {(letter.kind, letter.reason) for letter in letters} <= {("mcp-tool-call", "outcome_unknown")}
        keys, texts = [key for key, _ in arrived], [text for _, text in arrived]
        assert len(keys) == len(set(keys))
        assert len(texts) == len(set(texts))
        accepted, there = self.ledger.accepted[agent], dict(arrived)
        open_ended = {letter.key for letter in letters}
        for key, (_, text) in accepted.items():
            assert there.get(key, text) == text
            assert key in there or key in open_ended, (agent, key, text)
        assert {text for whose, text in self.ledger.recorded if whose == agent} <= set(texts)
        seqs = [accepted[key][0] for key in keys if key in accepted]
        assert seqs == sorted(seqs)
        for own in self.ledger.tried[agent].values():
            sent = set(texts) & set(own)
            assert [text for text in texts if text in sent] == [text for text in own if text in sent]
        assert set(texts) <= {text for own in self.ledger.tried[agent].values() for text in own}

    def told(self):
        """How much was played, in a line."""
        many = sum(len(of_agent) for of_agent in self.ledger.accepted.values()) + len(self.ledger.recorded)
        return f"{sum(self.kills.values())} kills {dict(self.kills)}, {many} events acknowledged"
