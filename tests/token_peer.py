"""A real OAuth token endpoint on loopback, for processes to ask; it rotates refresh tokens."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
from urllib.parse import parse_qs, unquote_plus

from peers import http_response, read_http_request, thread_server

JSON = "content-type: application/json"


class TokenPeer:
    """Gives out `tokens` one after the other, the last one again and again.

    With a `refresh_token` only that one is taken, and each answer brings the next one: R-1, R-2, … `say` may
    answer in its place: (status, value).
    """

    def __init__(self, tokens, refresh_token=None, *, expires_in=3_600):
        self.tokens = list(tokens)
        self.refresh_token = refresh_token
        self.expires_in = expires_in
        self.forms = []
        self.heads = []
        self.say = lambda form: None
        self.url = ""
        self._mutex = threading.Lock()

    def handle(self, connection):
        """Answer each request of a connection."""
        while request := read_http_request(connection):
            head, body = request
            with self._mutex:
                status, value = self._answer(head, dict(_form(body)))
            connection.sendall(http_response(status, json.dumps(value).encode(), JSON))

    def _answer(self, head, form):
        self.heads.append(head.decode())
        self.forms.append(form)
        if said := self.say(form):
            return said
        if self.refresh_token is not None and form.get("refresh_token") != self.refresh_token:
            return 400, {"error": "invalid_grant", "error_description": f"not {form.get('refresh_token')}"}
        token = self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]
        answer = {"access_token": token, "token_type": "Bearer", "expires_in": self.expires_in}
        if self.refresh_token is not None:
            self.refresh_token = f"rotated-{len(self.forms)}-of-{self.refresh_token[:20]}"
            answer["refresh_token"] = self.refresh_token
        return 200, answer


def _form(body):
    return ((name, values[0]) for name, values in parse_qs(body.decode()).items())


def basic_of(head):
    """Client id and secret of an Authorization header, decoded as RFC 6749 2.3.1 has it."""
    line = next(line for line in head.splitlines() if line.lower().startswith("authorization: basic "))
    pair = base64.b64decode(line.rpartition(" ")[2]).decode()
    return tuple(unquote_plus(half) for half in pair.split(":"))


@contextlib.contextmanager
def token_peer(*tokens, refresh_token=None, **options):
    """Serve until the block ends; gives the peer (`url`, `forms`, `say`)."""
    peer = TokenPeer(tokens, refresh_token, **options)
    with thread_server(peer.handle) as server:
        peer.url = f"http://127.0.0.1:{server.port}/oauth/token"
        yield peer
