"""An fp32 master in two halves: the bf16 weight rounded from it, and a remainder of 16 bits.

    bits of the master = bits of the weight · 2^16 + remainder,   −2^15 ≤ remainder < 2^15

The weight exists anyway, since the model computes with it, so a master costs two bytes beside it
instead of four. It is the weight that PyTorch rounds to, the nearest, and of two equally near ones
the even one, and with it every master comes back bit for bit but for one kind. Rounding to even
gives an even weight the masters half way on both of its sides, one more than 16 bits can tell
apart. The one above it (1 in 131,072) is kept as its neighbour towards the weight: its last bit, as
far off as any rounding of the arithmetic before. To split that one again changes nothing.

A NaN stays one, without its bits. On a CPU AdamW reads and writes both halves (adamw.py).
"""

import torch
from torch import Tensor

_MOST = 2**15 - 1
_PIECE = 1 << 19  # elements: what is computed on the way stays in the processor's cache


def split_master_(weight: Tensor, remainder: Tensor, master: Tensor) -> None:
    """Writes `master` (fp32) to `weight` (bf16) and `remainder` (int16), all of one size, 1-d."""
    pieces = (x.split(_PIECE) for x in (weight, remainder, master))
    for rounded, rest, whole in zip(*pieces, strict=True):
        rounded.copy_(whole)
        left = _high(rounded).neg_().add_(whole.view(torch.int32))
        rest.copy_(left.clamp_(-_MOST - 1, _MOST))


def join_master(weight: Tensor, remainder: Tensor) -> Tensor:
    """The fp32 master of the two, a new tensor."""
    return _high(weight).add_(remainder).view(torch.float32)


def _high(weight: Tensor) -> Tensor:
    return weight.view(torch.int16).to(torch.int32).bitwise_left_shift_(16)
