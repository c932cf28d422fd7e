"""The tokens of all agents, as the pumps ask for them; and the simplest: one for the host that is only read.

Tokens that are asked for, and recovered, are minted.py's.
"""

from __future__ import annotations

from typing import Protocol

from relay_client import TokenSource, TokenUnavailable, fingerprint


class NoTokenNow(Exception):
    """There is no token to send with. `reason` is what `why` shows; `next_ms` is monotonic, None: unknown."""

    def __init__(self, reason: str, detail: str, next_ms: int | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.next_ms = next_ms


class Tokens(Protocol):
    """Thread-safe. `refused` is always the name (fingerprint) of the token that was refused."""

    one_per_agent: bool  # else what befalls the token concerns all agents

    def token(self, agent: str, deadline: float | None = None) -> str | None:
        """The token to send with now, None for a relay that wants none.

        A recovery that is due is made here, before `deadline` (monotonic seconds); while one runs this waits
        for it, so that nothing goes out with a refused token. Raises NoTokenNow.
        """

    def evidence(self, agent: str) -> str:
        """A name of what is accepted together: acceptances under it are evidence. "" without a token."""

    def recover(
        self, agent: str, refused: str, *, still_good: bool = False, deadline: float | None = None
    ) -> bool:
        """Get another token than the refused one; True when there is one now, whoever got it.

        One recovery at a time, over all processes. With `still_good` the refused token is not given up: it
        works for others.
        """

    def has_other(self, agent: str, refused: str) -> bool:
        """Whether there is another one now, without asking anybody but a file."""

    def accepted(self, agent: str, name: str) -> None:
        """The relay took something with the token of this name."""

    def look_again(self, refused: str) -> bool:
        """Whether something outside changed, so that it is worth trying at once."""

    def hurry(self) -> None:
        """A flush begins: what only waits for its next try is tried at once."""

    def retry(self) -> None:
        """A person asked: forget what stopped, and try at once."""

    def forget(self, agent: str) -> None:
        """The agent is gone for good: keep nothing of its own token."""

    def describe(self) -> str:
        """Where tokens come from, for status and log."""

    def abort(self) -> None:
        """End what is under way at once, for good."""

    def close(self) -> None:
        """Close what is idle; what is under way is not concerned."""


class HostToken:
    """One token for all agents, read where it lies: looking again is all that can be done for it."""

    one_per_agent = False

    def __init__(self, source: TokenSource) -> None:
        """Nothing is read yet."""
        self._source = source

    def token(self, agent: str, deadline: float | None = None) -> str | None:  # noqa: ARG002 - the host's
        """The token as it is now."""
        try:
            return self._source.token()
        except TokenUnavailable as unavailable:
            raise NoTokenNow("no_token", str(unavailable)) from unavailable

    def evidence(self, agent: str) -> str:  # noqa: ARG002 - the host's
        """The token's fingerprint: what another token was accepted for proves nothing of this one."""
        try:
            return self._source.fingerprint()
        except TokenUnavailable:
            return ""

    def recover(
        self, agent: str, refused: str, *, still_good: bool = False, deadline: float | None = None
    ) -> bool:  # fmt: skip
        """Read it again. Names are compared, since somebody else may have read the change already."""
        del still_good, deadline
        return self.has_other(agent, refused)

    def has_other(self, agent: str, refused: str) -> bool:
        """The same: a look costs nothing."""
        self._source.refresh()
        return self.evidence(agent) not in {"", refused}

    def accepted(self, agent: str, name: str) -> None:
        """Nothing is learned from it."""

    def look_again(self, refused: str) -> bool:
        """Read it again."""
        return self.has_other("", refused)

    def hurry(self) -> None:
        """Nothing waits."""

    def retry(self) -> None:
        """Read it again."""
        self._source.refresh()

    def forget(self, agent: str) -> None:
        """No agent has one of its own."""

    def describe(self) -> str:
        """The source's own words."""
        return self._source.describe()

    def abort(self) -> None:
        """Nothing is ever under way."""

    def close(self) -> None:
        """Nothing is open."""


class AgentToken:
    """The token of one agent, as a TokenSource: for whoever speaks to the relay without a pump."""

    def __init__(self, tokens: Tokens, agent: str) -> None:
        """Nothing is asked yet."""
        self._tokens = tokens
        self._agent = agent
        self._last = ""

    def token(self) -> str | None:
        """The token to use now, got anew where that is due; raises TokenUnavailable."""
        try:
            token = self._tokens.token(self._agent)
        except NoTokenNow as none:
            raise TokenUnavailable(str(none)) from none
        self._last = fingerprint(token)
        return token

    def refresh(self) -> bool:
        """After a 401: whether there is another one now. One that others were given already counts."""
        return self._tokens.recover(self._agent, self._last)

    def describe(self) -> str:
        """Where it comes from."""
        return self._tokens.describe()

    def fingerprint(self) -> str:
        """A name of the token; raises as `token`."""
        return fingerprint(self.token())

    def close(self) -> None:
        """Close the connections to whoever gives out tokens."""
        self._tokens.close()
