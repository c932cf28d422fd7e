"""The wire text of an event: made once, at acceptance; taken apart again for batches, archives and people.

Delivery only joins what is made here, so every attempt sends the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from outbox.blake2 import blake2b
from outbox.json_text import elements, last_values, may_name, members, quoted, text_value, with_members
from outbox.text_cut import cut_characters, cut_utf8, utf8_pieces
from outbox.value import NamedTuple

TIME = "occurredAt"
KEY = "idempotencyKey"
QUOTED_NAMES = (f'"{TIME}"', f'"{KEY}"')

CHUNK_BYTES = 56 * 1024
ARCHIVE_BYTES = 8 * 1024 * 1024

_BLANKS = " \t\n\r"  # of JSON


class Stamp(NamedTuple):
    """What an event adds to its payload: its time, and its key as the relay sees it.

    `scope` goes before the producers' own keys inside a batch; `body_max_chars` cuts message bodies.
    """

    occurred_at_ms: int
    key: str
    scope: str = ""
    body_max_chars: int | None = None

    def members(self) -> dict[str, str | None]:
        """The two members, as JSON text."""
        return {TIME: str(self.occurred_at_ms), KEY: quoted(self.key)}


class Wire(NamedTuple):
    """A wire text, and how to read it: `shape` is object, value, batch, tool or archive."""

    text: str
    shape: str
    tool: str | None = None
    notes: Mapping[str, int] = MappingProxyType({})


def key_scope(agent: str) -> str:
    """What `relay.key_scope = "agent"` puts before a key: 16 hex digits of the agent's hash and a colon."""
    return f"{blake2b(agent.encode()).hexdigest()[:16]}:"


def wire_key(key: str, agent: str, scoped: bool) -> str:
    """The idempotency key as the relay sees it: the producer's, behind the agent's hash when scoped."""
    return key_scope(agent) + key if scoped else key


def make_wire(kind: str, payload: str, stamp: Stamp) -> Wire:
    """The wire text of a checked payload (its own JSON text, no blanks around it)."""
    maker = _MAKERS.get(kind)
    return maker(payload, stamp) if maker else _plain(payload, stamp)


def split_batch(wire_payload: bytes) -> tuple[bytes, list[bytes], bytes]:
    """A batch's wire text in parts: head through `[`, the messages, tail from `]`.

    `head + b",".join(messages) + tail` is the text again, and a request for any choice of messages.
    """
    text = wire_payload.decode()
    start, end = next((value, end) for name, _, value, end in members(text) if name == "messages")
    messages = [message.encode() for message in elements(text[start:end])]
    return text[: start + 1].encode(), messages, text[end - 1 :].encode()


def message_keys(messages: Sequence[bytes]) -> list[str]:
    """The idempotency keys of a batch's messages, as `split_batch` gives them."""
    return [text_value(last_values(message.decode())[KEY]) or "" for message in messages]


class ArchiveParts(NamedTuple):
    """A continuation archive, cut into the chunks in which it travels.

    `head` holds the members that every chunk repeats, `generation` is the producer's own; both are JSON text.
    """

    head: str
    generation: str | None
    texts: tuple[str, ...]
    occurred_at_ms: int

    @property
    def total(self) -> int:
        """How many chunks there are; an empty text is one."""
        return len(self.texts)

    def chunk(self, index: int, generation: int | None, wire_key: str) -> bytes:
        """The body of the request for one chunk (from 0): the same bytes for the same arguments.

        `generation` is what the relay answered to the first chunk; one that the producer gave goes before it.
        """
        fields = [self.head]
        if (known := self.generation or generation) is not None:
            fields.append(f'"generation":{known}')
        fields += [
            f'"chunkIndex":{index}',
            f'"totalChunks":{self.total}',
            f'"text":{quoted(self.texts[index])}',
            f'"{TIME}":{self.occurred_at_ms}',
            f'"{KEY}":{quoted(f"{wire_key}:{index}")}',
        ]
        return f"{{{','.join(fields)}}}".encode()


def archive_chunks(wire_payload: bytes) -> ArchiveParts:
    """The chunks of a stored continuation archive: at most 56 KiB of UTF-8 each, cut between characters."""
    values = last_values(wire_payload.decode())
    text, occurred_at_ms = text_value(values["text"]) or "", int(values[TIME])
    generation = values.get("generation", "null")
    made_here = {"text", "generation", "chunkIndex", "totalChunks", TIME, KEY}
    return ArchiveParts(
        head=",".join(f"{quoted(name)}:{value}" for name, value in values.items() if name not in made_here),
        generation=None if generation == "null" else generation,
        texts=tuple(utf8_pieces(text, CHUNK_BYTES)),
        occurred_at_ms=occurred_at_ms,
    )


def original_payload(
    kind: str,  # noqa: ARG001 - the shape says it all so far
    shape: str,
    wire_payload: bytes,
    *,
    key: str | None = None,
    occurred_at_ms: int | None = None,
) -> bytes:
    """The payload's JSON text, read back from the wire text: for showing, export and editing.

    What a producer had itself in the place of the two added members is kept nowhere, nor is what was cut.
    A batch comes back with its messages as they are sent; given the event's wire key and time, without what
    they got from these, so that another key can be given to all of it.
    """
    text = wire_payload.decode()
    if shape == "value":
        return last_values(text)["payload"].encode()
    if shape == "tool":
        call = last_values(text)
        return f'{{"tool":{call["name"]},"arguments":{call["arguments"]}}}'.encode()
    if shape != "batch":
        return _unstamped(text).encode()
    if key is None:
        return wire_payload
    head, messages, tail = split_batch(wire_payload)
    given = [
        _given(message.decode(), f"{key}:{index}", occurred_at_ms) for index, message in enumerate(messages)
    ]
    return head + ",".join(given).encode() + tail


def _unstamped(text: str) -> str:
    found = members(text)
    if (
        [name for name, *_ in found if name in (TIME, KEY)]
        == [TIME, KEY]
        == [name for name, *_ in found[-2:]]
    ):
        start = found[-2][1]
        return text[:start].removesuffix(",") + "}"  # the exact text that was stamped
    return with_members(text, {TIME: None, KEY: None})


def _given(message: str, derived_key: str, occurred_at_ms: int | None) -> str:
    values = last_values(message)
    added: dict[str, str | None] = {}
    if values.get(KEY) == quoted(derived_key):
        added[KEY] = None
    if values.get(TIME) == str(occurred_at_ms):
        added[TIME] = None
    return with_members(message, added)


def _plain(payload: str, stamp: Stamp) -> Wire:
    if not payload.startswith("{"):
        return Wire(_wrapped(payload, stamp), "value")
    return Wire(_stamped(payload, stamp), "object")


def _wrapped(value: str, stamp: Stamp) -> str:
    return f'{{"payload":{value},"{TIME}":{stamp.occurred_at_ms},"{KEY}":{quoted(stamp.key)}}}'


def _stamped(text: str, stamp: Stamp) -> str:
    if may_name(text, *QUOTED_NAMES) and not last_values(text).keys().isdisjoint((TIME, KEY)):
        return with_members(text, stamp.members())
    is_empty = not text.startswith('{"') and not text[1:-1].strip(_BLANKS)
    comma = "" if is_empty else ","
    return f'{text[:-1]}{comma}"{TIME}":{stamp.occurred_at_ms},"{KEY}":{quoted(stamp.key)}}}'


def _message(payload: str, stamp: Stamp) -> Wire:
    limit = stamp.body_max_chars
    if not limit or len(payload) <= limit or not payload.startswith("{"):
        return _plain(payload, stamp)
    body = text_value(last_values(payload).get("body", "null"))
    if body is None or len(body) <= limit:
        return _plain(payload, stamp)
    changed = {
        "body": quoted(cut_characters(body, limit)),
        "bodyTruncated": f'{{"originalChars":{len(body)}}}',
    }
    return Wire(with_members(payload, changed | stamp.members()), "object")


def _batch(payload: str, stamp: Stamp) -> Wire:
    array = payload if payload.startswith("[") else last_values(payload)["messages"]
    completed = [_completed(text, index, stamp) for index, text in enumerate(elements(array))]
    rest = payload if payload.startswith("{") else "{}"
    return Wire(with_members(rest, {"messages": f"[{','.join(completed)}]"}), "batch")


def _completed(message: str, index: int, stamp: Stamp) -> str:
    """A message of a batch with its own key and time, or else with those that follow from the event's."""
    own: Mapping[str, str] = {}
    if message.startswith("{") and may_name(message, *QUOTED_NAMES):
        own = last_values(message)
    key, at = text_value(own.get(KEY, "null")), own.get(TIME, "null")
    if key is None:
        key = f"{stamp.key}:{index}"
    elif not key.startswith(stamp.scope):  # an exported batch carries its scope already
        key = stamp.scope + key
    occurred_at_ms = stamp.occurred_at_ms if at == "null" else int(at)
    return _message(message, stamp._replace(occurred_at_ms=occurred_at_ms, key=key)).text


def _tool_call(payload: str, stamp: Stamp) -> Wire:  # noqa: ARG001 - key and time travel in the request's _meta
    call = last_values(payload)
    arguments = call.get("arguments", "null")
    text = f'{{"name":{call["tool"]},"arguments":{"{}" if arguments == "null" else arguments}}}'
    return Wire(text, "tool", tool=text_value(call["tool"]))


def _archive(payload: str, stamp: Stamp) -> Wire:
    if len(payload.encode()) > ARCHIVE_BYTES:
        text = text_value(last_values(payload)["text"]) or ""
        if len(text.encode("utf-8", "surrogatepass")) > ARCHIVE_BYTES:
            kept, lost_bytes = cut_utf8(text, ARCHIVE_BYTES)
            changed = {"text": quoted(kept)} | stamp.members()
            return Wire(with_members(payload, changed), "archive", notes={"archive_cut_bytes": lost_bytes})
    return Wire(_stamped(payload, stamp), "archive")


_MAKERS: Mapping[str, Callable[[str, Stamp], Wire]] = {
    "session-message": _message,
    "session-message-batch": _batch,
    "mcp-tool-call": _tool_call,
    "continuation-archive": _archive,
}
