"""BLAKE2b (RFC 7693) alone: `hashlib` loads OpenSSL beside it, which every call of a hook would wait for."""

from __future__ import annotations

try:
    from _blake2 import blake2b
except ImportError:  # an interpreter that keeps it elsewhere
    from hashlib import blake2b

__all__ = ["blake2b"]
