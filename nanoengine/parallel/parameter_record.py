"""What is known about a parameter beyond its values, where it is one rank's part of a model.

The record lies on the parameter itself; a parameter of a model in one piece has none. Two more
attributes of parameters belong to the kernels, who read them in their backward pass: `main_grad`,
the fp32 buffer that takes the gradient, and `late_grads`, a list that weight gradients wait in
(`kernels/linear.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanoengine.model.linear import TensorSplit


@dataclass(frozen=True)
class Slice:
    """The part of a whole tensor that a rank holds: runs [start, stop) along `dim`, in order."""

    dim: int
    whole: int
    runs: tuple[tuple[int, int], ...]

    def take(self, whole: Tensor) -> Tensor:
        """This rank's part; a view where it is one run."""
        parts = [whole.narrow(self.dim, lo, hi - lo) for lo, hi in self.runs]
        return parts[0] if len(parts) == 1 else torch.cat(parts, self.dim)

    def single_runs(self, part: Tensor) -> list[tuple[Tensor, Slice]]:
        """Views of this rank's `part`, one for each run, and the slice that each is."""
        views = part.split([hi - lo for lo, hi in self.runs], self.dim)
        return [
            (view, Slice(self.dim, self.whole, (run,)))
            for view, run in zip(views, self.runs, strict=True)
        ]

    def whole_shape(self, shape: torch.Size) -> torch.Size:
        return torch.Size((*shape[: self.dim], self.whole, *shape[self.dim + 1 :]))


@dataclass
class ParameterRecord:
    """The facts about a parameter (`record_of`)."""

    slice: Slice | None = None
    """The part of the whole tensor that this rank holds; None where all ranks hold the same."""
    is_partial: bool = False
    """Each tensor-parallel rank's gradient is one term of the sum."""
    is_expert: bool = False
    """Ranks along the ep axis hold different ones, so their gradients are not added up."""
    is_copy: bool = False
    """Another pipeline stage holds the same one, and counts it in the gradient's norm."""
    is_deferred: bool = False
    """Its gradient is finished only after the last backward pass (a tied embedding on two pipeline
    stages), or may not come in one (a vision tower's, of tokens without pictures): its bucket waits
    for the end."""


def record_of(parameter: Tensor) -> ParameterRecord:
    """The parameter's record; writing to it is how a fact is noted."""
    record: ParameterRecord | None = getattr(parameter, "record", None)
    if record is None:
        record = ParameterRecord()
        parameter.record = record  # type: ignore[attr-defined]
    return record


def mark_slice(
    parameter: nn.Parameter | None, dim: int, widths: tuple[int, ...], split: TensorSplit
) -> None:
    """Note that several matrices of the given local widths lie side by side in `parameter`, each
    split evenly."""
    if parameter is not None and split.size > 1:
        record_of(parameter).slice = side_by_side(dim, [split.size * w for w in widths], split)


def side_by_side(dim: int, widths: Sequence[int], split: TensorSplit) -> Slice:
    """The rank's part of matrices of the given whole widths that lie side by side, each split
    evenly."""
    runs, begin = [], 0
    for width in widths:
        share = width // split.size
        runs.append((begin + split.rank * share, begin + (split.rank + 1) * share))
        begin += width
    return Slice(dim, begin, tuple(runs))


def mark_partial(parameter: nn.Parameter | None) -> None:
    if parameter is not None:
        record_of(parameter).is_partial = True
