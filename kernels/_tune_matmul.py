"""Tile choices of the matmul kernels; `_tune.py` says why a fixed table.

M and N are the tile of the output, K the step of the reduction; for `weight_grad` the output tile
is N × K and M is the step. Chosen from what the compile gate reports; docs/kernels_moe_fp8.md has
the reasoning.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from kernels._tune import Tile

GROUPED: Mapping[int, Tile] = MappingProxyType(
    {
        16: Tile(M=16, N=128, K=64, num_warps=4, num_stages=4),
        64: Tile(M=64, N=128, K=64, num_warps=4, num_stages=4),
        128: Tile(M=128, N=128, K=64, num_warps=8, num_stages=3),
    }
)
GROUPED_FP32: Mapping[int, Tile] = MappingProxyType(
    {
        16: Tile(M=16, N=64, K=32, num_warps=4, num_stages=2),
        64: Tile(M=64, N=64, K=32, num_warps=8, num_stages=2),
    }
)
WEIGHT_GRAD = Tile(M=64, N=128, K=128, num_warps=8, num_stages=3)
WEIGHT_GRAD_FP32 = Tile(M=32, N=64, K=64, num_warps=4, num_stages=2)

BATCH_INVARIANT = Tile(M=128, N=128, K=64, num_warps=8, num_stages=3)
BATCH_INVARIANT_FP32 = Tile(M=64, N=64, K=32, num_warps=4, num_stages=2)
"""One tile for every number of rows: that is what makes a row's bits independent of it."""

FP8: Mapping[int, Tile] = MappingProxyType(
    {
        16: Tile(M=16, N=128, K=128, num_warps=4, num_stages=4),
        64: Tile(M=64, N=128, K=128, num_warps=4, num_stages=3),
        128: Tile(M=128, N=128, K=128, num_warps=8, num_stages=3),
    }
)


def for_rows(table: Mapping[int, Tile], rows: float) -> Tile:
    """The smallest tile that holds `rows`, or the largest there is: with few rows a smaller tile
    wastes less of the tensor core and starts more programs."""
    fitting = [m for m in table if m >= rows]
    return table[min(fitting) if fitting else max(table)]
