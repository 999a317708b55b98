"""Which keys open which routes of the server.

    --api-key-file     what clients of the model send: everything but the routes of control
    --admin-key-file   what the owner of the weights sends: everything

With either file every route asks for a key, but for the open ones. Without any the server answers
this machine alone, no page of another site, and keeps the routes of control closed.
"""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request

from nanoinfer.http.api_error import ApiError
from nanoinfer.http.callers import check_key, check_keyless, sends_key


@dataclass(frozen=True)
class Access:
    """The keys of a server, and the names by which callers without one may call it."""

    api_key: str | None = None
    admin_key: str | None = None
    allowed_hosts: tuple[str, ...] = ()

    def check(self, request: Request, *, is_control: bool) -> None:
        """ApiError for a request that may not be answered."""
        if not (self.api_key or self.admin_key):
            check_keyless(request, self.allowed_hosts)
        if not is_control:
            keys = [key for key in (self.api_key, self.admin_key) if key]
            if keys:
                check_key(request, keys)
        elif not self.admin_key:
            raise ApiError(
                403, "closed; start the server with the admin's API key (--admin-key-file)"
            )
        elif not sends_key(request, [self.admin_key]):
            if self.api_key and sends_key(request, [self.api_key]):
                raise ApiError(403, "this route is the admin's; send the key of --admin-key-file")
            check_key(request, [self.admin_key])
