"""`ProxyServer`: an HTTP proxy on this machine, for whoever has its token.

Plain requests come with their whole URL. `CONNECT` is granted to every host, because here it leads
nowhere: the proxy answers as that host itself, with a certificate of the run, and so a refusal is
an ordinary HTTP answer with a body that says why. What is answered is answers.py's affair.
Left out: HTTP/2 and WebSockets (501), and answers handed on before they are complete.
"""

from __future__ import annotations

import asyncio
import base64
import ssl
from contextlib import suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit, urlunsplit

import h11

from nanoinfer.http.api_key import is_one_of
from nanorl.envs.http_record.allow import split_host
from nanorl.envs.http_record.answers import Answers
from nanorl.envs.http_record.authority import RunAuthority
from nanorl.envs.http_record.http_exchange import WebAnswer, WebRequest
from nanorl.envs.http_record.refusal import NoAnswerError
from nanorl.envs.http_record.upstream import decoded, encoded

USER = "run"
IDLE_S = 120.0  # a connection that says nothing for so long is closed
_CHUNK_BYTES = 1 << 16
_HEAD_BYTES = 1 << 16


class ProxyServer:
    """Listens on 127.0.0.1, on a port that was free."""

    def __init__(
        self, answers: Answers, authority: RunAuthority, *, token: str, max_bytes: int
    ) -> None:
        self._answers, self._authority, self._max_bytes = answers, authority, max_bytes
        self._secret = base64.b64encode(f"{USER}:{token}".encode()).decode()
        self._server: asyncio.Server | None = None

    async def start(self) -> int:
        """Begin to listen; the port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return int(self._server.sockets[0].getsockname()[1])

    def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            gone = (ConnectionError, ssl.SSLError, h11.ProtocolError, TimeoutError)
            with suppress(*gone, asyncio.CancelledError):  # the last one: the proxy ends
                await self._converse(_Client(reader, writer))
        finally:
            writer.close()

    async def _converse(self, client: _Client) -> None:
        """Answer requests until the connection ends."""
        while (head := await client.next_head()) is not None:
            try:
                if head.method == b"CONNECT":
                    self._check_token(head)
                    await self._tunnel(client, head)
                    continue
                if client.host is None:
                    self._check_token(head)
                request = await self._request(client, head)
                answer = await self._answers.answer(request)
            except NoAnswerError as refused:
                answer = refused.answer(_url(client, head))
                client.is_last = True  # a body may be left unread
            await client.send(answer)
            if not client.begin_next():
                return

    def _check_token(self, head: h11.Request) -> None:
        for name, value in head.headers:
            if name == b"proxy-authorization":
                scheme, _, secret = value.decode("latin-1").partition(" ")
                if scheme.lower() == "basic" and is_one_of([secret.strip()], [self._secret]):
                    return
        raise NoAnswerError(
            407, "token_missing", "was not asked: the proxy's token is missing or wrong"
        )

    async def _tunnel(self, client: _Client, head: h11.Request) -> None:
        try:
            host, port = split_host(head.target.decode("ascii"))
        except ValueError:
            raise NoAnswerError(400, "bad_request", "is no host to connect to") from None
        context = self._authority.context(host)
        await client.become(host, port or 443, context)

    async def _request(self, client: _Client, head: h11.Request) -> WebRequest:
        url = _url(client, head)
        if not _is_whole(url):
            raise NoAnswerError(
                400, "bad_request", "is no address: a proxy is asked for whole URLs"
            )
        if any(name == b"upgrade" for name, _ in head.headers):
            raise NoAnswerError(501, "no_upgrade", "was not asked: WebSockets are not recorded")
        body = await client.body(self._max_bytes)
        method = head.method.decode("ascii")
        return WebRequest(method=method, url=url, headers=decoded(head.headers), body=body)


def _url(client: _Client, head: h11.Request) -> str:
    """The whole URL: as the client wrote it to a proxy, or of the host that it believes to talk to.
    Without the default port and without a name and password, which clients send as a header."""
    target = head.target.decode("latin-1")
    if client.host is not None:
        target = f"https://{client.host}{target}"
    with suppress(ValueError):
        parts = urlsplit(target)
        if parts.hostname:
            name = f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname
            is_default = parts.port in (None, 443 if parts.scheme == "https" else 80)
            place = name.rstrip(".") + ("" if is_default else f":{parts.port}")
            return urlunsplit(parts._replace(netloc=place, path=parts.path or "/", fragment=""))
    return target


def _is_whole(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return False


@dataclass
class _Client:
    """One connection of a client, and the host that it believes to be connected with."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    host: str | None = None  # with its port; None: it knows that this is a proxy
    is_last: bool = False
    method: bytes = b""  # of the request under way
    connection: h11.Connection = field(
        default_factory=lambda: h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)
    )

    async def next_head(self) -> h11.Request | None:
        event = await self._next_event()
        return event if isinstance(event, h11.Request) else None

    async def body(self, max_bytes: int) -> bytes:
        """The body of the request whose head was read. NoAnswerError where it is too large."""
        if self.connection.they_are_waiting_for_100_continue:
            self._write(h11.InformationalResponse(status_code=100, headers=[]))
        data = bytearray()
        while isinstance(event := await self._next_event(), h11.Data):
            data += event.data
            if len(data) > max_bytes:
                limit = f"--http.max-body-mb {max_bytes / (1 << 20):g}"
                raise NoAnswerError(
                    413, "request_too_large", f"was not asked: its body is over {limit}"
                )
        if not isinstance(event, h11.EndOfMessage):
            raise ConnectionError("the client left in the middle of a request")
        return bytes(data)

    async def send(self, answer: WebAnswer) -> None:
        """Write an answer, its length said once."""
        headers = list(answer.headers)
        if not self._is_head() and answer.status not in (204, 304):
            headers = [(name, value) for name, value in headers if name != "content-length"]
            headers.append(("content-length", str(len(answer.body))))
        if answer.status == 407:
            headers.append(("proxy-authenticate", 'Basic realm="nanorl"'))
        if self.is_last:
            headers.append(("connection", "close"))
        self._write(
            h11.Response(
                status_code=answer.status,
                reason=answer.reason.encode("latin-1", "replace"),
                headers=encoded(headers),
            )
        )
        if answer.body and not self._is_head():
            self._write(h11.Data(data=answer.body))
        self._write(h11.EndOfMessage())
        await self.writer.drain()

    def begin_next(self) -> bool:
        """Get ready for another request; False where there can be none."""
        if self.is_last or self.connection.states != {h11.CLIENT: h11.DONE, h11.SERVER: h11.DONE}:
            return False
        self.connection.start_next_cycle()
        self.method = b""
        return True

    async def become(self, host: str, port: int, context: ssl.SSLContext) -> None:
        """Grant a CONNECT: from here on the client talks TLS, with this process as that host."""
        self.writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
        await self.writer.drain()
        async with asyncio.timeout(IDLE_S):
            await self.writer.start_tls(context)
        bare = f"[{host}]" if ":" in host else host
        self.host = f"{bare}:{port}"
        self.connection = h11.Connection(h11.SERVER, max_incomplete_event_size=_HEAD_BYTES)

    async def _next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        while (event := self.connection.next_event()) is h11.NEED_DATA:
            async with asyncio.timeout(IDLE_S):
                data = await self.reader.read(_CHUNK_BYTES)
            self.connection.receive_data(data)
        if isinstance(event, h11.Request):
            self.method = bytes(event.method)
        return event

    def _is_head(self) -> bool:
        return self.method == b"HEAD"

    def _write(self, event: h11.Event) -> None:
        self.writer.write(self.connection.send(event) or b"")
