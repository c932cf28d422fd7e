"""`outbox run`: a command with its sidecar, which delivers one agent's events for as long as it runs."""

from __future__ import annotations

import argparse
import contextlib
import os
import socket
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outbox.api.client import LocalClient
from outbox.cli.arguments import seconds
from outbox.cli.output import clean, count
from outbox.cli.where import checked_agent, now_ms, settings_of, state_of
from outbox.errors import OutboxError, StoreError, Unavailable
from outbox.library import Outbox
from outbox.setting_keys import Settings
from outbox.sidecar.child import end_like, why_not_started
from outbox.sidecar.handoff import VARIABLE
from outbox.sidecar.listening import listen
from outbox.sidecar.reaping import adopt_orphans
from outbox.sidecar.record import Record, tmux_of
from outbox.sidecar.resume import Rules
from outbox.sidecar.resumer import Resumer
from outbox.sidecar.runner import Runner, as_without_us, asked_to_end, hold_signals, nudge
from outbox.sidecar.terminal import Terminal
from outbox.store.directory import StateDirectory
from outbox.store.place import running_daemon

if TYPE_CHECKING:
    from outbox.daemon.companion import Companion
    from outbox.daemon.flush import FlushReport

EXAMPLE = "outbox run -- claude\noutbox run --agent builder --self-resume -- claude --model opus"

_ANSWER_WITHIN_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Whose events, how it ends, and the command."""
    parser.add_argument(
        "--agent", metavar="A", help="whose events (default: $OUTBOX_AGENT, else the command's name)"
    )
    parser.add_argument(
        "--flush-timeout",
        type=seconds,
        metavar="S",
        help="seconds for what waits at the end (default: the setting daemon.flush_timeout_s)",
    )
    parser.add_argument(
        "--kill-after",
        type=seconds,
        metavar="S",
        help="seconds that the command has after a SIGTERM, 0: for ever (default: the setting "
        "sidecar.kill_after_s)",
    )
    parser.add_argument(
        "--self-resume",
        action="store_true",
        help="start the command again when it ends during a hand-off (outbox handoff)",
    )
    parser.add_argument("command", nargs="+", metavar="COMMAND", help="what to run, behind --")


def run(args: argparse.Namespace) -> int:
    """Run the command; ends as it ends."""
    settings = settings_of(args)
    state = state_of(settings)
    name = Path(args.command[0]).name
    agent = checked_agent(args.agent or os.environ.get("OUTBOX_AGENT") or name)
    daemon_socket = answering_daemon(state)
    if daemon_socket is None:
        settings.require_relay_url()
    state.create(allow_network_fs=settings.daemon.allow_network_fs)
    sidecar = Sidecar(settings, state, agent, args, daemon_socket)
    return end_like(sidecar.run())


def answering_daemon(state: StateDirectory) -> Path | None:
    """The socket of the daemon of this state directory, when one runs and answers (whatever it says)."""
    daemon = running_daemon(state)
    if daemon is None:
        return None
    try:
        LocalClient(daemon.socket).get("/livez", _ANSWER_WITHIN_S)
    except Unavailable:
        return None
    return daemon.socket


class Sidecar:
    """One `outbox run`, from its start to the last line."""

    def __init__(
        self,
        settings: Settings,
        state: StateDirectory,
        agent: str,
        args: argparse.Namespace,
        daemon_socket: Path | None,
    ) -> None:
        """Nothing is started yet."""
        self._settings, self._state, self._agent = settings, state, agent
        self._argv: list[str] = args.command
        self._resumes: bool = args.self_resume
        given_s, flush_s = args.kill_after, args.flush_timeout
        self._kill_after_ms = round(1_000 * (settings.sidecar.kill_after_s if given_s is None else given_s))
        self._flush_timeout_s: float = settings.daemon.flush_timeout_s if flush_s is None else flush_s
        self._daemon_socket = daemon_socket
        self._engine: _Engine | None = None
        self._resumer: Resumer | None = None
        self._record: Record
        self._told: dict[str, Any] = {}

    def run(self) -> int:
        """The wait status of the command; it and all that was started has ended."""
        mask = hold_signals()
        adopt_orphans()
        with contextlib.ExitStack() as at_end:
            self._record = Record(self._state.path)
            at_end.callback(self._record.close)
            self._make_outbox()
            terminal = Terminal()
            at_end.callback(terminal.close)
            if self._daemon_socket is None:
                listening = listen(self._record.place.socket)
                at_end.callback(listening.close)
                self._engine = _Engine(self._settings, self._state, self._agent, listening, mask)
            if self._resumes:
                self._resumer = self._new_resumer()
                at_end.callback(self._resumer.close)
            runner = Runner(self._environment(), mask, terminal, self._kill_after_ms)
            status, why = self._start(runner, self._argv)
            if why:
                _mention(f"{why} Nothing was run; what waits stays on disk.")
                return status << 8
            wait_status = self._serve(runner)
            self._flush()
        return wait_status

    def _make_outbox(self) -> None:
        """The agent is seen from now on; a disk that takes nothing now may do so later."""
        try:
            Outbox.open(self._agent, state_dir=self._state.path).close()
        except StoreError as error:
            _mention(f"outbox: {error} The command is run all the same.")

    def _environment(self) -> dict[str, str]:
        """What the command finds out about us."""
        place = self._record.place
        return {
            **os.environ,
            "OUTBOX_AGENT": self._agent,
            "OUTBOX_SOCKET": str(self._daemon_socket or place.socket),
            "OUTBOX_STATE_DIR": str(self._state.path),
            VARIABLE: place.name,
        }

    # The command -------------------------------------------------------------------------------------------

    def _serve(self, runner: Runner) -> int:
        """Serve the command, and start it again where a hand-off says so; the last wait status."""
        if self._engine is not None:
            self._engine.start()
        if self._resumer is None:
            let_go_of_streams()
            return runner.wait()
        while True:
            wait_status = runner.wait(self._resumer.attend)
            argv = self._resumer.after(wait_status, is_stopping=runner.is_stopping)
            if argv is None:
                break
            _, why = self._start(runner, argv)
            if why:
                self._resumer.could_not_start(why.rstrip("."))
                break
        let_go_of_streams()
        return wait_status

    def _start(self, runner: Runner, argv: Sequence[str]) -> tuple[int, str]:
        """Start the command; the exit status and the reason when it cannot be."""
        try:
            runner.start(argv)
        except OSError as error:
            return why_not_started(argv[0], error)
        self._told = {"name": Path(argv[0]).name, "pid": runner.pid, "startedAt": now_ms()}
        self._tell()
        return 0, ""

    def _tell(self) -> None:
        resumer = self._resumer
        self._record.write(
            {
                "agent": self._agent,
                "pid": os.getpid(),
                "engine": "daemon" if self._daemon_socket else "own",
                "socket": str(self._daemon_socket or self._record.place.socket),
                "command": self._told,
                "tmux": tmux_of(os.environ),
                "selfResume": self._resumes,
                "restarts": resumer.restarts if resumer else 0,
                "handoff": resumer.told() if resumer else None,
            }
        )

    # Hand-offs ---------------------------------------------------------------------------------------------

    def _new_resumer(self) -> Resumer:
        section = self._settings.sidecar
        rules = Rules(settle_ms=round(section.settle_s * 1_000), max_restarts=section.max_restarts)
        return Resumer(
            self._record.place,
            self._argv,
            rules,
            round(section.handoff_timeout_s * 1_000),
            publish=self._publish,
            drain=self._drain,
            changed=self._tell,
        )

    def _publish(self, payload: Mapping[str, Any]) -> None:
        """On disk; what cannot be stored must not stop the command from starting again."""
        try:
            with Outbox.open(self._agent, state_dir=self._state.path) as outbox:
                outbox.enqueue("session-message", {"from": self._agent, **payload})
        except OutboxError as error:
            _mention(f"outbox: {error}")

    def _drain(self) -> None:
        threading.Thread(target=self._drain_now, name="drain", daemon=True).start()

    def _drain_now(self) -> None:
        with contextlib.suppress(OutboxError):
            if self._engine is not None:
                self._engine.hurry(self._flush_timeout_s)
            elif self._daemon_socket is not None:
                LocalClient(self._daemon_socket).post(
                    "/v1/flush", {"agent": self._agent, "timeoutS": self._flush_timeout_s}, 3_600.0
                )

    # The end -----------------------------------------------------------------------------------------------

    def _flush(self) -> None:
        """Everything out until the deadline, or until we are asked to end; one line if something is left."""
        line = [""]
        over = threading.Event()

        def work() -> None:
            try:
                line[0] = self._last_line(over.is_set)
            finally:
                over.set()
                nudge()

        thread = threading.Thread(target=work, name="last-flush", daemon=True)
        thread.start()
        while not over.is_set() and not asked_to_end(_ANSWER_WITHIN_S):
            pass
        over.set()
        thread.join(_ANSWER_WITHIN_S)
        if thread.is_alive():  # it waits for the daemon, or still loads what sends
            line[0] = self._count_left(_CUT_SHORT)
        if line[0]:
            _mention(line[0])

    def _last_line(self, enough: Callable[[], bool]) -> str:
        try:
            report = self._report(enough)
        except OutboxError as error:
            return self._count_left(str(error))
        except Exception as fault:  # noqa: BLE001 - the command's end must not wait for what cannot end
            return self._count_left(f"a fault of this program: {fault!r}")
        return self._left_in_words(report.left, report.in_the_way.get(self._agent, "the time was over"))

    def _report(self, enough: Callable[[], bool]) -> FlushReport:
        if self._engine is not None:
            return self._engine.end(self._flush_timeout_s, enough)
        from outbox.daemon.flush import FlushReport, flush_outboxes  # noqa: PLC0415 - what sends is heavy

        if not self._state.outbox_path(self._agent).exists():
            return FlushReport(0, 0, 0)
        return flush_outboxes(self._state, self._agent, self._flush_timeout_s, lambda: self._settings)[0]

    def _count_left(self, why: str) -> str:
        """The line when no flush told what is left: read from the file."""
        from outbox.api.report import status_of  # noqa: PLC0415 - only here

        path = self._state.outbox_path(self._agent)
        try:
            left = status_of(self._state, path).waiting if path.exists() else 0
        except StoreError as error:
            return f"outbox: what waits of {self._agent} could not be counted: {error}"
        return self._left_in_words(left, why)

    def _left_in_words(self, left: int, why: str) -> str:
        if not left:
            return ""
        later = "The daemon goes on with them." if running_daemon(self._state) else _LATER
        return f"outbox: {count(left, 'event')} of {self._agent} left on disk: {why.rstrip('.')}. {later}"


_CUT_SHORT = "a signal ended the flush"
_LATER = "They go out with the next daemon, outbox run or outbox flush."


class _Engine:
    """Our own engine, made in a thread: loading it takes longer than the command should wait."""

    def __init__(
        self,
        settings: Settings,
        state: StateDirectory,
        agent: str,
        listening: socket.socket,
        mask: Collection[int],
    ) -> None:
        self._mask = mask
        self._made_of = (settings, state, agent)
        self._listening = listening
        self._stack = contextlib.ExitStack()
        self._companion: Companion | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._make, name="engine", daemon=True)

    def start(self) -> None:
        """Begin; returns at once."""
        self._thread.start()

    def _make(self) -> None:
        as_without_us(self._mask)  # programs that the engine runs, for tokens and alarms, inherit it
        try:
            from outbox import __version__  # noqa: PLC0415
            from outbox.daemon.companion import Companion  # noqa: PLC0415 - what sends is heavy

            companion = Companion(*self._made_of, __version__, self._listening)
            self._companion = self._stack.enter_context(companion.running())
        except Exception as error:  # noqa: BLE001 - told at the end, whatever it is: the terminal is the command's
            self._error = error

    def hurry(self, timeout_s: float) -> None:
        """Send what waits without regard to backoff; raises OutboxError."""
        self._thread.join()
        if self._companion is not None:
            self._companion.flush(None, timeout_s)

    def end(self, timeout_s: float, enough: Callable[[], bool]) -> FlushReport:
        """A last flush, then the end of everything; raises what kept us from starting."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        assert self._companion is not None  # noqa: S101 - made, or in error
        with self._stack:
            return self._companion.last_flush(timeout_s, enough)


def _mention(line: str) -> None:
    """A line on stderr; one that it does not take changes nothing of how the command runs and ends."""
    text = f"{clean(line)}\n".encode(sys.stderr.encoding or "utf-8", "backslashreplace")
    with contextlib.suppress(OSError):
        os.write(sys.stderr.fileno(), text)  # past its buffer, which the interpreter's end would complain of


def let_go_of_streams() -> None:
    """Keep nobody waiting at the other end of a pipe that only the command reads or writes."""
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1):
        os.dup2(null, stream)
    os.close(null)
