"""One relay over HTTP: the client, what its answers mean, and where its token comes from. Knows no queue."""

from __future__ import annotations

from relay_client.address import Address, parse_base_url
from relay_client.auth import NoToken, StaticToken, TokenFile, TokenSource, TokenUnavailable, fingerprint
from relay_client.classify import (
    read_archive_chunk,
    read_batch,
    read_health,
    read_preparation,
    read_single,
    read_spec,
    read_tool_call,
)
from relay_client.client import RelayClient
from relay_client.headers import decode_agent, encode_agent
from relay_client.mcp_endpoint import McpEndpoint
from relay_client.mcp_era import speaks_other_era
from relay_client.minting import Grant, Minter, TokenEndpoint
from relay_client.oauth import OAuthClient, OAuthTokens, secret_from
from relay_client.reading import Answer, Capabilities, Failure, Origin, Reading, Sort
from relay_client.refresh_token import RefreshTokenFile, write_durably
from relay_client.retry_after import parse_retry_after
from relay_client.runtime_token import RuntimeTokens
from relay_client.token_command import TokenCommand

__all__ = [
    "Address",
    "Answer",
    "Capabilities",
    "Failure",
    "Grant",
    "McpEndpoint",
    "Minter",
    "NoToken",
    "OAuthClient",
    "OAuthTokens",
    "Origin",
    "Reading",
    "RefreshTokenFile",
    "RelayClient",
    "RuntimeTokens",
    "Sort",
    "StaticToken",
    "TokenCommand",
    "TokenEndpoint",
    "TokenFile",
    "TokenSource",
    "TokenUnavailable",
    "decode_agent",
    "encode_agent",
    "fingerprint",
    "parse_base_url",
    "parse_retry_after",
    "read_archive_chunk",
    "read_batch",
    "read_health",
    "read_preparation",
    "read_single",
    "read_spec",
    "read_tool_call",
    "secret_from",
    "speaks_other_era",
    "write_durably",
]
