"""The bench never rots: every figure runs, and what it tells is what the documents speak of."""

import os
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parent.parent.parent
PEERS = {"litequeue, FULL", "persist-queue", "huey, fsync"}
PLOTS = {"enqueue-against-backlog.svg": 3, "drain-against-latency.svg": 2}


def rows(text, first_header):
    """The rows of each table whose first header is this one, as lists of cells."""
    found = []
    for part in text.split(f"\n| {first_header} |")[1:]:
        lines = part.split("\n\n")[0].splitlines()[2:]
        found += [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in lines]
    return found


def bench(*words):
    """`python -m bench` to its end."""
    return subprocess.run(
        [sys.executable, "-m", "bench", *words],
        cwd=ROOT,
        env={**os.environ, "TZ": "UTC"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.mark.slow
def test_every_figure_runs_and_is_written_down(tmp_path):
    """A quick run measures all targets that the documents name, in a table, and draws both plots."""
    done = bench("--quick", "--out", str(tmp_path), "--scratch", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = (tmp_path / "RESULTS.md").read_text("utf-8")
    targets = {row[0] for row in rows(results, "target")}
    for document in ("bench/RESULTS.md", "docs/performance.md"):
        assert {row[0] for row in rows((ROOT / document).read_text("utf-8"), "target")} == targets, document
    told = {row[0] for row in rows(results, "what")}
    left_out = set(re.findall(r"Not installed, so left out: (.+)\.", results))
    assert told & PEERS | left_out == PEERS
    assert told & left_out == set()
    for name, lines in PLOTS.items():
        drawn = ET.fromstring((tmp_path / name).read_text("utf-8"))
        assert len(drawn.findall("{http://www.w3.org/2000/svg}circle")) == lines * 2, name
        assert f"]({name})" in results
    assert not list(tmp_path.glob("bench-*")), "its files are removed"


def test_an_unknown_figure_is_named_with_those_there_are():
    """Nothing is measured then."""
    done = bench("enqueu")
    assert done.returncode == 2
    assert "'enqueu'" in done.stderr
    assert "enqueue, backlog, producers" in done.stderr
