"""The program that prints a token: real processes, with limits of time and output."""

import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
from processes import wait_for

from relay_client import Grant, TokenCommand, TokenUnavailable


def python(text, **options):
    """A command that runs some Python."""
    return TokenCommand([sys.executable, "-c", text], **options)


def minted(command):
    """What it gives out."""
    return command.mint("builder", deadline=None)


def test_it_is_run_each_time_and_without_a_shell(tmp_path):
    """Its words reach it as they are."""
    script = tmp_path / "a script; echo $HOME"
    script.write_text("#!/bin/sh\necho tok-$$\n")
    script.chmod(0o700)
    command = TokenCommand([str(script)])
    first, second = minted(command), minted(command)
    assert first.token.startswith("tok-")
    assert first != second


def test_an_object_with_its_end():
    """`expiresAt` is taken over."""
    text = 'print(\'{"token": "tok-1", "expiresAt": 1790000000000}\')'
    assert minted(python(text)) == Grant("tok-1", 1_790_000_000_000)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("import sys; sys.exit('tok-1')", "ended with status 1"),
        ("pass", "is empty"),
        ("print('x' * 100_000)", "prints more than 65,536 bytes"),
        ("import sys; sys.stderr.write('tok-1'); print('tok 1')", "white space"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9"),
    ],
)
def test_what_gives_no_token_says_why(text, reason):
    """Named by the program, without its output."""
    with pytest.raises(TokenUnavailable, match=reason) as unavailable:
        minted(python(text))
    assert "tok-1" not in str(unavailable.value)
    assert text not in str(unavailable.value)


def test_a_program_that_is_not_there():
    """The reason is the system's."""
    with pytest.raises(TokenUnavailable, match="cannot be started: no such file"):
        minted(TokenCommand(["/nowhere/at-all"]))


def test_one_that_takes_too_long_is_ended_with_all_it_started(tmp_path):
    """Neither it nor its child is left."""
    note = tmp_path / "pid"
    text = (
        "import pathlib, subprocess, sys, time;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        f"pathlib.Path({str(note)!r}).write_text(str(child.pid)); time.sleep(600)"
    )
    command = python(text, timeout_s=60)

    def end():
        wait_for(lambda: note.exists() and note.read_text(), 60)
        command.abort()

    ending = threading.Thread(target=end)
    ending.start()
    with pytest.raises(TokenUnavailable, match="command"):
        minted(command)
    ending.join(30)
    wait_for(lambda: _is_gone(int(note.read_text())))
    with pytest.raises(TokenUnavailable, match="is not run any more"):
        minted(command)


def test_words_that_no_program_can_be_given():
    """They are a reason like any other, and no fault of ours."""
    with pytest.raises(TokenUnavailable, match="cannot be started: embedded null"):
        minted(TokenCommand([sys.executable, "a\0b"]))


def test_one_that_cannot_be_ended_is_left(monkeypatch):
    """It became another user's (sudo), and hangs: nobody waits for it for ever."""

    def not_permitted(_pid, _number):
        raise PermissionError

    command = python("import time; time.sleep(600)", timeout_s=0.1)
    with monkeypatch.context() as patched:
        patched.setattr(os, "killpg", not_permitted)
        with pytest.raises(TokenUnavailable, match="took too long"):
            minted(command)
    (left,) = command._running
    command.abort()
    assert left.wait(30) == -signal.SIGKILL


def test_the_deadline_of_who_asks_counts():
    """A flush that is over does not wait for it."""
    with pytest.raises(TokenUnavailable, match="took too long"):
        python("import time; time.sleep(600)").mint("", deadline=time.monotonic() + 0.05)


def _is_gone(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"
