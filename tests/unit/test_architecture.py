"""The rooms of docs/architecture.md, held by reading the source: who may import whom, and what is pure.

Each rule is a function from sources to violations, `path:line: what is wrong`; it is asked about the project
and, so that we know it can say no, about made-up sources.
"""

import ast
import graphlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent

VALUES, WAYS_IN, REFERENCE = "values", "ways in", "relay_client.reference"

# Each room, and the rooms below it that it may import. A room may always import itself.
ROOMS = {
    VALUES: set(),
    "store": {VALUES},
    "relay_client": set(),
    REFERENCE: set(),  # not the client: what both had wrong would look right
    "delivery": {VALUES, "store", "relay_client"},
    WAYS_IN: {VALUES, "store"},
    "sidecar": {VALUES, "store", WAYS_IN, "delivery"},
    "capture": {VALUES, "store", WAYS_IN, "delivery", "sidecar", "relay_client"},
    "api": {VALUES, "store", WAYS_IN, "delivery", "sidecar", "capture"},
    "daemon": {VALUES, "store", WAYS_IN, "delivery", "sidecar", "capture", "api", "relay_client"},
    "demo": {VALUES, "store", WAYS_IN, "api", "daemon", "relay_client", REFERENCE},
    "cli": {
        *(VALUES, "store", WAYS_IN, "delivery", "sidecar", "capture", "api", "daemon", "demo"),
        *("relay_client", REFERENCE),
    },
}

# Imports of an upper room, inside a function, each with its reason.
LAZY = {
    ("outbox/library.py", "outbox.daemon.flush"): "flush without a daemon; an enqueue must not pay for it",
}

# Packages that not every room may import.
PACKAGES = {
    "apsw": {"store", REFERENCE},
    "sqlite3": set(),  # two builds of SQLite on one file can damage it
    "httpx": {"relay_client", REFERENCE},
    "starlette": {"api", REFERENCE},
    "uvicorn": {"api", REFERENCE},
    "structlog": {"daemon"},
    "rich": {"cli"},
    "prometheus_client": {"api"},
    "anyio": {"api"},
    "asyncio": {"api", "capture", WAYS_IN, REFERENCE},
}

# Modules without clock, chance, file or network; one whose header says "Pure" is held to it as well.
PURE = {
    *(f"outbox/{name}.py" for name in ("bounds", "errors", "event", "event_checks", "gap", "json_text")),
    *(f"outbox/{name}.py" for name in ("outcome", "policy", "printable", "setting_types", "text_cut")),
    *(f"outbox/{name}.py" for name in ("wire_text", "setting_keys")),
    *(f"outbox/delivery/{name}.py" for name in ("grouping", "parcel", "parts", "verdict")),
    *(f"relay_client/{name}.py" for name in ("classify", "headers", "mcp", "problem", "reading", "sse")),
}
PURE_LIBRARY = {
    *("__future__", "base64", "binascii", "collections", "dataclasses", "datetime", "difflib", "enum"),
    *(
        "functools",
        "hashlib",
        "http",
        "itertools",
        "json",
        "re",
        "shlex",
        "types",
        "typing",
        "unicodedata",
        "urllib",
        "zlib",
    ),
}
PURE_EXCEPTIONS = {
    ("outbox/setting_keys.py", "pathlib"): "the files that were read are named as paths; none is opened",
}
IMPURE_CALLS = {"open", "input", "now", "today", "utcnow"}

SQL_ROOMS = {"store", REFERENCE}
_SQL = re.compile(
    r"\s*(--[^\n]*\n\s*)*(SELECT\s|INSERT\s+(OR\s+\w+\s+)?INTO\s|UPDATE\s+\w+\s+SET\s|DELETE\s+FROM\s|PRAGMA\s"
    r"|(CREATE|ALTER|DROP)\s+(UNIQUE\s+)?(TABLE|INDEX|TRIGGER|VIEW)\s|BEGIN\b|COMMIT\b|ROLLBACK\b|VACUUM\b)"
)


@dataclass(frozen=True)
class Source:
    """One module: its path from the root, and what stands in it."""

    path: str
    text: str

    @property
    def module(self):
        """Its dotted name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    @property
    def tree(self):
        """Its syntax tree."""
        return ast.parse(self.text)


def project():
    """Every module of the two packages."""
    return [
        Source(str(path.relative_to(ROOT)), path.read_text("utf-8"))
        for package in ("outbox", "relay_client")
        for path in sorted((ROOT / package).rglob("*.py"))
    ]


def room_of(module):
    """The room of one of our modules."""
    package, *rest = module.split(".")
    if package == "relay_client":
        return REFERENCE if rest[:1] == ["reference"] else "relay_client"
    if not rest or rest[0] in {"library", "aio"}:
        return WAYS_IN
    if rest[0] == "__main__":
        return "cli"
    return rest[0] if rest[0] in ROOMS or (ROOT / package / rest[0]).is_dir() else VALUES


def imports(source, modules):
    """Each import: its line, the module it names, and whether it stands inside a function."""
    tree = source.tree
    lazy = {
        id(node)
        for function in ast.walk(tree)
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = _base(source, node)
            whole = [f"{base}.{alias.name}" for alias in node.names]
            names = [name if name in modules else base for name in whole]
        else:
            continue
        yield from ((node.lineno, name, id(node) in lazy) for name in dict.fromkeys(names))


def _base(source, node):
    if not node.level:
        return node.module
    package = source.module if source.path.endswith("/__init__.py") else source.module.rpartition(".")[0]
    above = package.split(".")[: len(package.split(".")) - node.level + 1]
    return ".".join([*above, *([node.module] if node.module else [])])


def is_ours(module):
    """Whether a module is one of the two packages'."""
    return module.partition(".")[0] in {"outbox", "relay_client"}


def upward_imports(sources):
    """Imports of a room that does not lie below, LAZY ones excepted."""
    modules = {source.module for source in sources}
    for source in sources:
        room = room_of(source.module)
        for line, name, lazy in imports(source, modules):
            if not is_ours(name) or room_of(name) in {room, *ROOMS.get(room, ())}:
                continue
            if not (lazy and (source.path, name) in LAZY):
                yield f"{source.path}:{line}: {room} imports {name} ({room_of(name)})"


def foreign_imports(sources):
    """Imports of a package that belongs to other rooms."""
    for source in sources:
        room = room_of(source.module)
        for line, name, _ in imports(source, ()):
            package = name.partition(".")[0]
            if room not in PACKAGES.get(package, {room}):
                yield f"{source.path}:{line}: {room} imports {package}"


def impurities(sources):
    """What a pure module may not import or call."""
    for source in sources:
        header = ast.get_docstring(source.tree) or ""
        if source.path not in PURE and not re.search(r"\bPure[.:]", header):
            continue
        for line, name, _ in imports(source, ()):
            package = name.partition(".")[0]
            standard = package in sys.stdlib_module_names and package not in PURE_LIBRARY
            if standard and (source.path, package) not in PURE_EXCEPTIONS:
                yield f"{source.path}:{line}: pure, and imports {package}"
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call) and (name := _called(node)) in IMPURE_CALLS:
                yield f"{source.path}:{node.lineno}: pure, and calls {name}"


def _called(call):
    function = call.func
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def stray_sql(sources):
    """Statements outside the rooms that hold files."""
    for source in sources:
        if room_of(source.module) in SQL_ROOMS:
            continue
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _SQL.match(node.value):
                yield f"{source.path}:{node.lineno}: SQL: {' '.join(node.value.split())[:60]}"


def test_the_table_of_rooms_has_no_circle():
    """Dependencies point downward only: in some order every room stands above what it imports."""
    assert set(graphlib.TopologicalSorter(ROOMS).static_order()) == set(ROOMS)


@pytest.mark.parametrize("rule", [upward_imports, foreign_imports, impurities, stray_sql])
def test_the_project_keeps_to_the_rooms(rule):
    """No import points upward, no package or statement is where it does not belong, what is pure stays so."""
    found = list(rule(project()))
    assert not found, "\n" + "\n".join(found)


def test_every_exception_is_still_needed():
    """An exception whose import is gone, or stands at the top of its module, is one no more."""
    sources = {source.path: source for source in project()}
    for path, module in LAZY:
        found = [lazy for _, name, lazy in imports(sources[path], {module}) if name == module]
        assert found, (path, module)
        assert all(found), (path, module)
    for path, package in PURE_EXCEPTIONS:
        assert any(name.partition(".")[0] == package for _, name, _ in imports(sources[path], ())), path


def test_every_folder_of_the_project_is_in_the_table():
    """A new room gets its place in the order before anything stands in it."""
    assert {room_of(source.module) for source in project()} <= set(ROOMS)


def test_every_pure_module_is_there():
    """A module that was renamed does not leave the list of pure ones unnoticed."""
    assert {source.path for source in project()} >= PURE


FORBIDDEN = [
    (
        upward_imports,
        "outbox/store/a.py",
        "import outbox.delivery.gate",
        "store imports outbox.delivery.gate",
    ),
    (
        upward_imports,
        "outbox/api/a.py",
        "from outbox.daemon.flush import b",
        "api imports outbox.daemon.flush",
    ),
    (upward_imports, "outbox/event.py", "from outbox import Outbox", "values imports outbox (ways in)"),
    (upward_imports, "outbox/event.py", "from .store import file", "values imports outbox.store (store)"),
    (upward_imports, "outbox/store/a.py", "from ..cli.b import c", "store imports outbox.cli.b (cli)"),
    (upward_imports, "outbox/api/a.py", "import relay_client", "api imports relay_client"),
    (upward_imports, "relay_client/a.py", "import outbox.errors", "relay_client imports outbox.errors"),
    (upward_imports, "relay_client/a.py", "import relay_client.reference", "(relay_client.reference)"),
    (
        upward_imports,
        "outbox/library.py",
        "import outbox.daemon.flush",
        "ways in imports outbox.daemon.flush",
    ),
    (upward_imports, "outbox/store/a.py", "\ndef f(): import outbox.cli", "store imports outbox.cli"),
    (foreign_imports, "outbox/delivery/a.py", "import apsw", "delivery imports apsw"),
    (foreign_imports, "outbox/store/a.py", "from sqlite3 import connect", "store imports sqlite3"),
    (foreign_imports, "outbox/a.py", "\ndef f(): import asyncio", "values imports asyncio"),
    (impurities, "outbox/policy.py", "import time", "pure, and imports time"),
    (impurities, "outbox/gap.py", "\ndef f(): open('x')", "pure, and calls open"),
    (impurities, "outbox/a.py", '"""A. Pure."""; from os import path', "pure, and imports os"),
    (impurities, "outbox/event.py", "\ndate.today()", "pure, and calls today"),
    (stray_sql, "outbox/delivery/a.py", '\nrun("SELECT 1 FROM outbox")', "SQL: SELECT 1 FROM outbox"),
    (stray_sql, "outbox/cli/a.py", 'f"DELETE FROM {name}"', "SQL: DELETE FROM"),
]


@pytest.mark.parametrize(("rule", "path", "text", "what"), FORBIDDEN)
def test_a_violation_names_file_and_line(rule, path, text, what):
    """Each rule can say no, and says where."""
    (said,) = rule([Source(path, text)])
    assert said.startswith(f"{path}:{len(text.splitlines())}: ")
    assert what in said


ALLOWED = [
    (upward_imports, "outbox/library.py", "def f(): from outbox.daemon.flush import flush_agent"),
    (upward_imports, "outbox/daemon/a.py", "import outbox.api.server, outbox.store.file, relay_client"),
    (foreign_imports, "outbox/store/a.py", "import apsw"),
    (impurities, "outbox/store/a.py", "import os, time"),
    (stray_sql, "outbox/store/a.py", '"SELECT 1 FROM outbox"'),
    (stray_sql, "outbox/cli/a.py", '"Select an agent"'),
]


@pytest.mark.parametrize(("rule", "path", "text"), ALLOWED)
def test_what_is_allowed_is_no_violation(rule, path, text):
    """The rules say no to nothing else."""
    assert list(rule([Source(path, text)])) == []
