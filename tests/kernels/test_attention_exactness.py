"""Attention on a CPU: decode, chunk, prefill and training give a token the same bits; gradients."""

import random

import pytest
import torch

from kernels import (
    flash_attn_varlen,
    make_kv_cache,
    make_paged_plan,
    make_varlen_plan,
    paged_attention,
    reshape_and_cache,
)
from kernels.torch.attention import flash_attn_varlen_ref
from kernels.torch.kv_cache import reshape_and_cache_ref
from kernels.torch.paged_attention import paged_attention_ref

pytestmark = pytest.mark.usefixtures("cpu_path")

HEADS = [
    *((9, 3, 64), (4, 4, 32), (8, 2, 128), (7, 1, 64), (16, 8, 128), (2, 2, 16), (20, 5, 32)),
    *((3, 3, 96), (2, 1, 256)),
]
BLOCK = 16


@pytest.fixture(params=[1, 2])
def num_threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def bounds(lengths):
    return [0, *torch.tensor(lengths).cumsum(0).tolist()]


def attend_whole(q, k, v, lengths, plan=None):
    cu, longest = bounds(lengths), max(lengths)
    return flash_attn_varlen(q, k, v, cu, cu, longest, longest, plan=plan)


def random_qkv(lengths, heads, dtype, seed=0):
    torch.manual_seed(seed)
    h, k, d = heads
    return [torch.randn(sum(lengths), n, d).to(dtype) for n in (h, k, k)]


def fill_cache(k, v, lengths, poison=3.0):
    """A shuffled paged cache holding the sequences; returns caches and block tables."""
    width = -(-max(lengths) // BLOCK)
    num_blocks = sum(-(-n // BLOCK) for n in lengths) + 1
    caches = [torch.full((num_blocks, BLOCK, *k.shape[1:]), poison, dtype=k.dtype) for _ in "kv"]
    order = (torch.randperm(num_blocks - 1) + 1).tolist()
    tables = torch.full((len(lengths), width), -1)
    slots = []
    for i, n in enumerate(lengths):
        tables[i, : -(-n // BLOCK)] = torch.tensor([order.pop() for _ in range(-(-n // BLOCK))])
        slots += [int(tables[i, t // BLOCK]) * BLOCK + t % BLOCK for t in range(n)]
    reshape_and_cache(k, v, *caches, torch.tensor(slots))
    return *caches, tables


def attend_tail(q, caches, lengths, counts, members):
    """The last counts[i] queries of each member, and their packed rows."""
    ends = bounds(lengths)[1:]
    rows = torch.cat([torch.arange(ends[i] - counts[i], ends[i]) for i in members])
    k_cache, v_cache, tables = caches
    out = paged_attention(
        q[rows],
        k_cache,
        v_cache,
        bounds([counts[i] for i in members]),
        [lengths[i] for i in members],
        tables[members],
        max_query_len=max(counts),
        max_seq_len=max(lengths),
    )
    return out, rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS)
def test_decode_chunk_and_prefill_repeat_the_trainers_bits(dtype, heads, num_threads):
    rng = random.Random(str(heads))
    lengths = [1, 2, 16, 17, 128, 129, 257, 700, *(rng.randint(1, 700) for _ in range(6))]
    q, k, v = random_qkv(lengths, heads, dtype)
    trained = attend_whole(q, k, v, lengths)
    caches = fill_cache(k, v, lengths)
    everyone = list(range(len(lengths)))
    for name, limit in (("whole", 700), ("decode", 1), ("pairs", 2), ("threes", 3), ("chunk", 300)):
        counts = [min(n, limit) if name != "chunk" else rng.randint(1, n) for n in lengths]
        out, rows = attend_tail(q, caches, lengths, counts, everyone)
        assert torch.equal(out, trained[rows]), name
    for _ in range(6):  # any company, mixed decodes and chunks
        members = rng.sample(everyone, rng.randint(1, 6))
        counts = [rng.choice([1, 1, rng.randint(1, n)]) for n in lengths]
        out, rows = attend_tail(q, caches, lengths, counts, members)
        assert torch.equal(out, trained[rows]), (members, counts)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_training_bits_do_not_depend_on_the_batch(dtype, num_threads):
    lengths = [3, 40, 41, 127, 300, 513]
    q, k, v = random_qkv(lengths, (9, 3, 64), dtype)
    together = attend_whole(q, k, v, lengths)
    for lo, n in zip(bounds(lengths), lengths, strict=False):
        rows = slice(lo, lo + n)
        alone = attend_whole(q[rows], k[rows], v[rows], [n])
        assert torch.equal(alone, together[rows]), n


def gradients(op, q, k, v, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
    out = op(*leaves)
    torch.manual_seed(1)
    weights = torch.randn(out.shape, dtype=torch.float64).to(q.dtype).to(dtype)
    return [out, *torch.autograd.grad(out, leaves, weights)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", HEADS[:4])
def test_output_and_gradients_are_as_good_as_plain_torch(dtype, heads):
    lengths = [1, 5, 64, 130, 257, 300, 40, 16]
    cu, scale = bounds(lengths), heads[2] ** -0.5
    q, k, v = random_qkv(lengths, heads, dtype)

    def plain(q, k, v):
        return flash_attn_varlen_ref(q, k, v, cu, cu, scale)[0]

    exact = gradients(plain, q, k, v, torch.float64)
    naive = gradients(plain, q, k, v, dtype)
    plan = make_varlen_plan(cu)
    ours = gradients(lambda *a: flash_attn_varlen(*a, cu, cu, 300, 300, plan=plan), q, k, v, dtype)
    for name, a, n, e in zip("oqkv", ours, naive, exact, strict=True):
        floor = 1e-12 if dtype == torch.float64 else 0.0
        ours_error, naive_error = ((x.double() - e).norm().item() for x in (a, n))
        assert ours_error <= 2 * naive_error + floor, name


def test_a_token_sees_neither_the_future_nor_other_sequences():
    lengths = [30, 50]
    q, k, v = random_qkv(lengths, (4, 2, 32), torch.float32)
    before = attend_whole(q, k, v, lengths)
    k[20:30], v[20:30] = 9.0, 9.0
    after = attend_whole(q, k, v, lengths)
    assert torch.equal(before[:20], after[:20])
    assert torch.equal(before[30:], after[30:])
    assert not torch.equal(before[20:30], after[20:30])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_paged_attention_equals_its_definition(dtype):
    lengths, counts = [1, 19, 200, 77, 20, 310, 0], [1, 19, 3, 1, 0, 150, 0]
    q, k, v = random_qkv(lengths, (6, 2, 32), dtype)
    k_cache, v_cache, tables = fill_cache(k, v, lengths)
    ends = bounds(lengths)[1:]
    rows = torch.cat([torch.arange(e - c, e) for e, c in zip(ends, counts, strict=True)])
    step = (bounds(counts), lengths, tables)
    plan = make_paged_plan(*step, cache=k_cache, num_heads=6, dtype=dtype)
    out = paged_attention(
        q[rows], k_cache, v_cache, *step, max_query_len=150, max_seq_len=310, plan=plan
    )
    expected = paged_attention_ref(q[rows], k_cache, v_cache, *step, 32**-0.5)
    assert torch.allclose(out, expected, rtol=0, atol=1e-5 if dtype == torch.float32 else 1e-12)


def test_one_plan_serves_many_layers():
    lengths = [64, 100]
    plan = make_varlen_plan(bounds(lengths))
    for seed in range(3):
        q, k, v = random_qkv(lengths, (4, 2, 32), torch.float32, seed)
        out = attend_whole(q, k, v, lengths, plan=plan)
        assert torch.equal(out, attend_whole(q, k, v, lengths))


@pytest.mark.parametrize("is_heads_first", [False, True])
def test_cache_rows_land_in_their_slots_and_no_others(is_heads_first):
    k, v = torch.randn(5, 3, 8), torch.randn(5, 3, 8)
    slots = torch.tensor([3, 17, 64, 0, 79])
    shape = (5, BLOCK, 3, 8)
    make = make_kv_cache if is_heads_first else torch.zeros
    ours = [make(shape, dtype=torch.float32, device="cpu").fill_(torch.nan) for _ in "kv"]
    assert ours[0].is_contiguous() != is_heads_first
    expected = [c.clone() for c in ours]
    reshape_and_cache(k, v, *ours, slots)
    reshape_and_cache_ref(k, v, *expected, slots)
    for a, e in zip(ours, expected, strict=True):
        assert torch.equal(a.isnan(), e.isnan())
        assert torch.equal(a.nan_to_num(), e.nan_to_num())


def test_bad_input_names_the_argument():
    q, k = torch.zeros(4, 4, 8), torch.zeros(4, 2, 8)
    cache = torch.zeros(3, BLOCK, 2, 8)
    table = torch.zeros(1, 1, dtype=torch.long)
    limits = {"max_query_len": 4, "max_seq_len": 4}
    with pytest.raises(ValueError, match="cu_seqlens"):
        flash_attn_varlen(q, k, k, [0, 3], [0, 4], 4, 4)
    with pytest.raises(ValueError, match="cu_seqlens"):
        flash_attn_varlen(q, k, k, [0, 4], [0, 3, 2, 4], 4, 4)
    with pytest.raises(ValueError, match="heads must be a multiple"):
        flash_attn_varlen(q[:, :3], k, k, [0, 4], [0, 4], 4, 4)
    with pytest.raises(ValueError, match="block_tables"):
        paged_attention(q, cache, cache, [0, 4], [40], table, **limits)
    with pytest.raises(ValueError, match="seq_lens"):
        paged_attention(q, cache, cache, [0, 4], [3], table, **limits)
    other = torch.zeros(3, 2, BLOCK, 8).transpose(1, 2)  # as make_kv_cache lays a CPU's
    with pytest.raises(ValueError, match="v_cache: must lie in memory in k_cache's order"):
        paged_attention(q, cache, other, [0, 4], [4], table, **limits)
    with pytest.raises(ValueError, match="v_cache: must lie in memory in k_cache's order"):
        reshape_and_cache(k, k, cache, other, torch.arange(4))
    with pytest.raises(ValueError, match="slot_mapping"):
        reshape_and_cache(k, k, cache, cache, torch.zeros(3, dtype=torch.long))
