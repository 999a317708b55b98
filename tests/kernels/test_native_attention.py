"""Attention in C++ against fp64; and a query has the same bits in training, prefill, a chunk, a
decode step and a tree, in any cache, in any company, on any number of threads."""

import random

import pytest
import torch
from native_cases import (
    DTYPES,
    ORDERS,
    bounds,
    causal_attention,
    shuffled_cache,
    split_qkv,
    threads,
)

from kernels import flash_attn_varlen, make_kv_cache, paged_attention
from kernels.cpp.ops import QuerySpan, _find_teams
from nanoengine.model.attention import SharedPrefixContext

pytestmark = pytest.mark.usefixtures("native")

SHAPES = [  # head_dim, key heads, group
    (16, 2, 1), (32, 1, 3), (64, 2, 4), (80, 1, 7), (96, 2, 1), (128, 1, 2), (40, 2, 3), (7, 1, 5),
    (64, 1, 30),
]  # fmt: skip
LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130, 200]


def train(q, k, v, lengths, **options):
    cu, longest = bounds(lengths), max(lengths)
    return flash_attn_varlen(q, k, v, cu, cu, longest, longest, **options)


def attend_tail(q, caches, lengths, counts, members):
    """(o of the last counts[i] queries of each member, their packed rows)."""
    ends = bounds(lengths)[1:]
    rows = torch.cat([torch.arange(ends[i] - counts[i], ends[i]) for i in members])
    starts = bounds([counts[i] for i in members])
    lens, tables = [lengths[i] for i in members], caches[2][members]
    limits = {"max_query_len": max(counts), "max_seq_len": max(lengths)}
    return paged_attention(q[rows], *caches[:2], starts, lens, tables, **limits), rows


def assert_near(ours, exact):
    """fp32 arithmetic on weighted means of values of size 1 or so, rounded once."""
    relative = 2.0**-8 if ours.dtype == torch.bfloat16 else 0.0
    off = (ours.double() - exact).abs() - relative * exact.abs()
    assert off.max() <= 4e-6, float(off.max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_fp64s_rounded_once(dtype, shape):
    head_dim, num_kv, group = shape
    torch.manual_seed(head_dim)
    q, k, v = split_qkv(sum(LENGTHS), num_kv, group, head_dim, dtype)
    assert_near(train(q, k, v, LENGTHS), causal_attention(q, k, v, LENGTHS))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_query_has_the_bits_of_training_however_it_is_served(dtype, order, shape):
    head_dim, num_kv, group = shape
    rng = random.Random(str((shape, dtype)))
    torch.manual_seed(1)
    q, k, v = split_qkv(sum(LENGTHS), num_kv, group, head_dim, dtype)
    trained = train(q, k, v, LENGTHS)
    everyone = list(range(len(LENGTHS)))
    for block_size in (16, 48, 3):
        caches = shuffled_cache(k, v, LENGTHS, block_size, order)
        for most in (1, 2, 9, 200):
            counts = [min(n, most) for n in LENGTHS]
            out, rows = attend_tail(q, caches, LENGTHS, counts, everyone)
            assert torch.equal(out, trained[rows]), (block_size, most)
        for num_threads in (1, 2, 3):
            members = rng.sample(everyone, rng.randint(1, 6))
            counts = [rng.choice([1, rng.randint(1, n)]) for n in LENGTHS]
            with threads(num_threads):
                out, rows = attend_tail(q, caches, LENGTHS, counts, members)
            assert torch.equal(out, trained[rows]), (members, counts, num_threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_training_bits_do_not_depend_on_company_or_threads(dtype, num_threads):
    torch.manual_seed(0)
    q, k, v = split_qkv(sum(LENGTHS), 2, 3, 64, dtype)
    together = train(q, k, v, LENGTHS)
    with threads(num_threads):
        assert torch.equal(train(q, k, v, LENGTHS), together)
        for lo, n in zip(bounds(LENGTHS), LENGTHS, strict=False):
            rows = slice(lo, lo + n)
            assert torch.equal(train(q[rows], k[rows], v[rows], [n]), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 2, 3), (40, 1, 7)])
def test_a_tree_has_the_bits_of_its_branches_alone(dtype, shape):
    head_dim, num_kv, group = shape
    torch.manual_seed(2)
    lengths, prefix_of = [70, 5, 33, 1, 40], [-1, 0, 0, 2, 2]
    cu = bounds(lengths)
    q, k, v = split_qkv(sum(lengths), num_kv, group, head_dim, dtype)
    tree = SharedPrefixContext(cu, prefix_of).attend(0, q, k, v)
    paths = []
    for segment, parent in enumerate(prefix_of):
        own = list(range(cu[segment], cu[segment + 1]))
        paths.append((paths[parent] if parent >= 0 else []) + own)
        rows = paths[-1]
        alone = train(q[rows], k[rows], v[rows], [len(rows)])
        assert torch.equal(tree[own], alone[-len(own) :])


FAMILIES = [  # keys in common, lengths of those that share them
    (128, [129, 128, 140, 333]), (64, [65] * 9), (16, [40, 41]), (0, [70]),
]  # fmt: skip


def siblings(num_kv, group, head_dim, dtype, order):
    """(q, k, v, lengths, caches) of sequences whose tables begin with their first sibling's blocks;
    what they had there themselves is spoilt."""
    lengths = [length for _, family in FAMILIES for length in family]
    q, k, v = split_qkv(sum(lengths), num_kv, group, head_dim, dtype)
    starts, leader = bounds(lengths), 0
    for shared, family in FAMILIES:
        first = starts[leader]
        for begin in starts[leader + 1 : leader + len(family)]:
            for x in (k, v):
                x[begin : begin + shared] = x[first : first + shared]
        leader += len(family)
    caches = shuffled_cache(k, v, lengths, 16, order)
    tables, leader = caches[2], 0
    for shared, family in FAMILIES:
        num_blocks = shared // 16
        for member in range(leader + 1, leader + len(family)):
            caches[0][tables[member, :num_blocks].long()] = 9.0
            tables[member, :num_blocks] = tables[leader, :num_blocks]
        leader += len(family)
    return q, k, v, lengths, caches


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 2, 3), (40, 3, 7), (16, 12, 1)])
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("order", ORDERS[1:])
def test_completions_of_one_prompt_have_the_bits_of_each_alone(dtype, shape, num_threads, order):
    head_dim, num_kv, group = shape
    torch.manual_seed(4)
    q, k, v, lengths, caches = siblings(num_kv, group, head_dim, dtype, order)
    trained, everyone = train(q, k, v, lengths), list(range(len(lengths)))
    with threads(num_threads):
        for counts in ([1] * len(lengths), [1, 1, 1, 200, *[1] * 11, 60]):
            out, rows = attend_tail(q, caches, lengths, counts, everyone)
            assert torch.equal(out, trained[rows])


@pytest.mark.parametrize(
    ("lens", "tables", "largest", "teams"),
    [
        # 40 keys in common, of which 32 fill vectors; the third shares too few with them
        ([41, 60, 50], [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 6, 7]], 8, [(3, 32), (0, 0), (0, 0)]),
        ([41, 60, 50], [[1, 2, 3, 4], [1, 2, 3, 5], [1, 9, 6, 7]], 8, [(2, 32), (0, 0), (1, 0)]),
        # equal entries behind the end of a sequence are none of its keys
        ([33, 64], [[1, 2, 3, 4], [1, 2, 3, 4]], 8, [(2, 32), (0, 0)]),
        ([31, 64], [[1, 2, 3, 4], [1, 2, 3, 4]], 8, [(1, 0), (1, 0)]),
        # at most so many, and none that halves what the others share
        ([64] * 3, [[1, 2, 3, 4]] * 3, 2, [(2, 64), (0, 0), (1, 0)]),
        (
            [96] * 4,
            [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7], [1, 2, 8, 9, 10, 11], [1, 2, 8, 9, 10, 12]],
            8,
            [(2, 80), (0, 0), (2, 80), (0, 0)],
        ),
    ],
)
def test_neighbours_whose_tables_begin_alike_form_a_team(lens, tables, largest, teams):
    spans = [QuerySpan(i, 1, length, 0) for i, length in enumerate(lens)]
    found = _find_teams(spans, torch.tensor(tables), 16, largest)
    assert found == teams


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_query_sees_neither_the_future_nor_other_sequences(dtype):
    lengths = [30, 50]
    q, k, v = split_qkv(80, 2, 2, 32, dtype)
    before = train(q, k, v, lengths)
    k[20:30], v[20:30] = 9.0, 9.0
    after = train(q, k, v, lengths)
    same = (before == after).flatten(1).all(1)
    assert same.tolist() == [True] * 20 + [False] * 10 + [True] * 50


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_key_far_above_the_others_takes_all_the_weight(dtype):
    q, k, v = split_qkv(100, 1, 2, 64, dtype)
    q[:], k[:] = 1.0, 0.0
    k[40] = 1000.0
    out = train(q, k, v, [100])
    assert torch.equal(out[40:], v[40].expand(60, 2, -1))
    k[40] = -1000.0
    weights = torch.ones(100, 100, dtype=torch.float64).tril()
    weights[:, 40] = 0  # but for query 40, which is not looked at
    weights /= weights.sum(1, keepdim=True)
    exact = (weights @ v[:, 0].double())[:, None].expand(-1, 2, -1)
    keep = [i for i in range(100) if i != 40]
    assert_near(train(q, k, v, [100])[keep], exact[keep])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", ORDERS)
def test_steps_without_queries_or_sequences_are_empty(dtype, order):
    lengths, counts = [20, 0, 33, 7], [3, 0, 0, 1]
    q, k, v = split_qkv(sum(lengths), 2, 2, 32, dtype)
    caches = shuffled_cache(k, v, lengths, 16, order)
    out, rows = attend_tail(q, caches, lengths, counts, [0, 1, 2, 3])
    assert torch.equal(out, train(q, k, v, lengths)[rows])
    none = torch.zeros(0, 2, dtype=torch.int64)
    limits = {"max_query_len": 1, "max_seq_len": 1}
    assert paged_attention(q[:0], *caches[:2], [0], [], none, **limits).shape == (0, 4, 32)
    assert flash_attn_varlen(q[:0], k[:0], v[:0], [0, 0], [0, 0], 0, 0).shape == (0, 4, 32)


def test_a_block_that_the_cache_does_not_have_is_refused():
    q, cache = torch.zeros(1, 2, 16), make_kv_cache((3, 16, 1, 16), torch.float32, "cpu")
    limits = {"max_query_len": 1, "max_seq_len": 40}
    for bad in (-1, 3):
        table = torch.tensor([[0, bad, 1]])
        with pytest.raises(ValueError, match=rf"block_tables\[0, 1\]={bad}"):
            paged_attention(q, cache, cache, [0, 1], [20], table, **limits)
        assert paged_attention(q, cache, cache, [0, 1], [16], table, **limits).shape == q.shape
