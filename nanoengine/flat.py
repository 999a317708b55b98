"""Parameters end to end in one flat buffer, with a gradient, a master and two moments beside it.

    weights    | matrix | matrix | … | norm | bias |     the decayed ones first, then the spared
    gradient   | fp32   | fp32   | … | fp32 | fp32 |     `param.main_grad` is a view of it
    master     | fp32   | fp32   | … | fp32 | fp32 |     what AdamW updates

So an update is a handful of passes over memory, whatever the model looks like. In fp32 and fp64 the
weights *are* the master. Where the model computes in bf16 they are rounded from it: on a GPU they
are a copy beside it, on a CPU one half of it, whose other half is a remainder of 16 bits
(kernels/torch/split_master.py).

Left out: buckets that are cut over processes (parallel/shards.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pkgutil import resolve_name

import torch
from torch import Tensor, nn

_SPLIT_MASTER = "kernels.torch.split_master:split_master_"

ALIGNMENT = 64  # elements; every parameter starts on a cache line in fp32 and in bf16
Named = list[tuple[str, nn.Parameter]]


@dataclass(frozen=True)
class Slot:
    """A parameter's place in the flat buffers."""

    name: str
    param: nn.Parameter
    offset: int

    def view(self, flat: Tensor) -> Tensor:
        """The parameter's part of a buffer, in its shape."""
        return flat[self.offset : self.offset + self.param.numel()].view(self.param.shape)


def lay_out(named: Named) -> tuple[list[Slot], int, int]:
    """Decayed parameters first: matrices, not the biases of experts, which are stacked. Returns
    (slots, end of the decayed part, total size)."""
    slots: list[Slot] = []
    offset, decay_end = 0, 0
    for decayed in (True, False):
        for name, param in named:
            if (param.ndim >= 2 and not name.endswith(".bias")) is decayed:
                slots.append(Slot(name, param, offset))
                offset += -(-param.numel() // ALIGNMENT) * ALIGNMENT
        if decayed:
            decay_end = offset
    return slots, decay_end, offset


def trainable(models: Sequence[nn.Module]) -> list[tuple[nn.Module, str, nn.Parameter]]:
    """(model, name, parameter) of each parameter that is trained; a tied one comes once."""
    found: dict[int, tuple[nn.Module, str, nn.Parameter]] = {}
    for model in models:
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                found.setdefault(id(parameter), (model, name, parameter))
    if not found:
        raise ValueError("no trainable parameters: every requires_grad is False")
    return list(found.values())


def collect_grad(param: nn.Parameter) -> None:
    """Move autograd's gradient into `main_grad`, in the order autograd produces them."""
    if param.grad is not None:
        # bf16 gradients of several micro-batches would round at each sum; here they add up in fp32.
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None


class Bucket:
    """Parameters with one flat gradient. This process owns `share` elements of it from `begin` on:
    all of it. Weight decay applies to the first `num_decayed` of them."""

    def __init__(self, named: Named, wide: torch.dtype, *, multiple: int = ALIGNMENT) -> None:
        """The gradient is of dtype `wide`; zeros make its size up to a multiple of `multiple`."""
        self.slots, self.num_decayed, size = lay_out(named)
        self.begin, self.share = 0, -(-size // multiple) * multiple
        device = self.slots[0].param.device
        self.grad = self.grad_shard = torch.zeros(self.share, dtype=wide, device=device)
        for slot in self.slots:
            # Kernels add a weight's gradient right here, and autograd never holds it (linear.py).
            slot.param.main_grad = slot.view(self.grad)  # type: ignore[attr-defined]

    def zero_grad(self) -> None:
        self.grad.zero_()


class BucketState:
    """A bucket's weights and masters, which start from what the parameters hold. Whoever makes one
    gives it its moments, 1-d and as long as the masters."""

    exp_avg: Tensor
    exp_avg_sq: Tensor

    def __init__(self, bucket: Bucket, dtype: torch.dtype) -> None:
        """The parameters become views of weights of `dtype`."""
        self.bucket = bucket
        self.remainder = empty_remainder(bucket, dtype)
        is_split = self.remainder is not None
        whole = torch.zeros_like(bucket.grad, dtype=dtype if is_split else None)
        for slot in bucket.slots:
            given = slot.param.data
            slot.view(whole).copy_(given)
            if self.remainder is not None:
                halves = slot.view(whole).view(-1), slot.view(self.remainder).view(-1)
                resolve_name(_SPLIT_MASTER)(*halves, given.flatten().float())
            # Its memory is free for the next buffers; the shape stays until the weights are there.
            slot.param.data = given.new_empty(()).expand(given.shape)
            del given
        self.weights = whole.to(dtype)  # the same memory where no rounding is needed
        self.shard = self.weights  # the part of them that this process updates
        self.master = whole
        for slot in bucket.slots:
            slot.param.data = slot.view(self.weights)

    @property
    def is_apart(self) -> bool:
        """Say whether the masters have memory of their own, and the weights do without it."""
        return self.shard.data_ptr() != self.master.data_ptr()

    @torch.no_grad()
    def round(self) -> None:
        """Round the masters into the weights, unless they are the same memory."""
        if self.is_apart:
            self.shard.copy_(self.master)


def empty_remainder(bucket: Bucket, dtype: torch.dtype) -> Tensor | None:
    """The other halves of masters that are bf16 weights, int16; None where masters are whole."""
    if dtype != torch.bfloat16 or bucket.grad.device.type != "cpu":
        return None
    return torch.zeros(bucket.share, dtype=torch.int16)
