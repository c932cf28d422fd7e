"""The documents say what the code does: made from it where they can be, compared with it elsewhere."""

import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

import outbox
from outbox import errors
from outbox.aio import AsyncOutbox
from outbox.api.app import local_app
from outbox.delivery.verdict import Effect, Step, judge, judge_group
from outbox.outcome import Reason, picture
from relay_client import Answer, Failure, Reading, Sort, read_single, read_tool_call
from relay_client.reference.process import RelayProcess

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
ARCHITECTURE = (DOCS / "architecture.md").read_text("utf-8")
GUARANTEES = (DOCS / "delivery-guarantees.md").read_text("utf-8")
LOCAL_HTTP = (DOCS / "local-http.md").read_text("utf-8")
CONTRACT = (DOCS / "relay-contract.md").read_text("utf-8")
SECURITY = (ROOT / "SECURITY.md").read_text("utf-8")
PYTHON_API = (DOCS / "python-api.md").read_text("utf-8")

PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def blocks(text, language):
    """The fenced blocks of one language."""
    return [block for named, block in _FENCED.findall(text) if named == language]


def table(text, first_header):
    """The rows of the table whose first header is this one, as lists of cells."""
    lines = text[text.index(f"\n| {first_header} |") + 1 :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


# Made from the code -----------------------------------------------------------------------------------------


def test_the_picture_of_the_states_is_current():
    """It is what `python -m outbox.outcome` prints."""
    assert blocks(ARCHITECTURE, "mermaid") == [picture() + "\n"]


def test_every_reason_of_a_dead_letter_is_explained():
    """And no other."""
    assert {row[0].strip("`") for row in table(GUARANTEES, "reason")} == {str(reason) for reason in Reason}


def test_every_route_of_the_local_socket_stands_in_the_table():
    """With its method, and no other."""
    routes = local_app(SimpleNamespace(state=None)).routes
    served = {
        f"{method} {route.path.replace(':segment', '')}"
        for route in routes
        for method in route.methods - {"HEAD"}
    }
    assert {row[0].strip("`") for row in table(LOCAL_HTTP, "call")} == served


def test_every_public_name_stands_in_the_python_api():
    """Whoever adds a name to `__all__` says what it is for."""
    names = [*outbox.__all__, "AsyncOutbox"]
    assert [name for name in names if not re.search(rf"`\W*([\w.]+\.)?{name}\b", PYTHON_API)] == []
    acts = [name for name in vars(AsyncOutbox) if not name.startswith("_")]
    assert [name for name in acts if f"`{name}" not in PYTHON_API] == []


def test_the_table_of_errors_has_codes_and_exit_statuses():
    """Scripts rely on both."""
    told = {row[0].strip("`"): row for row in table(PYTHON_API, "error")}
    classes = {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OutboxError)
    }
    assert set(told) == set(classes)
    for name, of in classes.items():
        assert told[name][2] == str(of.exit_status)
        assert f"`{'usage' if of is errors.UsageError else of.code}`" in told[name][1]


# The outcome table ------------------------------------------------------------------------------------------


def answered(status, body=b"", **headers):
    """An answer as the relay's client gives it."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer(status, headers=named, body=body)


def refused(code):
    """A body with an error code."""
    return b'{"error": {"code": "%b", "message": "No."}}' % code.encode()


ANSWERS = {
    Sort.ACCEPTED: [answered(200, b"{}"), answered(201), answered(202), answered(204)],
    Sort.DUPLICATE: [answered(409), answered(409, refused("duplicate"))],
    Sort.REFUSED: [
        *map(answered, (400, 410, 415, 422)),
        answered(404, refused("unknown_recipient")),
        answered(409, refused("key_reused")),
    ],
    Sort.TOO_LARGE: [answered(413)],
    Sort.IN_PROGRESS: [answered(409, refused("in_progress")), answered(409, retry_after="3")],
    Sort.UNAUTHORIZED: [answered(401), answered(200, refused("invalid_token"))],
    Sort.FORBIDDEN: [answered(403), answered(200, refused("insufficient_scope"))],
    Sort.NO_ENDPOINT: [*map(answered, (404, 405, 501))],
    Sort.BUSY: [*map(answered, (429, 503, 408, 421, 423, 425)), answered(500, retry_after="3")],
    Sort.GATEWAY: [*map(answered, (502, 504))],
    Sort.FAILED: [*map(answered, (500, 507, 418)), answered(200, refused("other"))],
    Sort.NOT_A_RELAY: [answered(200, b"<html>Sign in</html>")],
    Sort.REDIRECTED: [*map(answered, (301, 302, 303, 307, 308))],
    Sort.UNREACHABLE: [Answer(None, failure=Failure.UNREACHABLE, sent=False)],
    Sort.LOST: [Answer(None, failure=Failure.LOST)],
}
MCP_ANSWERS = {
    Sort.TOOL_ERROR: answered(200, b'{"id": "1", "result": {"isError": true, "content": []}}'),
    Sort.REFUSED: answered(200, b'{"id": "1", "error": {"code": -32601, "message": "No."}}'),
    Sort.FAILED: answered(200, b'{"id": "1", "error": {"code": -32603, "message": "No."}}'),
    Sort.LOST: answered(200),
}
GROUPS_ONLY = {Sort.ITEMS, Sort.UNCLEAR_BATCH, Sort.CONFLICT}
EFFECTS = {
    Effect.CLOSE: "; relay closed",
    Effect.HOLD_PATH: "; path held",
    Effect.TOKEN: "; the token is looked up again",
}


def words_for(sort, verdict):
    """A verdict in the words of the table."""
    if verdict.step is Step.BURY:
        return f"dead letter `{verdict.reason}`"
    if verdict.step is Step.ACK:
        return "settled as `tool_error`" if sort is Sort.TOOL_ERROR else "delivered"
    return ("attempt" if verdict.counts else "waits") + EFFECTS.get(verdict.effect, "")


def outcome_rows():
    """The rows of the outcome table by what the answer is read as."""
    return {Sort(row[1].strip("`")): row for row in table(CONTRACT, "the answer")}


def test_the_outcome_table_has_every_meaning_of_an_answer():
    """One row for each, but for those that only groups know."""
    assert set(outcome_rows()) == set(Sort) - GROUPS_ONLY
    groups = " ".join(row[0] for row in table(CONTRACT, "read as"))
    assert [sort for sort in GROUPS_ONLY if f"`{sort}`" not in groups] == []


@pytest.mark.parametrize("sort", ANSWERS, ids=str)
def test_the_outcome_table_reads_answers_as_the_code_does(sort):
    """Each status that is tried here stands in its row, and is read as the row says."""
    row = outcome_rows()[sort]
    for answer in ANSWERS[sort]:
        assert read_single(answer, now_ms=0, max_retry_after_ms=3_600_000).sort is sort, answer
        family = f"{str(answer.status)[0]}xx" if answer.status else ""
        assert answer.status is None or str(answer.status) in row[0] or family in row[0], answer


@pytest.mark.parametrize("sort", MCP_ANSWERS, ids=str)
def test_the_outcome_table_reads_tool_calls_as_the_code_does(sort):
    """The rows that speak of MCP."""
    assert read_tool_call(MCP_ANSWERS[sort], "1", now_ms=0, max_retry_after_ms=3_600_000).sort is sort
    assert "MCP" in outcome_rows()[sort][0]


@pytest.mark.parametrize("sort", sorted(set(Sort) - GROUPS_ONLY))
def test_the_outcome_table_judges_as_the_code_does(sort):
    """What becomes of the event: without evidence, with it, and when it must not be repeated."""
    _, _, without, with_evidence, unsafe = outcome_rows()[sort]
    readings = [Reading(sort, answer.status) for answer in ANSWERS.get(sort, [answered(200)])]
    for reading in readings:
        assert without == words_for(sort, judge(reading, unsafe=False, works=False))
        assert with_evidence == words_for(sort, judge(reading, unsafe=False, works=True))
    judged = {words_for(sort, judge(reading, unsafe=True, works=False)): reading for reading in readings}
    assert [words for words in judged if words not in unsafe] == []
    if len(judged) == 1:
        assert unsafe == next(iter(judged))


@pytest.mark.parametrize(
    ("words", "sorts", "step"),
    [
        ("is split in halves", [Sort.REFUSED, Sort.TOO_LARGE, Sort.CONFLICT], Step.SPLIT),
        ("goes again singly", [Sort.UNCLEAR_BATCH], Step.SINGLY),
        ("goes again at half its size", [Sort.FAILED, Sort.LOST], Step.HALVE),
    ],
)
def test_the_table_of_groups_judges_as_the_code_does(words, sorts, step):
    """What becomes of a group that got one answer for all of it."""
    row = next(row for row in table(CONTRACT, "read as") if row[1].startswith(words))
    for sort in sorts:
        assert judge_group(Reading(sort), works=True).step is step
        assert f"`{sort}`" in row[0]


# Promises ---------------------------------------------------------------------------------------------------


def test_every_promise_stands_in_the_guarantees():
    """P1 to P12, in order, each with the tests that hold it."""
    sections = re.split(r"^## ", GUARANTEES, flags=re.MULTILINE)[1:]
    assert [section.partition(":")[0] for section in sections] == [f"P{number}" for number in range(1, 13)]
    assert [section for section in sections if "\nHeld by: " not in section] == []


def test_every_file_of_chaos_holds_a_promise():
    """A new one is named in the guarantees, after `Held by:`, or nobody knows what it is for."""
    held_by = " ".join(re.findall(r"^Held by: (.*?)\n(?:\n|\Z)", GUARANTEES, re.MULTILINE | re.DOTALL))
    files = sorted(f"tests/chaos/{path.name}" for path in (ROOT / "tests/chaos").glob("test_*.py"))
    assert len(files) > 10
    assert [name for name in files if f"`{name}`" not in held_by] == []


def missing_tests(text):
    """The tests that a page names, as `tests/FILE.py` or `tests/FILE.py::NAME`, and that are not there."""
    for name in sorted(set(re.findall(r"`(tests/[^`]+)`", text))):
        path, _, test = name.partition("::")
        file = ROOT / path
        if not file.exists() or (test and f"\ndef {test}(" not in file.read_text("utf-8")):
            yield name


@pytest.mark.parametrize(
    "text", [GUARANTEES, ARCHITECTURE, SECURITY], ids=["guarantees", "architecture", "security"]
)
def test_the_tests_that_hold_a_promise_are_there(text):
    """A test that was renamed or removed is missed here."""
    assert "`tests/" in text
    assert list(missing_tests(text)) == []


def test_a_missing_test_is_found():
    """The test above can fail: for a file, and for a name in a file."""
    here = f"tests/unit/{Path(__file__).name}"
    gone = [f"{here}::test_gone", "tests/unit/test_gone.py"]
    named = [f"{here}::{test_a_missing_test_is_found.__name__}", *gone]
    assert list(missing_tests(" ".join(f"`{name}`" for name in named))) == gone


def test_every_claim_of_the_threat_model_names_a_test():
    """What nobody tests is no claim, and stands among what is not defended."""
    claims = [row for part in SECURITY.split("\n## ") for row in _claims(part)]
    assert len(claims) > 30
    assert [row[0] for row in claims if "`tests/" not in row[1]] == []


def _claims(part):
    return table(part, "claim") if "\n| claim |" in part else []


def test_every_file_that_owns_a_decision_is_there():
    """The table of decisions names files, and the table of rooms folders, that exist."""
    cells = [row[1] for row in table(ARCHITECTURE, "decision")] + [
        row[0] for row in table(ARCHITECTURE, "room")
    ]
    named = {name for cell in cells for name in re.findall(r"`((?:outbox|relay_client)[\w/.]*)`", cell)}
    assert len(named) > 30
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


# Log lines --------------------------------------------------------------------------------------------------


def logged_events():
    """Each event that the code logs, where, and the fields named there.

    Events are what is given to `log`, `_log`, `log_line` or `_changed`, and what those choose from.
    """
    for path in sorted((ROOT / "outbox").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not isinstance(node, ast.Call):
                continue
            function = node.func
            name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
            place = {"log": 0, "_log": 0, "log_line": 0, "_changed": 1}.get(name)
            if place is not None and len(node.args) > place:
                fields = {*_fields(node)} - {"level", "exc_info"}
                yield from ((text, f"{path.name}:{node.lineno}", fields) for text in _texts(node.args[place]))


def _fields(call):
    yield from (keyword.arg for keyword in call.keywords if keyword.arg)
    for argument in call.args:
        if isinstance(argument, ast.Dict):
            yield from (key.value for key in argument.keys if isinstance(key, ast.Constant))


def _texts(argument):
    if isinstance(argument, ast.IfExp):
        yield from (*_texts(argument.body), *_texts(argument.orelse))
    elif isinstance(argument, ast.Constant) and isinstance(argument.value, str):
        yield argument.value


def test_every_log_event_stands_in_the_table():
    """Who reads a log can look each line up; no event is told of that is never logged."""
    told = {row[0].strip("`") for row in table(ARCHITECTURE, "event")}
    logged = {event: where for event, where, _ in logged_events()}
    assert {event: where for event, where in logged.items() if event not in told} == {}
    assert told - set(logged) == set()


def test_every_field_of_a_log_event_stands_in_its_row():
    """As far as the fields are named where it is logged."""
    told = {row[0].strip("`"): row[3] for row in table(ARCHITECTURE, "event")}
    missing = [
        f"{where}: {event} has {field}"
        for event, where, fields in logged_events()
        for field in sorted(fields)
        if f"`{field}`" not in told.get(event, "")
    ]
    assert missing == []


# Links and examples -----------------------------------------------------------------------------------------


def anchors(text):
    """The anchors of a page's headings, as they are commonly made."""
    prose = _FENCED.sub("", text)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in _HEADING.findall(prose)}


def dead_links(page, text):
    """Relative links of a page that lead nowhere."""
    for target in _LINK.findall(_FENCED.sub("", text)):
        if not re.match(r"[a-z]+:", target) and not _leads_somewhere(page, text, target):
            yield target


def _leads_somewhere(page, text, target):
    name, _, anchor = target.partition("#")
    file = page.parent / name
    if not file.exists() or not anchor:
        return file.exists()
    return anchor in anchors(file.read_text("utf-8") if name else text)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_relative_link_is_dead(page):
    """Files and headings that pages point to are there."""
    assert list(dead_links(page, page.read_text("utf-8"))) == []


def test_a_dead_link_is_found():
    """The test above can fail: for a file, for a heading; what is elsewhere is not looked at."""
    text = (
        "# Here\n[a](gone.md) [b](#here) [c](#there) [d](https://example.org/gone) [e](architecture.md#gone)"
    )
    assert list(dead_links(DOCS / "made-up.md", text)) == ["gone.md", "#there", "architecture.md#gone"]


def expected_output(code):
    """What the comments `# -> …` of an example say that it prints."""
    return re.findall(r"# -> (.*)$", code, re.MULTILINE)


WITH_EXAMPLES = [page for page in PAGES if page.parent == DOCS and blocks(page.read_text("utf-8"), "python")]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.name)
def test_the_python_examples_run(page):
    """In a process of their own, with a state directory and a relay, one after the other."""
    code = "\n".join(blocks(page.read_text("utf-8"), "python"))
    with tempfile.TemporaryDirectory(prefix="docs-") as folder, RelayProcess(f"{folder}/relay.db") as relay:
        environment = {
            name: os.environ[name] for name in ("PATH", "HOME", "PYTHONPATH") if name in os.environ
        }
        environment |= {"OUTBOX_STATE_DIR": f"{folder}/state", "OUTBOX_RELAY_URL": relay.url}
        environment |= {"OUTBOX_RELAY_TRUST_ENV": "false", "XDG_CONFIG_HOME": folder}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert done.stderr == ""
    assert done.returncode == 0
    assert done.stdout.splitlines() == expected_output(code)


def test_there_are_examples():
    """A page whose examples are fenced otherwise is not passed over silently."""
    assert "python-api.md" in [page.name for page in WITH_EXAMPLES]
    assert len(expected_output(PYTHON_API)) > 10
