"""AdamW over many tensors at once.

With g the gradient times `grad_scale` (the clip factor, which may lie on the device so that no step
waits for it), t the step from 1, and w the fp32 master of p:

    m = b1·m + (1 − b1)·g              v = b2·v + (1 − b2)·g²
    w = w·(1 − lr·decay) − lr·(m / (1 − b1^t)) / (sqrt(v / (1 − b2^t)) + eps),   p = round(w)

On a GPU one launch over a table of int64 addresses, cut into chunks of equal size; the table
is a plan to build once and keep, because tensors of a training run stay where they are. On a CPU
one pass in C++ (`cpp/adamw.h`), over fp32 weights or over bf16 ones and the remainders that make
them masters (split_master.py). Everything else there goes to PyTorch's own one-pass kernel, whose
bits the C++ has; what that cannot read as it is (bf16 gradients, a clip factor, remainders) goes
through it piece by piece, so that widened copies never leave the cache.

Left out: amsgrad and maximize; the gradient's norm, which the engine sums over its shards in fp64.
AdamW: Loshchilov and Hutter, arXiv 1711.05101.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from kernels.backend import Backend, check_floating, use_native, use_triton
from kernels.cpp import ops as cpp_ops
from kernels.split_master import join_master, split_master_
from kernels.tensor_table import CHUNK, TensorTable

_PIECE = 1 << 19  # elements a CPU widens at a time; whole cache lines, so a tensor's only odd end
# is its own and pieces have the bits of the whole
_WIDE = (torch.float32, torch.float64)
Tensors = Sequence[Tensor]


def make_tensor_table(*lists: Tensors) -> TensorTable:
    """The table of lists that run in step: entry i of every list has the same number of elements,
    all of a list have one dtype, each is contiguous, all lie on one device."""
    _check_lists(lists)
    first = lists[0]
    device = first[0].device
    key = _key(lists)
    sizes = torch.tensor([x.numel() for x in first], dtype=torch.int64, device="cpu")
    counts = (sizes + CHUNK - 1) // CHUNK
    owner = torch.repeat_interleave(counts)
    within = torch.arange(len(owner), device="cpu") - (counts.cumsum(0) - counts)[owner]
    return TensorTable(
        address=torch.tensor(key, dtype=torch.int64, device=device),
        sizes=sizes.to(device),
        chunks=torch.stack([owner, within], 1).to(device=device, dtype=torch.int32),
        num_tensors=len(first),
        num_chunks=len(owner),
        dtypes=tuple(tensors[0].dtype for tensors in lists),
        is_aligned=all(address % 16 == 0 for row in key for address in row),
        key=key,
    )


def _key(lists: Sequence[Tensors]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(x.data_ptr() for x in tensors) for tensors in lists)


def _check_lists(lists: Sequence[Tensors], names: Sequence[str] = ()) -> None:
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


def _table_for(plan: TensorTable | None, lists: Sequence[Tensors]) -> TensorTable:
    if plan is None:
        return make_tensor_table(*lists)
    if plan.key != _key(lists):
        raise ValueError("plan: was made of other tensors; make it again with make_tensor_table")
    return plan


def _piece_size(tensors: Tensors) -> int:
    """At most the longest tensor; on a GPU, where a launch costs more than memory, just that."""
    longest = max(1, *(x.numel() for x in tensors))
    return min(longest, _PIECE) if tensors[0].device.type == "cpu" else longest


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
    plan: TensorTable | None = None,
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
        _check_lists(lists, ("params", "grads", "exp_avgs", "exp_avg_sqs", "master"))
    if remainders is not None:
        _check_remainders(params, remainders, master, on_triton)
        wide = exp_avgs
    for name, tensors in (("master", wide), ("exp_avgs", exp_avgs), ("exp_avg_sqs", exp_avg_sqs)):
        if tensors[0].dtype != wide[0].dtype or wide[0].dtype not in _WIDE:
            raise ValueError(f"{name}: must be float32 (bfloat16 params need a master)")
    _check_scale(grad_scale, params[0].device)
    if on_triton:
        from kernels.triton import adamw as triton_ops

        table = _table_for(plan, lists)
        if torch.float64 in table.dtypes:
            raise ValueError("params: float64 would be updated in float32; use backend='torch'")
        scale = _device_scale(grad_scale, params[0].device)
        has_master = master is not None
        triton_ops.step(table, scale, lr, betas, eps, weight_decay, step, has_master=has_master)
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
    update = partial(
        torch._fused_adamw_, lr=lr, beta1=betas[0], beta2=betas[1], eps=eps,
        weight_decay=weight_decay, amsgrad=False, maximize=False,
    )  # fmt: skip
    _torch_step(update, step, lists, remainders, grad_scale, has_master=master is not None)


def _torch_step(
    update: Callable[..., None],
    step: int,
    lists: tuple[Tensors, Tensors, Tensors, Tensors, Tensors],
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


def _device_scale(scale: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(scale, Tensor):
        return scale.to(torch.float32)
    return torch.full((), scale, dtype=torch.float32, device=device)
