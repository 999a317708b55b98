"""What the ranks do in test_build.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch
from pool import Rank
from torch import Tensor

from nanoengine.build import build_engine, build_value_engine
from nanoengine.config import EngineConfig
from nanoengine.packing import Sample
from nanoengine.parallel.layout import DATA_AXES, WORLD, Layout, SplitConfig
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.rendezvous import join_mesh, open_store
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoengine.state.whole_engine import Engine

SAMPLES = [
    Sample(tokens=[3, 1, 4, 1, 5, 9][:n], loss_mask=[0, *([1] * (n - 1))]) for n in (6, 5, 3, 6)
]


def met(rank: Rank, layout: Layout) -> Mesh:
    """A mesh whose store rank 0 opened inside itself; it is told to the others as an actor would
    be told, as bytes."""
    store = None
    if rank.rank == 0:
        store, meeting = open_store()
        rank.store.set("meeting", pickle.dumps(meeting))
    meeting = pickle.loads(rank.store.get("meeting"))
    mesh = join_mesh(meeting, layout, rank.rank, store=store, name="epoch-1")
    rank.meshes.append(mesh)
    return mesh


def sums_of_ranks(rank: Rank) -> float:
    return met(rank, Layout(dp=2)).sum_float("dp", rank.rank + 1.0)[0]


def train(
    rank: Rank, folder: Path, layout: Layout, config: EngineConfig, split: SplitConfig
) -> tuple[dict[str, float], dict[str, Tensor], dict[str, Tensor]]:
    """Of one step: its result, the masters before it, and what the engine tells after it."""
    engine = build_engine(folder, config, rank.mesh(layout), split)
    before = {name: tensor.clone() for name, tensor in engine.export_state()}
    mine = SAMPLES[engine.mesh.rank(DATA_AXES) :: engine.mesh.size(DATA_AXES)]
    result = engine.train_step(mine, sft_loss, num_loss_tokens)
    after = {name: tensor.clone() for name, tensor in engine.export_state(torch.float32)}
    return result, before, after


def masters(engine: Engine) -> dict[str, Tensor]:
    """What this rank owns, by parameter."""
    entries = engine.optimizer.entries("master")
    return {entry.slot.name: values.clone() for entry, values in entries}


def masters_of_ranks(
    rank: Rank, folder: Path, layout: Layout, config: EngineConfig
) -> dict[str, Tensor]:
    return masters(build_engine(folder, config, rank.mesh(layout)))


def value_step(rank: Rank, folder: Path, layout: Layout, config: EngineConfig) -> dict[str, float]:
    engine = build_value_engine(folder, config, rank.mesh(layout))
    mine = SAMPLES[engine.mesh.rank(DATA_AXES) :: engine.mesh.size(DATA_AXES)]
    for _ in range(2):
        result = engine.train_step(mine, sft_loss, num_loss_tokens)
    engine.mesh.barrier(WORLD)
    return result
