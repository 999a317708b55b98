"""Tile choices: one fixed table, keyed by op and class of shapes, read by the Triton launchers.

Fixed, so that a result depends on the input alone and a serving step never stops to measure. The
entries were chosen with the compile gate (`scripts/kernel_gate.py`: registers, spills, shared
memory, resident blocks); `docs/kernels.md` gives the reasoning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

NUM_MULTIPROCESSORS = 132
"""Of an H100 or H200 (SXM): how many programs fill the GPU, where a launcher has a choice."""


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
        ("flash_forward", "half-64"): Tile(M=128, N=64, num_warps=4, num_stages=3),
        ("flash_forward", "half-128"): Tile(M=128, N=128, num_warps=8, num_stages=2),
        ("flash_forward", "half-128-padded"): Tile(M=128, N=64, num_warps=8, num_stages=2),
        ("flash_forward", "half-256"): Tile(M=128, N=32, num_warps=8, num_stages=2),
        ("flash_forward", "fp32-64"): Tile(M=64, N=32, num_warps=8),
        ("flash_forward", "fp32-128"): Tile(M=32, N=16, num_warps=8),
        ("flash_forward", "fp32-256"): Tile(M=32, N=16, num_warps=8),
        ("flash_delta", "all"): Tile(M=32, num_warps=4),
        ("flash_dkdv", "half-64"): Tile(M=32, N=128, num_warps=8, num_stages=2),
        ("flash_dkdv", "half-128"): Tile(M=16, N=128, num_warps=8, num_stages=2),
        ("flash_dkdv", "half-256"): Tile(M=32, N=32, num_warps=8, num_stages=2),
        ("flash_dkdv", "fp32-64"): Tile(M=32, N=32, num_warps=8),
        ("flash_dkdv", "fp32-128"): Tile(M=16, N=32, num_warps=8, num_stages=1),
        ("flash_dkdv", "fp32-256"): Tile(M=16, N=32, num_warps=8, num_stages=1),
        ("flash_dq", "half-64"): Tile(M=128, N=64, num_warps=8, num_stages=2),
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
