"""Sinks in Triton's attention, interpreted, against the definitions in fp64: packed with lse and
all gradients, trees, prefill over pages, and decoding split over programs."""

from functools import partial

import pytest
import torch
from check_paged_kernels import make_step
from guard import assert_as_good_as_plain_torch

from kernels import (
    flash_attn_varlen,
    make_varlen_plan,
    paged_attention,
    paged_attention_decode,
    tree_attention,
)
from kernels.torch.attention import flash_attn_varlen_ref
from kernels.torch.paged_attention import paged_attention_ref

DTYPES = [torch.float32, torch.bfloat16]
SINKS = [2.0, -1.0, 6.0, -50.0, 0.5, 1.5, 4.0, -0.25]
BOUNDS, PARENTS = [0, 20, 25, 56, 60, 61, 70], [-1, 0, 0, -1, 3, 3]


def make_sinks(num_heads: int) -> torch.Tensor:
    return torch.tensor(SINKS).repeat(num_heads // len(SINKS) + 1)[:num_heads]


def rounding_of_dsinks(plain, inputs, wants_lse=False):
    """Three standard deviations of what fp32 rounds the sinks' gradient by, as a norm over heads.

    A head's gradient is one number, a sum over tokens of p (o . do + dlse). Which of two orders of
    summation comes closer to it is chance, so no multiple of plain torch's error bounds ours. With
    roundings that are independent, have no bias and are at most u = 2**-24 of what is rounded (N.
    Higham and T. Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019), variances
    add up: a product rounds by u times its size, the sums on the way to n terms by about
    n / 2 times their squares' sum, and an exp whose argument x was rounded by |x| + 2 times u.
    """
    q, k, v, sinks = (x.double() for x in inputs)
    out, lse = plain(q, k, v, sinks)
    torch.manual_seed(3)  # the slopes of `outputs_and_gradients`
    slope, *slope_of_lse = [torch.randn(o.shape).bfloat16() for o in (out, lse)[: 1 + wants_lse]]
    products = out * slope
    p, argument = (sinks - lse).exp(), (sinks - lse).abs()
    delta = products.sum(-1) + sum(slope_of_lse)
    of_delta = (q.shape[-1] / 2 + 1) * products.square().sum(-1)
    of_sum = ((argument + 2).square() + len(q) / 2) * delta.square()
    return 3 * 2**-24 * (p.square() * (of_delta + of_sum)).sum().sqrt().item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "causal", "wants_lse", "heads"),
    [
        (None, True, False, (8, 1, 64)),
        (None, True, True, (4, 2, 80)),
        (50, True, True, (2, 1, 64)),
        (None, False, True, (2, 2, 64)),
    ],
)
def test_output_lse_and_gradients(dtype, window, causal, wants_lse, heads):
    torch.manual_seed(0)
    num_q, num_k = [1, 30, 5, 0, 90], [100, 30, 70, 20, 91]
    if not causal:
        num_q, num_k = [40, 3, 17], [9, 3, 1]
    cu_q, cu_k = ([0, *torch.tensor(n).cumsum(0).tolist()] for n in (num_q, num_k))
    h, num_kv, d = heads
    inputs = [torch.randn(cu_q[-1], h, d), *(torch.randn(cu_k[-1], num_kv, d) for _ in "kv")]

    def ours(q, k, v, sinks):
        found = flash_attn_varlen(
            q, k, v, torch.tensor(cu_q), torch.tensor(cu_k), max(num_q), max(num_k),
            causal=causal, window=window, sinks=sinks, return_lse=True, backend="triton",
        )  # fmt: skip
        return found if wants_lse else found[0]

    def plain(q, k, v, sinks):
        return flash_attn_varlen_ref(
            q, k, v, cu_q, cu_k, d**-0.5, causal=causal, window=window, sinks=sinks
        )

    inputs.append(make_sinks(h))
    assert_as_good_as_plain_torch(
        ours,
        lambda *x: plain(*x) if wants_lse else plain(*x)[0],
        inputs,
        dtype,
        floors={-1: rounding_of_dsinks(plain, inputs, wants_lse)},
    )


def test_queries_that_see_no_key_give_all_to_the_sink():
    q, kv = torch.randn(5, 2, 64), torch.randn(2, 1, 64)
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32) for n in (5, 2))
    sinks = make_sinks(2)
    limits = {"sinks": sinks, "return_lse": True, "backend": "triton"}
    out, lse = flash_attn_varlen(q, kv, kv, cu_q, cu_k, 5, 2, **limits)
    assert not out[:3].any() and out[3:].any()
    torch.testing.assert_close(lse[:3], sinks.expand(3, 2))


def test_a_group_that_is_trained_batch_invariantly_has_the_bits_of_paged_attention():
    step = make_step((8, 2, 64), torch.bfloat16, [40, 7], [40, 7])
    q, k_cache, v_cache, starts, lens, tables = step
    blocks = [tables[i, : -(-n // 16)].long() for i, n in enumerate(lens.tolist())]
    k, v = (
        torch.cat([c[b].flatten(0, 1)[:n] for b, n in zip(blocks, lens.tolist(), strict=True)])
        for c in (k_cache, v_cache)
    )
    options = {"sinks": make_sinks(8), "batch_invariant": True, "backend": "triton"}
    trained = flash_attn_varlen(q, k, v, starts, starts, 40, 40, **options)
    served = paged_attention(*step, max_query_len=40, max_seq_len=40, **options)
    assert torch.equal(trained, served)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 30])
def test_a_tree(dtype, window):
    torch.manual_seed(0)
    plan = make_varlen_plan(BOUNDS, PARENTS)
    inputs = [*(torch.randn(70, heads, 16) for heads in (4, 2, 2)), make_sinks(4)]
    options = {"window": window}
    assert_as_good_as_plain_torch(
        lambda q, k, v, s: tree_attention(q, k, v, plan, sinks=s, backend="triton", **options),
        lambda q, k, v, s: unshared(q, k, v, s, plan, window)[0],
        inputs,
        dtype,
        floors={-1: rounding_of_dsinks(lambda *x: unshared(*x, plan, window), inputs)},
    )


def unshared(q, k, v, sinks, plan, window):
    """(o, lse) of each segment's queries over its own copy of all its keys."""
    parts = []
    for segment, rows in enumerate(plan.key_rows):
        own = slice(BOUNDS[segment], BOUNDS[segment + 1])
        rows, num = rows.long(), own.stop - own.start
        alone = (q[own], k[rows], v[rows], [0, num], [0, len(rows)])
        parts.append(flash_attn_varlen_ref(*alone, 16**-0.5, window=window, sinks=sinks))
    return tuple(torch.cat(part) for part in zip(*parts, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("heads", [(8, 1, 64), (6, 2, 80)])
def test_pages(dtype, window, heads):
    sinks = make_sinks(heads[0])

    def defined(step, kind):
        q, k, v, starts, lens, tables = step
        wide = [x.to(kind) for x in (q, k, v)]
        where = (starts, lens, tables.long(), q.shape[2] ** -0.5)
        return paged_attention_ref(*wide, *where, window=window, sinks=sinks).double()

    def check(ours, step):
        exact, plain = (defined(step, kind) for kind in (torch.float64, dtype))
        error, allowed = ((x - exact).norm() for x in (ours.double(), plain))
        assert error <= 2 * allowed + torch.finfo(dtype).eps / 8 * exact.norm()

    options = {"window": window, "sinks": sinks, "backend": "triton"}
    step = make_step(heads, dtype, [1, 19, 100, 3])
    check(paged_attention(*step, max_query_len=100, max_seq_len=130, **options), step)
    step = make_step(heads, dtype, [1, 1, 1, 1])
    q, k, v, _, lens, tables = step
    for split in ({}, {"num_splits": 3}, {"split_size": 16}, {"num_splits": 1}):
        decode = partial(paged_attention_decode, q, k, v, tables, lens, max_seq_len=130)
        check(decode(**options, **split), step)
