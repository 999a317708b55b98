"""PyTorch's look for NaN and infinity: on a GPU, without a compiler, in dtypes that C++ lacks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.memory import to_host


def are_finite(xs: Sequence[Tensor]) -> list[bool]:
    """Whether each tensor holds neither; see `kernels.memory.all_finite`."""
    return [bool(found) for found in to_host([_is_finite(x) for x in xs])]


def _is_finite(x: Tensor) -> Tensor:
    """A bool, on the tensor's device."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    # The extremes are finite if and only if all values are: NaN propagates to both.
    return torch.isfinite(torch.stack(x.aminmax())).all()
