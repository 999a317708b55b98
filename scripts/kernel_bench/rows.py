"""Benchmark rows of rms_norm, add_rms_norm, rope, qk_norm_rope and swiglu, forward and backward.

Bytes are what an ideal kernel moves. Backward rows time the backward pass alone (a retained graph).
"""

from collections.abc import Callable, Iterator

import torch
from kernel_bench import _peers
from kernel_bench.case import BenchCase, Op, backward_of, compiled, forward_of
from torch import Tensor

from kernels import (
    add_rms_norm,
    add_rows_,
    apply_rope,
    gather_rows,
    make_row_gather,
    qk_norm_rope,
    rms_norm,
    swiglu,
)
from kernels.gpu.gather_rows import gather_rows_ref
from kernels.torch.rms_norm import rms_norm_ref
from kernels.torch.rope import apply_rope_ref, qk_norm_rope_ref
from kernels.torch.swiglu import swiglu_ref

WIDTHS = {"qwen3-0.6b": (1024, 3072), "qwen3-4b": (2560, 9728), "llama-3-8b": (4096, 14336)}
HEADS = {"qwen3-0.6b": (16, 8, 128), "qwen3-4b": (32, 8, 128), "llama-3-8b": (32, 8, 128)}


def passes(
    op: str, model: str, ours: Op, plain: Op, inputs: list[Tensor], bytes_f: int, bytes_b: int
) -> Iterator[BenchCase]:
    """The forward and the backward row of one op; peers are eager and compiled PyTorch, Liger."""
    shape, dtype = f"{model} {tuple(inputs[0].shape)}", str(inputs[0].dtype)[6:]
    peers = {"eager": plain}
    if _peers.has("liger") and op in LIGER:
        peers["liger"] = LIGER[op]
    slow = {"compile": compiled(plain)} if inputs[0].is_cuda else {}
    for name, step_of, moved in (
        ("forward", forward_of, bytes_f),
        ("backward", backward_of, bytes_b),
    ):
        timed = dict(peers)
        if name == "forward" and op in _peers.FLASHINFER and _peers.has("flashinfer"):
            timed["flashinfer"] = _peers.FLASHINFER[op]
        yield BenchCase(
            name=f"{op}-{name}", op=op, shape=shape, dtype=dtype, run=step_of(ours, inputs),
            peers={peer: step_of(f, inputs) for peer, f in timed.items()}, bytes=moved,
            slow_peers={peer: step_of(f, inputs) for peer, f in slow.items()},
        )  # fmt: skip


def liger_norm(x: Tensor, w: Tensor) -> Tensor:
    from liger_kernel.transformers.functional import liger_rms_norm

    y: Tensor = liger_rms_norm(x, w, 1e-6, in_place=False)
    return y


def liger_swiglu(gate_up: Tensor) -> Tensor:
    from liger_kernel.transformers import functional

    y: Tensor = functional.liger_swiglu(*(x.contiguous() for x in gate_up.chunk(2, -1)))
    return y


LIGER: dict[str, Op] = {"rms_norm": liger_norm, "swiglu": liger_swiglu}


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
        _, k_heads, dim = HEADS[model]
        yield from gather_cases(model, normal(num_tokens, k_heads, dim))
        yield embedding_case(model, x)


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


def embedding_case(model: str, rows: Tensor) -> BenchCase:
    """The gradient of 151,936 embeddings, as many as Qwen3 has; half of the tokens are the same."""
    ids = torch.randint(0, 151_936, (len(rows),), device=rows.device)
    ids[::2] = 7
    ours, peer = (torch.zeros(151_936, rows.shape[1], device=rows.device) for _ in "op")
    moved = rows.numel() * (rows.element_size() + 4)
    return BenchCase(
        name="add_rows", op="add_rows_", shape=f"{model} {tuple(rows.shape)}",
        dtype=str(rows.dtype)[6:], run=lambda: add_rows_(ours, ids, rows),
        peers={"index_add-atomics": lambda: peer.index_add_(0, ids, rows.float())}, bytes=moved,
    )  # fmt: skip


def gather_cases(model: str, k: Tensor) -> Iterator[BenchCase]:
    """Keys of 16 segments behind one prompt of an eighth of the rows (`tree_attention`)."""
    prompt = torch.arange(len(k) // 8)
    index = torch.cat(
        [torch.cat([prompt, own]) for own in torch.arange(len(prompt), len(k)).chunk(16)]
    )
    plan, at = make_row_gather(index, len(k), k.device), index.to(k.device)
    moved = (len(k) + len(index)) * k[0].numel() * k.element_size()
    yield from passes(
        "gather_rows", model, lambda x: gather_rows(x, plan), lambda x: gather_rows_ref(x, at),
        [k], moved, moved,
    )  # fmt: skip
