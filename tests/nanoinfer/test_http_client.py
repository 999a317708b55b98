"""The client: whole answers in whatever form, or one error that says why there is none."""

from __future__ import annotations

import asyncio
import base64
import pickle
import socket
from collections.abc import Awaitable, Callable

import pytest

from nanoinfer.http.http_client import HttpClient, NoReplyError

OK = b"HTTP/1.1 200 OK\r\n"
ANSWERS = {
    "a length": OK + b"content-length: 4\r\n\r\nwell",
    "chunks": OK + b"transfer-encoding: chunked\r\n\r\n2\r\nwe\r\n2;x=1\r\nll\r\n0\r\n\r\n",
    "an end": OK + b"\r\nwell",
    "more than asked for": OK + b"content-length: 4\r\n\r\nwell, well",
    "a word before": b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 4\r\n\r\nwell",
}
FAULTS = {
    "nothing": (b"", "RemoteDisconnected"),
    "half": (OK + b"content-length: 9\r\n\r\nwell", "4 bytes read"),
    "half a chunk": (OK + b"transfer-encoding: chunked\r\n\r\n9\r\nwell", "IncompleteRead"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n", "BadStatusLine"),
    "too much": (OK + b"\r\n" + b"x" * 5000, "more than 4096 bytes"),
    "endless headers": (OK + b"a: b\r\n" * 200 + b"\r\n", "more than 100 headers"),
}


def asked(
    answer: bytes, use: Callable[[str], Awaitable[object]], *, is_silent: bool = False
) -> list[bytes]:
    """The requests that a server got while `use` had its address."""
    got: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0]
        got.append(head + await reader.readexactly(int(length or b"0")))
        if is_silent:
            got.append(await reader.read())  # until the client closes
        writer.write(answer)
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            await use(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

    asyncio.run(asyncio.wait_for(run(), 30))
    return got


@pytest.mark.parametrize("form", ANSWERS)
def test_an_answer_is_read_whole_in_every_form(form: str) -> None:
    async def use(place: str) -> None:
        client = HttpClient(address=f"http://{place}/base/", key="k")
        reply = await pickle.loads(pickle.dumps(client)).ask("POST", "/step?n=1", b"{}")
        assert reply == (200, "OK", b"well")

    (request,) = asked(ANSWERS[form], use)
    assert request.startswith(b"POST /base/step?n=1 HTTP/1.1\r\n") and request.endswith(b"\r\n{}")
    assert b"\r\nAuthorization: Bearer k\r\n" in request
    assert request.count(b"\r\nHost: 127.0.0.1:") == 1


def test_a_server_may_leave_open_what_it_was_asked_to_close() -> None:
    """The answer is whole when it has its length: nobody waits for the end of the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK + b"Content-Length:  4\r\nServer: x\r\n\r\nwe")
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(b"ll")
        await reader.read()  # until the client closes
        writer.close()

    async def run() -> None:
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            place = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
            reply = await HttpClient(address=f"http://{place}").ask("GET", "/")
            assert reply == (200, "OK", b"well")

    asyncio.run(asyncio.wait_for(run(), 30))


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_answer_is_one_error(fault: str) -> None:
    answer, message = FAULTS[fault]

    async def use(place: str) -> None:
        with pytest.raises(NoReplyError, match=message) as raised:
            await HttpClient(address=f"http://{place}", max_bytes=4096).ask("GET", "/")
        assert not raised.value.is_away

    asked(answer, use)


def test_a_password_of_the_address_is_sent_and_a_key_that_would_be_a_header_is_not() -> None:
    async def use(place: str) -> None:
        await HttpClient(address=f"http://any:se%20cret@{place}").ask("GET", "/")
        with pytest.raises(NoReplyError, match="Invalid header value"):
            await HttpClient(address=f"http://{place}", key="k\r\nX: y").ask("GET", "/")
        with pytest.raises(NoReplyError, match="control characters"):
            await HttpClient(address=f"http://{place}").ask("GET", "/a b")

    request = asked(ANSWERS["a length"], use)[0]
    assert b"Basic " + base64.b64encode(b"any:se cret") in request and b"@" not in request


def test_who_waits_no_longer_closes_the_connection() -> None:
    async def use(place: str) -> None:
        with pytest.raises(TimeoutError):
            await HttpClient(address=f"http://{place}", timeout_s=0.2).ask("GET", "/")

    assert asked(b"", use, is_silent=True)[1:] == [b""]


def test_a_caller_that_waits_is_served_inside_and_outside_of_a_loop() -> None:
    async def use(place: str) -> None:
        client = HttpClient(address=f"http://{place}")
        inside = asyncio.to_thread(client.ask_now, "GET", "/")
        assert (await inside).body == b"well"
        assert (await asyncio.to_thread(asyncio.run, in_loop(client))) == b"well"

    async def in_loop(client: HttpClient) -> bytes:
        return client.ask_now("GET", "/").body

    assert len(asked(ANSWERS["chunks"], use)) == 2


@pytest.mark.parametrize("host", ["nobody.invalid", "a" * 70 + ".example", "127.0.0.1"])
def test_where_nobody_listens_the_error_says_so(host: str) -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        client = HttpClient(address=f"http://{host}:{deaf.getsockname()[1]}", timeout_s=20)
        with pytest.raises(NoReplyError) as raised:
            client.ask_now("GET", "/")
    assert raised.value.is_away
