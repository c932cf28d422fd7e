"""Replay of a dead letter under a new key: with a changed payload, or as an event altogether new."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outbox.cli.output import count
from outbox.cli.show import indented
from outbox.delivery.parts import ArchiveProgress, BatchProgress
from outbox.errors import OutboxError, UsageError
from outbox.event import Accepted, accept, parse_event
from outbox.json_text import elements, last_values
from outbox.record import Record, event_fields, payload_of
from outbox.record_line import joined, one_value
from outbox.store.dead import replay_as
from outbox.store.file import OutboxFile
from outbox.store.records import letter_of
from outbox.wire_text import KEY, archive_chunks

_UNCHANGED = "Nothing was changed"


def replay_edited(
    box: OutboxFile, seq: int, source: str | None, now_ms: int, new_key: str, *, afresh: bool
) -> tuple[int, str]:
    """Put it at the tail under `new_key`, with the payload from `source` where one is named.

    `source` is a file, "-" for stdin, "" for an editor. `afresh` sends again what the relay has of it
    already; the second part of what is returned says how much that is. Raises UsageError or StoreFull.
    """
    letter = letter_of(box, seq)
    if letter is None or not letter.sound:
        raise UsageError(
            f"The stored text of dead letter {seq:,} of {box.agent!r} is damaged. {_UNCHANGED}. Enqueue the "
            "event anew, and discard this one."
        )
    old = payload_of(letter, box.agent)
    with _given(source, old, f"{box.path.stem}-{seq}") as text:
        new = old if text is None else _changed(text, old)
        event = _as_event(box, letter, new, now_ms, new_key)
        progress = None if afresh else kept_marks(letter, old, new, event)
        new_seq = replay_as(box, seq, event, progress, now_ms)
    return new_seq, _what_goes_again(letter) if afresh else ""


def _as_event(box: OutboxFile, letter: Record, payload: str, now_ms: int, new_key: str) -> Accepted:
    """The event with this payload, checked by today's rules, with the time and all else that it had."""
    fields = {name: text for name, text in event_fields(letter.event).items() if name != KEY}
    try:
        draft = parse_event(joined({**fields, "payload": payload}), box.limits)
    except UsageError as error:
        raise UsageError(f"{error}. {_UNCHANGED}.", code=error.code) from None
    return accept(draft, limits=box.limits, agent=box.agent, now_ms=now_ms, new_key=new_key)


def _changed(text: str, old: str) -> str:
    try:
        new = one_value(text)
    except UsageError as error:
        raise UsageError(f"The payload is {error}. {_UNCHANGED}.", code=error.code) from None
    if _value(new) == _value(old):
        raise UsageError(
            f"The payload is what it was. {_UNCHANGED}. Without --edit it is sent again with its key."
        )
    return new


# What the relay has already ---------------------------------------------------------------------------------


def kept_marks(letter: Record, old: str, new: str, event: Accepted) -> str | None:
    """The marks of what the relay has of it, which are kept: that does not go again.

    Raises UsageError for an edit that they do not fit: of what is stored, or of the number of its parts.
    """
    marks = letter.tries.progress
    if letter.event.shape == "batch" and (stored := BatchProgress.decode(marks).stored):
        before, after = _messages(old), _messages(new)
        if len(before) != len(after):
            raise _needs_new_key(letter, "changes the number of its messages")
        if any(_value(before[index]) != _value(after[index]) for index in stored):
            raise _needs_new_key(letter, "changes a message that the relay has already")
        return marks
    if letter.event.shape == "archive" and (chunks := ArchiveProgress.decode(marks).chunks):
        had, has = archive_chunks(letter.event.wire_payload), archive_chunks(event.wire_payload)
        same = (had.head, had.total, had.texts[:chunks]) == (has.head, has.total, has.texts[:chunks])
        if not same:
            raise _needs_new_key(letter, "changes what the relay has already, or the number of its chunks")
        return marks
    return None


def _needs_new_key(letter: Record, what: str) -> UsageError:
    return UsageError(
        f"The edit {what}. {_UNCHANGED}. With --new-key all of it is sent as a new event: "
        f"{_what_goes_again(letter)}"
    )


def _what_goes_again(letter: Record) -> str:
    marks, shape = letter.tries.progress, letter.event.shape
    if shape == "batch":
        parts = count(len(BatchProgress.decode(marks).stored), "message")
    elif shape == "archive":
        parts = count(ArchiveProgress.decode(marks).chunks, "chunk")
    else:
        return ""
    return "" if parts.startswith("0 ") else f"{parts} that the relay has already arrive a second time."


def _messages(payload: str) -> list[str]:
    return elements(payload if payload.startswith("[") else last_values(payload).get("messages", "[]"))


def _value(text: str) -> object:
    return json.loads(text, parse_int=str, parse_float=str)


# Where the payload comes from -------------------------------------------------------------------------------


@contextmanager
def _given(source: str | None, old: str, name: str) -> Iterator[str | None]:
    """The text of the payload; one from an editor is kept when it could not be used."""
    if source == "":
        with _edited("\n".join(indented(old)) + "\n", name) as text:
            yield text
    elif source == "-":
        yield _decoded(sys.stdin.buffer.read(), "stdin")
    else:
        yield None if source is None else _from_file(Path(source))


@contextmanager
def _edited(text: str, name: str) -> Iterator[str]:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError(
            f"--edit without a file needs a terminal. {_UNCHANGED}. Give --edit FILE, or - for stdin."
        )
    folder = Path(tempfile.mkdtemp(prefix="outbox-edit-"))
    file = folder / f"{name}.json"
    file.write_text(text, "utf-8")
    try:
        yield _from_editor(file)
    except OutboxError as error:
        if file.read_bytes() == text.encode():
            shutil.rmtree(folder)
            raise
        raise UsageError(f"{error} Your text is kept: --edit {file}", code=error.code) from None
    shutil.rmtree(folder)


def _from_file(path: Path) -> str:
    try:
        return _decoded(path.read_bytes(), str(path))
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be read: {error.strerror}. {_UNCHANGED}.") from None


def _from_editor(file: Path) -> str:
    editor = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
    try:
        status = subprocess.run([*shlex.split(editor), str(file)], check=False).returncode  # noqa: S603 - the user's own
    except (OSError, ValueError) as error:
        raise UsageError(f"The editor {editor!r} cannot be started: {error}. {_UNCHANGED}.") from None
    if status:
        raise UsageError(f"The editor ended with {status}. {_UNCHANGED}.")
    return _decoded(file.read_bytes(), str(file))


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.removeprefix(b"\xef\xbb\xbf").decode()
    except UnicodeDecodeError as error:
        raise UsageError(f"{name} is not UTF-8: byte {error.start + 1}. {_UNCHANGED}.") from None
