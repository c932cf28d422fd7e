"""Tokens that are asked for: renewed before they end, recovered after a 401, one recovery at a time.

Whom to ask is the minter's (relay_client); how long to wait stands in token_state.py. What people are told
lies in STATE/relay.sqlite, without a secret; the tokens themselves in STATE/tokens.
"""

from __future__ import annotations

import contextlib
import math
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from outbox.delivery.clock import Clock
from outbox.delivery.token_state import FOR_ALL, Held, Trouble, after_failure, at_once, held, stopped_before
from outbox.delivery.tokens import NoTokenNow
from outbox.errors import StoreError
from outbox.policy import Schedule
from outbox.store.relay_state import RelayState
from outbox.store.token_cache import TokenCache
from relay_client import Minter, TokenUnavailable, fingerprint

_LONGEST_MINT_S = 60.0
_LOOK_UP_S = 0.25  # so soon somebody who waits for another process sees that we stop
_AFTER_PROBE_MS = 1_000

Log = Callable[[str, dict[str, Any]], None]


class _Credential:
    """The token of one agent, or of the host. `mutex` is held by whoever gets a new one."""

    def __init__(self, agent: str) -> None:
        self.agent = agent
        self.mutex = threading.Lock()
        self.held: Held | None = None
        self.trouble: Trouble | None = None  # that is this one's own
        self.recovered_at_ms: int | None = None
        self.told = ""


class MintedTokens:
    """Thread-safe. `schedule` paces recoveries that fail; `tell` is given each token before it is used."""

    def __init__(
        self,
        minter: Minter,
        *,
        schedule: Schedule,
        clock: Clock,
        rng: random.Random,
        facts: RelayState,
        cache: TokenCache,
        log: Log,
        tell: Callable[[str | None], None] = lambda _token: None,
    ) -> None:
        """Nothing is asked yet. A recovery that was stopped stays so until something has changed."""
        self.one_per_agent = minter.one_per_agent
        self._minter = minter
        self._schedule = schedule
        self._clock = clock
        self._rng = rng
        self._facts = facts
        self._cache = cache
        self._log = log
        self._tell = tell
        self._mutex = threading.Lock()
        self._aborted = False
        self._probing = threading.Lock()  # held by the one who asks while nobody gets a token
        self._credentials: dict[str, _Credential] = {}
        fact = facts.read().get(FOR_ALL) or {}
        now_ms = clock.monotonic_ms()
        self._trouble = stopped_before(fact, minter.describe(), minter.inputs(), now_ms)
        if fact.get("source") != self.describe():
            self._note_all("")

    # What pumps ask ----------------------------------------------------------------------------------------

    def token(self, agent: str, deadline: float | None = None) -> str:
        """The token to send with; one that ends soon is renewed by whoever comes first. Raises NoTokenNow."""
        credential, now_ms = self._credential(agent), self._clock.monotonic_ms()
        have = credential.held
        if have is not None and have.is_good(now_ms):
            if not have.is_due(now_ms) or self._in_the_way(credential):
                return have.token
            if not credential.mutex.acquire(blocking=False):
                return have.token
            try:
                self._get(credential, deadline, have.name)
            except NoTokenNow:
                return have.token
            else:
                return self._got(credential)
            finally:
                credential.mutex.release()
        with credential.mutex:
            have = credential.held
            if have is None or not have.is_good(self._clock.monotonic_ms()):
                self._get(credential, deadline, have.name if have and have.refused else "")
            return self._got(credential)

    def evidence(self, agent: str) -> str:  # noqa: ARG002 - all that one minter gives out stands together
        """One name for all: tokens change often, and what the relay takes with one shows that it works."""
        return f"minted by {self._minter.describe()}"

    def recover(
        self, agent: str, refused: str, *, still_good: bool = False, deadline: float | None = None
    ) -> bool:
        """Get another token than the refused one; a new one that is refused at once waits by backoff."""
        credential = self._credential(agent)
        with credential.mutex:
            have = credential.held
            if have is not None and have.name != refused:
                return have.is_good(self._clock.monotonic_ms())
            if not still_good and have is not None:
                credential.held = replace(have, refused=True)
                if have.is_new(self._clock.monotonic_ms()):
                    self._failed(credential, TokenUnavailable("the relay refuses a new token", of_agent=True))
                    return False
            try:
                self._get(credential, deadline, refused)
            except NoTokenNow:
                return False
            have = credential.held
            if have is None or have.name != refused:
                return have is not None
            if not still_good:
                credential.held = replace(have, refused=True)
                self._failed(
                    credential,
                    TokenUnavailable("it gives out the same token, which the relay refuses", of_agent=True),
                )
            return False

    def has_other(self, agent: str, refused: str) -> bool:
        """Whether there is another one that may be sent."""
        have = self._credential(agent).held
        return have is not None and have.name != refused and have.is_good(self._clock.monotonic_ms())

    def accepted(self, agent: str, name: str) -> None:
        """It has been good: the next refusal is worth a recovery at once."""
        credential = self._credential(agent)
        have = credential.held
        if have is None or have.proven or have.name != name:
            return
        with credential.mutex:
            if credential.held is have:
                credential.held, credential.trouble, credential.told = replace(have, proven=True), None, ""
                self._note(credential, "ok")

    # What people and files change --------------------------------------------------------------------------

    def look_again(self, refused: str) -> bool:  # noqa: ARG002 - what matters is what it was made with
        """Whether settings or files changed since the last failure."""
        trouble = self._trouble
        if trouble is None or trouble.inputs == self._minter.inputs():
            return False
        self._trouble = None
        return True

    def hurry(self) -> None:
        """Try at once what only waits for its next try."""
        now_ms = self._clock.monotonic_ms()
        with self._mutex:
            if self._trouble is not None:
                self._trouble = at_once(self._trouble, now_ms)
            for credential in self._credentials.values():
                if credential.trouble is not None:
                    credential.trouble = at_once(credential.trouble, now_ms)

    def retry(self) -> None:
        """Forget every trouble; a token that is good stays the one to send with."""
        now_ms = self._clock.monotonic_ms()
        with self._mutex:
            self._trouble = None
            credentials = list(self._credentials.values())
            for credential in credentials:
                credential.trouble, credential.told = None, ""
        good = [one for one in credentials if one.held and one.held.is_good(now_ms)]
        for credential in good:
            self._note(credential, "ok")
        if not good:
            self._note_all("")

    def forget(self, agent: str) -> None:
        """Remove it from memory, disk and what people are told; the agent's next event gets a new one."""
        if self.one_per_agent:
            with self._mutex:
                self._credentials.pop(agent, None)
            self._cache.forget(agent)
            self._facts.write({f"token:{agent}": None})

    def describe(self) -> str:
        """The minter's own words."""
        return self._minter.describe()

    def abort(self) -> None:
        """End what is under way, for good; that it ended says nothing of whoever gives out tokens."""
        self._aborted = True
        self._minter.abort()

    def close(self) -> None:
        """Close the connections."""
        self._minter.close()

    # Inside ------------------------------------------------------------------------------------------------

    def _credential(self, agent: str) -> _Credential:
        name = agent if self.one_per_agent else ""
        found = self._credentials.get(name)
        if found is None:
            with self._mutex:
                found = self._credentials.setdefault(name, _Credential(name))
        return found

    def _got(self, credential: _Credential) -> str:
        assert credential.held is not None  # noqa: S101 - `_get` put it there
        return credential.held.token

    def _in_the_way(self, credential: _Credential) -> Trouble | None:
        """The trouble for which nobody is asked now; one that stopped is over once its inputs changed."""
        shared, own = self._trouble, credential.trouble  # others change them meanwhile
        if shared is not None and shared.stopped and not self.look_again(""):
            return shared
        now_ms = self._clock.monotonic_ms()
        troubles = [trouble for trouble in (shared, own) if trouble is not None]
        waits = [trouble for trouble in troubles if trouble.next_ms > now_ms]
        return max(waits, key=lambda trouble: trouble.next_ms, default=None)

    def _get(self, credential: _Credential, deadline: float | None, refused: str) -> None:
        """Put a token in place of the one there; the caller holds its mutex. Raises NoTokenNow."""
        with self._one_for_all():
            if trouble := self._in_the_way(credential):
                raise NoTokenNow(trouble.reason, trouble.detail, None if trouble.stopped else trouble.next_ms)
            self._try(credential, deadline, refused)

    @contextlib.contextmanager
    def _one_for_all(self) -> Iterator[None]:
        """While whoever gives out tokens is in trouble one agent asks, and not each one at once."""
        trouble = self._trouble
        if trouble is None or not self.one_per_agent:
            yield
            return
        if not self._probing.acquire(blocking=False):
            next_ms = self._clock.monotonic_ms() + _AFTER_PROBE_MS
            raise NoTokenNow(trouble.reason, trouble.detail, next_ms)
        try:
            yield
        finally:
            self._probing.release()

    def _try(self, credential: _Credential, deadline: float | None, refused: str) -> None:
        inputs = self._minter.inputs()  # what is put there meanwhile has not been tried
        is_recovery = bool(refused) and credential.held is not None and credential.held.refused
        if is_recovery or credential.told:
            self._note(credential, "recovering")
        try:
            with self._alone(credential, deadline):
                if not self._found(credential, refused):
                    self._mint(credential, deadline)
        except TokenUnavailable as unavailable:
            if self._aborted:
                raise NoTokenNow("token_recovery", str(unavailable)) from unavailable
            if unavailable.of_agent:
                self._trouble = None  # it answers
            self._failed(credential, unavailable, inputs)
            trouble = self._in_the_way(credential)
            reason = trouble.reason if trouble else "token_recovery"
            next_ms = None if trouble is None or trouble.stopped else trouble.next_ms
            raise NoTokenNow(reason, str(unavailable), next_ms) from unavailable
        self._trouble = None
        self._succeeded(credential, is_recovery=is_recovery)

    @contextlib.contextmanager
    def _alone(self, credential: _Credential, deadline: float | None) -> Iterator[None]:
        """One process at a time; the others find what it got."""
        if not self._minter.is_kept:
            yield
            return
        end = min(time.monotonic() + _LONGEST_MINT_S, math.inf if deadline is None else deadline)
        try:
            while True:
                left_s = max(0.0, end - time.monotonic())
                with self._cache.alone(credential.agent, min(left_s, _LOOK_UP_S)) as is_ours:
                    if is_ours:
                        yield
                        return
                if left_s <= _LOOK_UP_S or self._aborted:
                    raise TokenUnavailable("another process is getting one, and has not ended in time")
        except StoreError as error:
            raise TokenUnavailable(str(error)) from error

    def _found(self, credential: _Credential, refused: str) -> bool:
        """Take over a token that another process, or an earlier one of ours, was given."""
        kept = self._cache.read(credential.agent, self._minter.inputs()) if self._minter.is_kept else None
        if kept is None or fingerprint(kept[0]) in {refused, credential.held and credential.held.name}:
            return False
        now_ms, wall_ms = self._clock.monotonic_ms(), self._clock.wall_ms()
        found = held(kept[0], fingerprint(kept[0]), kept[1], wall_ms=wall_ms, now_ms=now_ms, proven=True)
        if (kept[1] is not None and kept[1] <= wall_ms) or found.is_due(now_ms):
            return False
        self._tell(found.token)
        credential.held = found
        return True

    def _mint(self, credential: _Credential, deadline: float | None) -> None:
        grant = self._minter.mint(credential.agent, deadline=deadline)
        self._tell(grant.token)
        if self._minter.is_kept:
            self._cache.write(credential.agent, self._minter.inputs(), grant.token, grant.expires_at_ms)
        credential.held = held(
            grant.token,
            fingerprint(grant.token),
            grant.expires_at_ms,
            wall_ms=self._clock.wall_ms(),
            now_ms=self._clock.monotonic_ms(),
            proven=False,
        )

    def _succeeded(self, credential: _Credential, *, is_recovery: bool) -> None:
        credential.recovered_at_ms = self._clock.wall_ms()
        self._note(credential, "ok")
        if is_recovery or credential.told:
            self._log("token_recovered", {**_of(credential), "source": self.describe()})
        credential.told = ""

    def _failed(self, credential: _Credential, error: TokenUnavailable, inputs: str = "") -> None:
        of_agent = error.of_agent
        trouble = after_failure(
            credential.trouble if of_agent else self._trouble,
            str(error),
            schedule=self._schedule,
            chance=self._rng.random(),
            now_ms=self._clock.monotonic_ms(),
            wall_ms=self._clock.wall_ms(),
            retry_after_ms=error.retry_after_ms,
            stopped=error.stops,
            inputs=inputs or self._minter.inputs(),
        )
        if of_agent:
            credential.trouble = trouble
        else:
            self._trouble = trouble
        self._note(credential, trouble.state, trouble)
        if credential.told != trouble.detail:
            credential.told = trouble.detail
            level = "error" if trouble.stopped else "warning"
            fields = {**_of(credential), "source": self.describe(), "detail": trouble.detail}
            self._log(
                "token_stopped" if trouble.stopped else "token_recovery_failed", {"level": level, **fields}
            )

    # What people are told ----------------------------------------------------------------------------------

    def _note_all(self, state: str) -> None:
        self._facts.write({FOR_ALL: {"source": self.describe(), "state": state, "detail": ""}})

    def _note(self, credential: _Credential, state: str, trouble: Trouble | None = None) -> None:
        fact = self._fact(credential, state, trouble)
        facts: dict[str, Any] = {}
        if self.one_per_agent:
            facts[f"token:{credential.agent}"] = fact
        is_ours = trouble is self._trouble if trouble else state == "ok" and self._trouble is None
        if is_ours or not self.one_per_agent:
            about_all = {"expiresAt": None} if self.one_per_agent else {}
            facts[FOR_ALL] = {"source": self.describe(), **fact, **about_all}
        self._facts.write(facts)

    def _fact(self, credential: _Credential, state: str, trouble: Trouble | None) -> Mapping[str, Any]:
        have, offset_ms = credential.held, self._clock.wall_ms() - self._clock.monotonic_ms()
        is_good = have is not None and not have.refused and have.expires_ms is not None
        waits = trouble is not None and not trouble.stopped
        return {
            "state": state,
            "detail": trouble.detail if trouble else "",
            "since": trouble.since_ms if trouble else self._clock.wall_ms(),
            "failures": trouble.failures if trouble else 0,
            "nextTryAt": trouble.next_ms + offset_ms if trouble and waits else None,
            "inputs": trouble.inputs if trouble else "",
            "expiresAt": have.expires_ms + offset_ms if is_good and have and have.expires_ms else None,
            "recoveredAt": credential.recovered_at_ms,
        }


def _of(credential: _Credential) -> dict[str, Any]:
    return {"agent": credential.agent} if credential.agent else {}
