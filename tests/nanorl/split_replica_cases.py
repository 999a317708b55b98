"""What the ranks do in test_replica.py where a replica is split over two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

from pool import Rank
from tiny_text import make_model
from torch import Tensor

from nanoengine.model.hf import export_state
from nanoinfer.config import InferConfig
from nanoinfer.params import Output, SamplingParams
from nanorl.roles.replica import Replica, ReplicaRecipe, Seat

PARAMS = SamplingParams(max_tokens=20, seed=7, ignore_eos=True)


class Offered:
    """An offer of the weights of another seed, and the receiver that brings them."""

    def __init__(self, version: int, seed: int = 1, broken: str = "") -> None:
        self.version = version
        self._seed, self._broken = seed, broken

    def receive(self, offer: Offered) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in export_state(make_model(offer._seed)):
            if name != offer._broken:
                yield name, tensor


def split(rank: Rank, folder: Path, port: int) -> list[Output]:
    """Rank 0 answers, takes new weights and answers again; the other follows."""
    recipe = ReplicaRecipe(folder=folder, device="cpu", infer=InferConfig(num_blocks=64))
    seat = Seat(rank=rank.rank, tp=2, host="127.0.0.1", port=port, name="r0")
    replica = Replica(recipe, seat=seat)

    async def lead() -> list[Output]:
        before = [replica.generate([5, i], PARAMS) for i in range(4)]
        outputs = await asyncio.gather(*before)
        assert (await replica.heartbeat())["num_finished"] == 4
        offer = Offered(3)
        await replica.load_weights(offer, offer)
        outputs.append(await replica.generate([5, 0], PARAMS))
        await replica.close()
        return outputs

    async def follow() -> list[Output]:
        await replica.follow()
        assert replica.metrics()["version"] == 3
        await replica.close()
        return []

    return asyncio.run(lead() if rank.rank == 0 else follow())
