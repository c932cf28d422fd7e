"""How the words behind a command are read; apart, so that a hook need not load argparse."""

from __future__ import annotations

import argparse
from difflib import get_close_matches
from typing import NoReturn

from outbox.errors import UsageError

_UNKNOWN = "unrecognized arguments: "
_NEAR = 0.75  # a slip of the hand; --help is not near --relay


class Parser(argparse.ArgumentParser):
    """argparse, whose complaints are ours: one line, exit status 2."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError, with the nearest option for one that is not known."""
        hint = ""
        if message.startswith(_UNKNOWN):
            word = message.removeprefix(_UNKNOWN).split()[0].partition("=")[0]
            near = get_close_matches(word, self._option_string_actions, 1, _NEAR)
            hint = f' Did you mean "{near[0]}"?' if near else ""
        raise UsageError(f"{self.prog}: {message}. Nothing was done.{hint} See: {self.prog} --help")


def new_parser(prog: str, about: str, example: str) -> Parser:
    """A parser without options; argparse may not cut their names short."""
    return Parser(
        prog=prog,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog="example:\n" + "\n".join(f"  {line.strip()}" for line in example.splitlines()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
