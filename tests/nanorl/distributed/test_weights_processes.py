"""Weights between real processes: every layout to every replica, deaths, late comers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from parallel_cases import Case
from pipeline_engine_cases import config_of
from weight_cases import Policy, Remote, Replica, weights_of

from nanoengine.parallel.layout import Layout
from nanoengine.parallel.meeting_store import MeetingPoint
from nanoengine.parallel.rendezvous import open_store
from nanoengine.plan.footprint import weight_bytes
from nanorl.distributed.weights import transport as transport_module
from nanorl.distributed.weights.offer import Offer, ReadersBusy, WeightsRefused
from nanorl.distributed.weights.transport import Transport, open_transport

pytestmark = pytest.mark.xdist_group("weights")
LAYOUTS = {
    "single": Case(dtype="fp32"),
    "tp2": Case(dtype="fp32", layout=Layout(tp=2)),
    "pp2": Case(dtype="fp32", layout=Layout(pp=2)),
    "dp2-zero3": Case(dtype="fp32", layout=Layout(dp=2), zero=3),
    "ep2": Case(dtype="fp32", layout=Layout(ep=2), family="qwen3_moe"),
    "stacked-ep2": Case(dtype="fp32", layout=Layout(ep=2), family="gpt_oss", tied=False),
    "stacked-tp2": Case(dtype="fp32", layout=Layout(tp=2), family="gpt_oss", tied=False),
}
ALONE = LAYOUTS["single"]


@dataclass
class Crew:
    """Two learner ranks and two replicas, used by one test after the other."""

    meeting: MeetingPoint
    policies: list[Remote]
    replicas: dict[str, Remote]
    num_built: int = 0

    async def build(self, case: Case) -> None:
        self.num_built += 1
        name = f"build{self.num_built}"
        ranks = self.policies[: case.layout.world]
        await asyncio.gather(*(rank.call("build", case, name) for rank in ranks))
        await asyncio.gather(*(one.call("build", case) for one in self.replicas.values()))

    async def change(self, case: Case, seed: int) -> None:
        ranks = self.policies[: case.layout.world]
        await asyncio.gather(*(rank.call("change", case, seed) for rank in ranks))

    def sending(
        self, case: Case, transport: Transport, version: int, how: str = "send", *args: Any
    ) -> Callable[[], Awaitable[Offer]]:
        senders = [transport.sender(rank) for rank in range(case.layout.world)]

        async def send() -> Offer:
            pairs = zip(self.policies, senders, strict=False)
            calls = [rank.call(how, sender, version, *args) for rank, sender in pairs]
            return (await asyncio.gather(*calls))[0]

        return send

    def loads(self) -> dict[str, Any]:
        return {name: loading(remote) for name, remote in self.replicas.items()}

    async def check(self, case: Case, version: int) -> None:
        """Both replicas hold that version of the weights, bit by bit."""
        for remote in self.replicas.values():
            await holds(remote, case, version)


def loading(remote: Remote, *args: Any) -> Callable[..., Awaitable[float]]:
    async def load(receiver: Any, offer: Offer) -> float:
        return await remote.call("load", receiver, offer, *args)

    return load


async def holds(remote: Remote, case: Case, version: int) -> None:
    found, tensors = await remote.call("holds")
    expected = weights_of(case, version)
    assert found == version
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    store, meeting = open_store()
    policies = [Remote(Policy, rank, meeting) for rank in range(2)]
    replicas = {f"replica-{i}": Remote(Replica) for i in range(2)}
    yield Crew(meeting, policies, replicas)
    for remote in (*policies, *replicas.values()):
        remote.kill()
    store.close()


def opened(kind: Any, case: Case, folder: Path, **options: Any) -> Transport:
    return open_transport(
        kind,
        num_bytes=weight_bytes(config_of(case), torch.float32),
        num_senders=case.layout.world,
        folder=folder,
        **options,
    )


@pytest.mark.parametrize("kind", ["shm", "disk", "dist"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_reaches_every_replica_bit_by_bit(
    crew: Crew, kind: str, layout: str, tmp_path: Path
) -> None:
    case = LAYOUTS[layout]

    async def run() -> None:
        transport = opened(kind, case, tmp_path)
        await crew.build(case)
        for version in (1, 2):
            await crew.change(case, version)
            send = crew.sending(case, transport, version)
            report = await transport.publish(send, crew.loads(), version)
            assert sorted(report.loaded) == sorted(crew.replicas), report
            await crew.check(case, version)
        transport.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["shm", "disk", "dist"])
def test_a_late_replica_gets_the_current_version(crew: Crew, kind: str, tmp_path: Path) -> None:
    async def run() -> None:
        transport = opened(kind, ALONE, tmp_path)
        await crew.build(ALONE)
        first, late = crew.replicas.values()
        with pytest.raises(WeightsRefused, match="no version has been published"):
            await transport.catch_up("late", loading(late))
        await crew.change(ALONE, 3)
        send = crew.sending(ALONE, transport, 3)
        await transport.publish(send, {"first": loading(first)}, 3)
        await transport.catch_up("late", loading(late))
        await crew.check(ALONE, 3)
        transport.close()

    asyncio.run(run())


def test_what_is_damaged_between_two_machines_is_refused(crew: Crew, tmp_path: Path) -> None:
    case = LAYOUTS["tp2"]

    async def run() -> None:
        transport = opened("dist", case, tmp_path)
        await crew.build(case)
        await crew.change(case, 1)
        await transport.publish(crew.sending(case, transport, 1), crew.loads(), 1)
        await crew.change(case, 2)
        send = crew.sending(case, transport, 2, "send_damaged")
        report = await transport.publish(send, crew.loads(), 2)
        assert sorted(report.refused) == sorted(crew.replicas)
        assert all("damaged on the way" in reason for reason in report.refused.values())
        await crew.check(case, 1)
        await transport.publish(crew.sending(case, transport, 2), crew.loads(), 2)
        await crew.check(case, 2)
        transport.close()

    asyncio.run(run())


def test_a_sender_killed_halfway_leaves_the_old_version_serving(crew: Crew, tmp_path: Path) -> None:
    async def run() -> None:
        transport = opened("shm", ALONE, tmp_path)
        await crew.build(ALONE)
        victim = Remote(Policy, 0, crew.meeting)
        crew.policies.insert(0, victim)
        try:
            await victim.call("build", ALONE, "victim")
            await victim.call("change", ALONE, 1)
            await transport.publish(crew.sending(ALONE, transport, 1), crew.loads(), 1)
            offer = transport._offer
            await victim.call("change", ALONE, 2)
            with pytest.raises(Exception, match="process ended"):
                send = crew.sending(ALONE, transport, 2, "send_and_die", 5)
                await transport.publish(send, crew.loads(), 2)
        finally:
            victim.kill()
            crew.policies.remove(victim)
        await crew.check(ALONE, 1)
        # Even a replica that is told of the version that lay there before refuses.
        name, remote = next(iter(crew.replicas.items()))
        with pytest.raises(WeightsRefused, match="not finished"):
            await loading(remote)(transport.receiver(name), offer)
        with pytest.raises(WeightsRefused):
            await transport.catch_up(name, loading(remote))
        await crew.check(ALONE, 1)
        await crew.change(ALONE, 2)  # the restarted learner
        await transport.publish(crew.sending(ALONE, transport, 2), crew.loads(), 2)
        await crew.check(ALONE, 2)
        transport.close()

    asyncio.run(run())


def test_a_replica_that_does_not_answer_holds_the_buffer_until_it_is_removed(
    crew: Crew, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def wait(tasks: Iterable[asyncio.Task[float]], timeout: float) -> Any:
        """The time of the one that hangs begins when the others have answered."""
        tasks = list(tasks)
        if others := [one for one in tasks if one.get_name() != "load hung"]:
            await asyncio.wait(others)
        return await asyncio.wait(tasks, timeout=timeout)

    monkeypatch.setattr(
        transport_module, "asyncio", SimpleNamespace(**vars(asyncio) | {"wait": wait})
    )

    async def run() -> None:
        transport = opened("shm", ALONE, tmp_path)
        await crew.build(ALONE)
        await crew.change(ALONE, 1)
        name, remote = next(iter(crew.replicas.items()))
        hung = Remote(Replica)
        try:
            await hung.call("build", ALONE)
            transport.timeout_s = 0.2
            loads = {name: loading(remote), "hung": loading(hung, 600.0)}
            report = await transport.publish(crew.sending(ALONE, transport, 1), loads, 1)
            assert (list(report.loaded), report.late) == ([name], ("hung",))
            send = crew.sending(ALONE, transport, 2)
            with pytest.raises(ReadersBusy, match="hung"):
                await transport.publish(send, {name: loading(remote)}, 2)
            with pytest.raises(ReadersBusy):  # nor does the sender itself write
                await send()
        finally:
            hung.kill()
        transport.remove("hung")
        transport.timeout_s = 60.0
        await crew.change(ALONE, 2)
        await transport.publish(send, {name: loading(remote)}, 2)
        await holds(remote, ALONE, 2)
        transport.close()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["shm", "dist"])
def test_a_replica_that_dies_is_reported_and_the_others_get_the_next_version(
    crew: Crew, kind: str, tmp_path: Path
) -> None:
    async def run() -> None:
        transport = opened(kind, ALONE, tmp_path, timeout_s=60.0)
        await crew.build(ALONE)
        await crew.change(ALONE, 1)
        victim = Remote(Replica)
        await victim.call("build", ALONE)
        loads = crew.loads() | {"victim": loading(victim)}
        await transport.publish(crew.sending(ALONE, transport, 1), loads, 1)
        await crew.check(ALONE, 1)
        await crew.change(ALONE, 2)
        victim.kill()
        if kind == "shm":
            report = await transport.publish(crew.sending(ALONE, transport, 2), loads, 2)
            assert list(report.dead) == ["victim"]
            assert len(report.loaded) == 2
        else:  # they meet, or nobody is served
            with pytest.raises(WeightsRefused, match="lost or too slow"):
                await transport.publish(crew.sending(ALONE, transport, 2), loads, 2)
            await crew.check(ALONE, 1)
        transport.remove("victim")
        await transport.publish(crew.sending(ALONE, transport, 2), crew.loads(), 2)
        await crew.check(ALONE, 2)
        transport.close()

    asyncio.run(run())
