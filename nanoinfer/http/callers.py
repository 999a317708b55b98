"""Who may call a server: with one of its keys, from no foreign web page, by one of its names.

Any web page can send requests to the loopback, and a page's own name can be made to lead here (DNS
rebinding), which no Origin tells. So a server without a key answers its own names alone.
"""

from __future__ import annotations

from collections.abc import Collection

from starlette.requests import Request

from nanoinfer.http.api_error import ApiError
from nanoinfer.http.api_key import given_keys, is_foreign_page, is_one_of
from nanoinfer.http.listening import is_loopback


def sends_key(request: Request, keys: Collection[str]) -> bool:
    """Say whether a request has one of the keys."""
    return is_one_of(given_keys(request.headers), keys)


def check_key(
    request: Request,
    keys: Collection[str],
    told: str = "wrong or missing API key; send Authorization: Bearer KEY",
) -> None:
    """ApiError 401, with what is `told`, for a request without any of the keys."""
    if not sends_key(request, keys):
        raise ApiError(401, told)


def check_keyless(request: Request, allowed_hosts: Collection[str] | None = None) -> None:
    """ApiError 403 for what a server without a key does not answer. `allowed_hosts` are more names
    of it, where there is such an option."""
    if is_foreign_page(request.headers):
        raise ApiError(403, "a browser's request; start the server with an API key")
    fix = "start the server with an API key" if allowed_hosts is None else "add it to allowed_hosts"
    check_host(request, f"server's; {fix}", allowed_hosts or ())


def check_host(
    request: Request, whose: str = "machine's", allowed_hosts: Collection[str] = ()
) -> None:
    """ApiError 403 for a request by another name than this machine's own, and those allowed."""
    host = request.url.hostname or ""
    if not is_loopback(host) and host not in allowed_hosts:
        raise ApiError(403, f"host {host!r} is not this {whose}")
