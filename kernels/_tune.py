"""Tile choices: one fixed table, keyed by op and class of shapes, read by the Triton launchers.

Fixed, so that a result depends on the input alone and a serving step never stops to measure. The
entries were chosen with the compile gate (`scripts/kernel_gate.py`: registers, spills, shared
memory, resident blocks); `docs/kernels.md` gives the reasoning.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


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
        # flash_attention: M queries, N keys; class = head_dim rounded up to a power of two
    }
)


def tile(op: str, shape_class: str) -> Tile:
    """The tile of an op for a class of shapes; `KeyError` is a bug in the launcher."""
    return TILES[op, shape_class]
