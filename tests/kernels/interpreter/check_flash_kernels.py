"""Triton's packed attention, interpreted: o, lse and all gradients against the definition in fp64.

Inputs lie between NaN guard bands, outputs start as NaN. Sequences: empty, of one token, shorter
and longer than a tile, queries fewer (a prefix hit) and more than keys.
"""

import pytest
import torch

from kernels import flash_attn_varlen
from kernels.torch.attention import flash_attn_varlen_ref

EQUAL = ([0, 1, 37, 70, 64], None)
PREFIXED = ([1, 30, 5, 0, 40], [100, 30, 70, 20, 41])
SWAPPED = ([40, 3, 17], [9, 3, 0])


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """Memory that a launcher asks for is NaN, so what a kernel does not write shows."""
    empty = torch.empty

    def poisoned(*args, **kwargs):
        out = empty(*args, **kwargs)
        return out.fill_(torch.nan) if out.dtype.is_floating_point else out

    monkeypatch.setattr(torch, "empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda x: poisoned(x.shape, dtype=x.dtype))


def guarded(x):
    """The same values as a strided view, with NaN before, after and between the rows."""
    buffer = torch.full((x.shape[0] + 8, x.shape[1] + 1, x.shape[2]), torch.nan).to(x.dtype)
    view = buffer[4:-4, :-1]
    view.copy_(x)
    return view


def bounds(counts):
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


def run(op, qkv, dtype, wants_lse):
    leaves = [guarded(x.to(dtype)).requires_grad_() for x in qkv]
    o, lse = op(*leaves)
    torch.manual_seed(1)
    weight_o = torch.randn(o.shape).bfloat16().to(dtype)
    weight_lse = torch.randn(lse.shape).to(lse.dtype)
    is_seen = lse > -torch.inf
    outs = (o, lse[is_seen]) if wants_lse else (o,)
    weights = (weight_o, weight_lse[is_seen]) if wants_lse else (weight_o,)
    return [o, lse, *torch.autograd.grad(outs, leaves, weights)]


def check(lengths, heads, dtype, *, causal=True, window=None, wants_lse=False):
    torch.manual_seed(0)
    num_q, num_k = lengths[0], lengths[1] or lengths[0]
    h, num_kv, d = heads
    sizes = ((num_q, h), (num_k, num_kv), (num_k, num_kv))
    qkv = [torch.randn(sum(n), count, d).to(dtype) for n, count in sizes]
    cu_q, cu_k = bounds(num_q), bounds(num_k)
    mask = {"causal": causal, "window": window}

    def ours(q, k, v):
        limits = max(num_q), max(num_k)
        return flash_attn_varlen(
            q, k, v, cu_q, cu_k, *limits, **mask, return_lse=True, backend="triton"
        )

    def plain(q, k, v):
        return flash_attn_varlen_ref(q, k, v, cu_q.tolist(), cu_k.tolist(), d**-0.5, **mask)

    exact = run(plain, qkv, torch.float64, wants_lse)
    naive = run(plain, qkv, dtype, wants_lse)
    for name, a, n, e in zip(
        ("o", "lse", "dq", "dk", "dv"), run(ours, qkv, dtype, wants_lse), naive, exact, strict=True
    ):
        assert a.dtype == n.dtype, name
        assert torch.equal(a.isinf(), e.isinf()), name
        a, n, e = (x.double().masked_fill(x.isinf(), 0.0) for x in (a, n, e))
        assert (a - e).norm() <= 2 * (n - e).norm() + 1e-7 * e.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(2, 2, 64), (4, 1, 80)])
def test_whole_sequences(heads, dtype):
    check(EQUAL, heads, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("group", [1, 4, 7, 8])
def test_every_group_and_head_dim(group, head_dim, dtype):
    """A whole sequence of one token, a prefix hit, a sequence without queries, one with both."""
    check(([1, 20, 0, 5], [1, 37, 5, 5]), (group, 1, head_dim), dtype)


def test_two_groups_of_eight_and_an_odd_head_dim():
    check(([20, 7], None), (16, 2, 24), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_queries_and_keys_of_different_lengths(dtype):
    check(PREFIXED, (4, 2, 64), dtype, wants_lse=True)


def test_queries_that_see_no_key_give_zero_and_minus_infinity():
    check(SWAPPED, (2, 1, 64), torch.float32, wants_lse=True)


@pytest.mark.parametrize("window", [2, 50, 1000])
def test_window(window):
    check(PREFIXED, (2, 1, 64), torch.float32, window=window)
    check(([90, 40], None), (1, 1, 64), torch.float32, window=window)


def test_every_key_is_visible_without_causal():
    check(PREFIXED, (2, 1, 64), torch.float32, causal=False, wants_lse=True)


def test_no_tokens():
    empty = torch.zeros(0, 2, 64, requires_grad=True)
    cu = torch.zeros(1, dtype=torch.int32)
    out = flash_attn_varlen(empty, empty, empty, cu, cu, 0, 0, backend="triton")
    assert out.shape == empty.shape
    assert torch.autograd.grad(out.sum(), empty)[0].shape == empty.shape


def test_backward_is_the_same_bits_every_time():
    torch.manual_seed(0)
    qkv = [torch.randn(90, n, 64).bfloat16() for n in (4, 2, 2)]
    cu = bounds([50, 40])

    def op(q, k, v):
        return flash_attn_varlen(
            q, k, v, cu, cu, 50, 50, return_lse=True, backend="triton"
        )  # fmt: skip

    first, second = (run(op, qkv, torch.bfloat16, True) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_bad_input_names_the_argument():
    q, cu = torch.zeros(4, 2, 16), torch.tensor([0, 4], dtype=torch.int32)

    def attend(**change):
        arguments = {"q_THD": q, "k_SKD": q, "v_SKD": q, "cu_seqlens_q": cu, "cu_seqlens_k": cu}
        arguments |= {"max_seqlen_q": 4, "max_seqlen_k": 4, "backend": "triton"} | change
        flash_attn_varlen(**arguments)

    for name, change in {
        "k, v: dtypes": {"k_SKD": q.half(), "v_SKD": q.half()},
        "q: dtype torch.float64": {n: q.double() for n in ("q_THD", "k_SKD", "v_SKD")},
        "k, v": {"v_SKD": q[:3]},
        "cu_seqlens_q": {"cu_seqlens_q": cu[None]},
        "cu_seqlens_k": {"cu_seqlens_k": torch.tensor([0, 2, 4])},
        "max_seqlen_q": {"max_seqlen_q": 0},
        "window": {"window": 0},
        "head_dim": {"q_THD": torch.zeros(4, 2, 512), "k_SKD": torch.zeros(4, 2, 512),
                     "v_SKD": torch.zeros(4, 2, 512)},
    }.items():  # fmt: skip
        with pytest.raises(ValueError, match=name):
            attend(**change)
