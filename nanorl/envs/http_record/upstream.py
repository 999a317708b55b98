"""`Upstream`: asks a server, at an address that was checked, with limits of time and size.

A connection for every request, HTTP/1.1, never a redirect: clients follow those themselves, and the
next request is checked like any other. Names are resolved here and the address is connected to, so
a name cannot point elsewhere between the check and the connection.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

import h11

from nanorl.envs.http_record.allow import AllowList
from nanorl.envs.http_record.http_exchange import (
    HOP_BY_HOP,
    Headers,
    WebAnswer,
    WebRequest,
    kept_headers,
)
from nanorl.envs.http_record.refusal import NoAnswerError, not_allowed

_CHUNK_BYTES = 1 << 16
_HEAD_BYTES = 1 << 16
_DROPPED = HOP_BY_HOP | {"host", "content-length", "accept-encoding", "expect"}


class Upstream:
    """The way out of a proxy."""

    def __init__(
        self, allow: AllowList, *, ca_file: Path | None, timeout_s: float, max_bytes: int
    ) -> None:
        self._allow, self._timeout_s, self._max_bytes = allow, timeout_s, max_bytes
        self._tls = ssl.create_default_context()
        if ca_file is not None:
            self._tls.load_verify_locations(ca_file)
        self._tls.set_alpn_protocols(["http/1.1"])

    async def ask(self, request: WebRequest) -> WebAnswer:
        """The server's answer. NoAnswerError where it gives none that can be used."""
        parts = urlsplit(request.url)
        try:
            async with asyncio.timeout(self._timeout_s):
                return await self._ask(request, parts)
        except TimeoutError:
            limit = f"--http.timeout-s {self._timeout_s:g}"
            raise NoAnswerError(504, "upstream_timeout", f"took longer than {limit}") from None
        except (OSError, ssl.SSLError, h11.RemoteProtocolError) as error:
            raise NoAnswerError(502, "upstream_failed", f"gave no answer: {error}") from error

    async def _ask(self, request: WebRequest, parts: SplitResult) -> WebAnswer:
        host = parts.hostname or ""
        is_tls = parts.scheme == "https"
        port = parts.port or (443 if is_tls else 80)
        address = await self._address(host, port)
        reader, writer = await asyncio.open_connection(
            address, port, ssl=self._tls if is_tls else None,
            server_hostname=host if is_tls else None,
        )  # fmt: skip
        try:
            connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_BYTES)
            writer.write(_written(connection, request, parts))
            return await self._read(connection, reader)
        finally:
            writer.close()

    async def _address(self, host: str, port: int) -> str:
        """The first address of the host. NoAnswerError if any of them is one that it must not
        have."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(one[4][0]) for one in found]
        for address in addresses:
            if not self._allow.allows_address(address, host, port):
                raise not_allowed(host, port, f"has the private address {address}", address)
        return addresses[0]

    async def _read(self, connection: h11.Connection, reader: asyncio.StreamReader) -> WebAnswer:
        response: h11.Response | None = None
        body = bytearray()
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                connection.receive_data(await reader.read(_CHUNK_BYTES))
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > self._max_bytes:
                    limit = f"--http.max-body-mb {self._max_bytes / (1 << 20):g}"
                    raise NoAnswerError(502, "answer_too_large", f"sent more than {limit}")
            elif isinstance(event, h11.EndOfMessage):
                assert response is not None, "h11 ends no message that has not begun"
                return WebAnswer(
                    status=response.status_code,
                    reason=response.reason.decode("latin-1"),
                    headers=kept_headers(decoded(response.headers)),
                    body=bytes(body),
                )
            elif isinstance(event, h11.ConnectionClosed) or event is h11.PAUSED:
                raise ConnectionError("the connection was closed")


def decoded(headers: Iterable[tuple[bytes, bytes]]) -> Headers:
    """Header lines as text; h11 has their names in lower case."""
    return tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in headers)


def _written(connection: h11.Connection, request: WebRequest, parts: SplitResult) -> bytes:
    kept = [(name, value) for name, value in request.headers if name not in _DROPPED]
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    headers = [("host", parts.netloc), *kept, ("accept-encoding", request.encoding)]
    if request.body or request.method in ("POST", "PUT", "PATCH"):
        headers.append(("content-length", str(len(request.body))))
    headers.append(("connection", "close"))
    events = (
        h11.Request(method=request.method, target=target, headers=encoded(headers)),
        *([h11.Data(data=request.body)] if request.body else []),
        h11.EndOfMessage(),
    )
    return b"".join(connection.send(one) or b"" for one in events)


def encoded(headers: list[tuple[str, str]]) -> list[tuple[bytes, bytes]]:
    """The inverse of `decoded`."""
    return [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
