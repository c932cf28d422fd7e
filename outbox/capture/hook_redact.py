"""Secrets in what a hook hands over: found by the shapes of common tokens, and blacked out. Pure.

Every pattern takes time in proportion to the text: it begins with a literal, never inside what it has already
looked at, and gives nothing back (possessive quantifiers).
"""

from __future__ import annotations

import re

from outbox.errors import UsageError
from outbox.value import NamedTuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_TOKEN = r"[A-Za-z0-9_-]"  # noqa: S105 - a class of characters
_NOT_INSIDE = r"(?<![A-Za-z0-9_-])"
_BLOCK = "-----BEGIN "


class Shape(NamedTuple):
    """A kind of secret.

    One of the `hints` stands in every text that holds one. Group 1 of the pattern is kept, the rest of what
    it finds goes; without a pattern it is the block of a private key, found by hand.
    """

    name: str
    hints: tuple[str, ...]
    pattern: str | None


DEFAULT_SHAPES: tuple[Shape, ...] = (
    Shape("private-key", ("PRIVATE KEY",), None),
    Shape(
        "github",
        ("ghp_", "gho_", "ghu_", "ghs_", "ghr_", "github_pat_"),
        _NOT_INSIDE + r"()(?:gh[pousr]_[A-Za-z0-9]{20,}+|github_pat_[A-Za-z0-9_]{20,}+)",
    ),
    Shape("gitlab", ("glpat-",), rf"{_NOT_INSIDE}()glpat-{_TOKEN}{{20,}}+"),
    Shape("sk", ("sk-", "sk_live_", "rk_live_"), rf"{_NOT_INSIDE}()(?:sk-|[sr]k_live_){_TOKEN}{{20,}}+"),
    Shape("aws", ("AKIA", "ASIA"), r"(?<![A-Z0-9])()(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])"),
    Shape(
        "aws-secret",
        ("aws_secret_access_key", "AWS_SECRET_ACCESS_KEY", "SecretAccessKey"),
        r"((?:aws_secret_access_key|AWS_SECRET_ACCESS_KEY|SecretAccessKey)[\s\"':=]{1,8})[A-Za-z0-9/+=]{40}",
    ),
    Shape("slack", ("xox", "xapp-"), rf"{_NOT_INSIDE}()(?:xox[abeoprs]|xapp)-[A-Za-z0-9-]{{10,}}+"),
    Shape("slack-hook", ("hooks.slack.com/",), r"(hooks\.slack\.com/)[A-Za-z0-9/_-]{20,}+"),
    Shape("google", ("AIza",), rf"{_NOT_INSIDE}()AIza{_TOKEN}{{35}}"),
    Shape("npm", ("npm_",), rf"{_NOT_INSIDE}()npm_[A-Za-z0-9]{{30,}}+"),
    Shape("hugging-face", ("hf_",), rf"{_NOT_INSIDE}()hf_[A-Za-z0-9]{{30,}}+"),
    Shape("jwt", ("eyJ",), rf"(?<![A-Za-z0-9_.-])()eyJ{_TOKEN}{{10,}}+\.eyJ{_TOKEN}{{10,}}+\.{_TOKEN}*+"),
    Shape(
        "authorization",
        ("earer ", "uthorization"),
        r"((?:[Bb]earer|[Aa]uthorization[\"']?\s{0,3}[:=]\s{0,3}[\"']?(?:[Bb]earer|[Bb]asic|[Tt]oken))\s{1,3})"
        r"[A-Za-z0-9._~+/=-]{12,}+",
    ),
    Shape("url-password", ("://",), r"(://[^\s/:@\"']{0,100}:)[^\s/:@\"']{1,200}(?=@)"),
)


class Redaction:
    """The shapes in use, and how many secrets were blacked out so far: `counts`, by name."""

    def __init__(self, settings: str = "") -> None:
        """Take the default shapes, and what `settings` says: words with commas between.

        `-NAME` leaves out a default shape; any other word is a prefix of tokens that are secret too.

        Raises UsageError when it is asked to leave out what is not there.
        """
        self.counts: dict[str, int] = {}
        words = [word for word in (part.strip() for part in settings.split(",")) if word]
        left_out = {word[1:] for word in words if word.startswith("-")}
        if unknown := left_out - {shape.name for shape in DEFAULT_SHAPES}:
            raise UsageError(f"no secrets are called {min(unknown)!r}")
        own = [_own_shape(word) for word in words if not word.startswith("-")]
        self._shapes = [*(shape for shape in DEFAULT_SHAPES if shape.name not in left_out), *own]

    def suspects(self, text: str) -> list[Shape]:
        r"""The shapes that may be in a JSON text; letters may stand in it as \u00XX."""
        if "\\u00" in text:
            return self._shapes
        return [shape for shape in self._shapes if any(hint in text for hint in shape.hints)]

    def redacted(self, string: str, shapes: Iterable[Shape]) -> str:
        """The string without the secrets of these shapes."""
        for shape in shapes:
            if not any(hint in string for hint in shape.hints):
                continue
            mark = f"[redacted: {shape.name}]"
            if shape.pattern is None:
                string, found = _without_key_blocks(string, mark)
            else:
                string, found = re.subn(shape.pattern, rf"\g<1>{mark}", string)
            if found:
                self.counts[shape.name] = self.counts.get(shape.name, 0) + found
        return string


def _own_shape(prefix: str) -> Shape:
    return Shape(prefix, (prefix,), rf"{_NOT_INSIDE}(){re.escape(prefix)}[A-Za-z0-9._~+/=-]{{4,}}+")


def _without_key_blocks(text: str, mark: str) -> tuple[str, int]:
    """Blocks of PEM (RFC 7468) and OpenPGP private keys, up to the end where one is cut off."""
    pieces, position, found = [], 0, 0
    while (start := text.find(_BLOCK, position)) >= 0:
        label_end = text.find("-----", start + len(_BLOCK))
        label = text[start + len(_BLOCK) : label_end] if label_end >= 0 else ""
        if "PRIVATE KEY" not in label[:60]:
            pieces.append(text[position : start + len(_BLOCK)])
            position = start + len(_BLOCK)
            continue
        end = text.find(f"-----END {label}-----", label_end)
        pieces += [text[position:start], mark]
        position = end + len(label) + len("-----END -----") if end >= 0 else len(text)
        found += 1
    pieces.append(text[position:])
    return "".join(pieces), found
