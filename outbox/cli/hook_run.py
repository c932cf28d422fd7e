"""`outbox hook RUNNER`: one call of a hook, from argv and stdin onto the disk. Quick, silent, always exit 0.

Runners read exit 2 as "block", and stdout as a decision: no usage error and no trouble may show there.
"""

from __future__ import annotations

import os
import select
import sys
import time

from outbox.capture.hook_call import read_call
from outbox.capture.hook_json import decoded
from outbox.capture.hook_record import Desk, record
from outbox.capture.hook_redact import Redaction
from outbox.capture.hook_table import RUNNERS
from outbox.errors import OutboxError, UsageError
from outbox.event_checks import check_agent
from outbox.printable import printable, quoted
from outbox.state_dir import absolute, expand_home, state_dir, state_folder
from outbox.store.directory import StateDirectory
from outbox.value import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from outbox.capture.hook_table import Runner

_SILENCE_S = 0.8  # of a stdin that stays open: the runner gives 1.5 s in all
_ALL_S = 1.2
_MOST_DIGITS = 18
_LOCK_MS = 600
_LEAST_LOCK_MS = 100
_MOST_BYTES = 64 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_OPTIONS = ("--agent", "--event", "--record", "--redact", "--state-dir", "--config")


class Words(NamedTuple):
    """The command line, taken apart: options, plain words, and the first option that nobody knows."""

    options: dict[str, str]
    plain: list[str]
    unknown: str | None


def run_hook(argv: Sequence[str]) -> int:
    """Record one call. Always 0; what could not be stored is told on stderr, and counted in the state."""
    started_s, started_ms = time.monotonic(), time.time_ns() // 1_000_000
    words = read_words(argv)
    try:
        _record(words, started_s, started_ms)
    except BaseException as error:  # noqa: BLE001 - not even an interrupt may show in the exit status
        _tell(words, error, started_ms)
    return 0


def _record(words: Words, started_s: float, started_ms: int) -> None:
    runner, argument = _asked(words)
    options = words.options
    data = _stdin() if argument is None else os.fsencode(argument)
    record_also = frozenset(options.get("--record", "").split(","))
    call = read_call(runner, decoded(data), options.get("--event"), record_also)
    if call is None:
        return
    left_ms = int(1_000 * (_ALL_S - (time.monotonic() - started_s)))

    def put(folder: str) -> str:
        desk = Desk(
            StateDirectory(folder).create(allow_network_fs=_network_fs_allowed()),
            check_agent(options.get("--agent") or os.environ.get("OUTBOX_AGENT") or runner.name),
            max(_LEAST_LOCK_MS, min(_LOCK_MS, left_ms)),
            _body_limit(),
        )
        record(desk, call, Redaction(options.get("--redact", "")), started_ms)
        return desk.agent

    if os.environ.get("OUTBOX_SOCKET", "").strip() and not options.get("--config"):
        from outbox.api.hook_way import put_and_hand_over  # noqa: PLC0415 - another user's way

        put_and_hand_over(os.environ, options.get("--state-dir"), put, started_s + _ALL_S)
    else:
        put(_place(options))


def read_words(argv: Sequence[str]) -> Words:
    """Take the command line apart; never fails. Pure."""
    options: dict[str, str] = {}
    plain: list[str] = []
    unknown = None
    left = iter(argv)
    for word in left:
        name, equals, value = word.partition("=")
        if word == "--":
            plain += left
        elif name in _OPTIONS:
            options[name] = value if equals else next(left, "")
        elif word.startswith("-") and word != "--json":
            unknown = unknown or name
        elif word != "--json":
            plain.append(word)
    return Words(options, plain, unknown)


def _asked(words: Words) -> tuple[Runner, str | None]:
    """The runner, and the call's JSON where it is given as an argument."""
    name, *rest = words.plain or [""]
    if name not in RUNNERS:
        raise UsageError(f"no runner is called {quoted(name)}; known are {', '.join(RUNNERS)}")
    if words.unknown is not None:
        raise UsageError(f"the option {quoted(words.unknown)} is not known; known are {', '.join(_OPTIONS)}")
    if len(rest) > 1:
        raise UsageError("there is more than one argument behind the runner")
    return RUNNERS[name], rest[0] if rest else None


def _stdin() -> bytes:
    """What stands on stdin, to its end, or to where it has been silent for too long."""
    if sys.stdin is None:
        raise UsageError("stdin is closed, and no argument holds the call")
    fd, chunks, size = sys.stdin.fileno(), list[bytes](), 0
    end = time.monotonic() + _ALL_S
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    while (left_s := min(_SILENCE_S, end - time.monotonic())) > 0 and poll.poll(left_s * 1_000):
        chunk = os.read(fd, _CHUNK_BYTES)
        if not chunk:
            break
        chunks.append(chunk)
        size += len(chunk)
        if size > _MOST_BYTES:
            raise UsageError(f"the call has more than {_MOST_BYTES:,} bytes", code="too_large")
    return b"".join(chunks)


def _place(options: Mapping[str, str]) -> str:
    """The state directory, as a producer finds it: no file of configuration is read, unless one is named."""
    if given := options.get("--state-dir"):
        return absolute(expand_home(given, os.environ))
    if given := options.get("--config"):
        from outbox.settings import load  # noqa: PLC0415 - the rare case

        return str(state_dir(load(environ=os.environ, config_path=given), os.environ))
    return state_folder(os.environ)


def _network_fs_allowed() -> bool:
    return os.environ.get("OUTBOX_DAEMON_ALLOW_NETWORK_FS", "").strip().lower() in {"true", "yes", "on", "1"}


def _body_limit() -> int | None:
    """The limit of the environment; what is no number must not cost the event, and cuts nothing."""
    text = os.environ.get("AGENT_RELAY_MESSAGE_BODY_MAX_CHARS", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS else None


def _tell(words: Words, error: BaseException, now_ms: int) -> None:
    """One line on stderr and one in the state; where neither is possible there is nobody left to tell."""
    name = " ".join(["outbox hook", *words.plain[:1]])
    what = str(error) if isinstance(error, OutboxError) else f"{type(error).__name__}: {error}"
    line = printable(f"{name}: {what.rstrip('.')}. This call is not recorded; the runner goes on.")
    try:
        from outbox.capture.hook_faults import note_fault  # noqa: PLC0415 - most calls have none

        noted = note_fault(StateDirectory(_place(words.options)), line, now_ms)
    except Exception:  # noqa: BLE001 - a fault in telling of a fault
        noted = False
    end = "Counted in: outbox status" if noted else "It could not be counted either"
    try:
        sys.stderr.write(f"{line} {end}.\n".encode("ascii", "backslashreplace").decode())
        sys.stderr.flush()
    except Exception:  # noqa: BLE001 - as above
        return
