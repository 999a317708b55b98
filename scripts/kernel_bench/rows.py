"""Benchmark rows of rms_norm, add_rms_norm, rope, qk_norm_rope and swiglu, forward and backward.

Bytes are what an ideal kernel moves. Backward rows time the backward pass alone (a retained graph).
"""

from collections.abc import Callable, Iterator

import torch
from kernel_bench.case import BenchCase
from torch import Tensor

from kernels import add_rms_norm, apply_rope, qk_norm_rope, rms_norm, swiglu
from kernels.qk_norm_rope import qk_norm_rope_ref
from kernels.rms_norm import rms_norm_ref
from kernels.rope import apply_rope_ref
from kernels.swiglu import swiglu_ref

WIDTHS = {"qwen3-0.6b": (1024, 3072), "qwen3-4b": (2560, 9728), "llama-3-8b": (4096, 14336)}
HEADS = {"qwen3-0.6b": (16, 8, 128), "qwen3-4b": (32, 8, 128), "llama-3-8b": (32, 8, 128)}
Op = Callable[..., Tensor | tuple[Tensor, ...]]


def passes(
    op: str, model: str, ours: Op, plain: Op, inputs: list[Tensor], bytes_f: int, bytes_b: int
) -> Iterator[BenchCase]:
    """The forward and the backward row of one op; peers are eager and compiled PyTorch."""
    shape = f"{model} {tuple(inputs[0].shape)}"
    dtype = str(inputs[0].dtype)[6:]
    theirs = {"eager": plain, "compile": torch.compile(plain)} if inputs[0].is_cuda else {}
    detached = [x.detach() for x in inputs]
    yield BenchCase(
        name=f"{op}-forward", op=op, shape=shape, dtype=dtype, run=lambda: ours(*detached),
        peers={name: (lambda f=f: f(*detached)) for name, f in theirs.items()},
        bytes=bytes_f, flops=None,
    )  # fmt: skip
    yield BenchCase(
        name=f"{op}-backward", op=op, shape=shape, dtype=dtype, run=backward_of(ours, inputs),
        peers={name: backward_of(f, inputs) for name, f in theirs.items()},
        bytes=bytes_b, flops=None,
    )  # fmt: skip


def backward_of(op: Op, inputs: list[Tensor]) -> Callable[[], object]:
    leaves = [x.detach().requires_grad_() for x in inputs]
    outs = op(*leaves)
    outs = outs if isinstance(outs, tuple) else (outs,)
    grads = [torch.randn_like(out) for out in outs]
    return lambda: torch.autograd.grad(outs, leaves, grads, retain_graph=True)


def cases(device: str) -> Iterator[BenchCase]:
    is_gpu = device == "cuda"
    num_tokens = 16384 if is_gpu else 256
    dtype = torch.bfloat16 if is_gpu else torch.float32
    models = list(WIDTHS) if is_gpu else ["qwen3-0.6b"]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    for model in models:
        hidden, ffn = WIDTHS[model]
        item = num_tokens * hidden * dtype.itemsize
        x, residual, w = normal(num_tokens, hidden), normal(num_tokens, hidden), normal(hidden)
        yield from passes("rms_norm", model, rms_norm, plain_norm, [x, w], 2 * item, 3 * item)
        yield from passes(
            "add_rms_norm", model, add_rms_norm, plain_add_norm, [x, residual, w], 4 * item,
            4 * item,
        )  # fmt: skip
        item = num_tokens * ffn * dtype.itemsize
        gate_up = [normal(num_tokens, 2 * ffn)]
        yield from passes("swiglu", model, swiglu, swiglu_ref, gate_up, 3 * item, 5 * item)
        yield from rope_cases(model, num_tokens, normal, device)


def plain_norm(x: Tensor, w: Tensor) -> Tensor:
    return rms_norm_ref(x, w, 1e-6)


def plain_add_norm(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    total = x + residual
    return rms_norm_ref(total, w, 1e-6), total


def rope_cases(
    model: str, num_tokens: int, normal: Callable[..., Tensor], device: str
) -> Iterator[BenchCase]:
    q_heads, k_heads, dim = HEADS[model]
    q, k = normal(num_tokens, q_heads, dim), normal(num_tokens, k_heads, dim)
    angle = torch.rand(num_tokens, dim // 2, device=device)
    cos, sin, at = angle.cos(), angle.sin(), torch.arange(num_tokens, device=device)
    item = (q.numel() + k.numel()) * q.element_size()
    yield from passes(
        "rope", model, lambda q, k: apply_rope(q, k, cos, sin, at),
        lambda q, k: apply_rope_ref(q, k, cos, sin, at), [q, k], 2 * item, 2 * item,
    )  # fmt: skip
    weights = [normal(dim), normal(dim)]
    yield from passes(
        "qk_norm_rope", model, lambda q, k, a, b: qk_norm_rope(q, k, a, b, cos, sin, at, 1e-6),
        lambda q, k, a, b: qk_norm_rope_ref(q, k, a, b, cos, sin, at, 1e-6), [q, k, *weights],
        2 * item, 3 * item,
    )  # fmt: skip
