"""`HttpClient`: one request over one connection, with limits of time and size.

    client = HttpClient("http://127.0.0.1:8000", key, timeout_s=60)
    reply = await client.ask("POST", "/heartbeat", b"{}")
    reply = client.ask_now("GET", "/health")                 # outside of coroutines

The messages are those of http.client, the waiting is asyncio's: whoever cancels a call closes its
connection, by which the server knows. No redirect is followed, and no proxy of the environment is
asked: it could not reach this machine.
Left out: connections that are kept, streams, cookies, redirects.
"""

from __future__ import annotations

import asyncio
import base64
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from io import BytesIO
from typing import Any, NamedTuple, cast
from urllib.parse import unquote, urlsplit

_CHUNK_BYTES = 1 << 16
_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d+)[ \t]*(?=\r\n|$)", re.IGNORECASE)
PORTS = {"http": 80, "https": 443}


class HttpReply(NamedTuple):
    """The whole answer to a request."""

    status: int
    reason: str
    body: bytes


class NoReplyError(ConnectionError):
    """There is no whole answer. `is_away`: nobody took the connection, so another try may help."""

    def __init__(self, message: str, *, is_away: bool = False) -> None:
        super().__init__(message)
        self.is_away = is_away


@dataclass(frozen=True)
class HttpClient:
    """The way to one server. It can be pickled."""

    address: str
    """http://host:port, or https, and what stands before every path. A password in it is a key."""
    key: str | None = None
    """Sent as `Authorization: Bearer KEY`."""
    timeout_s: float = 600.0
    """Wall-clock limit of a call, from connecting to the last byte."""
    max_bytes: int = 1 << 30
    """The most that an answer may bring."""

    async def ask(self, method: str, path: str, body: bytes | None = None) -> HttpReply:
        """The answer, of whatever status; `body` is JSON. `NoReplyError` where there is none,
        `TimeoutError` after `timeout_s`."""
        async with asyncio.timeout(self.timeout_s):
            reader, writer = await self._connect()
            try:
                writer.write(self._request(method, path, body))
                response = HTTPResponse(cast(Any, _Wire(await self._read(reader))), method=method)
                response.begin()
                return HttpReply(response.status, response.reason, response.read())
            except (OSError, ValueError, HTTPException) as error:
                raise _no_reply(error) from error
            finally:
                writer.close()

    def ask_now(self, method: str, path: str, body: bytes | None = None) -> HttpReply:
        """The same for a caller that waits: in a thread where a loop runs here already."""
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self.ask(method, path, body))
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(asyncio.run, self.ask(method, path, body)).result()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        try:
            parts = urlsplit(self.address)
            port = parts.port or PORTS[parts.scheme]
            is_tls = parts.scheme == "https"
            return await asyncio.open_connection(parts.hostname, port, ssl=is_tls or None)
        except (OSError, ValueError) as error:  # a name that is none is a ValueError
            raise _no_reply(error, is_away=True) from error

    def _request(self, method: str, path: str, body: bytes | None) -> bytes:
        parts = urlsplit(self.address)
        headers = {"Host": parts.netloc.rpartition("@")[2], "Connection": "close"}
        if body is not None:
            headers["Content-Type"] = "application/json"
        if self.key:
            headers["Authorization"] = f"Bearer {self.key}"
        elif parts.password:
            named = f"{unquote(parts.username or '')}:{unquote(parts.password)}"
            headers["Authorization"] = f"Basic {base64.b64encode(named.encode()).decode()}"
        wire = _Wire()
        connection = HTTPConnection(parts.hostname or "")
        connection.sock = cast(Any, wire)
        connection.request(method, parts.path.rstrip("/") + path, body, headers)
        return wire.getvalue()

    async def _read(self, reader: asyncio.StreamReader) -> bytes:
        """All that comes until the answer is whole, or the server closes the connection."""
        received = bytearray()
        with suppress(ConnectionError):  # one that did not want the whole body may reset it then
            while part := await reader.read(_CHUNK_BYTES):
                received += part
                if len(received) > self.max_bytes:
                    raise ValueError(f"the answer is more than {self.max_bytes} bytes")
                if _is_whole(received):
                    break
        return bytes(received)


def _is_whole(received: bytearray) -> bool:
    """Say whether as much is there as the head announces: a server may leave a connection open that
    it was asked to close."""
    end = received.find(b"\r\n\r\n")
    size = _LENGTH.search(received, 0, end) if end >= 0 else None
    return size is not None and len(received) >= end + 4 + int(size[1])


class _Wire(BytesIO):
    """A socket to http.client: the bytes that it has written, or those that it may read."""

    sendall = BytesIO.write

    def makefile(self, mode: str) -> BytesIO:
        return self


def _no_reply(error: Exception, *, is_away: bool = False) -> NoReplyError:
    return NoReplyError(f"{type(error).__name__}: {error}", is_away=is_away)
