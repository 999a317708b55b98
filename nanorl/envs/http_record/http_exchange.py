"""A request and its answer, and what of them is kept: the key of a request, its redacted URL.

Credentials are never written. Headers such as Authorization and Cookie are no part of a key, so
that a replay needs none; body and URL are, but only inside of a salted hash. Answers lose
Set-Cookie, on the disk and on the way to the client alike: both runs then see the same.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

Headers = tuple[tuple[str, str], ...]  # names in lower case

# RFC 9110, 7.6.1: they are about one connection.
HOP_BY_HOP = frozenset(
    (
        *("connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade"),
        *("proxy-authenticate", "proxy-authorization", "proxy-connection"),
    )
)
_SECRET = re.compile(r"key|token|secret|passw|pwd|auth|sig|session|credential|code", re.IGNORECASE)
HIDDEN = "hidden"


@dataclass(frozen=True, kw_only=True)
class WebRequest:
    """The request of a client.

    WebRequest(method="GET", url="https://api.example.org/items?page=2", headers=(), body=b"")
    """

    method: str
    url: str
    headers: Headers
    body: bytes

    @property
    def encoding(self) -> str:
        """The encoding that is asked for on the client's behalf: lists differ from one version of a
        client to the next, and a record should not."""
        wanted = ",".join(value for name, value in self.headers if name == "accept-encoding")
        return "gzip" if re.search(r"\bgzip\b(?!\s*;\s*q=0(\.0*)?\s*(,|$))", wanted) else "identity"

    def key(self, salt: bytes, key_headers: Sequence[str]) -> str:
        """The key that two requests share if they get the same answer."""
        lines = [self.method, self.url, self.encoding]
        wanted = {name.lower() for name in key_headers}
        lines += sorted(f"{name}: {value}" for name, value in self.headers if name in wanted)
        lines.append(hashlib.sha256(self.body).hexdigest())
        return hmac.new(salt, "\n".join(lines).encode(), hashlib.sha256).hexdigest()

    @property
    def shown_url(self) -> str:
        """The URL as it may be written down: without values that may be secrets."""
        return redacted(self.url)


@dataclass(frozen=True, kw_only=True)
class WebAnswer:
    """The answer that came back: the body as it was sent, compressed where it was, without the
    chunks of the connection."""

    status: int
    reason: str
    headers: Headers
    body: bytes

    @property
    def is_lasting(self) -> bool:
        """Say whether the answer tells something of the question, not of a server's bad minute."""
        return self.status < 500 and self.status not in (408, 425, 429)


def redacted(url: str) -> str:
    """`url` with the values of its query's secrets hidden, and without a fragment."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return "an address that cannot be read"
    pairs = parse_qsl(parts.query, keep_blank_values=True)
    if not any(_SECRET.search(name) for name, _ in pairs):
        return urlunsplit(parts._replace(fragment=""))
    shown = [(name, HIDDEN if _SECRET.search(name) else value) for name, value in pairs]
    return urlunsplit(parts._replace(query=urlencode(shown), fragment=""))


def kept_headers(headers: Headers) -> Headers:
    """The headers of an answer that a client is given, on the first day and on every later one."""
    named = {
        one.strip().lower()
        for name, value in headers
        if name == "connection"
        for one in value.split(",")
    }
    dropped = HOP_BY_HOP | named | {"set-cookie", "set-cookie2", "alt-svc"}
    return tuple((name, value) for name, value in headers if name not in dropped)
