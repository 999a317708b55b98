"""Servers of tests that misbehave on their wires: they hang, hang up, flood, or talk nonsense."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import urlsplit

FAULTS = ("hang", "hang up", "flood", "garbage", "500")
FLOOD_BYTES = 24 << 20

Answer = Callable[[bytes, bytes], Awaitable[bytes]]
"""From the head and body of a request to the whole answer."""
Fault = Callable[[bytes, bytes], str]
"""The fault that a request meets; empty: none."""


def http(body: bytes, status: str = "200 OK") -> bytes:
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
    return f"{head}content-length: {len(body)}\r\nconnection: close\r\n\r\n".encode() + body


@contextlib.asynccontextmanager
async def misbehaving(answer: Answer, fault: Fault) -> AsyncIterator[str]:
    """The address of a server that answers one request on each connection."""
    serving: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if line)
            body = await reader.readexactly(int(fields.get(b"content-length", b"0")))
            chosen = fault(head, body)
            if chosen == "hang":
                await asyncio.sleep(600)
            elif chosen == "flood":
                writer.write(http(b"[" * FLOOD_BYTES))
                await writer.drain()
            elif chosen == "garbage":
                writer.write(http(b'{"total": NaN, "episode": 7, "choices": "many"}'))
            elif chosen == "500":
                writer.write(http(b'{"error": {"message": "oh"}}', "500 Oh"))
            elif not chosen:
                writer.write(await answer(head, body))
                await writer.drain()
        except (OSError, EOFError):
            pass  # the client has gone
        finally:
            writer.close()

    def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.create_task(serve(reader, writer))
        serving.add(task)
        task.add_done_callback(serving.discard)

    server = await asyncio.start_server(begin, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in list(serving):
            task.cancel()
        await asyncio.gather(*serving, return_exceptions=True)
        await server.wait_closed()


def passing_on(url: str) -> Answer:
    """What the server at `url` answers."""
    parts = urlsplit(url)

    async def answer(head: bytes, body: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(parts.hostname, parts.port)
        try:
            writer.write(head.replace(b"keep-alive", b"close") + body)
            reply = await reader.readuntil(b"\r\n\r\n")
            length = int(reply.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
            return reply + await reader.readexactly(length)
        finally:
            writer.close()

    return answer
