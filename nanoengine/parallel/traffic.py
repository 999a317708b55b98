"""What collectives cost: the counters of a mesh, and the bytes that a ring puts on the wire.

Left out: time, which `nanoengine/estimate.py` models.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Traffic:
    """What a rank handed to one kind of collective. `bytes` are those of the whole tensor: the
    reduced one, the gathered one, the one before scattering, the one sent."""

    calls: int = 0
    bytes: int = 0


def wire_bytes(op: str, num_bytes: int, num_ranks: int) -> float:
    """Bytes each rank sends for a tensor of `num_bytes` by the ring algorithm."""
    share = (num_ranks - 1) / num_ranks
    return {"all_reduce": 2 * share, "all_gather": share, "reduce_scatter": share}.get(
        op, 1.0
    ) * num_bytes
