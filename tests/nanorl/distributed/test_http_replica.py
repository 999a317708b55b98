"""A server at an address is a replica like any other."""

from __future__ import annotations

import asyncio
import pickle
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from serving import KEY, Served, serve
from tiny_text import make_model, make_text_engine
from waiting import until

from kernels.transport.checksum import checksum
from nanoengine.formats.hf import export_state, save_model
from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles.http_replica import HttpReplica
from nanorl.distributed.roles.replica_clients import ReplicaLost
from nanorl.distributed.roles.router import Router
from nanorl.distributed.weights.disk import DiskOffer, DiskReceiver
from nanorl.distributed.weights.offer import BaseVersionMissing, Offer, WeightEntry, WeightsRefused

PARAMS = SamplingParams(
    max_tokens=100,
    seed=7,
    ignore_eos=True,
    repetition_penalty=1.1,
    logit_bias={3: 1.5},
    top_logps=2,
)


def client(served: Served) -> HttpReplica:
    made = HttpReplica(url=f"http://127.0.0.1:{served.port}", api_key=KEY, timeout_s=60)
    return pickle.loads(pickle.dumps(made))


def alone(ids: list[int], params: SamplingParams, seed: int = 0) -> Output:
    return make_text_engine(seed, num_blocks=512).generate([ids], params)[0]


def same(mine: Output, true: Output) -> bool:
    return replace(mine, num_cached_tokens=0) == replace(true, num_cached_tokens=0)


def hold_at(served: Served, count: int) -> None:
    """Once it has sampled so many tokens it samples no more until it is resumed: whoever does
    something to its requests may be late."""
    step = served.engine.step

    def step_and_hold() -> Any:
        finished = step()
        if served.engine.metrics()["sampled_tokens"] >= count:
            served.app.client._can_step.clear()
        return finished

    served.engine.step = step_and_hold  # type: ignore[method-assign]


async def until_sampled(served: Served, count: int) -> None:
    await until(lambda: served.engine.metrics()["sampled_tokens"] >= count)


def test_requests_move_between_servers_and_lose_nothing() -> None:
    """One drains while it serves, another's caller goes away, and a third address is nobody's."""

    async def scenario(first: Served, second: Served, deaf: socket.socket) -> None:
        router = Router(gate=0, wait_s=30)
        nobody = HttpReplica(url=f"http://127.0.0.1:{deaf.getsockname()[1]}")
        router.set_replicas({"a": client(first), "b": client(second), "c": nobody})
        hold_at(first, 30)
        prompts = [[i, 5, 6] for i in range(6)]
        tasks = [asyncio.create_task(router.generate(ids, PARAMS)) for ids in prompts]
        gone = asyncio.create_task(router.generate([9, 9], PARAMS))
        await until_sampled(first, 30)
        gone.cancel()
        await client(first).drain()
        for ids, task in zip(prompts, tasks, strict=True):
            assert same(await task, alone(ids, PARAMS))
        counters = router.counters()
        assert counters["num_drained"] >= 2 and counters["num_lost"] >= 1
        assert counters["num_open"] == 1
        assert (await client(second).heartbeat())["num_finished"] >= 4
        refused = await client(first).generate([1], PARAMS, "late", None)
        assert (refused.finish_reason, refused.ids) == ("abort", [])
        assert first.send("/v1/completions", {"prompt": "a"})[0] == 503
        assert not first.send("/resume", {})[1]["is_drained"]

    with serve() as first, serve() as second, socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # nobody else gets this port, and it does not listen
        asyncio.run(scenario(first, second, deaf))


def test_what_a_server_refuses_and_what_it_loses_are_told_apart() -> None:
    async def scenario(served: Served) -> None:
        replica = client(served)
        with pytest.raises(ValueError, match="outside the vocabulary"):
            await replica.generate([10**6], PARAMS, "r", None)
        with pytest.raises(ValueError, match="answered 401"):
            await replace(replica, api_key="wrong").heartbeat()

        async def die(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"{}")
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
            writer.close()

        async with await asyncio.start_server(die, "127.0.0.1", 0) as dying:
            port = dying.sockets[0].getsockname()[1]
            with pytest.raises(ReplicaLost, match="1 bytes read"):
                await HttpReplica(url=f"http://127.0.0.1:{port}").heartbeat()

    with serve() as served:
        asyncio.run(scenario(served))
    with pytest.raises(ValueError, match="must look like"):
        HttpReplica(url="localhost:8000")


def test_a_server_takes_the_versions_of_a_folder_whole_and_verified(tmp_path: Path) -> None:
    save_model(make_model(1), tmp_path / "v1")
    entries = tuple(
        WeightEntry(name, tuple(tensor.shape), "float32").sealed(checksum(tensor))
        for name, tensor in export_state(make_model(1))
    )
    good = DiskOffer(version=1, entries=entries, folder=str(tmp_path / "v1"))
    torn = replace(good, entries=(replace(entries[0], seal=5), *entries[1:]), version=2)
    receiver = DiskReceiver("key", has_changes=False)

    async def scenario(served: Served) -> None:
        replica = client(served)
        for offer, error, message in (
            (torn, WeightsRefused, "is not what was written"),
            (replace(good, entries=entries[1:]), WeightsRefused, "not among the checksums"),
            (replace(good, folder="/etc"), WeightsRefused, "not below"),
            (replace(good, base_version=0), BaseVersionMissing, "whole versions"),
            (Offer(version=1), WeightsRefused, "transport disk"),
        ):
            with pytest.raises(error, match=message):
                await replica.load_weights(receiver, offer)
        assert (await replica.heartbeat())["version"] == 0
        assert await replica.load_weights(receiver, good) > 0
        await replica.sleep()
        await replica.wake()
        output = await replica.generate([1, 2], PARAMS, "r", None)
        expected = alone([1, 2], PARAMS, seed=1)
        assert (output.ids, output.logps, set(output.versions)) == (
            expected.ids,
            expected.logps,
            {1},
        )

    with serve(weights_root=tmp_path) as served:
        asyncio.run(scenario(served))
