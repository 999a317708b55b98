"""Times a publication of weights by each transport, against the memory's copy rate.

    rows(num_bytes)    a list of rows; `bash scripts/bench.sh sched` writes them beside its own
    python scripts/bench_weights.py --megabytes 500 [--json FILE]

Rows, in GB of weights per second (bytes of the model / seconds of `Transport.publish`):
    sync-KIND            verified, and copied into the replica's weights
    sync-KIND-serving    until the replica can serve them: on a CPU that packs every matrix again
    first-KIND           the first publication, which plans, connects and opens

Learner and replica are actors of two processes, but for inproc, which is the copy between the two
engines of an inline run (weights/in_process.py). The peer of each row is a plain copy of as
many bytes with as many threads, taken between the publications.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from statistics import median
from typing import Any, get_args

import torch
from bench_output import print_rows, write_json

from nanoengine.config import EngineConfig
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.plan.footprint import weight_bytes
from nanoengine.state.whole_engine import Engine
from nanoinfer.async_engine import AsyncEngine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanorl.distributed.weights.in_process import make_publisher
from nanorl.distributed.weights.offer import Offer, WeightReceiver, WeightSender
from nanorl.distributed.weights.transport import Kind, open_transport
from nanosched import Scheduler

Row = dict[str, Any]
REPEATS = 5
TARGETS = {"inproc": 0.7, "shm": 0.4}  # of the copy rate


def config_of(num_bytes: int) -> ModelConfig:
    """A model of about so many bytes in fp32, with the proportions of a small Qwen."""

    def make(num_layers: int) -> ModelConfig:
        return ModelConfig(
            model_type="llama",
            vocab_size=16_384,
            hidden_size=1024,
            intermediate_size=3072,
            num_layers=num_layers,
            num_heads=16,
            num_kv_heads=8,
            head_dim=64,
            tie_word_embeddings=True,
            max_position_embeddings=256,
        )

    base, one = (weight_bytes(make(n), torch.float32) for n in (1, 2))
    return make(max(1, 1 + (num_bytes - base) // (one - base)))


class Learner:
    """The policy's only rank."""

    def __init__(self, config: ModelConfig) -> None:
        model = Transformer(config)
        model.init_weights(seed=0)
        self.engine = Engine(model, EngineConfig(dtype="fp32"))
        self._sender: WeightSender | None = None

    def ready(self) -> None:
        """Answers once the actor is there."""

    def send(self, sender: WeightSender, version: int) -> Offer:
        self._sender = self._sender or sender
        return self._sender.send(self.engine, version)


class Replica:
    """An inference engine. Without `is_packing` what `update_weights` does after the copy, which is
    the same for every transport, is left out."""

    def __init__(self, config: ModelConfig) -> None:
        self.engine = LLMEngine(Transformer(config), InferConfig(num_blocks=4))
        self._repack = self.engine.model.repack
        self._receiver: WeightReceiver | None = None

    def ready(self) -> None:
        """Answers once the actor is there."""

    def load(self, receiver: WeightReceiver, offer: Offer, is_packing: bool) -> float:
        start = time.perf_counter()
        self._receiver = self._receiver or receiver
        self.pack(is_packing)
        self.engine.update_weights(
            self._receiver.receive(offer), offer.version, is_finite=self._receiver.refuses_nan
        )
        return time.perf_counter() - start

    def pack(self, is_packing: bool) -> None:
        """Whether an update packs the matrices again."""
        model: Any = self.engine.model
        model.repack = self._repack if is_packing else lambda: None


def rows(num_bytes: int) -> list[Row]:
    """Every transport, with weights of about `num_bytes`."""
    config = config_of(num_bytes)
    found = asyncio.run(_measure_inline(config))
    for kind in get_args(Kind):
        if kind == "cuda_ipc":
            continue  # of GPUs
        found += asyncio.run(_measure(kind, config))
    return found


async def _measure_inline(config: ModelConfig) -> list[Row]:
    learner, replica = Learner(config), Replica(config)
    async with AsyncEngine(replica.engine) as generator:
        publisher = make_publisher(learner.engine, generator)

        async def publish(is_packing: bool) -> float:
            replica.pack(is_packing)
            return await publisher.publish(replica.engine.version + 1)

        return await _rows_of("inproc", config, publish)


async def _measure(kind: Kind, config: ModelConfig) -> list[Row]:
    size = weight_bytes(config, torch.float32)
    transport = open_transport(kind, num_bytes=size, timeout_s=300.0)
    with Scheduler(backend="local") as sched:
        learner = sched.actor(Learner).remote(config)
        replica = sched.actor(Replica).remote(config)
        await asyncio.gather(learner.call(Learner.ready), replica.call(Replica.ready))
        sender = transport.sender(0)
        version = 0

        async def send() -> Offer:
            return await learner.call(Learner.send, sender, version)

        async def publish(is_packing: bool) -> float:
            nonlocal version
            version += 1

            async def load(receiver: WeightReceiver, offer: Offer) -> float:
                return await replica.call(Replica.load, receiver, offer, is_packing)

            report = await transport.publish(send, {"replica": load}, version)
            if not report.loaded:
                raise RuntimeError(f"{kind}: {report}")
            return report.seconds

        found = await _rows_of(kind, config, publish)
    transport.close()
    return found


async def _rows_of(
    kind: str, config: ModelConfig, publish: Callable[[bool], Awaitable[float]]
) -> list[Row]:
    """Publications, and copies of as many bytes between them. `publish` is told whether to pack,
    and returns its seconds."""
    size = weight_bytes(config, torch.float32)
    seconds: dict[str, list[float]] = {"": [], "-serving": []}
    copies = []
    copy_seconds(size)  # touches the memory
    first = await publish(False)
    for _ in range(REPEATS):
        for suffix, is_packing in (("", False), ("-serving", True)):
            seconds[suffix].append(await publish(is_packing))
        copies.append(copy_seconds(size))
    base = {"dtype": "fp32", "threads": torch.get_num_threads(), "unit": "GB/s", "peer": "copy"}
    rate = size / median(copies) / 1e9
    values = {f"sync-{kind}{suffix}": median(taken) for suffix, taken in seconds.items()}
    values[f"first-{kind}"] = first
    return [
        base
        | {"name": name, "value": size / taken / 1e9, "peer_value": rate}
        | {"ratio": size / taken / 1e9 / rate, "bound": None, "bytes": size}
        | ({"target": TARGETS[kind]} if name == f"sync-{kind}" and kind in TARGETS else {})
        for name, taken in values.items()
    ]


def copy_seconds(num_bytes: int) -> float:
    """One copy of so many bytes between tensors that are there already; the fastest of three."""
    source, out = torch.ones(num_bytes // 4), torch.zeros(num_bytes // 4)
    found = []
    for _ in range(3):
        start = time.perf_counter()
        out.copy_(source)
        found.append(time.perf_counter() - start)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description="Weight transports against a plain copy.")
    parser.add_argument("--megabytes", type=int, default=500)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = rows(args.megabytes * 1_000_000)
    print_rows(found)
    if args.json is not None:
        write_json(args.json, found)


if __name__ == "__main__":
    main()
