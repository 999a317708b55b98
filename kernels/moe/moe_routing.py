"""Routing of a mixture of experts: which experts a token visits, and the order to visit them in.

`topk_softmax`: p = softmax(router logits) over the E experts in fp32, the k largest of each token
and their weights. With `renormalize` the weights of a token sum to 1:

    w_j = p_j / Σ_i p_i           dz_j = w_j · (dw_j − Σ_i dw_i · w_i), 0 elsewhere
    w_j = p_j (without)           dz_e = [e chosen] · w_e · dw_e − p_e · Σ_i dw_i · w_i

Equal probabilities go to the expert with the lower index on every back end.

`moe_align`: a stable counting sort of the N·k slots (slot = token · k + choice) by expert, and the
cut of every expert's run into tiles of `block_m` rows, the unit a grouped matmul works on. The
number of tiles depends on the data; the arrays have its upper bound, known without asking the
device, and the tiles too many carry expert −1.

Left out: capacity limits and dropped tokens, shared experts, the load-balancing loss.
Next: grouped_gemm.py, moe.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import Backend, check_tensors, use_triton


@dataclass(frozen=True)
class MoeAlignment:
    """Slots in expert order. Expert e's are `slots[offsets[e]:offsets[e + 1]]`; tile t covers rows
    `tile_starts[t]` and following of expert `tile_experts[t]`. All int32."""

    slots: Tensor
    offsets: Tensor
    tile_experts: Tensor
    tile_starts: Tensor


def topk_softmax_ref(
    router_logits_NE: Tensor, k: int, renormalize: bool = True
) -> tuple[Tensor, Tensor]:
    """The definition, differentiable by autograd alone."""
    wide = torch.promote_types(router_logits_NE.dtype, torch.float32)
    p_NE = torch.softmax(router_logits_NE.to(wide), -1)
    ids_NK = p_NE.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    weights_NK = p_NE.gather(1, ids_NK)
    if renormalize:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return weights_NK, ids_NK.int()


class _TopkSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, k, renormalize, on_triton):
        if on_triton:
            # Here: not every machine has Triton.
            from kernels.triton import moe_routing as triton_ops

            weights, ids = triton_ops.topk_softmax(logits, k, renormalize)
        else:
            weights, ids = topk_softmax_ref(logits, k, renormalize)
        ctx.save_for_backward(logits, weights, ids)
        ctx.renormalize, ctx.on_triton = renormalize, on_triton
        ctx.mark_non_differentiable(ids)
        return weights, ids

    @staticmethod
    def backward(ctx, dweights, _dids):
        logits, weights, ids = ctx.saved_tensors
        if not ctx.on_triton:
            return _topk_backward(dweights, logits, weights, ids, ctx.renormalize), *(None,) * 3
        from kernels.triton import moe_routing as triton_ops  # here: not every machine has Triton

        dlogits = triton_ops.topk_softmax_backward(dweights, logits, weights, ids, ctx.renormalize)
        return dlogits, None, None, None


def _topk_backward(
    dweights: Tensor, logits: Tensor, weights: Tensor, ids: Tensor, renormalize: bool
) -> Tensor:
    total_N1 = (dweights * weights).sum(-1, keepdim=True)
    chosen_NK = weights * (dweights - total_N1 if renormalize else dweights)
    if renormalize:
        dlogits = torch.zeros(logits.shape, dtype=weights.dtype, device=logits.device)
    else:
        dlogits = torch.softmax(logits.to(weights.dtype), -1).mul_(-total_N1)
    return dlogits.scatter_add_(1, ids.long(), chosen_NK).to(logits.dtype)


def topk_softmax(
    router_logits_NE: Tensor, k: int, *, renormalize: bool = True, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """The k most probable experts of each token, most probable first.

    Returns weights [N, k] in fp32 (differentiable) and expert ids [N, k] int32.
    """
    if router_logits_NE.dim() != 2:
        raise ValueError(
            f"router_logits: shape {tuple(router_logits_NE.shape)} must be [tokens, experts]"
        )
    if not 1 <= k <= router_logits_NE.shape[1]:
        raise ValueError(f"k={k}: must be from 1 to the {router_logits_NE.shape[1]} experts")
    on_triton = use_triton(backend, router_logits_NE)
    check_tensors(router_logits_NE, "router_logits", on_triton)
    weights_NK, ids_NK = _TopkSoftmax.apply(router_logits_NE, k, renormalize, on_triton)
    return weights_NK, ids_NK


def moe_align_ref(topk_ids_NK: Tensor, num_experts: int, block_m: int) -> MoeAlignment:
    """The definition, with torch's stable sort."""
    flat = topk_ids_NK.reshape(-1).long()
    slots = flat.argsort(stable=True)
    ends = torch.bincount(flat, minlength=num_experts).cumsum(0)
    offsets = torch.cat([ends.new_zeros(1), ends])
    return MoeAlignment(slots.int(), offsets.int(), *tiles_ref(offsets, flat.numel(), block_m))


def tiles_ref(offsets: Tensor, num_rows: int, block_m: int) -> tuple[Tensor, Tensor]:
    """(tile_experts, tile_starts) of runs that end at `offsets[1:]`."""
    ends = ((offsets.diff() + block_m - 1) // block_m).cumsum(0)
    most = num_rows // block_m + min(num_rows, len(ends))  # tiles, however the rows are split
    tile = torch.arange(most, device=offsets.device)
    expert = torch.searchsorted(ends, tile, right=True)
    is_used = expert < len(ends)
    safe = expert.clamp(max=len(ends) - 1)
    first = torch.cat([ends.new_zeros(1), ends])[safe]
    start = offsets[safe] + (tile - first) * block_m
    return torch.where(is_used, expert, -1).int(), torch.where(is_used, start, 0).int()


def moe_align(
    topk_ids_NK: Tensor, num_experts: int, block_m: int, *, backend: Backend = "auto"
) -> MoeAlignment:
    """Sort the slots of `topk_ids` by expert, stably, and cut each run into tiles of `block_m`."""
    if topk_ids_NK.dim() != 2 or topk_ids_NK.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"topk_ids: {topk_ids_NK.dtype} {tuple(topk_ids_NK.shape)} must be int32 or int64 "
            "[tokens, k]"
        )
    if block_m < 1:
        raise ValueError(f"block_m={block_m}: must be at least 1 row")
    check_expert_ids(topk_ids_NK, num_experts)
    if not use_triton(backend, topk_ids_NK):
        return moe_align_ref(topk_ids_NK, num_experts, block_m)
    from kernels.triton import moe_routing as triton_ops  # here: not every machine has Triton

    return MoeAlignment(*triton_ops.moe_align(topk_ids_NK, num_experts, block_m))


def check_expert_ids(topk_ids: Tensor, num_experts: int) -> None:
    """On a CPU only: looking at values on a GPU would stop it."""
    if topk_ids.device.type != "cpu" or not topk_ids.numel():
        return
    low, high = (int(x) for x in topk_ids.aminmax())
    if low < 0 or high >= num_experts:
        raise ValueError(
            f"topk_ids: expert {low if low < 0 else high} is not one of the {num_experts} experts"
        )
