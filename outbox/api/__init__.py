"""The local socket and what it tells: status, reasons, and a client of it for commands."""
