"""How a person's command is run, and an address posted to: with a limit of time, and without our secrets."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from http.client import HTTPException
from urllib import request
from urllib.error import HTTPError

from outbox.setting_keys import KEYS
from outbox.setting_types import Token

TIMEOUT_S = 10.0
_ENDS_WITHIN_S = 5.0


def run_command(words: tuple[str, ...], body: bytes, timeout_s: float = TIMEOUT_S) -> str:
    """Run a program with `body` on stdin, in a session of its own; why it did not take it, "" when it did.

    It did not when it cannot be started, ends with another status than 0, or takes too long: then it is
    killed, with what it started. One that took another user (sudo) cannot be, and is left behind.
    """
    silent = subprocess.DEVNULL
    try:
        process = subprocess.Popen(  # noqa: S603 - the operator's own command, and no shell
            words,
            stdin=subprocess.PIPE,
            stdout=silent,
            stderr=silent,
            start_new_session=True,
            env=_environment(),
        )
    except OSError as error:
        return f"{words[0]} cannot be started: {error.strerror}"
    try:
        process.communicate(body, timeout_s)
    except subprocess.TimeoutExpired:
        what_then = "was ended" if _is_ended(process) else "cannot be ended by us"
        return f"{words[0]} took longer than {timeout_s:g} s and {what_then}"
    return f"{words[0]} ended with status {process.returncode}" if process.returncode else ""


def _is_ended(process: subprocess.Popen[bytes]) -> bool:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    assert process.stdin is not None  # noqa: S101 - it was asked for
    process.stdin.close()
    try:
        process.wait(_ENDS_WITHIN_S)
    except subprocess.TimeoutExpired:
        return False
    return True


def _environment() -> dict[str, str]:
    secrets = {
        name for key in KEYS.values() if isinstance(key.type, Token) for name in (key.variable, *key.aliases)
    }
    return {name: text for name, text in os.environ.items() if name not in secrets}


class _Straight(request.HTTPRedirectHandler):
    """A secret address, and what is posted to it, go to nobody whom a redirect names."""

    def redirect_request(self, *_: object) -> None:
        """None: the redirect is the answer."""


def post(url: str, body: bytes, timeout_s: float = TIMEOUT_S) -> str:
    """Post JSON; why it was not taken, "" after an answer of 2xx. `timeout_s` bounds each wait."""
    headers = {"Content-Type": "application/json"}
    try:
        asked = request.Request(url, body, headers, method="POST")  # noqa: S310 - http or https, the type says
        with request.build_opener(_Straight).open(asked, timeout=timeout_s):
            return ""
    except HTTPError as error:
        error.close()
        return f"the address answered {error.code}"
    except (OSError, HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return f"the address does not answer: {reason}"
