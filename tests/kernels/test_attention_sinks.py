"""Sinks on a CPU: a head's learnt score takes part in the softmax of every query and has no value.

Against a softmax over [scores, sink] in fp64 whose last column is dropped, with gradients; and the
same bits in training, in a tree, in chunks and in decoding, for any number of threads.
"""

import math

import pytest
import torch
from native_cases import bounds, shuffled_cache, split_qkv, threads

from kernels import (
    flash_attn_varlen,
    make_paged_plan,
    make_varlen_plan,
    paged_attention,
    paged_attention_decode,
    tree_attention,
)
from kernels.torch.attention import flash_attn_varlen_ref
from kernels.torch.paged_attention import paged_attention_ref

pytestmark = pytest.mark.usefixtures("cpu_path")

DTYPES = [torch.float32, torch.bfloat16]
SHAPES = [(16, 2, 1), (40, 1, 3), (64, 2, 4)]  # head_dim, key heads, group
LENGTHS = [1, 300, 17, 128, 129, 2]
SEGMENTS, PREFIX_OF = [150, 5, 133, 1, 40], [-1, 0, 0, 2, 2]


def make_sinks(num_heads, dtype=torch.float32):
    """Some that take nearly everything, some that take half, one that takes nothing."""
    some = [3.0, -1.0, 9.0, -60.0, 0.5, 1.5, -0.25, 5.0]
    return torch.tensor([some[i % 8] for i in range(num_heads)], dtype=dtype)


def softmax_with_sink(q_QHD, k_KKD, v_KKD, sinks_H, window=None):
    """The definition in the tensors' dtype; the queries are a sequence's last."""
    num_queries, num_keys = len(q_QHD), len(k_KKD)
    group = q_QHD.shape[1] // k_KKD.shape[1]
    k, v = (x.repeat_interleave(group, 1) for x in (k_KKD, v_KKD))
    position, key = torch.arange(num_keys - num_queries, num_keys)[:, None], torch.arange(num_keys)
    seen = key <= position
    if window is not None:
        seen &= position - window < key
    scores = torch.einsum("qhd,khd->hqk", q_QHD, k) * q_QHD.shape[2] ** -0.5
    scores = scores.masked_fill(~seen, -math.inf)
    column = sinks_H.to(scores.dtype)[:, None, None].expand(-1, num_queries, 1)
    weights = torch.softmax(torch.cat([scores, column], -1), -1)[:, :, :-1]
    return torch.einsum("hqk,khd->qhd", weights, v)


def by_branch(q, k, v, sinks, lengths, prefix_of, window):
    cu, rows, parts = bounds(lengths), [], []
    for segment, parent in enumerate(prefix_of):
        own = list(range(cu[segment], cu[segment + 1]))
        rows.append((rows[parent] if parent >= 0 else []) + own)
        of = rows[-1]
        parts.append(softmax_with_sink(q[own], k[of], v[of], sinks, window))
    return torch.cat(parts)


def train(q, k, v, sinks, lengths, window=None, **options):
    cu, longest = bounds(lengths), max(lengths)
    options |= {"window": window, "sinks": sinks}
    return flash_attn_varlen(q, k, v, cu, cu, longest, longest, **options)


def with_gradients(op, inputs, dtype):
    """o, dq, dk, dv, dsinks."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    out = op(*leaves)
    slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    slope = slope.to(inputs[0].dtype).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, slope)]


def check_against_definition(ours, plain, num_tokens, shape, dtype, window):
    torch.manual_seed(0 if window is None else window)
    head_dim, num_kv, group = shape
    qkv = split_qkv(num_tokens, num_kv, group, head_dim, dtype)
    inputs = [*qkv, make_sinks(num_kv * group, dtype)]
    exact = with_gradients(plain, inputs, torch.float64)
    naive = with_gradients(plain, inputs, dtype)
    found = with_gradients(ours, inputs, dtype)
    rounding = {torch.float32: 1e-6, torch.bfloat16: 2.0**-7}[dtype]
    names = ("o", "dq", "dk", "dv", "dsinks")
    for name, a, n, e in zip(names, found, naive, exact, strict=True):
        assert a.dtype == n.dtype, name
        error, most = ((x.double() - e).norm().item() for x in (a, n))
        # with a window of one key dq and dk are what little a sink leaves
        floor = rounding * (exact[3].norm().item() if window == 1 else e.norm().item())
        assert error <= 2 * most + floor, (name, error, most)
    assert exact[4].abs().max() > 0.05  # the sinks matter


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 1, 5, 128, 200])
@pytest.mark.parametrize("shape", SHAPES)
def test_output_and_gradients_are_those_of_a_softmax_over_one_more_score(dtype, window, shape):
    alone = [-1] * len(LENGTHS)
    check_against_definition(
        lambda *x: train(*x, LENGTHS, window),
        lambda *x: by_branch(*x, LENGTHS, alone, window),
        *(sum(LENGTHS), shape, dtype, window),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 5, 180])
def test_a_trees_output_and_gradients_are_those_of_its_branches(dtype, window):
    plan = make_varlen_plan(bounds(SEGMENTS), PREFIX_OF)
    check_against_definition(
        lambda q, k, v, s: tree_attention(q, k, v, plan, window=window, sinks=s),
        lambda *x: by_branch(*x, SEGMENTS, PREFIX_OF, window),
        *(sum(SEGMENTS), SHAPES[2], dtype, window),
    )


@pytest.mark.parametrize("window", [None, 2])
def test_gradients_are_finite_differences(window):
    """Of fp64, which PyTorch computes on either path."""
    torch.manual_seed(0)
    shapes = ((7, 2, 2), (7, 1, 2), (7, 1, 2), (2,))
    leaves = [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
    tree = make_varlen_plan([0, 3, 5, 7], [-1, 0, 0])
    assert torch.autograd.gradcheck(lambda *x: train(*x, [5, 2], window), leaves)
    assert torch.autograd.gradcheck(
        lambda q, k, v, s: tree_attention(q, k, v, tree, window=window, sinks=s), leaves
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("window", [None, 40])
def test_chunks_decoding_and_training_give_a_query_the_same_bits(dtype, window):
    torch.manual_seed(0)
    head_dim, num_kv, group = SHAPES[2]
    q, k, v = split_qkv(sum(LENGTHS), num_kv, group, head_dim, dtype)
    sinks = make_sinks(num_kv * group, dtype)
    trained = train(q, k, v, sinks, LENGTHS, window)
    *caches, tables = shuffled_cache(k, v, LENGTHS, 16, True)
    used = tables[tables >= 0]
    for cache in caches:
        cache[used] = cache[used].nan_to_num(3.0)
    cu = bounds(LENGTHS)
    for num_threads, chunk in ((1, 1), (2, 1), (2, 7), (1, 1000)):
        with threads(num_threads):
            step = [min(n, chunk) for n in LENGTHS]
            rows = [t for end, n in zip(cu[1:], step, strict=True) for t in range(end - n, end)]
            plan = make_paged_plan(
                bounds(step), LENGTHS, tables, cache=caches[0], num_heads=num_kv * group,
                dtype=dtype,
            )  # fmt: skip
            served = paged_attention(
                q[rows], *caches, bounds(step), LENGTHS, tables, max_query_len=max(step),
                max_seq_len=max(LENGTHS), window=window, sinks=sinks, plan=plan,
            )  # fmt: skip
            assert torch.equal(served, trained[rows]), (num_threads, chunk)
            assert torch.equal(train(q, k, v, sinks, LENGTHS, window), trained)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradient_bits_do_not_depend_on_the_number_of_threads(dtype):
    torch.manual_seed(0)
    inputs = [*split_qkv(sum(LENGTHS), 2, 4, 64, dtype), make_sinks(8, dtype)]
    found = []
    for num_threads in (1, 2, 3):
        with threads(num_threads):
            found.append(with_gradients(lambda *x: train(*x, LENGTHS), inputs, dtype))
    assert all(torch.equal(a, b) for run in found[1:] for a, b in zip(found[0], run, strict=True))


def test_definitions_and_other_masks_have_sinks_too():
    torch.manual_seed(0)
    q, k, v = (torch.randn(9, heads, 8, dtype=torch.float64) for heads in (4, 2, 2))
    sinks = make_sinks(4, torch.float64)
    expected = softmax_with_sink(q, k, v, sinks)
    out, lse = flash_attn_varlen_ref(q, k, v, [0, 9], [0, 9], 8**-0.5, sinks=sinks)
    torch.testing.assert_close(out, expected)
    alone = flash_attn_varlen_ref(q, k, v, [0, 9], [0, 9], 8**-0.5)[1]
    torch.testing.assert_close(lse, torch.logaddexp(alone, sinks.expand(9, 4)))
    last, _ = flash_attn_varlen(
        q[-3:], k, v, [0, 3], [0, 9], 3, 9, sinks=sinks, return_lse=True
    )  # fmt: skip
    torch.testing.assert_close(last, expected[-3:])
    cache = [x[None] for x in (k, v)]
    table = torch.zeros(1, 1, dtype=torch.int64)
    paged = paged_attention_ref(q[-2:], *cache, [0, 2], [9], table, 8**-0.5, sinks=sinks)
    torch.testing.assert_close(paged, expected[-2:])
    one = paged_attention_decode(q[-1:], *cache, table, [9], max_seq_len=9, sinks=sinks)
    torch.testing.assert_close(one, expected[-1:])


def test_sinks_of_another_number_of_heads_are_refused():
    x = torch.randn(3, 2, 8)
    with pytest.raises(ValueError, match=r"sinks: shape \(3,\).*q's 2 heads"):
        train(x, x, x, torch.zeros(3), [3])


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_far_above_and_below_all_scores_overflow_nothing(dtype):
    """One takes all of the weight, to the last bit of fp32, one takes none."""
    torch.manual_seed(0)
    qkv = split_qkv(40, 1, 3, 16, dtype)
    sinks = torch.tensor([500.0, -1e4, 1e30], dtype=dtype)
    out, *grads = with_gradients(lambda *x: train(*x, [40]), [*qkv, sinks], dtype)
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    assert not out[:, ::2].any() and not grads[3].any()
    plain = train(*qkv, None, [40])
    assert torch.equal(out[:, 1], plain[:, 1])
