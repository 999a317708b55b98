"""Errors of routes: what a handler raises, and paths and methods that are not there."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from logging import Logger

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute

from nanoinfer.http.api_error import ApiError, HungUpError

Handler = Callable[[Request], Awaitable[Response]]


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
    if isinstance(error, HungUpError):
        return ApiError(499, "the client hung up")
    for kind, status in (statuses or {}).items():
        if isinstance(error, kind):
            return ApiError(status, str(error))
    return None


def failure(error: BaseException, log: Logger, failed: str, status: int = 500) -> ApiError:
    """The answer to an error that nobody expected, which is logged: something, `failed`, did."""
    log.error("a request failed", exc_info=error)
    return ApiError(status, f"{failed} failed: {type(error).__name__}: {error}")
