"""Who may call a server: keys in files, the routes that a key opens, and callers without one.

    --api-key-file     what clients of the model send: everything but the routes of control
    --admin-key-file   what the owner of the weights sends: everything

With either file every route asks for a key, but for the open ones. Without any the server answers
this machine alone, no page of another site, and keeps the routes of control closed.
A key is sent as OpenAI's clients do (`Authorization: Bearer KEY`), as Anthropic's (`x-api-key:
KEY`), or as a password, whatever the name (`http://any:KEY@host:port`): clients that know of no key
take such an address.
Left out: users, quotas, keys that expire.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import ipaddress
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from starlette.requests import Request

from nanoinfer.server.http_io import ApiError

LOG = logging.getLogger("nanoinfer.http")


@dataclass(frozen=True)
class Access:
    """The keys of a server, and the names by which callers without one may call it."""

    api_key: str | None = None
    admin_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()

    def check(self, request: Request, *, is_control: bool) -> None:
        """ApiError for a request that may not be answered."""
        if self.api_key is None and self.admin_key is None:
            self._check_local(request)
        keys = [self.admin_key] if is_control else [self.api_key, self.admin_key]
        opening = [key for key in keys if key is not None]
        if is_control and not opening:
            raise ApiError(
                403, "closed; start the server with the admin's API key (--admin-key-file)"
            )
        if not opening:
            return
        given = list(given_keys(request))
        if _is_one_of(given, opening):
            return
        if is_control and self.api_key is not None and _is_one_of(given, [self.api_key]):
            raise ApiError(403, "this route is the admin's; send the key of --admin-key-file")
        raise ApiError(401, "wrong or missing API key; send Authorization: Bearer KEY")

    def _check_local(self, request: Request) -> None:
        if is_foreign_page(request):  # any web page can send requests to loopback
            raise ApiError(403, "a browser's request; start the server with an API key")
        host = request.url.hostname or ""
        if not is_loopback(host) and host not in self.allowed_hosts:
            # a page's own name that was made to lead here, which no Origin tells
            raise ApiError(403, f"host {host!r} is not this server's; add it to allowed_hosts")


def _is_one_of(given: list[str], keys: list[str]) -> bool:
    """Compared in a time that does not tell how much of a key is right."""
    return any(hmac.compare_digest(one.encode(), key.encode()) for one in given for key in keys)


def given_keys(request: Request) -> Iterator[str]:
    """The keys that a request sends, in each of the ways that clients know."""
    kind, _, value = request.headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        yield value.strip()
    # A browser that was once given a password sends it with the requests of other pages too.
    if kind.lower() == "basic" and not is_foreign_page(request):
        yield _password(value)
    if "x-api-key" in request.headers:
        yield request.headers["x-api-key"].strip()


def _password(value: str) -> str:
    try:
        return base64.b64decode(value, validate=True).decode().partition(":")[2]
    except (binascii.Error, UnicodeDecodeError):
        return ""


def require_key(host: str, *, has_key: bool) -> None:
    """`ValueError` where a network would be listened to without asking for a key."""
    if not has_key and not is_loopback(host):
        raise ValueError(
            f"--host {host}: is open to the network; give --api-key-file, or listen on 127.0.0.1"
        )


def read_key(file: Path | None, *, flag: str = "--api-key-file") -> str | None:
    """The key that clients must send: the only line of `file`. `ValueError` if it is not one."""
    if file is None:
        return None
    key = read_key_file(file, flag).strip()
    if not key or not key.isascii() or not key.isprintable():
        raise ValueError(f"{flag} {file}: the API key must be one line of ASCII text, not empty")
    return key


def read_key_file(file: Path, flag: str) -> str:
    """The text of a file of keys. `ValueError` if it cannot be read. A warning is logged where
    other users of the machine can read it: they have the keys as well."""
    file = file.expanduser()
    try:
        text = file.read_text(encoding="utf-8")
        mode = file.stat().st_mode
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{flag} {file}: cannot be read ({error})") from None
    if mode & 0o044:
        LOG.warning("%s %s: other users can read this key; chmod 600 it", flag, file)
    return text


def is_foreign_page(request: Request) -> bool:
    """True for a request of a web page that another server, or nobody, has sent. A page of a name
    that was made to lead here is not foreign by this rule: its host is refused as such."""
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] != request.headers.get("host")


def is_loopback(host: str) -> bool:
    """True for a name or address by which this machine calls itself."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
