"""Benchmark rows of the mixture of experts at Qwen3-30B-A3B's shape: routing, grouped matmul, MoE.

The peer of the matmuls is `torch._grouped_mm`, alone or put together into the whole MoE.
"""

from collections.abc import Callable, Iterator

import torch
from kernel_bench.case import BenchCase
from torch import Tensor

from kernels import fused_moe, grouped_gemm, moe_align, swiglu, topk_softmax
from kernels.moe_routing import moe_align_ref, topk_softmax_ref

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


def backward_of(op: Callable[..., Tensor], leaves: list[Tensor]) -> Callable[[], object]:
    out = op(*leaves)
    return lambda: torch.autograd.grad(out, leaves, torch.ones_like(out), retain_graph=True)


def cases(device: str) -> Iterator[BenchCase]:
    is_gpu = device == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float32
    experts = EXPERTS if is_gpu else 16
    name = str(dtype)[6:]

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype).mul_(scale).requires_grad_()

    w13 = normal(experts, 2 * WIDTH, HIDDEN, scale=HIDDEN**-0.5)
    w2 = normal(experts, HIDDEN, WIDTH, scale=WIDTH**-0.5)
    for num_tokens in (16384, 64) if is_gpu else (64,):
        logits = torch.randn(num_tokens, experts, device=device)
        weights, ids = topk_softmax(logits, K)
        shape = f"N={num_tokens} E={experts} k={K} H={HIDDEN} F={WIDTH}"
        yield BenchCase(
            name="topk_softmax", op="topk_softmax", shape=shape, dtype="float32",
            run=lambda z=logits: topk_softmax(z, K),
            peers={"eager": lambda z=logits: topk_softmax_ref(z, K)},
            bytes=logits.nbytes + 8 * ids.numel(), flops=None,
        )  # fmt: skip
        yield BenchCase(
            name="moe_align", op="moe_align", shape=shape, dtype="int32",
            run=lambda i=ids: moe_align(i, experts, 128),
            peers={"eager": lambda i=ids: moe_align_ref(i, experts, 128)},
            bytes=8 * ids.numel(), flops=None,
        )  # fmt: skip
        x, slots = normal(num_tokens, HIDDEN), num_tokens * K
        flops = 6 * slots * HIDDEN * WIDTH
        expert_bytes = min(experts, slots) * 3 * HIDDEN * WIDTH * dtype.itemsize

        def op(*leaves: Tensor, i: Tensor = ids) -> Tensor:
            return fused_moe(*leaves, i)

        def peer(*leaves: Tensor, i: Tensor = ids) -> Tensor:
            return moe_of_torch(*leaves, i)

        leaves = [x, w13, w2, weights.detach().requires_grad_()]
        plain = [t.detach() for t in leaves]
        is_decode = num_tokens <= 64
        yield BenchCase(
            name="fused_moe-forward", op="fused_moe", shape=shape, dtype=name,
            run=lambda f=op, t=plain: f(*t),
            peers={"grouped_mm": lambda f=peer, t=plain: f(*t)} if is_gpu else {},
            bytes=expert_bytes if is_decode else None, flops=None if is_decode else flops,
        )  # fmt: skip
        if not is_decode or not is_gpu:
            yield BenchCase(
                name="fused_moe-backward", op="fused_moe", shape=shape, dtype=name,
                run=backward_of(op, leaves),
                peers={"grouped_mm": backward_of(peer, leaves)} if is_gpu else {},
                bytes=None, flops=2 * flops,
            )  # fmt: skip
        offsets = moe_align(ids, experts, 128).offsets
        rows = normal(slots, HIDDEN).detach()
        yield BenchCase(
            name="grouped_gemm", op="grouped_gemm", shape=shape, dtype=name,
            run=lambda r=rows, o=offsets: grouped_gemm(r, w13.detach(), o),
            peers={
                "grouped_mm": lambda r=rows, o=offsets: torch._grouped_mm(
                    r, w13.detach().transpose(1, 2), offs=o[1:]
                )
            } if is_gpu else {},
            bytes=None, flops=4 * slots * HIDDEN * WIDTH,
        )  # fmt: skip
