"""Whom to trust over TLS, and who we say we are."""

from __future__ import annotations

import ssl

import httpx


def tls_context(
    ca_file: str | None = None, client_cert: str | None = None, client_key: str | None = None
) -> ssl.SSLContext:
    """A client's context: verifies names and chains, against `ca_file` alone where one is given.

    `client_cert` is a PEM file; it holds the key too unless `client_key` does.

    Raises:
        ValueError: a file is missing or holds no such thing; one line that names it.
    """
    try:
        context = ssl.create_default_context(cafile=ca_file) if ca_file else _usual_trust()
    except OSError as error:
        raise ValueError(f"{ca_file} holds no CA certificates: {_reason(error)}") from None
    if client_cert:
        try:
            context.load_cert_chain(client_cert, client_key, password=_no_password)
        except OSError as error:
            files = f"{client_cert} with {client_key}" if client_key else client_cert
            raise ValueError(f"{files} is no certificate with its key: {_reason(error)}") from None
    context.set_alpn_protocols(["http/1.1"])
    return context


def _usual_trust() -> ssl.SSLContext:
    """The system's certificates, and certifi's for a system without any."""
    context = httpx.create_ssl_context(trust_env=False)
    context.load_default_certs()
    return context


def _no_password() -> str:
    # Without this, OpenSSL would ask on the terminal and wait there for ever.
    raise ValueError("the key of the client certificate is encrypted; it has to be in the clear")


def _reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLError):
        return (error.reason or str(error)).replace("_", " ").lower()
    return (error.strerror or str(error)).lower()
