"""AdamW in PyTorch: the definition, and the step of adamw.py where no kernel runs. PyTorch's own
one-pass kernel does it, over whole tensors where it can read everything as it is, else by pieces.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.adamw import AdamWStep, Tensors
from kernels.torch.split_master import join_master, split_master_

_PIECE = 1 << 19  # elements a CPU widens at a time; whole cache lines, so a tensor's only odd end
# is its own and pieces have the bits of the whole


def adamw_ref(
    master: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The definition, on one tensor: new (master, exp_avg, exp_avg_sq)."""
    g = grad.to(master.dtype) * grad_scale
    m = betas[0] * exp_avg + (1 - betas[0]) * g
    v = betas[1] * exp_avg_sq + (1 - betas[1]) * g**2
    root = (v / (1 - betas[1] ** step)).sqrt() + eps
    return master * (1 - lr * weight_decay) - lr * (m / (1 - betas[0] ** step)) / root, m, v


def step(
    lists: Sequence[Tensors],
    remainders: Tensors | None,
    scale: Tensor | float,
    update: AdamWStep,
    *,
    has_master: bool,
) -> None:
    """One step in place of (params, grads, exp_avgs, exp_avg_sqs, masters)."""
    run = partial(
        torch._fused_adamw_, lr=update.lr, beta1=update.betas[0], beta2=update.betas[1],
        eps=update.eps, weight_decay=update.weight_decay, amsgrad=False, maximize=False,
    )  # fmt: skip
    _step(run, update.step, lists, remainders, scale, has_master=has_master)


def _step(
    update: Callable[..., None],
    step: int,
    lists: Sequence[Tensors],
    remainders: Tensors | None,
    scale: Tensor | float,
    *,
    has_master: bool,
) -> None:
    """`update` over whole tensors where it can read everything as it is, else by pieces."""
    params, grads, exp_avgs, exp_avg_sqs, wide = (list(tensors) for tensors in lists)
    steps = [torch.tensor(float(step), device=params[0].device)] * len(params)
    is_scaled = isinstance(scale, Tensor) or scale != 1.0
    is_split = remainders is not None
    if not (is_scaled or has_master or is_split) and grads[0].dtype == wide[0].dtype:
        update(wide, grads, exp_avgs, exp_avg_sqs, [], steps)
        return
    size = _piece_size(params)
    scratch = torch.empty(size, dtype=exp_avgs[0].dtype, device=params[0].device)
    rests = params if remainders is None else remainders
    for tensors in zip(*lists, rests, strict=True):
        for p, g, m, v, w, rest in zip(*(x.view(-1).split(size) for x in tensors), strict=True):
            wide_g = scratch[: len(g)].copy_(g)
            if is_scaled:
                wide_g.mul_(scale)
            master = join_master(p, rest) if is_split else w
            update([master], [wide_g], [m], [v], [], steps[:1])
            if is_split:
                split_master_(p, rest, master)
            elif has_master:
                p.copy_(w)


def _piece_size(tensors: Tensors) -> int:
    """At most the longest tensor; on a GPU, where a launch costs more than memory, just that."""
    longest = max(1, *(x.numel() for x in tensors))
    return min(longest, _PIECE) if tensors[0].device.type == "cpu" else longest
