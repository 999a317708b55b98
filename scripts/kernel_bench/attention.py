"""Attention: training forward and backward, cache writes, paged prefill and decode.

Peers: PyTorch's scaled_dot_product_attention (the back end it chooses), its varlen attention, and
for decoding a dense cache of the same sequences.
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from kernel_bench.case import MODELS, BenchCase, ModelShape
from torch import Tensor

from kernels import flash_attn_varlen, paged_attention, paged_attention_decode, reshape_and_cache

BLOCK = 16
Steps = dict[str, Callable[[], object]]


def cases(device: str) -> Iterator[BenchCase]:
    models = MODELS if device == "cuda" else {"qwen3-0.6b": MODELS["qwen3-0.6b"]}
    lengths = (2048, 8192) if device == "cuda" else (256,)
    for name, model in models.items():
        for length in lengths:
            num_seqs = max(1, 16_384 // length) if device == "cuda" else 2
            yield from _training(name, model, num_seqs, length, device)
        yield from _paged(name, model, device)


def _dtype(device: str) -> torch.dtype:
    return torch.bfloat16 if device == "cuda" else torch.float32


def _label(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]


def _training(
    name: str, model: ModelShape, num_seqs: int, length: int, device: str
) -> Iterator[BenchCase]:
    dtype, total = _dtype(device), num_seqs * length
    heads = (model.heads, model.kv_heads, model.kv_heads)
    q, k, v = (
        torch.randn(total, n, model.head_dim, device=device, dtype=dtype, requires_grad=True)
        for n in heads
    )
    cu = torch.arange(0, total + 1, length, dtype=torch.int32, device=device)
    grad = torch.randn_like(q)

    def ours() -> Tensor:
        out = flash_attn_varlen(q, k, v, cu, cu, length, length)
        return out if isinstance(out, Tensor) else out[0]

    forwards: dict[str, Callable[[], Tensor]] = {"ours": ours, "sdpa": _sdpa(q, k, v, num_seqs)}
    if device == "cuda" and model.heads == model.kv_heads:
        forwards["varlen_attn"] = _varlen(q, k, v, cu, length)
    flops = 2 * model.heads * model.head_dim * num_seqs * length * length  # causal: half of 4
    shape = f"{name} B={num_seqs} L={length}"
    with torch.no_grad():
        steps: Steps = dict(forwards)
        yield _case("flash-forward", "flash_attn_varlen", shape, dtype, steps, flops=flops)
    outs = {peer: forward() for peer, forward in forwards.items()}
    backwards: Steps = {
        peer: lambda o=out: torch.autograd.grad(
            o, (q, k, v), grad.view(o.shape) if o.shape == grad.shape else _batched(grad, num_seqs),
            retain_graph=True,
        )
        for peer, out in outs.items()
    }  # fmt: skip
    yield _case(
        "flash-backward", "flash_attn_varlen", shape, dtype, backwards, flops=flops * 5 // 2
    )


def _batched(x_THD: Tensor, num_seqs: int) -> Tensor:
    return x_THD.unflatten(0, (num_seqs, -1)).transpose(1, 2)


def _sdpa(q: Tensor, k: Tensor, v: Tensor, num_seqs: int) -> Callable[[], Tensor]:
    """Equal lengths make the packed batch a rectangle: the best case for the peer."""
    batch = [_batched(x, num_seqs) for x in (q, k, v)]
    return lambda: F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True)


def _varlen(q: Tensor, k: Tensor, v: Tensor, cu: Tensor, length: int) -> Callable[[], Tensor]:
    from torch.nn.attention.varlen import varlen_attn

    return lambda: varlen_attn(q, k, v, cu, cu, length, length, window_size=(-1, 0))


def _paged(name: str, model: ModelShape, device: str) -> Iterator[BenchCase]:
    dtype, size = _dtype(device), (64 if device == "cuda" else 4)
    context = 4096 if device == "cuda" else 256
    width = context // BLOCK
    shape = (size * width, BLOCK, model.kv_heads, model.head_dim)
    caches = [torch.randn(shape, device=device, dtype=dtype) for _ in "kv"]
    row_bytes = model.kv_heads * model.head_dim * dtype.itemsize
    tables = torch.randperm(size * width, device=device, dtype=torch.int32).view(size, width)
    lens = torch.full((size,), context, dtype=torch.int32, device=device)

    tokens = 8192 if device == "cuda" else 512
    k, v = (torch.randn(tokens, *shape[2:], device=device, dtype=dtype) for _ in "kv")
    slots = torch.randperm(size * context, device=device)[:tokens]

    def eager_store() -> None:
        for x, cache in zip((k, v), caches, strict=True):
            cache.flatten(0, 1)[slots] = x

    steps: Steps = {"ours": lambda: reshape_and_cache(k, v, *caches, slots), "eager": eager_store}
    label = f"{name} N={tokens}"
    yield _case("store-kv", "reshape_and_cache", label, dtype, steps, moved=4 * tokens * row_bytes)

    q = torch.randn(size, model.heads, model.head_dim, device=device, dtype=dtype)
    dense = [x.view(size, context, *shape[2:]).transpose(1, 2) for x in caches]
    steps = {
        "ours": lambda: paged_attention_decode(
            q, *caches, tables, lens, max_seq_len=context, softmax_scale=model.head_dim**-0.5
        ),
        "sdpa-dense": lambda: F.scaled_dot_product_attention(
            q.unsqueeze(2), *dense, enable_gqa=True
        ),
    }
    label = f"{name} B={size} L={context}"
    moved = 2 * size * context * row_bytes
    yield _case("paged-decode", "paged_attention_decode", label, dtype, steps, moved=moved)

    chunk, members = (512, 8) if device == "cuda" else (64, 2)
    q = torch.randn(members * chunk, model.heads, model.head_dim, device=device, dtype=dtype)
    starts = torch.arange(0, len(q) + 1, chunk, dtype=torch.int32, device=device)
    dense = [x[:members] for x in dense]
    q_batch = _batched(q, members)
    mask = torch.ones(chunk, context, dtype=torch.bool, device=device).tril(context - chunk)
    steps = {
        "ours": lambda: paged_attention(
            q, *caches, starts, lens[:members], tables[:members], max_query_len=chunk,
            max_seq_len=context,
        ),
        "sdpa-dense": lambda: F.scaled_dot_product_attention(
            q_batch, *dense, attn_mask=mask, enable_gqa=True
        ),
    }  # fmt: skip
    pairs = members * (chunk * (context - chunk) + chunk * chunk // 2)
    flops = 4 * model.heads * model.head_dim * pairs
    label = f"{name} B={members} q={chunk} L={context}"
    yield _case("paged-prefill", "paged_attention", label, dtype, steps, flops=flops)


def _case(
    name: str,
    op: str,
    shape: str,
    dtype: torch.dtype,
    steps: Steps,
    moved: int | None = None,
    flops: int | None = None,
) -> BenchCase:
    peers = {peer: step for peer, step in steps.items() if peer != "ours"}
    return BenchCase(name, op, shape, _label(dtype), steps["ours"], peers, moved, flops)
