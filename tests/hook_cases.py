"""The hook input of agent runners, and what its README says of each line."""

import base64
import json
from pathlib import Path

CASES = Path(__file__).parent / "cases" / "hooks"
FILES = ("claude-code", "codex", "codex-notify", "gemini", "copilot", "opencode")


def lines_of(name):
    """The lines of a file, as they are given to the command."""
    return (CASES / f"{name}.jsonl").read_text("utf-8").split("\n")[:-1]


def expected(name):
    """What stands in the expect file: the runner, and one row a line."""
    return json.loads((CASES / f"{name}.expect.json").read_text("utf-8"))


def cases():
    """Each line of each file: `(id, runner, text, row)`."""
    for name in FILES:
        told = expected(name)
        for text, row in zip(lines_of(name), told["lines"], strict=True):
            yield f"{name}-{row['line']}", told["runner"], text, row


def at(value, pointer):
    """What a JSON pointer (RFC 6901, without escapes) names; None when nothing is there."""
    for step in pointer.split("/")[1:]:
        value = value[int(step)] if isinstance(value, list) else value.get(step)
        if value is None:
            return None
    return value


def refused():
    """The inputs that are no hook JSON: `(name, words, stdin or None, row)`."""
    for row in json.loads((CASES / "refused.json").read_text("utf-8"))["inputs"]:
        stdin = row.get("stdin")
        data = None if stdin is None else stdin.encode()
        if "stdin_base64" in row:
            data = base64.b64decode(row["stdin_base64"])
        if "make" in row:
            data = json.dumps(made(row["make"])).encode()
        yield row["name"], row["command"], data, row


def made(make):
    """A large input, from its base."""
    value = json.loads(json.dumps(make["base"]))
    *way, last = make["set"].split("/")[1:]
    place = value
    for step in way:
        place = place[step]
    place[last] = make["text"] * make["times"]
    return value
