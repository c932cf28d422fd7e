"""docs/local-http.md: its examples run, and give what they say."""

import os
import re
import shutil
import subprocess
import sys

import pytest
from processes import ROOT, DaemonProcess

NOBODY = "http://127.0.0.1:9"  # the discard port: nobody listens there
PAGE = (ROOT / "docs" / "local-http.md").read_text("utf-8")


def blocks(language):
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


def expected(text):
    """What the comments of an example say that it prints."""
    return re.findall(r"# -> (.*)$", text, re.MULTILINE)


@pytest.fixture
def env(tmp_path):
    """A daemon whose relay is away, and what its examples know of it."""
    state = tmp_path / "state"
    with DaemonProcess(
        state, NOBODY, {"daemon.flush_timeout_s": "0.1"}, flags=["--http", "127.0.0.1:0"]
    ) as daemon:
        yield {
            "PATH": os.environ["PATH"],
            "OUTBOX_SOCKET": str(state / "outbox.sock"),
            "OUTBOX_STATE_DIR": str(state),
            "OUTBOX_HTTP": daemon.said("serving")[-1]["http"],
        }


def test_the_examples(env, tmp_path):
    """All of them, one after the other, against one daemon."""
    assert shutil.which("curl"), "the examples of the page need curl; .ci/run installs it"
    python = "\n".join(blocks("py"))
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", python], env=env, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout.splitlines()) == ("", expected(python))
    shell = "\n".join(blocks("sh"))
    # -w and most answers end without a line's end: each example is followed by one where it is missing
    script = "set -eu\n" + re.sub(r"^(# -> .*\n)+", r"\g<0>echo\n", shell + "\n", flags=re.MULTILINE)
    done = subprocess.run(
        ["bash", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stderr == ""
    assert [line for line in done.stdout.splitlines() if line] == expected(shell)


def test_every_metric_is_on_the_page(env):
    """And no other."""
    told = set(re.findall(r"^\| `(outbox_\w+)", PAGE, re.MULTILINE))
    done = subprocess.run(
        ["curl", "-sS", "--unix-socket", env["OUTBOX_SOCKET"], "http://localhost/metrics"],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    served = {line.split()[2] for line in done.stdout.splitlines() if line.startswith("# TYPE ")}
    assert told == served
