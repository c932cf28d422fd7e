"""The words of a command that starts again: with a session to go on with, or fresh. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

_RESUME, _CONTINUE = "--resume", "--continue"
_SHORT = {"-r": _RESUME, "-c": _CONTINUE}
_CLAUDE = "claude"  # short options are claude's own only where it is the command itself


def relaunched(argv: Sequence[str], session_id: str | None) -> list[str]:
    """`argv` for another start: `--resume ID` at the end of its options, or nothing of the kind with None.

    A session that the first start named is named no more. What stands behind `--` is no option.
    """
    end = argv.index("--") if "--" in argv else len(argv)
    options = list(_without_sessions(argv[:end]))
    resume = [] if session_id is None else [_RESUME, session_id]
    return [*options, *resume, *argv[end:]]


def _without_sessions(words: Sequence[str]) -> Iterator[str]:
    is_claude = bool(words) and words[0].rpartition("/")[2] == _CLAUDE
    skip = False
    for number, word in enumerate(words):
        if skip:
            skip = False
            continue
        name = _SHORT.get(word, word) if is_claude else word
        if name == _RESUME:
            skip = number + 1 < len(words) and not words[number + 1].startswith("-")
        elif name != _CONTINUE and not word.startswith(f"{_RESUME}="):
            yield word
