"""Servers that somebody else started, by their addresses: whose they are, and whether they will do.

server_at("http://gpu7:8000", key_file)          a nanoinfer.server
server_at("vllm+http://gpu7:8000", key_file)     another project's, which is imported for it
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from nanoinfer.http.api_key import read_key
from nanorl.distributed.roles.http_replica import HttpReplica
from nanorl.distributed.roles.replica_clients import ReplicaLost

_CHECK_S = 30.0  # a server that is busy answers between two steps


def server_at(address: str, key_file: Path | None) -> HttpReplica:
    """The client of a server; `ValueError` for an address or a key file that cannot be. Before the
    address stands whose server it is, where it is another project's: vllm+http://gpu7:8000."""
    key = read_key(key_file, flag="--rollout.api-key-file")
    engine, _, scheme = address.partition("://")[0].rpartition("+")
    url = address if not engine else f"{scheme}://{address.partition('://')[2]}"
    return _client_of(engine, address)(url=url, api_key=key)


def _client_of(engine: str, address: str) -> type[HttpReplica]:
    if not engine:
        return HttpReplica
    if engine == "vllm":
        from nanorl.distributed.roles.vllm_replica import VllmReplica  # here: few runs need it

        return VllmReplica
    if engine == "sglang":
        from nanorl.distributed.roles.sglang_replica import SglangReplica  # here: few runs need it

        return SglangReplica
    raise ValueError(
        f"--rollout.addresses {address}: {engine}+ is no engine that is known; write vllm+http://, "
        "sglang+http://, or http:// for a nanoinfer.server"
    )


def check_servers(
    addresses: Sequence[str], key_file: Path | None, temperature: float = 1.0
) -> None:
    """`ValueError` unless all of them answer, and can draw rollouts at this temperature. For
    whoever has no event loop yet."""

    async def ask(server: HttpReplica) -> None:
        try:
            await replace(server, timeout_s=_CHECK_S).ready(temperature)
        except (ReplicaLost, RuntimeError, ValueError) as error:
            raise ValueError(
                f"--rollout.addresses {server.url}: no {server.engine} that can be used "
                f"({error}); start one there, with the key of --rollout.api-key-file, or leave it "
                "out"
            ) from None

    async def ask_all() -> None:
        for server in servers:
            await ask(server)

    servers = [server_at(address, key_file) for address in addresses]
    asyncio.run(ask_all())
