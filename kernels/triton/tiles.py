"""Tile choices: one fixed table, keyed by op and class of shapes, read by the Triton launchers.

Fixed, so that a result depends on the input alone and a serving step never stops to measure. The
entries were chosen with the compile gate (`scripts/kernel_gate.py`: registers, spills, shared
memory, resident blocks); `docs/kernels.md` gives the reasoning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch

NUM_MULTIPROCESSORS = 132
"""Those of an H100 or H200 (SXM): how many programs fill the GPU, where a launcher has a choice."""


@dataclass(frozen=True)
class Tile:
    """One program's share. What M, N and K are is said where the op's launcher reads them."""

    num_warps: int
    num_stages: int = 2
    M: int = 0
    N: int = 0
    K: int = 0


TILES: Mapping[tuple[str, str], Tile] = MappingProxyType(
    {
        # flash_attention: M queries, N keys; class = element width, padded head_dim
        ("flash_forward", "half-64"): Tile(M=128, N=64, num_warps=8, num_stages=3),
        ("flash_forward", "half-128"): Tile(M=128, N=64, num_warps=8, num_stages=3),
        ("flash_forward", "half-128-padded"): Tile(M=128, N=64, num_warps=8, num_stages=2),
        ("flash_forward", "half-256"): Tile(M=128, N=32, num_warps=8, num_stages=2),
        ("flash_forward", "fp32-64"): Tile(M=64, N=32, num_warps=8),
        ("flash_forward", "fp32-128"): Tile(M=32, N=16, num_warps=8),
        ("flash_forward", "fp32-256"): Tile(M=32, N=16, num_warps=8),
        ("flash_delta", "all"): Tile(M=32, num_warps=4),
        ("flash_dkdv", "half-64"): Tile(M=64, N=64, num_warps=4, num_stages=2),
        ("flash_dkdv", "half-128"): Tile(M=32, N=64, num_warps=4, num_stages=2),
        ("flash_dkdv", "half-256"): Tile(M=32, N=32, num_warps=8, num_stages=2),
        ("flash_dkdv", "fp32-64"): Tile(M=32, N=32, num_warps=8),
        ("flash_dkdv", "fp32-128"): Tile(M=16, N=32, num_warps=8, num_stages=1),
        ("flash_dkdv", "fp32-256"): Tile(M=16, N=32, num_warps=8, num_stages=1),
        ("flash_dq", "half-64"): Tile(M=64, N=64, num_warps=4, num_stages=2),
        ("flash_dq", "half-128"): Tile(M=128, N=64, num_warps=8, num_stages=2),
        ("flash_dq", "half-256"): Tile(M=64, N=32, num_warps=8, num_stages=2),
        ("flash_dq", "fp32-64"): Tile(M=32, N=32, num_warps=8),
        ("flash_dq", "fp32-128"): Tile(M=32, N=16, num_warps=8),
        ("flash_dq", "fp32-256"): Tile(M=32, N=16, num_warps=8),
        # paged attention: M rows (queries x heads of a group), N keys
        ("paged_prefill", "half-64"): Tile(M=128, N=64, num_warps=4, num_stages=3),
        ("paged_prefill", "half-128"): Tile(M=128, N=64, num_warps=8, num_stages=3),
        ("paged_prefill", "half-256"): Tile(M=64, N=32, num_warps=8, num_stages=2),
        ("paged_prefill", "fp32-64"): Tile(M=64, N=32, num_warps=8),
        ("paged_prefill", "fp32-128"): Tile(M=32, N=16, num_warps=8),
        ("paged_prefill", "fp32-256"): Tile(M=16, N=32, num_warps=8),
        # M is the most there may be: fewer query heads a key head take a smaller tile
        ("paged_decode", "half-64"): Tile(M=64, N=64, num_warps=4, num_stages=3),
        ("paged_decode", "half-128"): Tile(M=64, N=64, num_warps=4, num_stages=3),
        ("paged_decode", "half-256"): Tile(M=16, N=64, num_warps=4, num_stages=3),
        ("paged_decode", "fp32-64"): Tile(M=16, N=64, num_warps=4, num_stages=3),
        ("paged_decode", "fp32-128"): Tile(M=16, N=16, num_warps=4, num_stages=2),
        ("paged_decode", "fp32-256"): Tile(M=16, N=16, num_warps=4, num_stages=2),
        ("sum_rows", "all"): Tile(N=1024, num_warps=4),
        ("store_kv", "all"): Tile(M=4096, num_warps=4),  # M elements of k, and of v
    }
)


def tile(op: str, shape_class: str) -> Tile:
    """The tile of an op for a class of shapes; `KeyError` is a bug in the launcher."""
    return TILES[op, shape_class]


# Launch shapes of the row ops: functions of the width alone, never of the number of rows, so that
# a row has the same bits in every batch.
#
# Sixteen elements a thread are two 16-byte loads of bf16: enough bytes in flight to hide memory
# latency, few enough registers for full occupancy. `docs/kernels_rows.md` gives the arithmetic.

NUM_PARTIALS = 264  # programs of a weight gradient: two for each multiprocessor of an H200
_THREAD_ELEMENTS = 16
_TILE_ELEMENTS = 2048
_HEAD_ELEMENTS = (
    2048  # of half a head times heads: 16 a thread on 8 warps, which may use 255 registers
)


@dataclass(frozen=True)
class RowTile:
    """A program's share: `rows` whole rows of up to `block` columns (a power of two)."""

    rows: int
    block: int
    num_warps: int


def power_of_2(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << max(0, n - 1).bit_length()


def warps_for(num_elements: int, thread_elements: int = _THREAD_ELEMENTS) -> int:
    """Warps so that a thread holds about `thread_elements` of a tile: 1 to 16."""
    return min(16, max(1, power_of_2(num_elements) // (32 * thread_elements)))


def head_tile(num_heads: int, half_block: int) -> int:
    """Heads that a program takes at a time, a power of two; more go one tile after the other."""
    return min(power_of_2(num_heads), max(1, _HEAD_ELEMENTS // half_block))


def row_tile(num_cols: int) -> RowTile:
    block = power_of_2(num_cols)
    rows = max(1, _TILE_ELEMENTS // block)
    return RowTile(rows, block, warps_for(rows * block))


# Matmul kernels: M and N are the tile of the output, K the step of the reduction; for `weight_grad`
# the output tile is N × K and M is the step. Chosen from what the compile gate reports;
# docs/kernels_moe_fp8.md has the reasoning.

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


# Adds the partial sums of a weight gradient in a fixed order: the second pass of every backward
# kernel here that reduces over rows. Atomics would add in the order programs happen to finish.

_ROWS, _COLS = 32, 32


@triton.jit
def _sum_partials_kernel(
    partial_ptr, out_ptr, num_partials, num_cols, ROWS: tl.constexpr, COLS: tl.constexpr
):
    cols = tl.program_id(0) * COLS + tl.arange(0, COLS)[None, :]
    total = tl.zeros([ROWS, COLS], dtype=tl.float32)
    for start in range(0, num_partials, ROWS):
        rows = tl.arange(0, ROWS)[:, None]
        mask = (rows < num_partials - start) & (cols < num_cols)
        first = partial_ptr + tl.cast(start, tl.int64) * num_cols
        total += tl.load(first + rows * num_cols + cols, mask, other=0.0)
    out_cols = tl.program_id(0) * COLS + tl.arange(0, COLS)
    out = tl.sum(total, 0).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + out_cols, out, out_cols < num_cols)


def sum_partials(partial_PC: Tensor, dtype: torch.dtype) -> Tensor:
    """Column sums of fp32 partials, rounded once to `dtype`; zeros where there are none."""
    num_partials, num_cols = partial_PC.shape
    out = torch.empty(num_cols, dtype=dtype, device=partial_PC.device)
    launch(_sum_partials_kernel, (triton.cdiv(num_cols, _COLS),))(
        partial_PC, out, num_partials, num_cols, ROWS=_ROWS, COLS=_COLS
    )
    return out


# One step of the online softmax, which every attention kernel here takes tile by tile.
#
# For a row with products d_j = q · k_j, scores s_j = d_j · scale2 (in powers of 2, scale2 > 0) and
# values v_j, kept so far: top = max s, total = Σ 2^(s − top), acc = Σ 2^(s − top) · v. A tile may
# move the maximum; what was summed before it then shrinks by 2^(top − new_top). In the end
# o = acc / total, lse2 = top + log2 total.
#
# s − top is one fused multiply-add, by name. Left to the compiler, a loop without a mask gets one,
# and a loop with a mask a product and a difference, which round differently; and a trainer sends a
# pair of query and key through one loop that a decode step sends through the other.


@triton.jit
def weigh_tile(total, top, products, scale2, MAY_BE_EMPTY: tl.constexpr):
    """(p [M, N], shrink [M], total [M], top [M]) after products [M, N], -inf where a key is hidden;
    the caller goes on with acc = acc · shrink + p · v. With `MAY_BE_EMPTY` a row may have seen no
    key yet: its top is −inf, and −inf − (−inf) would be NaN."""
    new_top = tl.maximum(top, tl.max(products, 1) * scale2)
    finite_top = new_top
    if MAY_BE_EMPTY:
        finite_top = tl.where(new_top == -float("inf"), 0.0, new_top)
    p = tl.exp2(tl.fma(products, scale2, -finite_top[:, None]))
    shrink = tl.exp2(top - finite_top)
    return p, shrink, total * shrink + tl.sum(p, 1), new_top


@triton.jit
def bank(total, part, step):
    """(total, part) of a long sum in fp32 after its step number `step`: every second moves what was
    added up to `total`. In one chain the error grows with the root of the number of terms, and is
    several times that of cuBLAS, which cuts long sums too."""
    is_last = step % 2 == 1
    return total + tl.where(is_last, part, 0.0), tl.where(is_last, 0.0, part)


@triton.jit
def meet_sinks(sinks, top):
    """(top, total) of rows that have met their sinks, in natural units, and no key yet; `sinks` is
    one for each row, or one for all."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    return tl.zeros_like(top) + sinks * LOG2_E, tl.zeros_like(top) + 1.0
