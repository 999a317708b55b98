"""What the ranks do in test_replica.py where a replica is split over two of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from pool import Rank
from tiny_text import make_model
from torch import Tensor

from nanoengine.formats.hf import export_state
from nanoengine.parallel.meeting_store import MeetingPoint
from nanoinfer.config import InferConfig
from nanoinfer.params import Output, SamplingParams
from nanorl.distributed.roles.replica_role import Replica, ReplicaRecipe, Seat
from nanorl.distributed.weights.offer import Offer

PARAMS = SamplingParams(max_tokens=20, seed=7, ignore_eos=True)


@dataclass(frozen=True, kw_only=True)
class SeedOffer(Offer):
    """The weights of another seed, perhaps without one of them."""

    lacks: str = ""


class SeedReceiver:
    """Makes what a `SeedOffer` names; counts how often the same one was asked."""

    key = "seeds"
    refuses_nan = False

    def __init__(self) -> None:
        self.num_received = 0

    def receive(self, offer: Offer) -> Iterator[tuple[str, Tensor]]:
        assert isinstance(offer, SeedOffer)
        self.num_received += 1
        for name, tensor in export_state(make_model(1)):
            if name != offer.lacks:
                yield name, tensor


def split(rank: Rank, folder: Path, meeting: MeetingPoint) -> list[Output]:
    """Rank 0 answers, takes new weights and answers again; the other follows."""
    return (lead if rank.rank == 0 else follow)(folder, meeting)


def lead(folder: Path, meeting: MeetingPoint) -> list[Output]:
    async def run(replica: Replica) -> list[Output]:
        before = [replica.generate([5, i], PARAMS) for i in range(4)]
        outputs = await asyncio.gather(*before)
        assert (await replica.heartbeat())["num_finished"] == 4
        await replica.load_weights(SeedReceiver(), SeedOffer(version=3))
        outputs.append(await replica.generate([5, 0], PARAMS))
        await replica.close()
        return outputs

    return asyncio.run(run(_replica(0, folder, meeting)))


def follow(folder: Path, meeting: MeetingPoint) -> list[Output]:
    async def run(replica: Replica) -> list[Output]:
        await replica.follow()
        assert replica.metrics()["version"] == 3
        await replica.close()
        return []

    return asyncio.run(run(_replica(1, folder, meeting)))


def _replica(rank: int, folder: Path, meeting: MeetingPoint) -> Replica:
    torch.set_num_threads(1)
    recipe = ReplicaRecipe(folder=folder, device="cpu", infer=InferConfig(num_blocks=64))
    return Replica(recipe, seat=Seat(rank=rank, tp=2, meeting=meeting, name="r0"))
