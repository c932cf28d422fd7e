"""The files that `outbox install` writes: from the units of systemd/, for one command, each with a seal.

A seal in the first line tells a file that nobody has changed since we wrote it: an upgrade may replace it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from outbox.errors import StoreError, UsageError

TEMPLATE_COMMAND = "/opt/relay-outbox/bin/outbox"
SYSTEM_FILES: Mapping[str, str] = {
    "outbox.service": "etc/systemd/system/outbox.service",
    "outbox.socket": "etc/systemd/system/outbox.socket",
    "outbox-flush@.service": "etc/systemd/system/outbox-flush@.service",
    "sysusers.conf": "etc/sysusers.d/relay-outbox.conf",
    "tmpfiles.conf": "etc/tmpfiles.d/relay-outbox.conf",
}
USER_FILES: Mapping[str, str] = {
    "user/outbox.service": "systemd/user/outbox.service",
    "user/outbox-flush@.service": "systemd/user/outbox-flush@.service",
}
WANTS = {  # the links that `systemctl enable` makes, by whether it is a user's
    False: (
        "etc/systemd/system/multi-user.target.wants/outbox.service",
        "etc/systemd/system/sockets.target.wants/outbox.socket",
    ),
    True: ("systemd/user/default.target.wants/outbox.service",),
}

NEW, SAME, OLDER, CHANGED = "new", "same", "older", "changed"
_SEAL = re.compile(r"# Written by outbox install \(\S+\); seal ([0-9a-f]{16})\. To change it: a drop-in\.\n")
_UNFIT = re.compile(r"[\"'\\$\x00-\x1f]")
_PLAIN_WORD = re.compile(r"[\w./@+:=,-]+")


@dataclass(frozen=True, slots=True)
class UnitFile:
    """One file to write: where, and all of its text."""

    path: Path
    text: str

    def standing(self) -> str:
        """What lies there now: nothing ("new"), the "same", an "older" one of ours, or a "changed" one.

        Raises StoreError when it cannot be read.
        """
        try:
            found = self.path.read_text("utf-8", "surrogateescape")
        except FileNotFoundError:
            return NEW
        except OSError as error:
            raise StoreError(
                f"{str(self.path)!r} cannot be read: {error.strerror}. Nothing was written. Look at what "
                "lies there, and move it away."
            ) from error
        if found == self.text:
            return SAME
        return OLDER if is_sealed(found) else CHANGED


def unit_files(below: Path, places: Mapping[str, str], words: Sequence[str], seal_of: str) -> list[UnitFile]:
    """The files of an installation `below` a folder; its units start `words` (a program and its options).

    `seal_of` is the release that writes them.
    """
    folder = template_folder()
    made = []
    for name, place in places.items():
        text = with_command((folder / name).read_text("utf-8"), words)
        made.append(UnitFile(below / place, seal(text, seal_of)))
    return made


def template_folder() -> Path:
    """Where the units lie: beside the packages in a checkout, else where pip put the data of the wheel.

    Raises StoreError when they are not there.
    """
    checkout = Path(__file__).parents[2] / "systemd"
    if (checkout / "outbox.service").is_file():
        return checkout
    try:
        files = distribution("relay-outbox").files or []
    except PackageNotFoundError:
        files = []
    for file in files:
        if file.parts[-3:] == ("relay-outbox", "systemd", "outbox.service"):
            return Path(str(file.locate())).resolve().parent
    raise StoreError(
        "The unit files are not where the package was installed. Nothing was written. Install it anew with "
        "pip, or copy them from the folder systemd/ of the source."
    )


def with_command(text: str, words: Sequence[str]) -> str:
    """A unit that starts `words` in place of the command it was written with. Values only."""
    program, *options = words
    command, more = quoted(program), "".join(f" {quoted(option)}" for option in options)
    text = text.replace(f"{TEMPLATE_COMMAND} serve", f"{command} serve{more}")
    return text.replace(f"{TEMPLATE_COMMAND} flush", f"{command} flush{more}")


def quoted(word: str) -> str:
    """A word as a unit's command line has it (systemd.service(5), "Command lines").

    Raises UsageError for one that no command line can carry.
    """
    if _UNFIT.search(word):
        raise UsageError(
            f"A unit cannot start {word!r}: it has a quote, a backslash, a $ or a control character. Nothing "
            "was written. Use a path without."
        )
    return word if _PLAIN_WORD.fullmatch(word) else '"' + word.replace("%", "%%") + '"'


def seal(text: str, version: str) -> str:
    """The text below a first line by which `is_sealed` knows it."""
    return f"# Written by outbox install ({version}); seal {_digest(text)}. To change it: a drop-in.\n{text}"


def is_sealed(text: str) -> bool:
    """Whether this is a text of `seal` that nobody has changed since."""
    found = _SEAL.match(text)
    return found is not None and found[1] == _digest(text[found.end() :])


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogateescape"), digest_size=8).hexdigest()
