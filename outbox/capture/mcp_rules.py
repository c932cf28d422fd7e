"""Which calls may wait in the outbox, and what becomes of one that got no result. Pure.

The rule: a call waits only when nobody would miss its answer, and goes again only when that cannot do harm.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Sequence
from dataclasses import dataclass

from outbox.capture.mcp_message import within
from outbox.json_text import text_value, with_members
from relay_client.reading import Reading, Sort

ANNOTATION = "relay-outbox/bufferable"

_SAYS_SO = re.compile(r"fire[_-]?and[_-]?forget", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the configuration says of tools."""

    buffer: Sequence[str] = ()
    idempotent: bool = False
    safe_to_repeat: frozenset[str] = frozenset()

    def may_wait(self, tool: str, described: str | None) -> bool:
        """Whether calls of a tool may wait in the outbox; `described` is its entry in `tools/list`.

        The first of: a configured name or pattern; the annotation `_meta["relay-outbox/bufferable"]`, true or
        false; a name that says "fire and forget". Nothing else: an answer may be missed.
        """
        if any(_fits(tool, pattern) for pattern in self.buffer):
            return True
        said = within(described, "_meta", ANNOTATION) if described else None
        return said == "true" if said in {"true", "false"} else bool(_SAYS_SO.search(tool))

    def is_safe(self, tool: str, *, relay_honours_keys: bool) -> bool:
        """Whether a call whose outcome is unknown may go again with its key (relay contract, "MCP")."""
        return self.idempotent or relay_honours_keys or tool in self.safe_to_repeat


def _fits(tool: str, pattern: str) -> bool:
    """Whether a name fits a pattern: `*` is any text, `?` any character, everything else itself."""
    wanted = re.escape(pattern).replace(r"\*", ".*").replace(r"\?", ".")
    return re.fullmatch(wanted, tool, re.DOTALL) is not None


class Ran(enum.Enum):
    """Whether the tool ran, as far as the answer tells."""

    NO = enum.auto()  # and it can be tried again later
    REFUSED = enum.auto()  # and trying again would not help
    PERHAPS = enum.auto()


class Step(enum.Enum):
    """What becomes of a call that got no result."""

    QUEUE = enum.auto()
    SAY_NOT_RUN = enum.auto()
    SAY_REFUSED = enum.auto()
    SAY_PERHAPS = enum.auto()


_NOT_RUN = frozenset({Sort.UNREACHABLE, Sort.UNAUTHORIZED})
_PERHAPS = frozenset({
    Sort.BUSY, Sort.REDIRECTED, Sort.IN_PROGRESS, Sort.DUPLICATE, Sort.GATEWAY, Sort.LOST, Sort.NOT_A_RELAY,
})  # fmt: skip
_ASKED_TO_WAIT = frozenset({429, 503, None})  # None: we ourselves did
_REFUSING = frozenset(range(400, 500))


def whether_it_ran(reading: Reading) -> Ran:
    """What a reading without a result says of the call, as the outcome table has it for unsafe calls.

    Of what asks to wait, only 429 and 503 say that nothing was done: a gateway may give up, or send us
    elsewhere, when the tool runs already.
    """
    waits = reading.sort is Sort.BUSY and reading.status in _ASKED_TO_WAIT
    if reading.not_run or waits or reading.sort in _NOT_RUN:
        return Ran.NO
    if reading.sort in _PERHAPS:
        return Ran.PERHAPS
    return Ran.REFUSED if reading.status in _REFUSING or reading.sort is Sort.REFUSED else Ran.PERHAPS


def next_step(ran: Ran, *, may_wait: bool, safe: bool) -> Step:
    """What becomes of a call that got no result. Queued, it keeps the key of the try that is behind it."""
    if ran is Ran.REFUSED:
        return Step.SAY_REFUSED
    if may_wait and (ran is Ran.NO or safe):
        return Step.QUEUE
    return Step.SAY_NOT_RUN if ran is Ran.NO else Step.SAY_PERHAPS


def tool_name(described: str) -> str:
    """The name in a tool's entry of `tools/list`."""
    return text_value(within(described, "name") or "null") or ""


def as_listed(described: str, rules: Rules) -> str:
    """A tool's entry as the client sees it.

    One that may wait has no `outputSchema`: "queued" could never fit it, and clients check.
    """
    if rules.may_wait(tool_name(described), described) and within(described, "outputSchema") is not None:
        return with_members(described, {"outputSchema": None})
    return described
