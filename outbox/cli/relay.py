"""`outbox relay`: the reference relay, for trying things out and for tests."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from outbox.cli.output import clean, emit_json, say
from outbox.errors import ConfigError

EXAMPLE = "outbox relay --port 4850 --db relay.sqlite"

_TOKEN_VARIABLE = "OUTBOX_RELAY_TOKEN"  # noqa: S105 - the name of a variable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Where it listens, what it keeps, whom it lets in; tokens never stand on the command line."""
    parser.add_argument(
        "--db", required=True, metavar="FILE", help="the SQLite file; made when it is not there"
    )
    parser.add_argument("--port", type=_port, default=4850, help="0 takes a free one (default: 4850)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to bind (default: 127.0.0.1)")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        help=f"tokens to accept, one a line (default: ${_TOKEN_VARIABLE}; without any, none is asked for)",
    )
    parser.add_argument(
        "--path", action="append", default=[], metavar="/api/…", help="a further path, for a custom kind"
    )
    parser.add_argument(
        "--refuse",
        action="append",
        default=[],
        metavar="TEXT",
        help="answer 422 to what holds this text, to try out dead letters",
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM or Ctrl-C; 0, 69 when the address is taken, 5 when the file cannot be used."""
    tokens = _tokens(args.token_file)
    from relay_client.reference import serve  # noqa: PLC0415 - a server's weight is for the server

    def ready(url: str) -> None:
        if args.json:
            emit_json({"url": url, "db": args.db})
        else:
            say(*_how_to_use(url, args.db, with_token=bool(tokens)))

    faults = [_refusal(text) for text in args.refuse]
    return serve(args.host, args.port, args.db, tokens, ready=ready, paths=args.path, faults=faults)


def _refusal(text: str) -> dict[str, Any]:
    """The rule of the reference relay that refuses each message with this text, alone or in a batch."""
    because = {"code": "validation_failed", "message": f"This relay takes nothing that holds {text!r}."}
    return {
        "match": {"method": "POST"},
        "action": {"perItem": {"match": {"bodyContains": text}, "status": 422, "body": {"error": because}}},
    }


def _tokens(file: str | None) -> list[str]:
    if file is None:
        return os.environ.get(_TOKEN_VARIABLE, "").split()
    try:
        return Path(file).read_text("utf-8").split()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is no text"
        raise ConfigError(
            f"--token-file {file!r} cannot be read: {reason}. Nothing was started. It holds a token a line."
        ) from error


def _how_to_use(url: str, db: str, *, with_token: bool) -> list[str]:
    token = " --token-file FILE" if with_token else ""
    return [
        f"The reference relay takes events at {url}, and keeps them in {clean(db)}. Ctrl-C ends it.",
        f"To deliver to it:       outbox serve --relay {url}{token}",
        f"To see what it holds:   curl {url}/api/reference/summary",
    ]


def _port(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) <= 65_535):
        raise argparse.ArgumentTypeError(f"{text!r} is no port (0 to 65535)")
    return int(text)
