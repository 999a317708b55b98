"""The sockets of our servers."""

import asyncio
import socket

import pytest

from nanoinfer.http.listening import listen


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_no_answer_waits_for_the_client_to_acknowledge_its_head(host: str) -> None:
    """Nagle's algorithm is off in the connections of a server that is given our socket: with it the
    second write of an answer waited 40 ms."""

    async def run() -> int:
        accepted: asyncio.Future[socket.socket] = asyncio.get_running_loop().create_future()

        async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            accepted.set_result(writer.get_extra_info("socket"))
            writer.close()

        try:
            listener = listen(host, 0)
        except ValueError:
            pytest.skip(f"this machine has no {host}")
        server = await asyncio.start_server(serve, sock=listener)
        _, writer = await asyncio.open_connection(host, listener.getsockname()[1])
        option = (await accepted).getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        server.close()
        return option

    assert asyncio.run(asyncio.wait_for(run(), 30)) != 0
