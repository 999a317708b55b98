"""AdamW over many tensors at once.

With g the gradient times `grad_scale` (the clip factor, which may lie on the device so that no step
waits for it), t the step from 1, and w the fp32 master of p:

    m = b1·m + (1 − b1)·g              v = b2·v + (1 − b2)·g²
    w = w·(1 − lr·decay) − lr·(m / (1 − b1^t)) / (sqrt(v / (1 − b2^t)) + eps),   p = round(w)

On a GPU one launch over a table of int64 addresses, cut into chunks of equal size
(`gpu/tensor_table.py`). On a CPU one pass in C++ (`cpp/adamw.h`), over fp32 weights or over bf16
ones and the remainders that make them masters (`torch/split_master.py`). Everything else there goes
to PyTorch's own one-pass kernel, whose bits the C++ has; what that cannot read as it is (bf16
gradients, a clip factor, remainders) goes through it piece by piece, so that widened copies never
leave the cache (`torch/adamw.py`, with `adamw_ref`).

Left out: amsgrad and maximize; the gradient's norm, which the engine sums over its shards in fp64.
AdamW: Loshchilov and Hutter, arXiv 1711.05101.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import Backend, check_floating, resolve, use_native, use_triton
from kernels.cpp import ops as cpp_ops

_WIDE = (torch.float32, torch.float64)
_STEP = {"triton": "kernels.gpu.tensor_table:step", "torch": "kernels.torch.adamw:step"}
Tensors = Sequence[Tensor]


class AdamWStep(NamedTuple):
    """The numbers of one step; `step` counts from 1."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    step: int


def check_lists(lists: Sequence[Tensors], names: Sequence[str] = ()) -> None:
    """The lists of a table; without names each is called `tensors`."""
    first = lists[0]
    if not first:
        raise ValueError(f"{names[0] if names else 'tensors'}: the list is empty")
    for name, tensors in zip(names or ["tensors"] * len(lists), lists, strict=True):
        if len(tensors) != len(first):
            raise ValueError(f"{name}: lists of {len(first)} and {len(tensors)}: one length")
        for i, x in enumerate(tensors):
            check_floating(**{f"{name}[{i}]": x})
            if x.dtype != tensors[0].dtype:
                raise ValueError(
                    f"{name}[{i}]: dtype {x.dtype} must be {tensors[0].dtype} of its list"
                )
            if x.numel() != first[i].numel() or x.device != first[0].device:
                raise ValueError(
                    f"{name}[{i}]: {x.numel()} elements on {x.device} beside "
                    f"{names[0] if names else name}[{i}]'s {first[i].numel()} on {first[0].device}"
                )
            if not x.is_contiguous():
                raise ValueError(f"{name}[{i}]: shape {tuple(x.shape)} must be contiguous")


@torch.no_grad()
def fused_adamw_(
    params: Tensors,
    grads: Tensors,
    exp_avgs: Tensors,
    exp_avg_sqs: Tensors,
    master: Tensors | None,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: Tensor | float = 1.0,
    remainders: Tensors | None = None,
    plan: object = None,
    backend: Backend = "auto",
) -> None:
    """One AdamW step in place: `params` (bf16, or anything), `grads` (read only), fp32 moments and
    masters. Without `master` the params are fp32 and their own masters, or bf16 and halves of them,
    whose `remainders` (int16, on a CPU) are the others. `step` counts from 1.

    `plan` is `make_tensor_table(params, grads, exp_avgs, exp_avg_sqs, master)` (params for the
    master where there is none); without it the table is built and copied at every call.
    """
    if step < 1:
        raise ValueError(f"step={step}: counts from 1")
    wide = params if master is None else master
    lists = (params, grads, exp_avgs, exp_avg_sqs, wide)
    on_triton = use_triton(backend, params[0], has_cpp=True) if params else False
    if plan is None or not on_triton:
        check_lists(lists, ("params", "grads", "exp_avgs", "exp_avg_sqs", "master"))
    if remainders is not None:
        _check_remainders(params, remainders, master, on_triton)
        wide = exp_avgs
    for name, tensors in (("master", wide), ("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs)):
        if tensors[0].dtype != wide[0].dtype or wide[0].dtype not in _WIDE:
            raise ValueError(f"{name}: must be float32 (bfloat16 params need a master)")
    _check_scale(grad_scale, params[0].device)
    update, has_master = AdamWStep(lr, betas, eps, weight_decay, step), master is not None
    if on_triton:
        resolve(_STEP["triton"])(lists, plan, grad_scale, update, has_master=has_master)
        return
    refusal = None if master is None else "masters are params, or params and remainders"
    if use_native(backend, *wide, *grads, *exp_avgs, *exp_avg_sqs, refusal=refusal):
        factors = cpp_ops.AdamWFactors(
            scale=float(grad_scale),
            decay=1 - lr * weight_decay,
            rest1=1 - betas[0],
            beta2=betas[1],
            rest2=1 - betas[1],
            root_scale=(1 - betas[1] ** step) ** 0.5,
            eps=eps,
            step_size=lr / (1 - betas[0] ** step),
        )
        rests = [None] * len(params) if remainders is None else remainders
        for p, r, g, m, v in zip(params, rests, grads, exp_avgs, exp_avg_sqs, strict=True):
            cpp_ops.adamw_(p, r, g, m, v, factors)
        return
    resolve(_STEP["torch"])(lists, remainders, grad_scale, update, has_master=has_master)


def _check_remainders(
    params: Tensors, remainders: Tensors, master: Tensors | None, on_triton: bool
) -> None:
    if master is not None:
        raise ValueError("remainders: masters are given too; one of the two")
    if on_triton or params[0].device.type != "cpu":
        raise ValueError("remainders: on a CPU only; give fp32 masters instead")
    if params[0].dtype != torch.bfloat16:
        raise ValueError(f"remainders: complete bfloat16 params, not {params[0].dtype} ones")
    for i, (p, r) in enumerate(zip(params, remainders, strict=True)):
        if r.dtype != torch.int16 or r.numel() != p.numel() or not r.is_contiguous():
            raise ValueError(
                f"remainders[{i}]: {r.dtype} of {r.numel()} elements must be contiguous int16 of "
                f"the {p.numel()} of params[{i}]"
            )


def _check_scale(scale: Tensor | float, device: torch.device) -> None:
    if isinstance(scale, Tensor) and (scale.numel() != 1 or scale.device != device):
        raise ValueError(
            f"grad_scale: shape {tuple(scale.shape)} on {scale.device} must be one number on "
            f"{device}"
        )
