"""What changed between two versions of a tensor: places and new values, bit by bit.

An optimizer step in bf16 leaves many weights as they were, because the update is smaller than their
last bit. A change costs the 4 bytes of its place beside the value, so where more than a third of
the elements changed the whole tensor travels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nanorl.distributed.weights.offer import WeightsRefused

_MOST_CHANGED = 1 / 3
_MOST_ELEMENTS = 2**31 - 1  # places are int32
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def changes(base: Tensor, new: Tensor) -> tuple[Tensor, Tensor] | None:
    """(places [N] int32 in the flattened tensor, their new values [N]); None where the whole tensor
    is the shorter message. Values are compared as bits: -0 is not 0, and NaN is itself."""
    if base.shape != new.shape or base.dtype != new.dtype or new.numel() > _MOST_ELEMENTS:
        return None
    flat = new.detach().reshape(-1)
    has_changed = _bits(base.reshape(-1)) != _bits(flat)
    if int(has_changed.sum()) > _MOST_CHANGED * flat.numel():
        return None
    places = has_changed.nonzero().view(-1)
    return places.int(), flat[places]


def apply_changes(tensor: Tensor, places: Tensor, values: Tensor) -> None:
    """Write the changes into a contiguous tensor. WeightsRefused, with nothing written, if they
    cannot be of this tensor."""
    flat = tensor.view(-1)
    is_right = places.shape == values.shape and places.dtype == torch.int32
    if is_right and len(places):
        lowest, highest = (int(place) for place in places.aminmax())
        is_right = lowest >= 0 and highest < len(flat)
    if not is_right or values.dtype != tensor.dtype:
        raise WeightsRefused("the changes do not fit the tensor; nothing was loaded")
    flat[places.long()] = values


def _bits(x: Tensor) -> Tensor:
    return x.view(_INTEGERS[x.element_size()])
