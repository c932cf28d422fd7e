"""The types of settings: how what stands in a file or a variable becomes a value, and is shown again.

Pure. A value may always be given as text, since variables have nothing else; a file may use TOML's own types.
Each `read` raises Unfit with the rest of a sentence that starts with the setting: "has no scheme; write …".
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from outbox.printable import MASK, has_unprintable, printable, quoted

_WHOLE = re.compile(r"[+-]?[0-9]+")
_MEASURE = re.compile(r"([0-9]{1,40}(?:\.[0-9]{1,9})?) *([A-Za-z]*)")
_HOST = re.compile(r"[\w.~%-]+")
_BARE_ADDRESS = re.compile(r"[\w.-]+(?::[0-9]+)?(?:/[\w./-]*)?")
_BEFORE_HOST = re.compile(r"^([a-z][a-z0-9+.-]*://)?.*@", re.IGNORECASE | re.DOTALL)
_QUERY = re.compile(r"\?.*", re.DOTALL)
_LONGEST_SHOWN_CHARS = 200

_TIME_UNITS = {
    **dict.fromkeys(("ms", "millisecond", "milliseconds"), 0.001),
    **dict.fromkeys(("", "s", "sec", "second", "seconds"), 1),
    **dict.fromkeys(("m", "min", "minute", "minutes"), 60),
    **dict.fromkeys(("h", "hour", "hours"), 3600),
    **dict.fromkeys(("d", "day", "days"), 86_400),
}
_SIZE_UNITS = {
    **dict.fromkeys(("", "b"), 1),
    **dict(zip(("kb", "mb", "gb", "tb"), (10**3, 10**6, 10**9, 10**12), strict=True)),
    **dict(zip(("kib", "mib", "gib", "tib"), (2**10, 2**20, 2**30, 2**40), strict=True)),
}
_FLAGS = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


class Unfit(ValueError):
    """What was given is no value of this setting; the message is the rest of the sentence about it."""


class WrittenFloat(float):
    """A TOML float that remembers how it was written, so that a message can show `1e3` as `1e3`."""

    written: str

    def __new__(cls, written: str) -> Self:
        """Read `written` as `float` does."""
        number = super().__new__(cls, written)
        number.written = written
        return number


class SettingType(Protocol):
    """What a setting may be."""

    def read(self, raw: Any) -> Any:
        """The value of what was given; raises Unfit with the reason why it is none."""

    def write(self, value: Any) -> str:
        """The value as it would stand in a TOML file; secrets as they are."""

    def show(self, raw: Any) -> str:
        """What was given, for a message: one line, secrets masked."""


class _Shown:
    """Writes and shows a value as TOML would have it."""

    def write(self, value: Any) -> str:
        return quoted(value or "") if isinstance(value, str | None) else _toml(value)

    def show(self, raw: Any) -> str:
        text = _toml(raw)
        return text if len(text) <= _LONGEST_SHOWN_CHARS else text[:_LONGEST_SHOWN_CHARS] + "…"


@dataclass(frozen=True, slots=True)
class Text(_Shown):
    """Text; empty means: not set."""

    def read(self, raw: Any) -> str | None:
        """The text without white space around it, or None."""
        if not isinstance(raw, str):
            raise Unfit("is no text; write it in quotes")
        if any(ord(character) < 0x20 or ord(character) == 0x7F for character in raw.strip()):
            raise Unfit("has a control character in it")
        return raw.strip() or None


@dataclass(frozen=True, slots=True)
class FilePath(Text):
    """The path of a file; a relative one in a file of configuration starts from the folder of that file."""


@dataclass(frozen=True, slots=True)
class HostPort(Text):
    """An address to listen at, HOST:PORT; an IPv6 address stands in brackets."""

    def read(self, raw: Any) -> str | None:
        """The address, or None."""
        text = Text.read(self, raw)
        if text is None:
            return None
        host, _, port = text.rpartition(":")
        bare = not host.startswith("[") and ":" in host
        if not host or bare or not (port.isascii() and port.isdigit() and int(port[:6]) < 2**16):
            raise Unfit("is no address to listen at; write HOST:PORT, such as 127.0.0.1:4860 or [::1]:4860")
        return text


@dataclass(frozen=True, slots=True)
class SecretFile(FilePath):
    """The path of a file with a secret; a bare name may be that of a systemd credential."""


@dataclass(frozen=True, slots=True)
class Token(Text):
    """A secret for an Authorization header (RFC 6750 2.1), never shown."""

    def read(self, raw: Any) -> str | None:
        """The token, or None."""
        token = Text.read(self, raw)
        if token and not all("!" <= character <= "~" for character in token):
            raise Unfit("is no token; a token is visible ASCII without spaces")
        return token

    def show(self, raw: Any) -> str:
        """A mask of fixed length."""
        return MASK if raw else '""'


@dataclass(frozen=True, slots=True)
class RelayUrl(Text):
    """The address of a relay."""

    def read(self, raw: Any) -> str | None:
        """The address in one spelling, or None."""
        text = Text.read(self, raw)
        return text and relay_url(text)

    def show(self, raw: Any) -> str:
        """The address; what may be a secret in it (before an @, after a question mark) is masked."""
        return Text.show(self, without_secrets(raw) if isinstance(raw, str) else raw)


def without_secrets(address: str) -> str:
    """An address with a mask in the place of what may be a secret: what is before an @, and the query."""
    masked = _BEFORE_HOST.sub(lambda found: f"{found.group(1) or ''}{MASK}@", address)
    return _QUERY.sub(f"?{MASK}", masked)


def relay_url(text: str) -> str:
    """`text` as a base address: lower-case scheme and host, no slash at the end.

    Raises Unfit with the reason why it is none: no scheme or another than http and https, no host, a port out
    of range, and what a base address cannot have (credentials, a query, a fragment).
    """
    if "://" not in text:
        raise Unfit(f"has no scheme; write http://{text if _BARE_ADDRESS.fullmatch(text) else 'HOST:PORT'}")
    if has_unprintable(text) or any(character.isspace() for character in text):
        raise Unfit("has white space or a control character in it")
    try:
        parts = urlsplit(text)
        host = parts.hostname or ""
    except ValueError:
        raise Unfit("is no address; write http://HOST:PORT") from None
    if parts.scheme not in {"http", "https"}:
        raise Unfit("has a scheme that is not spoken here; use http or https")
    if "@" in parts.netloc:
        raise Unfit("has credentials in it; they belong in relay.token or relay.token_file")
    if "?" in text or "#" in text:
        raise Unfit("has a query or a fragment; a base address has none")
    if ":" in host:
        host = f"[{host}]"
    elif not _HOST.fullmatch(host):
        raise Unfit("has no host; write http://HOST:PORT" if not host else "has no readable host")
    return f"{parts.scheme}://{host}{_port(parts.netloc)}{parts.path.rstrip('/')}"


def _port(netloc: str) -> str:
    port = netloc.rpartition("]")[2].partition(":")[2]
    if not port:
        return ""
    if not (port.isascii() and port.isdigit() and 0 < int(port[:6]) < 65_536 and len(port) < 6):
        raise Unfit("has a port out of range; ports are 1 to 65535")
    return f":{port}"


@dataclass(frozen=True, slots=True)
class SecretUrl(Token):
    """An http or https address that is a secret as a whole: whoever knows it may post there. Never shown."""

    def read(self, raw: Any) -> str | None:
        """The address as it was given, or None."""
        text = Token.read(self, raw)
        if text is None:
            return None
        try:
            parts = urlsplit(text)
            known = parts.scheme in {"http", "https"} and parts.hostname and parts.port != 0
        except ValueError:
            known = False
        if not known:
            raise Unfit("is no address; write https://HOST/PATH")
        return text


@dataclass(frozen=True, slots=True)
class EndpointUrl(RelayUrl):
    """The whole address of one call, kept as it is given; it may have a query (RFC 6749 3.2)."""

    def read(self, raw: Any) -> str | None:
        """The address, or None."""
        text = Text.read(self, raw)
        if text is not None:
            relay_url(text.partition("?")[0])
        return text


@dataclass(frozen=True, slots=True)
class RelayPath(_Shown):
    """A path at the relay, joined to the base address; an `optional` one may be empty: not set."""

    optional: bool = False

    def read(self, raw: Any) -> str | None:
        """The path."""
        if not isinstance(raw, str):
            raise Unfit("is no text; write it in quotes")
        path = raw.strip()
        if self.optional and not path:
            return None
        if not path.startswith("/") or path.startswith("//"):
            raise Unfit('is no path; it starts with one "/"')
        if "#" in path or not all("!" <= character <= "~" for character in path):
            raise Unfit('is no path; it is visible ASCII without spaces and "#"')
        return path


@dataclass(frozen=True, slots=True)
class Whole(_Shown):
    """A whole number from `low` to `high`."""

    low: int
    high: int

    def read(self, raw: Any) -> int:
        """The number."""
        text = _written(raw)
        if not _WHOLE.fullmatch(text):
            raise Unfit("is no whole number; write it in digits")
        number = int(text[:40])
        if not self.low <= number <= self.high:
            raise Unfit(f"is out of range; from {self.low:,} to {self.high:,}")
        return number


@dataclass(frozen=True, slots=True)
class Size(_Shown):
    """A number of bytes, or text with a unit: 1048576, "1 MiB", "1.5 GB"."""

    low: int
    high: int

    def read(self, raw: Any) -> int:
        """The number of bytes."""
        found = _MEASURE.fullmatch(_written(raw))
        unit = _SIZE_UNITS.get(found.group(2).lower()) if found else None
        if found is None or unit is None or (unit == 1 and "." in found.group(1)):
            raise Unfit('is no size; write a whole number of bytes, or "64 KiB", "512 MiB", "2 GiB"')
        size = round(float(found.group(1)) * unit) if "." in found.group(1) else int(found.group(1)) * unit
        if not self.low <= size <= self.high:
            raise Unfit(f"is out of range; from {self.write(self.low)} to {self.write(self.high)}")
        return size

    def write(self, value: Any) -> str:
        """The largest binary unit that divides it, or the number."""
        for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value and value % size == 0:
                return f'"{value // size} {unit}"'
        return str(value)


@dataclass(frozen=True, slots=True)
class Seconds(_Shown):
    """A number of seconds, or text with a unit: 90, 0.5, "250 ms", "10 min", "24 h", "7 days"."""

    low: float
    high: float

    def read(self, raw: Any) -> float:
        """The number of seconds, to the millisecond."""
        found = _MEASURE.fullmatch(_written(raw))
        unit = _TIME_UNITS.get(found.group(2).lower()) if found else None
        if found is None or unit is None:
            raise Unfit('is no time; write a number of seconds, or "250 ms", "10 min", "24 h", "7 days"')
        seconds = round(float(found.group(1)) * unit, 3)
        if not self.low <= seconds <= self.high:
            raise Unfit(f"is out of range; from {self.write(self.low)} to {self.write(self.high)}")
        return seconds

    def write(self, value: Any) -> str:
        """Whole days, hours or minutes with their unit, else the number of seconds."""
        for unit, size, least in (("days", 86_400, 172_800), ("h", 3600, 3600), ("min", 60, 120)):
            if value >= least and value % size == 0:
                return f'"{value / size:.0f} {unit}"'
        return f"{value:.3f}".rstrip("0").rstrip(".")


@dataclass(frozen=True, slots=True)
class Flag(_Shown):
    """true or false."""

    def read(self, raw: Any) -> bool:
        """The truth."""
        flag = raw if isinstance(raw, bool) else _FLAGS.get(_written(raw).lower())
        if flag is None:
            raise Unfit("is neither true nor false")
        return flag


@dataclass(frozen=True, slots=True)
class Choice(_Shown):
    """One of some words."""

    words: tuple[str, ...]

    def read(self, raw: Any) -> str:
        """The word."""
        word = raw.strip().lower() if isinstance(raw, str) else ""
        if word not in self.words:
            raise Unfit("is not one of " + ", ".join(f'"{known}"' for known in self.words))
        return word


@dataclass(frozen=True, slots=True)
class Names(_Shown):
    """A list of names; in text they stand between commas."""

    def read(self, raw: Any) -> tuple[str, ...]:
        """The names, each once."""
        names = raw.split(",") if isinstance(raw, str) else raw
        if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
            raise Unfit('is no list of names; write ["one", "two"]')
        return tuple(dict.fromkeys(stripped for name in names if (stripped := name.strip())))


@dataclass(frozen=True, slots=True)
class Words(_Shown):
    """A program and its arguments; in text they are split and quoted as in a shell, which is never run."""

    def read(self, raw: Any) -> tuple[str, ...]:
        """The words; none means: not set."""
        try:
            words = shlex.split(raw) if isinstance(raw, str) else raw
        except ValueError:
            raise Unfit("has a quotation mark without its other half") from None
        if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
            raise Unfit('is no command; write ["program", "argument"]')
        if any("\0" in word for word in words) or (words and not words[0].strip()):
            raise Unfit("names no program")
        return tuple(words)


def _written(raw: Any) -> str:
    """A number as it was written, or text; anything else is no number."""
    if isinstance(raw, WrittenFloat):
        return raw.written
    if isinstance(raw, str):
        return raw.strip()
    return "" if isinstance(raw, bool) or not isinstance(raw, int | float) else str(raw)


def _toml(value: Any) -> str:
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, WrittenFloat):
        return value.written
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{printable(name)} = {_toml(item)}" for name, item in value.items()) + "}"
    return printable(str(value))
