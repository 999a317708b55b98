"""Gate cases of the mixture of experts, at the shape of Qwen3-30B-A3B (128 experts, 8 a token)."""

from collections.abc import Callable, Iterator

import torch
from gate_case import GateCase

from kernels import fused_moe, grouped_gemm, moe_align, topk_softmax

HIDDEN, WIDTH, EXPERTS, K = 2048, 768, 128, 8


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def routed(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.empty(tokens, K, requires_grad=True)
    return weights, torch.empty(tokens, K, dtype=torch.int32)


def moe(tokens: int, backward: bool, dtype: torch.dtype = torch.bfloat16) -> Callable[[], object]:
    def call() -> object:
        shapes = (tokens, HIDDEN), (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
        leaves = tuple(leaf(*shape, dtype=dtype) for shape in shapes)
        weights, ids = routed(tokens)
        y = fused_moe(*leaves, weights, ids, backend="triton")
        return torch.autograd.grad(y.sum(), (*leaves, weights)) if backward else y

    return call


def gpt_oss(tokens: int, backward: bool) -> Callable[[], object]:
    """32 experts, 4 a token, with biases and the clamped activation."""

    def call() -> object:
        hidden = width = 2880
        x, w13, w2 = leaf(tokens, hidden), leaf(32, 2 * width, hidden), leaf(32, hidden, width)
        biases = leaf(32, 2 * width), leaf(32, hidden)
        weights = torch.empty(tokens, 4, requires_grad=True)
        ids = torch.empty(tokens, 4, dtype=torch.int32)
        y = fused_moe(
            x, w13, w2, weights, ids, biases=biases, activation="clamped_swiglu", backend="triton"
        )
        leaves = (x, w13, w2, weights, *biases)
        return torch.autograd.grad(y.sum(), leaves) if backward else y

    return call


def router(experts: int = EXPERTS, k: int = K) -> object:
    grads = []
    for dtype in (torch.bfloat16, torch.float32):
        logits = leaf(4096, experts, dtype=dtype)
        for renormalize in (True, False):
            weights, ids = topk_softmax(logits, k, renormalize=renormalize, backend="triton")
            grads.append(torch.autograd.grad(weights.sum(), logits))
    return moe_align(ids, experts, 128, backend="triton"), grads


def grouped(dtype: torch.dtype) -> Callable[[], object]:
    def call() -> object:
        x = torch.empty(8192, HIDDEN, dtype=dtype, requires_grad=True)
        w = torch.empty(16, WIDTH, HIDDEN, dtype=dtype, requires_grad=True)
        w.main_grad = torch.empty(w.shape)
        offsets = torch.empty(17, dtype=torch.int32)
        y = grouped_gemm(x, w, offsets, backend="triton")
        return torch.autograd.grad(y.sum(), x), y.sum().backward

    return call


def cases() -> Iterator[GateCase]:
    elementwise = ("ld128",)
    tiny: tuple[str, ...] = ()
    of = {
        "_rows_kernel": ("wgmma", "ld128"),
        "_weight_grad_kernel": ("wgmma", "ld128"),
        "_forward_kernel": elementwise,
        "_act_backward_kernel": elementwise,
        "_sum_choices_kernel": elementwise,
    }
    yield GateCase("moe-train", moe(8192, True), need=tiny, need_of=of)
    decode = {**of, "_rows_kernel": ("ld128",)}
    yield GateCase("moe-decode", moe(64, False), need=tiny, need_of=decode)
    yield GateCase("moe-train-64_rows", moe(1024, True), need=tiny, need_of=of)  # an expert's mean
    yield GateCase("moe-gpt_oss-train", gpt_oss(8192, True), need=tiny, need_of=of)
    yield GateCase("moe-gpt_oss-decode", gpt_oss(64, False), need=tiny, need_of=decode)
    yield GateCase("moe-route", router)
    for experts, k in ((256, 8), (512, 10)):  # DeepSeek-V3, Qwen3-Next
        yield GateCase(f"moe-route-{experts}", lambda e=experts, k=k: router(e, k))
    for tokens in (64, 1024):  # both tiles of fp32
        yield GateCase(f"moe-fp32-{tokens}", moe(tokens, True, torch.float32), need=tiny)
    yield GateCase("grouped-gemm-bf16", grouped(torch.bfloat16), need_of=of)
    yield GateCase("grouped-gemm-fp32", grouped(torch.float32))
