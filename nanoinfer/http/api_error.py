"""Errors that clients are told.

Every error a client can cause becomes `ApiError` with a status of 4xx and the OpenAI shape
`{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from starlette.responses import JSONResponse


class ApiError(Exception):
    """An error that the client is told, with its HTTP status and the field at fault."""

    def __init__(
        self, status: int, message: str, param: str | None = None, *, code: str | None = None
    ) -> None:
        """`code` is a name of OpenAI's for the kind of error, where it has one."""
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def to_json(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        told = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": told}

    @property
    def headers(self) -> dict[str, str]:
        """Those that go with the status."""
        named = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}}
        return named.get(self.status, {})

    def response(self) -> JSONResponse:
        return JSONResponse(self.to_json(), self.status, self.headers)


class HungUpError(Exception):
    """The client closed its connection."""


@contextmanager
def user_errors() -> Iterator[None]:
    """Inside, a `ValueError` is about what the client asked for."""
    try:
        yield
    except ValueError as error:
        message = str(error)
        name = message.split(":")[0].split("=")[0]
        raise ApiError(400, message, name if name.isidentifier() else None) from None
