"""Attention: training forward and backward, a tree, cache writes, paged prefill and decode.

Peers: PyTorch's scaled_dot_product_attention (the back end it chooses, FlashAttention 2, cuDNN),
its varlen attention, FlexAttention, and for decoding a dense cache of the same sequences; of a tree
its branches as sequences of their own. Where
they are installed: FlashAttention 2 and 3, FlashInfer (`_peers.py`).
"""

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from kernel_bench import _peers
from kernel_bench.case import MODELS, BenchCase, ModelShape, Op, backward_of, forward_of
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from kernels import (
    flash_attn_varlen,
    make_paged_plan,
    make_varlen_plan,
    paged_attention,
    paged_attention_decode,
    reshape_and_cache,
    tree_attention,
)
from kernels.kv_cache import PagedPlan, keys_in_runs, make_kv_cache

BLOCK = 16
FLEX_MODEL, FLEX_LENGTH = "qwen3-4b", 8192  # once: compiling takes its time
Steps = dict[str, Callable[[], object]]


def cases(device: str) -> Iterator[BenchCase]:
    models = MODELS if device == "cuda" else {"qwen3-0.6b": MODELS["qwen3-0.6b"]}
    lengths = (2048, 8192) if device == "cuda" else (256,)
    for name, model in models.items():
        for length in lengths:
            num_seqs = max(1, 16_384 // length) if device == "cuda" else 2
            yield from _training(name, model, num_seqs, length, device)
        yield from _tree(name, model, device)
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
    qkv = [torch.randn(total, n, model.head_dim, device=device, dtype=dtype) for n in heads]
    cu = torch.arange(0, total + 1, length, dtype=torch.int32, device=device)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return flash_attn_varlen(q, k, v, cu, cu, length, length)

    peers: dict[str, Op] = {"sdpa": _sdpa(num_seqs, None)}
    slow: dict[str, Op] = {}
    if device == "cuda":
        peers["sdpa-flash"] = _sdpa(num_seqs, SDPBackend.FLASH_ATTENTION)
        peers["sdpa-cudnn"] = _sdpa(num_seqs, SDPBackend.CUDNN_ATTENTION)
        peers["varlen_attn"] = _varlen(cu, length)
        peers |= _peers.varlen_attention(cu, length)
        if (name, length) == (FLEX_MODEL, FLEX_LENGTH):
            slow["flex_attention"] = _flex(num_seqs, length)
    flops = 2 * model.heads * model.head_dim * num_seqs * length * length  # causal: half of 4
    for kind, step_of, work in (
        ("forward", forward_of, flops),
        ("backward", backward_of, flops * 5 // 2),
    ):
        yield BenchCase(
            f"flash-{kind}", "flash_attn_varlen", f"{name} B={num_seqs} L={length}", _label(dtype),
            step_of(ours, qkv), {peer: step_of(f, qkv) for peer, f in peers.items()}, flops=work,
            slow_peers={peer: step_of(f, qkv) for peer, f in slow.items()},
        )  # fmt: skip


def _tree(name: str, model: ModelShape, device: str) -> Iterator[BenchCase]:
    """Eight completions of one prompt of the same length."""
    dtype, length = _dtype(device), 1024 if device == "cuda" else 64
    bounds = list(range(0, 9 * length + 1, length))
    plan = make_varlen_plan(bounds, [-1] + [0] * 8)
    heads = (model.heads, model.kv_heads, model.kv_heads)
    qkv = [torch.randn(bounds[-1], n, model.head_dim, device=device, dtype=dtype) for n in heads]
    prompt = torch.arange(length)
    rows = torch.cat([torch.cat([prompt, prompt + lo]) for lo in bounds[1:-1]]).to(device)
    cu = torch.arange(0, len(rows) + 1, 2 * length, dtype=torch.int32, device=device)

    def unshared(q: Tensor, k: Tensor, v: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        return flash_attn_varlen(q[rows], k[rows], v[rows], cu, cu, 2 * length, 2 * length)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return tree_attention(q, k, v, plan)

    for kind, step_of in (("forward", forward_of), ("backward", backward_of)):
        yield BenchCase(
            f"tree-{kind}", "tree_attention", f"{name} 8 of {length} + {length}", _label(dtype),
            step_of(ours, qkv), {"unshared": step_of(unshared, qkv)},
        )  # fmt: skip


def _batched(x_THD: Tensor, num_seqs: int) -> Tensor:
    return x_THD.unflatten(0, (num_seqs, -1)).transpose(1, 2)


def _sdpa(num_seqs: int, backend: SDPBackend | None) -> Op:
    """Equal lengths make the packed batch a rectangle: the best case for the peer."""

    def op(*qkv: Tensor) -> Tensor:
        batch = [_batched(x, num_seqs) for x in qkv]
        if backend is None:
            return F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True)
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(*batch, is_causal=True, enable_gqa=True)

    return op


def _varlen(cu: Tensor, length: int) -> Op:
    def op(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        options = {"window_size": (-1, 0)}  # causal
        if q.shape[1] != k.shape[1]:
            options["enable_gqa"] = True
        out: Tensor = varlen_attn(q, k, v, cu, cu, length, length, **options)
        return out

    return op


def _flex(num_seqs: int, length: int) -> Op:
    made: list[Callable[..., Tensor]] = []

    def op(*qkv: Tensor) -> Tensor:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if not made:
            mask = create_block_mask(
                lambda b, h, i, j: i >= j, None, None, length, length, device=str(qkv[0].device)
            )
            attend = torch.compile(flex_attention, dynamic=False)
            made.append(lambda *batch: attend(*batch, block_mask=mask, enable_gqa=True))
        return made[0](*(_batched(x, num_seqs) for x in qkv))

    return op


def _paged(name: str, model: ModelShape, device: str) -> Iterator[BenchCase]:
    dtype, size = _dtype(device), (64 if device == "cuda" else 4)
    context = 4096 if device == "cuda" else 256
    width = context // BLOCK
    shape = (size * width, BLOCK, model.kv_heads, model.head_dim)
    caches = [make_kv_cache(shape, dtype, device).normal_() for _ in "kv"]
    served = [keys_in_runs(caches[0]), caches[1]]  # as an engine's; the memory is random anyway
    row_bytes = model.kv_heads * model.head_dim * dtype.itemsize
    tables = torch.randperm(size * width, device=device, dtype=torch.int32).view(size, width)
    lens = torch.full((size,), context, dtype=torch.int32, device=device)

    tokens = 8192 if device == "cuda" else 512
    k, v = (torch.randn(tokens, *shape[2:], device=device, dtype=dtype) for _ in "kv")
    slots = torch.randperm(size * context, device=device)[:tokens]

    def eager_store() -> None:
        for x, cache in zip((k, v), caches, strict=True):
            cache[slots // BLOCK, slots % BLOCK] = x

    steps: Steps = {"ours": lambda: reshape_and_cache(k, v, *served, slots), "eager": eager_store}
    label = f"{name} N={tokens}"
    yield _case("store-kv", "reshape_and_cache", label, dtype, steps, moved=4 * tokens * row_bytes)

    q = torch.randn(size, model.heads, model.head_dim, device=device, dtype=dtype)
    plan = None
    if device == "cpu":  # as the engine does: planned once a step, for all layers
        plan = _plan(q, range(size + 1), lens, tables, caches[1])
    dense = [x.reshape(size, context, *shape[2:]).transpose(1, 2) for x in caches]
    steps = {
        "ours": _decode(q, served, tables, lens, context, plan),
        "sdpa-dense": lambda: F.scaled_dot_product_attention(
            q.unsqueeze(2), *dense, enable_gqa=True
        ),
    }
    if device == "cuda":
        steps |= _peers.paged_decode(q, caches, tables, lens)
    label = f"{name} B={size} L={context}"
    moved = 2 * size * context * row_bytes
    yield _case("paged-decode", "paged_attention_decode", label, dtype, steps, moved=moved)

    chunk, members = (512, 8) if device == "cuda" else (64, 2)
    q = torch.randn(members * chunk, model.heads, model.head_dim, device=device, dtype=dtype)
    starts = torch.arange(0, len(q) + 1, chunk, dtype=torch.int32, device=device)
    dense = [x[:members] for x in dense]
    q_batch = _batched(q, members)
    if device == "cpu":
        plan = _plan(q, starts, lens[:members], tables[:members], caches[1])
    mask = torch.ones(chunk, context, dtype=torch.bool, device=device).tril(context - chunk)
    steps = {
        "ours": lambda: paged_attention(
            q, *served, starts, lens[:members], tables[:members], max_query_len=chunk,
            max_seq_len=context, plan=plan,
        ),
        "sdpa-dense": lambda: F.scaled_dot_product_attention(
            q_batch, *dense, attn_mask=mask, enable_gqa=True
        ),
    }  # fmt: skip
    if device == "cuda":
        steps |= _peers.paged_prefill(q, starts, caches, tables[:members])
    pairs = members * (chunk * (context - chunk) + chunk * chunk // 2)
    flops = 4 * model.heads * model.head_dim * pairs
    label = f"{name} B={members} q={chunk} L={context}"
    yield _case("paged-prefill", "paged_attention", label, dtype, steps, flops=flops)


def _plan(
    q: Tensor, starts: Tensor | range, lens: Tensor, tables: Tensor, cache: Tensor
) -> PagedPlan:
    return make_paged_plan(
        starts, lens, tables, cache=cache, num_heads=q.shape[1], dtype=cache.dtype
    )


def _decode(
    q: Tensor, caches: list[Tensor], tables: Tensor, lens: Tensor, context: int,
    plan: PagedPlan | None,
) -> Callable[[], object]:  # fmt: skip
    if plan is None:
        return lambda: paged_attention_decode(q, *caches, tables, lens, max_seq_len=context)
    return lambda: paged_attention(
        q, *caches, range(len(q) + 1), lens, tables, max_query_len=1, max_seq_len=context, plan=plan
    )


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
