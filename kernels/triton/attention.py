"""Triton kernels of `flash_attn_varlen`: forward, and a backward pass without atomics.

Forward: a program holds M queries of one head and walks over N keys at a time, keeping the running
maximum and sum of each row (online softmax, in powers of 2). It stores o and lse, never scores;
lse in powers of 2 as well, since a logarithm that goes to base e and back loses its last bits, and
with them every p of the row.

Backward recomputes P = 2^(S − lse) tile by tile, in three launches:
    delta_i = Σ_d do·o − dlse       one number a row, so that dS = P ∘ (dO·Vᵀ − delta); and lse
                                    again, +inf (so that P = 0) for a row that saw no key
    dk, dv                          a program holds N keys and walks over the queries of every head
                                    of the group, so the group's sum has one owner and one order
    dq                              a program holds M queries and walks over keys
S is thus computed three times in all; the alternative, atomics on dq, is not deterministic.

Forward and dq mask only the tiles on the diagonal, at a sequence's end or (with a window) all; the
loop over the rest has no comparison. In dk, dv a second loop would cost registers that are not
there (the two accumulators take half of them), so every tile is masked.

A head's sink is the first score that a row meets, of no value: forward starts from it, lse has it,
and so P needs no other change. Its own gradient is a sum over delta and lse, in PyTorch.

Left out: TMA descriptors and warp specialisation (in Triton 3.9 the latter does not compile for
this loop), head_dim beyond 256, dropout.

Legend: M queries, N keys of a tile, D head_dim padded to a power of two.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.tiles import Tile, meet_sinks, tile, weigh_tile

_LOG2_E = math.log2(math.e)
LOG2_E: tl.constexpr = tl.constexpr(_LOG2_E)


@triton.jit
def _place(base, first, stride, num_rows, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
           D: tl.constexpr):  # fmt: skip
    """(addresses of rows first..first + ROWS of one head, whether each is inside). The tile's first
    row has a 64-bit offset: row times stride passes 2^31 in long sequences."""
    rows, dims = tl.arange(0, ROWS), tl.arange(0, D)
    inside = (rows < num_rows - first)[:, None]
    if HEAD_DIM != D:
        inside = inside & (dims < HEAD_DIM)[None, :]
    base += tl.cast(first, tl.int64) * stride
    return base + rows[:, None] * stride + dims[None, :], inside


@triton.jit
def _load_rows(base, first, stride, num_rows, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
               D: tl.constexpr):  # fmt: skip
    """Rows of one head as a tile; zeros past the sequence and past the head."""
    at, inside = _place(base, first, stride, num_rows, ROWS, HEAD_DIM, D)
    return tl.load(at, inside, other=0.0)


@triton.jit
def _store_rows(base, first, stride, num_rows, x, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
                D: tl.constexpr):  # fmt: skip
    at, inside = _place(base, first, stride, num_rows, ROWS, HEAD_DIM, D)
    tl.store(at, x.to(base.dtype.element_ty), inside)


@triton.jit
def _is_visible(position, key, num_k, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr):
    """`position` is where the query sits among the keys; both broadcast against each other."""
    seen = key < num_k
    if CAUSAL:
        seen = seen & (key <= position)
    if WINDOWED:
        seen = seen & (key > position - window)
    return seen


@triton.jit
def _span(cu_ptr, seq):
    """A sequence's first packed row and its length."""
    start = tl.load(cu_ptr + seq)
    return start.to(tl.int64), tl.load(cu_ptr + seq + 1) - start


@triton.jit
def _key_range(
    first, num_q, num_k, window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """(begin, end of the tiles without a mask, end) of the keys that queries first..first+M see."""
    position = first + num_k - num_q
    begin, end, full = 0, num_k, num_k // N * N
    if CAUSAL:
        end = tl.maximum(0, tl.minimum(num_k, position + M))
        full = tl.maximum(0, tl.minimum(num_k, position + 1)) // N * N
    if WINDOWED:
        begin = tl.maximum(0, position - window + 1) // N * N
        full = begin
    return begin, full, end


@triton.jit
def _forward_keys(
    acc, total, top, q, k_base, v_base, k_token, v_token, begin, end, position, num_k, scale2,
    window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    for at in range(begin, end, N):
        keys = at + tl.arange(0, N)
        k = _load_rows(k_base, at, k_token, num_k, N, HEAD_DIM, D)
        products = tl.dot(q, tl.trans(k), input_precision="ieee")
        if MASKED:
            seen = _is_visible(position[:, None], keys[None, :], num_k, window, CAUSAL, WINDOWED)
            products = tl.where(seen, products, -float("inf"))
        p, shrink, total, top = weigh_tile(total, top, products, scale2, MASKED)
        v = _load_rows(v_base, at, v_token, num_k, N, HEAD_DIM, D)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
    return acc, total, top


@triton.jit
def _forward_kernel(
    q_ptr, k_ptr, v_ptr, sink_ptr, o_ptr, lse2_ptr, cu_q_ptr, cu_k_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, o_token, o_head, lse_head, scale2, window,
    HAS_SINKS: tl.constexpr, GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    head, seq = tl.program_id(1).to(tl.int64), tl.program_id(2)
    q_start, num_q = _span(cu_q_ptr, seq)
    k_start, num_k = _span(cu_k_ptr, seq)
    # causal: the last queries have most keys; they go first, so that no long tile is left over
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if first >= num_q:
        return
    query = first + tl.arange(0, M)
    position = query + num_k - num_q
    q_base = q_ptr + q_start * q_token + head * q_head
    q = _load_rows(q_base, first, q_token, num_q, M, HEAD_DIM, D)
    k_base = k_ptr + k_start * k_token + head // GROUP * k_head
    v_base = v_ptr + k_start * v_token + head // GROUP * v_head
    top = tl.full([M], -float("inf"), dtype=tl.float32)
    total = tl.zeros([M], dtype=tl.float32)
    if HAS_SINKS:
        top, total = meet_sinks(tl.load(sink_ptr + head), top)
    acc = tl.zeros([M, D], dtype=tl.float32)
    begin, full, end = _key_range(first, num_q, num_k, window, CAUSAL, WINDOWED, M, N)
    if not WINDOWED:
        acc, total, top = _forward_keys(
            acc, total, top, q, k_base, v_base, k_token, v_token, begin, full, position, num_k,
            scale2, window, CAUSAL, WINDOWED, False, HEAD_DIM, D, N,
        )  # fmt: skip
    acc, total, top = _forward_keys(
        acc, total, top, q, k_base, v_base, k_token, v_token, full, end, position, num_k,
        scale2, window, CAUSAL, WINDOWED, True, HEAD_DIM, D, N,
    )  # fmt: skip
    is_empty = total == 0.0
    acc = acc / tl.where(is_empty, 1.0, total)[:, None]
    o_base = o_ptr + q_start * o_token + head * o_head
    _store_rows(o_base, first, o_token, num_q, acc, M, HEAD_DIM, D)
    lse2 = tl.where(is_empty, -float("inf"), top + tl.log2(total))
    tl.store(lse2_ptr + head * lse_head + q_start + query, lse2, query < num_q)


@triton.jit
def _delta_kernel(
    o_ptr, do_ptr, dlse_ptr, found_ptr, delta_ptr, lse2_ptr, num_tokens, o_token, o_head, do_token,
    do_head, dlse_token, dlse_head, lse_head, HAS_DLSE: tl.constexpr, HEAD_DIM: tl.constexpr,
    D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    first, head = tl.program_id(0).to(tl.int64) * M, tl.program_id(1).to(tl.int64)
    rows, left = tl.arange(0, M), num_tokens - first
    o = _load_rows(o_ptr + head * o_head, first, o_token, num_tokens, M, HEAD_DIM, D)
    do = _load_rows(do_ptr + head * do_head, first, do_token, num_tokens, M, HEAD_DIM, D)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if HAS_DLSE:
        at = dlse_ptr + (first + rows) * dlse_token + head * dlse_head
        delta -= tl.load(at, rows < left, other=0.0) * LOG2_E  # of lse, not of lse2
    at = head * lse_head + first + rows
    tl.store(delta_ptr + at, delta, rows < left)
    found = tl.load(found_ptr + at, rows < left, other=0.0)
    lse2 = tl.where(found == -float("inf"), float("inf"), found)
    tl.store(lse2_ptr + at, lse2, rows < left)


@triton.jit
def _dkdv_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dk_ptr, dv_ptr, cu_q_ptr, cu_k_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, dk_token, dk_head,
    lse_head, scale, scale2, window,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    kv_head, seq = tl.program_id(1).to(tl.int64), tl.program_id(2)
    q_start, num_q = _span(cu_q_ptr, seq)
    k_start, num_k = _span(cu_k_ptr, seq)
    first = tl.program_id(0) * N  # causal: the first keys have most queries
    if first >= num_k:
        return
    keys = first + tl.arange(0, N)
    k_base = k_ptr + k_start * k_token + kv_head * k_head
    v_base = v_ptr + k_start * v_token + kv_head * v_head
    k = _load_rows(k_base, first, k_token, num_k, N, HEAD_DIM, D)
    v = _load_rows(v_base, first, v_token, num_k, N, HEAD_DIM, D)
    dk = tl.zeros([N, D], dtype=tl.float32)
    dv = tl.zeros([N, D], dtype=tl.float32)
    offset = num_k - num_q
    begin, end = 0, num_q  # the queries that see any of these keys
    if CAUSAL:
        begin = tl.maximum(0, first - offset) // M * M
    if WINDOWED:
        end = tl.minimum(num_q, tl.maximum(0, first + N + window - 1 - offset))
    for i in range(GROUP):
        head = kv_head * GROUP + i
        q_base = q_ptr + q_start * q_token + head * q_head
        do_base = do_ptr + q_start * do_token + head * do_head
        row_base = head * lse_head + q_start
        for at in range(begin, end, M):
            query = at + tl.arange(0, M)
            q = _load_rows(q_base, at, q_token, num_q, M, HEAD_DIM, D)
            scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale2
            lse2 = tl.load(lse2_ptr + row_base + query, query < num_q, other=float("inf"))
            p = tl.exp2(scores - lse2[None, :])
            if CAUSAL:  # rows of keys past the end are not stored: they need no mask
                seen = (query + offset)[None, :] >= keys[:, None]
                if WINDOWED:
                    seen = seen & ((query + offset - window)[None, :] < keys[:, None])
                p = tl.where(seen, p, 0.0)
            do = _load_rows(do_base, at, do_token, num_q, M, HEAD_DIM, D)
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision="ieee")
            delta = tl.load(delta_ptr + row_base + query, query < num_q, other=0.0)
            dp = tl.dot(v, tl.trans(do), input_precision="ieee")
            ds = p * (dp - delta[None, :])
            dk = tl.dot(ds.to(q.dtype), q, dk, input_precision="ieee")
    base = k_start * dk_token + kv_head * dk_head
    _store_rows(dk_ptr + base, first, dk_token, num_k, dk * scale, N, HEAD_DIM, D)
    _store_rows(dv_ptr + base, first, dk_token, num_k, dv, N, HEAD_DIM, D)


@triton.jit
def _dq_keys(
    dq, q, do, lse2, delta, k_base, v_base, k_token, v_token, begin, end, position, num_k, scale2,
    window, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    for at in range(begin, end, N):
        keys = at + tl.arange(0, N)
        k = _load_rows(k_base, at, k_token, num_k, N, HEAD_DIM, D)
        v = _load_rows(v_base, at, v_token, num_k, N, HEAD_DIM, D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale2
        p = tl.exp2(scores - lse2[:, None])
        if MASKED:
            seen = _is_visible(position[:, None], keys[None, :], num_k, window, CAUSAL, WINDOWED)
            p = tl.where(seen, p, 0.0)
        dp = tl.dot(do, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None])
        dq = tl.dot(ds.to(k.dtype), k, dq, input_precision="ieee")
    return dq


@triton.jit
def _dq_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, lse2_ptr, delta_ptr, dq_ptr, cu_q_ptr, cu_k_ptr,
    q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, dq_token, dq_head,
    lse_head, scale, scale2, window,
    GROUP: tl.constexpr, CAUSAL: tl.constexpr, WINDOWED: tl.constexpr,
    HEAD_DIM: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    head, seq = tl.program_id(1).to(tl.int64), tl.program_id(2)
    q_start, num_q = _span(cu_q_ptr, seq)
    k_start, num_k = _span(cu_k_ptr, seq)
    first = (tl.num_programs(0) - 1 - tl.program_id(0)) * M
    if first >= num_q:
        return
    query = first + tl.arange(0, M)
    position = query + num_k - num_q
    q_base = q_ptr + q_start * q_token + head * q_head
    q = _load_rows(q_base, first, q_token, num_q, M, HEAD_DIM, D)
    do_base = do_ptr + q_start * do_token + head * do_head
    do = _load_rows(do_base, first, do_token, num_q, M, HEAD_DIM, D)
    row = head * lse_head + q_start + query
    lse2 = tl.load(lse2_ptr + row, query < num_q, other=float("inf"))
    delta = tl.load(delta_ptr + row, query < num_q, other=0.0)
    k_base = k_ptr + k_start * k_token + head // GROUP * k_head
    v_base = v_ptr + k_start * v_token + head // GROUP * v_head
    dq = tl.zeros([M, D], dtype=tl.float32)
    begin, full, end = _key_range(first, num_q, num_k, window, CAUSAL, WINDOWED, M, N)
    if not WINDOWED:
        dq = _dq_keys(
            dq, q, do, lse2, delta, k_base, v_base, k_token, v_token, begin, full, position, num_k,
            scale2, window, CAUSAL, WINDOWED, False, HEAD_DIM, D, N,
        )  # fmt: skip
    dq = _dq_keys(
        dq, q, do, lse2, delta, k_base, v_base, k_token, v_token, full, end, position, num_k,
        scale2, window, CAUSAL, WINDOWED, True, HEAD_DIM, D, N,
    )  # fmt: skip
    at = dq_ptr + q_start * dq_token + head * dq_head
    _store_rows(at, first, dq_token, num_q, dq * scale, M, HEAD_DIM, D)


def _strides(*tensors: Tensor) -> list[int]:
    """Token and head stride of each."""
    return [stride for x in tensors for stride in x.stride()[:2]]


def _shape_class(x: Tensor) -> str:
    width = max(16, triton.next_power_of_2(x.shape[-1]))
    return f"{'fp32' if x.dtype == torch.float32 else 'half'}-{max(64, width)}"


def _forward_class(q: Tensor) -> str:
    """A padded head has a mask for each tile: with 128 keys it spills (16 bytes at head_dim 80)."""
    found = _shape_class(q)
    return f"{found}-padded" if found == "half-128" and q.shape[-1] < 128 else found


class TritonAttention(torch.autograd.Function):
    """(o, lse2 [H, T]) with gradients of both, lse2 the logarithm to base 2: whoever wants the
    natural one multiplies it, and the others pay nothing. Keeps q, k, v, o and lse2. `sinks` are
    fp32."""

    @staticmethod
    def forward(
        ctx, q, k, v, sinks, cu_q, cu_k, max_q, max_k, causal, scale, window, batch_invariant
    ):
        q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        num_tokens, num_heads, head_dim = q.shape
        o = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse2 = torch.empty(num_heads, num_tokens, dtype=torch.float32, device=q.device)
        ctx.save_for_backward(q, k, v, sinks, o, lse2, cu_q, cu_k)
        ctx.set_materialize_grads(False)
        ctx.limits, ctx.scale = (max_q, max_k), scale
        ctx.shape = {
            "GROUP": num_heads // k.shape[1],
            "CAUSAL": causal,
            "WINDOWED": window is not None,
            "HEAD_DIM": head_dim,
            "D": max(16, triton.next_power_of_2(head_dim)),
        }
        ctx.window = window or 0
        if num_tokens:
            t = tile("flash_forward", _forward_class(q))
            if batch_invariant:  # paged attention's: equal tiles make equal sums
                t = tile("paged_prefill", _shape_class(q))
            grid = (triton.cdiv(max_q, t.M), num_heads, cu_q.shape[0] - 1)
            launch(_forward_kernel, grid)(
                q, k, v, sinks, o, lse2, cu_q, cu_k, *_strides(q, k, v, o), lse2.stride(0),
                scale * _LOG2_E, ctx.window, HAS_SINKS=sinks is not None, **ctx.shape,
                **_options(t),
            )  # fmt: skip
        return o, lse2

    @staticmethod
    def backward(ctx, do, dlse2):
        q, k, v, sinks, o, found, cu_q, cu_k = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        do = do if do.stride(2) == 1 else do.contiguous()
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        if not q.shape[0]:
            dsinks = None if sinks is None else torch.zeros_like(sinks)
            return dq, dk.zero_(), dv.zero_(), dsinks, *[None] * 8
        num_heads, num_seqs = q.shape[1], cu_q.shape[0] - 1
        delta, lse2 = torch.empty_like(found), torch.empty_like(found)
        width = {name: ctx.shape[name] for name in ("HEAD_DIM", "D")}
        t = tile("flash_delta", "all")
        launch(_delta_kernel, (triton.cdiv(q.shape[0], t.M), num_heads))(
            o, do, dlse2, found, delta, lse2, q.shape[0], *_strides(o, do),
            *((0, 0) if dlse2 is None else (dlse2.stride(1), dlse2.stride(0))), found.stride(0),
            HAS_DLSE=dlse2 is not None, **width, M=t.M, num_warps=t.num_warps,
        )  # fmt: skip
        scales = (ctx.scale, ctx.scale * _LOG2_E, ctx.window)
        t = tile("flash_dkdv", _shape_class(q))
        launch(_dkdv_kernel, (triton.cdiv(ctx.limits[1], t.N), k.shape[1], num_seqs))(
            q, k, v, do, lse2, delta, dk, dv, cu_q, cu_k, *_strides(q, k, v, do, dk),
            lse2.stride(0), *scales, **ctx.shape, **_options(t),
        )  # fmt: skip
        t = tile("flash_dq", _shape_class(q))
        launch(_dq_kernel, (triton.cdiv(ctx.limits[0], t.M), num_heads, num_seqs))(
            q, k, v, do, lse2, delta, dq, cu_q, cu_k, *_strides(q, k, v, do, dq),
            lse2.stride(0), *scales, **ctx.shape, **_options(t),
        )  # fmt: skip
        dsinks = None
        if sinks is not None:
            weight = torch.exp2(sinks.unsqueeze(1) * _LOG2_E - lse2)
            dsinks = weight.mul_(delta).sum(1).neg_()
        return dq, dk, dv, dsinks, *[None] * 8


def _options(t: Tile) -> dict[str, int]:
    return {"M": t.M, "N": t.N, "num_warps": t.num_warps, "num_stages": t.num_stages}
