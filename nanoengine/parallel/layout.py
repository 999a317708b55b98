"""The axes along which a model and its samples are split, how many ranks are along each, and both
as options.

mesh.py says what the axes split and what their ranks exchange. Here is no PyTorch: a command line
asks for a layout before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

AXES = ("pp", "dp", "ep", "cp", "tp")
DATA_AXES = ("dp", "ep")
"""Each combination of these coordinates has samples of its own."""
REPLICA_AXES = ("dp", "ep", "cp")
"""All that hold the same dense parameters, and add up their gradients."""
WORLD = AXES


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The number of ranks along each axis."""

    pp: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for axis in AXES:
            if getattr(self, axis) < 1:
                raise ValueError(f"{axis}={getattr(self, axis)}: must be at least 1")

    def __str__(self) -> str:
        """`dp2·tp4`, or `single`."""
        sizes = ((axis, getattr(self, axis)) for axis in AXES)
        return "·".join(f"{axis}{size}" for axis, size in sizes if size > 1) or "single"

    @property
    def world(self) -> int:
        return self.pp * self.dp * self.ep * self.cp * self.tp

    def coordinates(self, rank: int) -> dict[str, int]:
        """The place of `rank` on each axis."""
        found = {}
        for axis in reversed(AXES):
            rank, found[axis] = divmod(rank, getattr(self, axis))
        return found

    def members(self, rank: int, axes: Sequence[str]) -> list[int]:
        """The ranks that differ from `rank` only along `axes`, in order; `rank` is one of them."""
        here = self.coordinates(rank)
        others = [name for name in AXES if name not in axes]
        return [
            other
            for other in range(self.world)
            if all(self.coordinates(other)[name] == here[name] for name in others)
        ]


@dataclass(frozen=True, kw_only=True)
class SplitConfig:
    """The way a model is split, beside the sizes of the layout. A field that a layout has no use
    for (a schedule without pp, sequence_parallel without tp) is not read."""

    schedule: Literal["gpipe", "1f1b", "interleaved", "zb_h1"] = "1f1b"
    """Order of the pipeline's forward and backward passes."""
    chunks: int = 1
    """Layer groups of a pipeline rank (interleaved)."""
    sequence_parallel: bool = False
    """With tp: cut the rows between matrices too."""


@dataclass(frozen=True, kw_only=True)
class LayoutConfig(SplitConfig):
    """The processes of a training engine, as options. What they share is an engine's too."""

    tp: int = 1
    """Processes that share each matrix."""
    pp: int = 1
    """Processes that share the layers."""
    dp: int = 1
    """Processes with samples of their own."""
    cp: int = 1
    """Processes that share the tokens of a sequence."""
    ep: int = 1
    """Processes that share the experts of a mixture, with samples of their own."""
    zero: Literal[0, 1, 2, 3] = 0
    """What the dp (and cp) processes share: 1 optimizer state, 2 gradients, 3 parameters."""

    @property
    def layout(self) -> Layout:
        return Layout(tp=self.tp, pp=self.pp, dp=self.dp, cp=self.cp, ep=self.ep)
