"""What systemd is told of this service (sd_notify(3)), by hand: a few datagrams need no library.

The messages are made by pure functions; `ServiceLink` sends them, and says nothing where no systemd listens.
"""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

from outbox.printable import printable

_SEND_WITHIN_S = 5.0  # a systemd that does not read must not hang us for long
_LONGEST_STATUS_CHARS = 400


def ready(status: str) -> str:
    """Start or reload is done."""
    return f"READY=1\n{status_line(status)}"


def reloading(monotonic_us: int) -> str:
    """A reload begins at this moment of CLOCK_MONOTONIC (needed by Type=notify-reload of systemd 253)."""
    return f"RELOADING=1\nMONOTONIC_USEC={monotonic_us}"


def stopping(status: str, extend_s: float) -> str:
    """The end begins; what is still to do may take `extend_s` longer than TimeoutStopSec= says."""
    return f"STOPPING=1\n{status_line(status)}\n{extend(extend_s)}"


def extend(extend_s: float) -> str:
    """We are still at it: do not kill us within the next `extend_s`."""
    return f"EXTEND_TIMEOUT_USEC={round(extend_s * 1_000_000)}"


def status_line(status: str) -> str:
    """The line that `systemctl status` shows; never more than one, whatever a relay answered."""
    return f"STATUS={printable(status)[:_LONGEST_STATUS_CHARS]}"


WATCHDOG = "WATCHDOG=1"


@dataclass(frozen=True, slots=True)
class ServiceLink:
    """Where systemd listens (None: nowhere), and how often it wants to hear from us (None: never)."""

    address: str | None = None
    watchdog_s: float | None = None

    def tell(self, *messages: str) -> bool:
        """Send these in one datagram; False when nobody listens or it cannot be delivered."""
        if self.address is None:
            return False
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(_SEND_WITHIN_S)
                sender.sendto("\n".join(messages).encode(), _sockaddr(self.address))
        except OSError:
            return False
        return True


def take_link(environ: MutableMapping[str, str], pid: int) -> ServiceLink:
    """The link that systemd set up for the process `pid`. Its variables are removed.

    So no child speaks in our name. A watchdog meant for another process (WATCHDOG_PID) is none
    (sd_watchdog_enabled(3)); an address of another kind than path and abstract is none either.
    """
    address = environ.pop("NOTIFY_SOCKET", "")
    usec, whose = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
    if not address.startswith(("/", "@")):
        return ServiceLink()
    is_ours = whose in {"", str(pid)}
    watchdog_s = int(usec) / 1_000_000 if is_ours and usec.isascii() and usec.isdigit() else 0.0
    return ServiceLink(address, watchdog_s or None)


def _sockaddr(address: str) -> bytes:
    """As the kernel wants it: "@" stands for the NUL of the abstract name space (unix(7))."""
    raw = os.fsencode(address)
    return b"\0" + raw[1:] if raw.startswith(b"@") else raw
