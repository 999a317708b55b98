"""Router and replicas in processes of their own: real signals, and no request is lost."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from replica_actors import Asker, MortalReplica
from tiny_text import make_text_engine, save_folder

from nanoengine.parallel.rendezvous import open_store
from nanoinfer.config import InferConfig
from nanoinfer.params import SamplingParams
from nanorl.distributed.roles.replica_role import ReplicaRecipe, Seat
from nanosched import ActorHandle, Resources, Scheduler

pytestmark = pytest.mark.xdist_group("processes")

CONFIG = InferConfig(num_blocks=300, max_num_seqs=16, max_batch_tokens=64)
REQUESTS = [
    ([5, 6, i % 4] * 8, SamplingParams(max_tokens=150, seed=i, ignore_eos=True)) for i in range(24)
]


@asynccontextmanager
async def cluster() -> AsyncIterator[Scheduler]:
    sched = Scheduler("local", resources=Resources(num_cpus=8), preload=("replica_actors",))
    try:
        async with asyncio.timeout(200):
            yield sched
    finally:
        sched.close()


def start(sched: Scheduler, folder: Path) -> ActorHandle[MortalReplica]:
    recipe = ReplicaRecipe(folder=folder, device="cpu", infer=CONFIG)
    return sched.actor(MortalReplica).remote(recipe)


async def until_busy(replica: ActorHandle[MortalReplica], num_sampled: int) -> None:
    while (await replica.call(MortalReplica.heartbeat))["sampled_tokens"] < num_sampled:
        await asyncio.sleep(0.005)


def no_load(counters: dict[str, float]) -> bool:
    return not any(value for name, value in counters.items() if name.startswith("load/"))


def test_replicas_killed_hung_drained_and_added_under_load_lose_no_request(tmp_path: Path) -> None:
    save_folder(tmp_path)
    prompts, params = [ids for ids, _ in REQUESTS], [p for _, p in REQUESTS]
    expected = make_text_engine(num_blocks=300).generate(prompts, params)

    async def scenario() -> None:
        async with cluster() as sched:
            replicas = {f"r{i}": start(sched, tmp_path) for i in range(4)}
            pids = [await handle.call(MortalReplica.pid) for handle in replicas.values()]
            for name in ("r0", "r1", "r2"):  # none of them answers before it is lost
                await replicas[name].call(MortalReplica.hold, 100)
            asker = sched.actor(Asker).remote()
            await asker.call(Asker.set_replicas, replicas)
            asked = asker.call(Asker.ask, REQUESTS)
            gone = asker.call(Asker.ask_and_go, [9] * 9, REQUESTS[0][1], 0.02)
            await until_busy(replicas["r0"], 100)
            os.kill(pids[0], signal.SIGKILL)
            await until_busy(replicas["r1"], 100)
            await replicas["r1"].call(MortalReplica.drain)
            sched.kill(replicas["r1"])
            os.kill(pids[2], signal.SIGSTOP)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(replicas["r2"].call(MortalReplica.heartbeat), 0.3)
            sched.kill(replicas["r2"])
            replicas = {"r3": replicas["r3"], "r4": start(sched, tmp_path)}
            await asker.call(Asker.set_replicas, replicas)
            outputs = await asked
            for output, true in zip(outputs, expected, strict=True):
                assert (output.ids, output.logps) == (true.ids, true.logps)
            await gone
            await replicas["r4"].call(MortalReplica.heartbeat)
            counters = await asker.call(Asker.counters)
            assert counters["num_lost"] >= 2 and counters["num_drained"] >= 1, counters
            assert counters["num_open"] == 2 and no_load(counters), counters

    asyncio.run(scenario())


def test_a_caller_that_goes_away_frees_the_replica(tmp_path: Path) -> None:
    save_folder(tmp_path)

    async def scenario() -> None:
        async with cluster() as sched:
            replica, asker = start(sched, tmp_path), sched.actor(Asker).remote()
            await asker.call(Asker.set_replicas, {"r0": replica})
            await replica.call(MortalReplica.hold, 1)
            long = SamplingParams(max_tokens=490, ignore_eos=True)
            assert await asker.call(Asker.ask_and_go, [1, 2], long, 0.05)
            beat = {"num_aborted": 0.0, "num_finished": 0.0}
            while beat["num_aborted"] + beat["num_finished"] == 0:
                beat = await replica.call(MortalReplica.heartbeat)
            assert (beat["num_aborted"], beat["num_finished"]) == (1, 0)
            assert no_load(await asker.call(Asker.counters))

    asyncio.run(scenario())


def test_a_split_replica_that_loses_a_rank_is_lost_as_one(tmp_path: Path) -> None:
    save_folder(tmp_path)
    prompts, params = [ids for ids, _ in REQUESTS[:6]], [p for _, p in REQUESTS[:6]]
    expected = make_text_engine(num_blocks=300).generate(prompts, params)

    async def scenario() -> None:
        store, meeting = open_store()
        async with cluster() as sched:
            recipe = ReplicaRecipe(folder=tmp_path, device="cpu", infer=CONFIG)
            seats = [Seat(rank=rank, tp=2, meeting=meeting, name="r0") for rank in range(2)]
            group = sched.group(MortalReplica, [((recipe,), {"seat": seat}) for seat in seats])
            leader, follower = group.handles
            pid = await follower.call(MortalReplica.pid)
            following = follower.call(MortalReplica.follow)
            go_on = tmp_path / "go-on"
            await leader.call(MortalReplica.hold, 50, go_on)
            asker = sched.actor(Asker).remote()
            await asker.call(Asker.set_replicas, {"split": leader})
            asked = asker.call(Asker.ask, REQUESTS[:6])
            await until_busy(leader, 50)
            os.kill(pid, signal.SIGKILL)
            go_on.touch()
            assert "rank 1" in await group.death
            await asker.call(Asker.set_replicas, {"whole": start(sched, tmp_path)})
            outputs = await asked
            assert [output.ids for output in outputs] == [true.ids for true in expected]
            counters = await asker.call(Asker.counters)
            assert counters["num_lost"] == 6 and no_load(counters), counters
            assert following.error() is not None
        store.close()

    asyncio.run(scenario())
