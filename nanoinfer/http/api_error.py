"""Errors that clients are told.

Every error a client can cause becomes `ApiError` with a status of 4xx and the OpenAI shape
`{"error": {"message", "type", "param", "code"}}`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from logging import Logger
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute


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


class ClientDisconnectedError(Exception):
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


def application(routes: Sequence[BaseRoute], hint: str = "") -> Starlette:
    """The routes as an application, which answers for all other paths and methods as well; `hint`
    ends what it says of those."""

    async def no_route(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException), "registered for that class"
        message = f"{request.method} {request.url.path}: {error.detail}{hint}"
        response = ApiError(error.status_code, message).response()
        response.headers.update(error.headers or {})  # the methods that are allowed
        return response

    return Starlette(routes=routes, exception_handlers={HTTPException: no_route})


def known_error(
    error: BaseException, statuses: Mapping[type[Exception], int] | None = None
) -> ApiError | None:
    """The answer to an error that was expected: one that says itself what the client is told, or
    that has one of the classes of `statuses`. None for others."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ClientDisconnectedError):
        return ApiError(499, "the client hung up")
    for kind, status in (statuses or {}).items():
        if isinstance(error, kind):
            return ApiError(status, str(error))
    return None


def failure(error: BaseException, log: Logger, failed: str, status: int = 500) -> ApiError:
    """The answer to an error that nobody expected, which is logged: something, `failed`, did."""
    log.error("a request failed", exc_info=error)
    return ApiError(status, f"{failed} failed: {type(error).__name__}: {error}")
