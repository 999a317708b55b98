"""Benchmark rows of the mixture of experts at Qwen3-30B-A3B's shape: routing, grouped matmul, MoE.

The peer of the matmuls is `torch._grouped_mm`, alone or put together into the whole MoE.
"""

from collections.abc import Iterator

import torch
from kernel_bench.case import BenchCase, backward_of, forward_of
from torch import Tensor

from kernels import fused_moe, grouped_gemm, moe_align, swiglu, topk_softmax
from kernels.moe.moe_routing import moe_align_ref, topk_softmax_ref

HIDDEN, WIDTH, EXPERTS, K = 2048, 768, 128, 8


def moe_of_torch(x: Tensor, w13: Tensor, w2: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """Sort, two torch._grouped_mm, scatter back."""
    k = ids.shape[1]
    order = ids.flatten().argsort(stable=True)
    ends = torch.bincount(ids.flatten(), minlength=w13.shape[0]).cumsum(0).int()
    h = torch._grouped_mm(x[order // k], w13.transpose(1, 2), offs=ends)
    y = torch._grouped_mm(swiglu(h), w2.transpose(1, 2), offs=ends)
    slots = torch.empty_like(y).index_copy(0, order, y).view(*ids.shape, -1)
    return (slots.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def cases(device: str) -> Iterator[BenchCase]:
    is_gpu = device == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    experts = EXPERTS if is_gpu else 16

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).mul_(scale).requires_grad_()

    w13 = normal(experts, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5)
    w2 = normal(experts, HIDDEN, WIDTH, scale=WIDTH**-0.5)
    for num_tokens in (16384, 64) if is_gpu else (64,):
        logits = torch.randn(num_tokens, experts, device=device)
        weights, ids = topk_softmax(logits, K)
        yield from routing_cases(logits, ids)
        x = normal(num_tokens, HIDDEN)
        yield from layer_cases([x, w13, w2, weights.detach().requires_grad_()], ids)
        yield matmul_case(normal(num_tokens * K, HIDDEN).detach(), w13.detach(), ids)


def shape_of(ids: Tensor, experts: int) -> str:
    return f"N={len(ids)} E={experts} k={K} H={HIDDEN} F={WIDTH}"


def routing_cases(logits: Tensor, ids: Tensor) -> Iterator[BenchCase]:
    experts = logits.shape[1]
    yield BenchCase(
        name="topk_softmax", op="topk_softmax", shape=shape_of(ids, experts), dtype="float32",
        run=lambda: topk_softmax(logits, K),
        peers={"eager": lambda: topk_softmax_ref(logits, K)},
        bytes=logits.nbytes + 8 * ids.numel(),
    )  # fmt: skip
    yield BenchCase(
        name="moe_align", op="moe_align", shape=shape_of(ids, experts), dtype="int32",
        run=lambda: moe_align(ids, experts, 128),
        peers={"eager": lambda: moe_align_ref(ids, experts, 128)},
        bytes=8 * ids.numel(),
    )  # fmt: skip


def layer_cases(leaves: list[Tensor], ids: Tensor) -> Iterator[BenchCase]:
    """The whole layer forward and, where it is not a decoding step, backward."""
    x, w13 = leaves[:2]
    experts, slots = len(w13), ids.numel()
    shape, dtype = shape_of(ids, experts), str(x.dtype)[6:]
    flops = 6 * slots * HIDDEN * WIDTH
    is_decode = len(ids) <= 64

    def op(*tensors: Tensor) -> Tensor:
        return fused_moe(*tensors, ids)

    def peer(*tensors: Tensor) -> Tensor:
        return moe_of_torch(*tensors, ids)

    yield BenchCase(
        name="fused_moe-forward", op="fused_moe", shape=shape, dtype=dtype,
        run=forward_of(op, leaves),
        peers={"grouped_mm": forward_of(peer, leaves)} if x.is_cuda else {},
        bytes=min(experts, slots) * 3 * HIDDEN * WIDTH * x.itemsize if is_decode else None,
        flops=None if is_decode else flops,
    )  # fmt: skip
    if not is_decode or not x.is_cuda:
        yield BenchCase(
            name="fused_moe-backward", op="fused_moe", shape=shape, dtype=dtype,
            run=backward_of(op, leaves),
            peers={"grouped_mm": backward_of(peer, leaves)} if x.is_cuda else {},
            flops=2 * flops,
        )  # fmt: skip


def matmul_case(rows: Tensor, w13: Tensor, ids: Tensor) -> BenchCase:
    offsets = moe_align(ids, len(w13), 128).offsets
    ends, transposed = offsets[1:], w13.transpose(1, 2)
    return BenchCase(
        name="grouped_gemm", op="grouped_gemm", shape=shape_of(ids, len(w13)),
        dtype=str(rows.dtype)[6:],
        run=lambda: grouped_gemm(rows, w13, offsets),
        peers={"grouped_mm": lambda: torch._grouped_mm(rows, transposed, offs=ends)}
        if rows.is_cuda else {},
        flops=4 * len(rows) * HIDDEN * WIDTH,
    )  # fmt: skip
