"""What the ranks do in test_mesh.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from pool import Rank

from nanoengine.parallel.layout import REPLICA_AXES, Layout
from nanoengine.state.reshard import Resharder
from nanoengine.state.slices import Box, Piece, make_piece


def every_collective(rank: Rank, dtype: torch.dtype) -> dict[str, Any]:
    mesh = rank.mesh(Layout(dp=2, tp=2))
    me, n = mesh.rank("tp"), mesh.size("tp")
    found: dict[str, Any] = {"place": (mesh.rank("dp"), me, mesh.rank())}
    x = torch.arange(4, dtype=dtype) + 10 * rank.rank
    total, largest = x.clone(), x.clone()
    mesh.all_reduce("tp", total)
    mesh.all_reduce(("dp", "tp"), largest, "max")
    gathered, part = torch.empty(8, dtype=dtype), torch.empty(2, dtype=dtype)
    mesh.all_gather("dp", gathered, x)
    mesh.reduce_scatter("tp", part, x)
    root = x.clone()
    mesh.broadcast(REPLICA_AXES, root, 1)
    neighbour = torch.empty_like(x)
    mesh.exchange("tp", x, (me + 1) % n, neighbour, (me - 1) % n).wait()
    swapped = torch.empty_like(x)
    mesh.all_to_all("tp", swapped, x, [2, 2], [2, 2])
    tensors = {
        "sum": total,
        "max": largest,
        "gathered": gathered,
        "part": part,
        "root": root,
        "neighbour": neighbour,
        "swapped": swapped,
    }
    found |= {name: tensor.tolist() for name, tensor in tensors.items()}
    found["traffic"] = {key: (t.calls, t.bytes) for key, t in mesh.traffic.items()}
    found["json"] = mesh.gather_json("dp", {"rank": rank.rank, "text": "ü" * rank.rank})
    return found


def bf16_sums(rank: Rank) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """This rank's values; their sum over the ranks, of which this rank's part is also the part
    that a reduce-scatter gives; the same reduced without widening."""
    mesh = rank.mesh(Layout(dp=4))
    mine = torch.randn(2000, generator=torch.Generator().manual_seed(rank.rank)).bfloat16()
    total, narrow = mine.clone(), mine.clone()
    mesh.all_reduce("dp", total)
    part = torch.empty(500, dtype=torch.bfloat16)
    mesh.reduce_scatter("dp", part, mine)
    assert torch.equal(part, total[500 * rank.rank : 500 * (rank.rank + 1)])
    with mock.patch("nanoengine.parallel.mesh._widen", lambda tensor: tensor):
        mesh.all_reduce("dp", narrow)
    return mine.float(), total.float(), narrow.float()


def two_meshes(rank: Rank) -> list[float]:
    """Two grids over the same processes, used in turn."""
    first, second = rank.mesh(Layout(dp=2)), rank.mesh(Layout(tp=2))
    x = torch.ones(1) * (rank.rank + 1)
    first.all_reduce("dp", x)
    second.all_reduce("tp", x)
    first.all_reduce("dp", x)
    assert not torch.distributed.is_initialized()
    return x.tolist()


def one_rank_raises(rank: Rank) -> None:
    if rank.rank == 1:
        raise ValueError("planted")
    rank.mesh(Layout(dp=2)).barrier()


def sleeps(rank: Rank) -> None:
    import time

    time.sleep(60)


def one_rank_changes_its_wishes(rank: Rank) -> tuple[int, bool]:
    """Rank 0 holds a matrix; rank 1 wants it whole, and then (rank 0 as before) its right half."""
    resharder = Resharder(rank.mesh(Layout(dp=2)))
    matrix = torch.arange(12.0).view(3, 4)
    held = [(make_piece("w", matrix), matrix)] if rank.rank == 0 else []
    whole, half = torch.zeros(3, 4), torch.zeros(3, 2)
    for piece, target in (
        (make_piece("w", whole), whole),
        (Piece("w", (3, 4), Box((0, 2), (3, 2))), half),
    ):
        resharder.run(held, [(piece, target)] if rank.rank == 1 else [])
    was_right = torch.equal(whole, matrix) and torch.equal(half, matrix[:, 2:])
    return resharder.num_plans, was_right or rank.rank == 0
