"""Launch shapes of the row ops: functions of the width alone, never of the number of rows, so that
a row has the same bits in every batch.

Sixteen elements a thread are two 16-byte loads of bf16: enough bytes in flight to hide memory
latency, few enough registers for full occupancy. `docs/kernels_rows.md` gives the arithmetic.
"""

from dataclasses import dataclass

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
