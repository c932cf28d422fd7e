"""`python -m relay_client.reference`: the reference relay from a command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from relay_client.reference.server import serve


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve as told; print `listening URL` once connections are taken; return the exit status."""
    options = _parser().parse_args(arguments)
    tokens = list(options.token)
    for file in options.token_file:
        tokens += (sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")).split()
    return serve(
        options.host,
        options.port,
        options.db,
        tokens,
        ready=_announce,
        paths=options.path,
        runtime_token_ttl_s=options.runtime_token_ttl_s,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m relay_client.reference", description=__doc__)
    parser.add_argument(
        "--db", required=True, metavar="FILE", help="the SQLite file; made when it is not there"
    )
    parser.add_argument("--port", type=int, default=4850, help="0 takes a free port (default: 4850)")
    parser.add_argument("--host", default="127.0.0.1", help="the address to bind (default: loopback only)")
    parser.add_argument(
        "--token", action="append", default=[], help="a token to accept; without any, none is asked for"
    )
    parser.add_argument(
        "--token-file",
        action="append",
        default=[],
        metavar="FILE",
        help="tokens to accept, one a line; - reads stdin",
    )
    parser.add_argument(
        "--path", action="append", default=[], metavar="/api/…", help="a further path, for a custom kind"
    )
    parser.add_argument(
        "--runtime-token-ttl-s", type=int, default=3600, metavar="S", help="how long a minted token lives"
    )
    return parser


def _announce(url: str) -> None:
    sys.stdout.write(f"listening {url}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
