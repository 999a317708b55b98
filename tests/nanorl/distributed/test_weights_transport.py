"""A version is taken over whole or not at all, whatever happens to it on the way."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_cases import Case
from pipeline_engine_cases import Run, config_of, make_engine
from torch import Tensor
from weight_cases import serve, weights_of

from nanoengine.formats.hf import export_state, read_state
from nanoengine.plan.footprint import weight_bytes
from nanoengine.state.whole_engine import Engine
from nanoinfer.engine import LLMEngine
from nanorl.distributed.weights.cuda_ipc import GpuHandle
from nanorl.distributed.weights.delta import apply_changes, changes
from nanorl.distributed.weights.offer import BaseVersionMissing, Offer, ReadersBusy, WeightsRefused
from nanorl.distributed.weights.shm import PADDING_BYTES
from nanorl.distributed.weights.transport import (
    PublishReport,
    Transport,
    open_transport,
)
from nanosched import TaskError, WorkerDied

CASE = Case(dtype="fp32")


class Both:
    """A learner and replicas of one process, and what a transport does between them."""

    def __init__(self, transport: Transport, case: Case = CASE, names: str = "a") -> None:
        self.transport, self.case = transport, case
        self.learner: Engine = make_engine(Run(case=case))
        self.replicas: dict[str, LLMEngine] = {name: serve(case) for name in names}
        self._sender = transport.sender(0)
        self._version = 0

    def change(self, version: int) -> None:
        self._version = version
        self.learner.load_weights(iter(weights_of(self.case, version).items()))
        self.learner.version += 1

    async def send(self) -> Offer:
        return self._sender.send(self.learner, self._version)

    def loading(self, name: str) -> Callable[..., Awaitable[float]]:
        async def load(receiver: Any, offer: Offer) -> float:
            state, engine = receiver.receive(offer), self.replicas[name]
            engine.update_weights(state, offer.version, is_finite=receiver.refuses_nan)
            return 0.0

        return load

    async def publish(self, version: int, names: str = "") -> PublishReport:
        self.change(version)
        loads = {name: self.loading(name) for name in names or self.replicas}
        return await self.transport.publish(self.send, loads, version)

    def check(self, version: int, name: str = "a") -> None:
        engine, expected = self.replicas[name], weights_of(self.case, version)
        assert engine.version == version
        for key, tensor in export_state(engine.model):
            assert torch.equal(tensor, expected[key]), key


def opened(kind: Any, folder: Path, case: Case = CASE, **options: Any) -> Transport:
    size = weight_bytes(config_of(case), torch.float32)
    return open_transport(kind, num_bytes=size, folder=folder, **options)


# -- damage ------------------------------------------------------------------------------------


def flip(transport: Any, offer: Any) -> Offer:
    """One bit of the last tensor."""
    if hasattr(offer, "folder"):
        path = Path(offer.folder) / "model.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
    else:
        entry = offer.entries[-1]
        transport._buffer.view()[entry.begin + entry.num_bytes - 3] ^= 1
    return offer


def drop(transport: Any, offer: Any) -> Offer:
    return replace(offer, entries=offer.entries[:-1])


def rename(transport: Any, offer: Any) -> Offer:
    *rest, last = offer.entries
    return replace(offer, entries=(*rest, replace(last, name="model.layers.9.odd.weight")))


def reshape(transport: Any, offer: Any) -> Offer:
    first, *rest = offer.entries
    return replace(offer, entries=(replace(first, shape=first.shape[::-1]), *rest))


def retype(transport: Any, offer: Any) -> Offer:
    first, *rest = offer.entries
    return replace(offer, entries=(replace(first, dtype="int32"), *rest))


def double(transport: Any, offer: Any) -> Offer:
    return replace(offer, entries=(*offer.entries, offer.entries[0]))


def make_stale(transport: Any, offer: Any) -> Offer:
    return replace(offer, version=offer.version + 1)


def displace(transport: Any, offer: Any) -> Offer:
    first, *rest = offer.entries
    return replace(offer, entries=(replace(first, begin=first.begin + (1 << 40)), *rest))


def cut_short(transport: Any, offer: Any) -> Offer:
    path = Path(offer.folder) / "model.safetensors"
    os.truncate(path, path.stat().st_size // 2)
    return offer


def delete(transport: Any, offer: Any) -> Offer:
    (Path(offer.folder) / "model.safetensors").unlink()
    return offer


COMMON = [flip, drop, rename, reshape, retype, make_stale]


@pytest.mark.parametrize(
    ("kind", "damage"),
    [("shm", damage) for damage in (*COMMON, double, displace)]
    + [("disk", damage) for damage in (*COMMON, cut_short, delete)],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_damaged_version_is_refused_and_the_old_one_serves(
    kind: str, damage: Callable[[Any, Any], Offer], tmp_path: Path
) -> None:
    both = Both(opened(kind, tmp_path))

    async def send_damaged() -> Offer:
        return damage(both.transport, await both.send())

    async def run() -> None:
        await both.publish(1)
        both.change(2)
        loads = {"a": both.loading("a")}
        version = 3 if damage is make_stale else 2
        report = await both.transport.publish(send_damaged, loads, version)
        assert list(report.refused) == ["a"]
        both.check(1)
        assert (await both.publish(4)).loaded
        both.check(4)

    asyncio.run(run())
    both.transport.close()


@pytest.fixture
def shared_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of cuda_ipc is this process's, and its handle the tensor itself."""
    monkeypatch.setattr(GpuHandle, "of", lambda tensor: GpuHandle(torch.Tensor, (tensor,), "gpu"))
    monkeypatch.setattr(GpuHandle, "open", lambda self: self.arguments[0])


@pytest.mark.usefixtures("shared_gpu")
def test_cuda_ipc_keeps_one_buffer_and_waits_for_its_readers(tmp_path: Path) -> None:
    both = Both(opened("cuda_ipc", tmp_path), names="ab")
    transport: Any = both.transport

    async def run() -> None:
        places = set()
        for version in (1, 2):
            await both.publish(version)
            places.add(transport._offer.handle.arguments[0].data_ptr())
            for name in "ab":
                both.check(version, name)
        assert len(places) == 1
        transport._enter("a", 2)
        with pytest.raises(ReadersBusy):
            await both.publish(3)
        transport._answered("a")
        transport._offer = await both.send()
        transport._offer.handle.arguments[0][-PADDING_BYTES - 5] ^= 1
        with pytest.raises(WeightsRefused, match="checksum"):
            await transport.catch_up("a", both.loading("a"))
        both.check(2)

    asyncio.run(run())
    transport.close()


@pytest.mark.parametrize("kind", ["shm", "disk"])
def test_weights_that_are_not_finite_are_refused(kind: str, tmp_path: Path) -> None:
    both = Both(opened(kind, tmp_path))

    async def run() -> None:
        await both.publish(1)
        both.change(2)
        with torch.no_grad():
            both.learner.model.norm[0] = float("nan")
        report = await both.transport.publish(both.send, {"a": both.loading("a")}, 2)
        assert "NaN or infinity" in report.refused["a"]
        both.check(1)

    asyncio.run(run())
    both.transport.close()


# -- what the kinds promise --------------------------------------------------------------------


def test_weights_that_do_not_fit_the_buffer_are_refused_before_anything_is_written() -> None:
    both = Both(open_transport("shm", num_bytes=1))
    with pytest.raises(ValueError, match="num_bytes"):
        large = replace(CASE, shape=(("vocab_size", 9001),))
        both.learner = make_engine(Run(case=large))
        asyncio.run(both.send())


def test_a_folder_is_whole_or_not_there_and_two_versions_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = Both(opened("disk", tmp_path))

    async def run() -> None:
        for version in (1, 2, 3):
            await both.publish(version)
        assert sorted(os.listdir(tmp_path)) == ["v00000002", "v00000003"]
        found = dict(read_state(tmp_path / "v00000003"))  # what a server at an address would read
        expected = weights_of(CASE, 3)
        assert all(torch.equal(found[name], expected[name]) for name in expected)

        def fail(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", fail)
            with pytest.raises(OSError, match="No space"):
                await both.publish(4)
        both.check(3)
        await both.publish(5)
        assert sorted(os.listdir(tmp_path)) == ["v00000003", "v00000005"]

    asyncio.run(run())


# -- changes alone -------------------------------------------------------------------------------


def touch(both: Both, version: int, share: float) -> dict[str, Tensor]:
    """The learner takes a step that changes that share of each tensor."""
    generator = torch.Generator().manual_seed(version)
    state = {}
    for name, tensor in both.learner.export_state():
        moved = torch.rand(tensor.shape, generator=generator) < share
        state[name] = torch.where(moved, tensor + 0.5, tensor)
    both._version = version
    both.learner.load_weights(iter(state.items()))
    both.learner.version += 1
    return state


def test_changes_reach_a_replica_that_has_the_base_and_all_reaches_one_that_has_not(
    tmp_path: Path,
) -> None:
    both = Both(opened("disk", tmp_path, is_delta=True), names="abc")

    async def run() -> None:
        await both.publish(1, "ab")
        state = touch(both, 2, 0.05)
        loads = {"a": both.loading("a")}
        await both.transport.publish(both.send, loads, 2)
        assert os.listdir(tmp_path / "v00000002-changes")
        full = (tmp_path / "v00000001" / "model.safetensors").stat().st_size
        small = (tmp_path / "v00000002-changes" / "changes.safetensors").stat().st_size
        assert small < 0.3 * full
        with pytest.raises(BaseVersionMissing, match="since version 1; here is none"):
            offer = both.transport._offer
            assert offer is not None
            list(open_transport("disk", is_delta=True).receiver("x").receive(offer))
        state = touch(both, 3, 0.05)
        loads = {name: both.loading(name) for name in "ab"}  # b has version 1 still
        report = await both.transport.publish(both.send, loads, 3)
        assert sorted(report.loaded) == ["a", "b"]
        await both.transport.catch_up("c", both.loading("c"))
        for name in "abc":
            engine = both.replicas[name]
            assert engine.version == 3
            assert all(torch.equal(t, state[key]) for key, t in export_state(engine.model))

    asyncio.run(run())


def test_damaged_changes_are_refused_and_the_next_version_comes_whole(tmp_path: Path) -> None:
    both = Both(opened("disk", tmp_path, is_delta=True))

    async def send_damaged() -> Offer:
        offer: Any = await both.send()
        path = Path(offer.folder) / "changes.safetensors"
        data = bytearray(path.read_bytes())
        data[-3] ^= 1
        path.write_bytes(data)
        return offer

    async def run() -> None:
        await both.publish(1)
        touch(both, 2, 0.05)
        report = await both.transport.publish(send_damaged, {"a": both.loading("a")}, 2)
        assert "checksum" in report.refused["a"] or "do not fit" in report.refused["a"]
        both.check(1)
        offer = both.transport._offer
        assert offer is not None
        with pytest.raises(BaseVersionMissing):  # its base is not what it was
            list(both.transport.receiver("a").receive(offer))
        state = touch(both, 3, 0.05)
        report = await both.transport.publish(both.send, {"a": both.loading("a")}, 3)
        assert report.loaded
        engine = both.replicas["a"]
        assert all(torch.equal(t, state[key]) for key, t in export_state(engine.model))

    asyncio.run(run())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_changes_are_of_bits_and_applied_to_the_base_give_the_new_tensor(
    dtype: torch.dtype,
) -> None:
    base = torch.randn(50, 7).to(dtype)
    base[3, 3], base[5, 5] = 0.0, float("nan")
    new = base.clone()
    new[3, 3], new[0, 0], new[49, 6] = -0.0, 9.0, float("inf")
    found = changes(base, new)
    assert found is not None and found[0].dtype == torch.int32
    assert found[0].tolist() == [0, 3 * 7 + 3, 49 * 7 + 6]
    apply_changes(base, *found)
    assert torch.equal(base.view(torch.uint8), new.view(torch.uint8))
    assert changes(base, base + 1) is None
    nothing = changes(base, base)
    assert nothing is not None and len(nothing[0]) == 0
    with pytest.raises(WeightsRefused, match="do not fit"):
        apply_changes(base, torch.tensor([350], dtype=torch.int32), new[:1, 0])


# -- what replicas answer ------------------------------------------------------------------------


def test_a_report_says_who_loaded_refused_and_died(tmp_path: Path) -> None:
    both = Both(opened("shm", tmp_path), names="ab")

    async def dies(*_: Any) -> float:
        raise WorkerDied("killed")

    async def raises(*_: Any) -> float:
        raise TaskError("Replica.load_weights", ValueError("the tensors do not fit the model"))

    async def run() -> None:
        both.change(1)
        loads: dict[str, Any] = {"a": both.loading("a"), "dead": dies, "odd": raises}
        report = await both.transport.publish(both.send, loads, 1)
        assert (list(report.loaded), list(report.dead), list(report.refused), report.late) == (
            ["a"], ["dead"], ["odd"], ()
        )  # fmt: skip
        both.check(1)
        assert not both.transport._ledger.readers()  # type: ignore[attr-defined]
        with pytest.raises(WorkerDied):
            await both.transport.catch_up("dead", dies)
        with pytest.raises(WeightsRefused, match="was asked for"):
            await both.transport.publish(both.send, {}, 7)
        both.check(1)

    asyncio.run(run())
    both.transport.close()


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({"kind": "carrier-pigeon"}, "must be one of shm, cuda_ipc"),
        ({"kind": "shm"}, "needs the model's size"),
        ({"kind": "shm", "num_bytes": 1000, "is_delta": True}, "use disk"),
    ],
)
def test_mistakes_are_named(options: dict[str, Any], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        open_transport(**options)
