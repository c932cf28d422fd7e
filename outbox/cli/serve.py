"""`outbox serve`: the daemon in the foreground."""

from __future__ import annotations

import argparse
import os
from typing import Any

EXAMPLE = "outbox serve --relay http://relay.internal:4850 --token-file /etc/outbox/token"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `serve`; the token is never one of them, since command lines can be seen by all."""
    parser.add_argument("--relay", metavar="URL", help="the relay's address")
    parser.add_argument(
        "--token-file", metavar="FILE", help="a file with the token, read again when it changes"
    )
    parser.add_argument(
        "--socket", metavar="PATH", help="where the local socket lies (default: STATE/outbox.sock)"
    )
    parser.add_argument(
        "--http", metavar="HOST:PORT", help="serve the local HTTP by TCP too, on loopback, with a token"
    )


def run(args: argparse.Namespace) -> int:
    """Serve until SIGTERM; 0, or 6 when another daemon is there."""
    from outbox import __version__  # noqa: PLC0415 - the daemon's weight is for the daemon
    from outbox.cli.seeds import seed_advice, seeds_found  # noqa: PLC0415
    from outbox.daemon.activation import take_sockets  # noqa: PLC0415
    from outbox.daemon.logs import configure, log_line, register_secret  # noqa: PLC0415
    from outbox.daemon.sd_notify import take_link  # noqa: PLC0415
    from outbox.daemon.supervisor import Daemon  # noqa: PLC0415
    from outbox.setting_keys import Settings  # noqa: PLC0415
    from outbox.settings import load  # noqa: PLC0415
    from outbox.state_dir import state_dir  # noqa: PLC0415
    from outbox.store.directory import StateDirectory  # noqa: PLC0415

    flags: dict[str, Any] = {
        "relay.url": args.relay,
        "relay.token_file": args.token_file,
        "daemon.socket": args.socket,
        "daemon.http": args.http,
        "daemon.state_dir": args.state_dir,
    }

    def read() -> Settings:
        settings = load(flags, environ=os.environ, config_path=args.config)
        settings.require_relay_url()
        configure(settings.daemon.log_format, settings.daemon.log_level)
        register_secret(settings.relay.token)
        register_secret(settings.daemon.http_token)
        return settings

    link, sockets = take_link(os.environ, os.getpid()), take_sockets(os.environ, os.getpid())
    settings = read()
    state = StateDirectory(state_dir(settings, os.environ))
    state.create(allow_network_fs=settings.daemon.allow_network_fs)
    for path in seeds_found(os.environ):
        log_line("seed_outbox", {"level": "warning", "file": str(path), "detail": seed_advice(path)})
    return Daemon(settings, state, read, __version__, log_line, link=link, sockets=sockets).run()
