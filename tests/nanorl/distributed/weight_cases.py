"""Learner ranks and replicas in processes of their own, for the tests of weight transport.

A `Remote` runs one object in a process and calls its methods one after the other; an error comes
back as it was raised, a process that ends is `WorkerDied`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
from parallel_cases import Case
from pipeline_engine_cases import Run, make_engine, whole_model
from pool import PRELOAD
from torch import Tensor

from kernels.transport.checksum import checksum, copy_with_checksums
from nanoengine.formats.hf import export_state
from nanoengine.parallel.meeting_store import MeetingPoint, MeetingStore
from nanoengine.parallel.mesh import Mesh
from nanoengine.state.whole_engine import Engine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanorl.distributed.weights import dist as dist_link
from nanorl.distributed.weights import shm
from nanorl.distributed.weights.offer import Offer, WeightReceiver, WeightSender
from nanosched import WorkerDied


def weights_of(case: Case, seed: int) -> dict[str, Tensor]:
    """The tensors of "version" `seed` of a model: 0 is what `whole_model` gives."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: tensor + seed * 0.01 * torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
        for name, tensor in export_state(whole_model(case))
    }


class Policy:
    """One learner rank."""

    def __init__(self, rank: int, point: MeetingPoint) -> None:
        self._rank = rank
        self._store = MeetingStore(point)
        self._senders: dict[str, WeightSender] = {}
        self._engine: Engine | None = None

    def build(self, case: Case, name: str) -> None:
        mesh = None
        if case.layout.world > 1:
            mesh = Mesh(case.layout, self._rank, self._store, name=name, timeout_s=60)
        self._engine = make_engine(Run(case=case), mesh)

    def change(self, case: Case, seed: int) -> None:
        assert self._engine is not None
        self._engine.load_weights(iter(weights_of(case, seed).items()))
        self._engine.version += 1

    def send(self, sender: WeightSender, version: int) -> Offer:
        assert self._engine is not None
        return self._senders.setdefault(sender.key, sender).send(self._engine, version)

    def send_damaged(self, sender: WeightSender, version: int) -> Offer:
        """Over dist, with checksums that are not those of what is sent."""
        with mock.patch.object(dist_link, "checksum", lambda x: checksum(x) + 1):
            return self.send(sender, version)

    def send_and_die(self, sender: WeightSender, version: int, die_after: int) -> Offer:
        """Over shm; the process is killed when it has copied so many tensors."""

        def copy_and_die(outs: list[Tensor], xs: list[Tensor]) -> list[int]:
            copy_with_checksums(outs[:die_after], xs[:die_after])
            os.kill(os.getpid(), signal.SIGKILL)
            return []

        with mock.patch.object(shm, "copy_with_checksums", copy_and_die):
            return self.send(sender, version)


class Replica:
    """One inference engine; it serves version 0 of the weights."""

    def __init__(self) -> None:
        self._engine: LLMEngine | None = None
        self._receivers: dict[str, WeightReceiver] = {}

    def build(self, case: Case) -> None:
        self._engine = serve(case)

    def load(self, receiver: WeightReceiver, offer: Offer, delay_s: float = 0.0) -> float:
        assert self._engine is not None
        start = time.perf_counter()
        time.sleep(delay_s)
        receiver = self._receivers.setdefault(receiver.key, receiver)
        state = receiver.receive(offer)
        self._engine.update_weights(state, offer.version, is_finite=receiver.refuses_nan)
        return time.perf_counter() - start

    def holds(self) -> tuple[int, dict[str, Tensor]]:
        """(version, weights by their Hugging Face names)"""
        assert self._engine is not None
        return self._engine.version, dict(export_state(self._engine.model))


def serve(case: Case) -> LLMEngine:
    return LLMEngine(whole_model(case), InferConfig(num_blocks=8))


class Remote:
    def __init__(self, cls: type, *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self._connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, cls, args), daemon=True)
        self.process.start()
        theirs.close()

    async def call(self, method: str, *args: Any) -> Any:
        try:
            self._connection.send((method, args))
            is_good, value = await asyncio.to_thread(self._connection.recv)
        except (EOFError, OSError):
            raise WorkerDied("the process ended") from None
        if not is_good:
            raise value
        return value

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def _serve(connection: Connection, cls: type, args: Sequence[Any]) -> None:
    torch.set_num_threads(1)
    found = cls(*args)
    while True:
        try:
            method, arguments = connection.recv()
        except EOFError:
            return
        try:
            answer = (True, getattr(found, method)(*arguments))
        except Exception as error:
            answer = (False, error)
        connection.send(answer)
