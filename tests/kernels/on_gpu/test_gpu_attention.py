"""Attention on a real GPU, at larger shapes than the interpreter can afford. Skipped elsewhere."""

import pytest
import torch

from kernels import flash_attn_varlen, paged_attention, paged_attention_decode, reshape_and_cache
from kernels.torch.attention import flash_attn_varlen_ref
from kernels.torch.paged_attention import paged_attention_ref
from nanoengine.model.attention import SharedPrefixContext

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
HEADS = [(4, 4, 64), (8, 2, 80), (14, 2, 128), (16, 2, 128)]
LENGTHS = [1, 0, 700, 129, 1500, 64, 333]


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int().cuda()


def with_gradients(op, qkv, dtype):
    leaves = [x.to(dtype).requires_grad_() for x in qkv]
    out = op(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    return [out, *torch.autograd.grad(out, leaves, weights.to("cuda", dtype))]


def random_qkv(num_q, num_k, heads, dtype):
    torch.manual_seed(0)
    h, num_kv, d = heads
    sizes = ((num_q, h), (num_k, num_kv), (num_k, num_kv))
    return [torch.randn(n, count, d).to("cuda", dtype) for n, count in sizes]


def assert_as_good_as_plain_torch(ours, naive, exact):
    for i, (a, n, e) in enumerate(zip(ours, naive, exact, strict=True)):
        assert a.isfinite().all(), i
        assert (a.double() - e).norm() <= 2 * (n.double() - e).norm() + 1e-7 * e.norm(), i


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 200])
def test_flash_attention_and_its_bitwise_repeatable_gradients(heads, dtype, window):
    longer = [n + 100 for n in LENGTHS]
    qkv = random_qkv(sum(LENGTHS), sum(longer), heads, dtype)
    cu_q, cu_k = bounds(LENGTHS), bounds(longer)

    def ours(q, k, v):
        return flash_attn_varlen(q, k, v, cu_q, cu_k, 1500, 1600, window=window)

    def plain(q, k, v):
        limits = cu_q.tolist(), cu_k.tolist()
        return flash_attn_varlen_ref(q, k, v, *limits, heads[2] ** -0.5, window=window)[0]

    first = with_gradients(ours, qkv, dtype)
    exact = with_gradients(plain, qkv, torch.float64)
    naive = with_gradients(plain, qkv, dtype)
    assert_as_good_as_plain_torch(first, naive, exact)
    again = with_gradients(ours, qkv, dtype)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def make_step(heads, dtype, counts, lengths, block):
    """A shuffled cache written by reshape_and_cache; unwritten rows are NaN."""
    h, num_kv, d = heads
    num_blocks = sum(-(-n // block) for n in lengths) + 3
    caches = [torch.full((num_blocks, block, num_kv, d), torch.nan).to("cuda", dtype) for _ in "kv"]
    order = torch.randperm(num_blocks).tolist()
    tables = torch.full((len(lengths), -(-max(lengths) // block)), 2**30, dtype=torch.int32)
    for i, n in enumerate(lengths):
        for j in range(-(-n // block)):
            tables[i, j] = order.pop()
        at = torch.arange(n)
        slots = tables[i, at // block].long() * block + at % block
        k, v = (torch.randn(n, num_kv, d).to("cuda", dtype) for _ in "kv")
        reshape_and_cache(k, v, *caches, slots.cuda(), debug=True)
    q = torch.randn(sum(counts), h, d).to("cuda", dtype)
    return q, *caches, bounds(counts), torch.tensor(lengths).int().cuda(), tables.cuda()


def definition(step, kind, window=None):
    q, k, v, starts, lens, tables = step
    wide = [x.to(kind) for x in (q, k, v)]
    options = {"softmax_scale": q.shape[2] ** -0.5, "window": window}
    return paged_attention_ref(*wide, starts, lens, tables.long(), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("block", [16, 32])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 5, 300])
def test_paged_attention_of_a_mixed_step(heads, block, dtype, window):
    torch.manual_seed(0)
    step = make_step(heads, dtype, [1, 1, 700, 1, 33, 512], [1, 4000, 700, 65, 900, 513], block)
    limits = {"max_query_len": 700, "max_seq_len": 4000}
    ours = paged_attention(*step, **limits, window=window, debug=True)
    exact, naive = (definition(step, kind, window) for kind in (torch.float64, dtype))
    assert_as_good_as_plain_torch([ours], [naive], [exact])


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("window", [None, 5, 1500])
def test_decode_is_right_and_with_a_split_size_independent_of_the_batch(heads, window):
    torch.manual_seed(0)
    lengths = [1, 17, 4000, 1024, 333, 2049]
    step = make_step(heads, torch.bfloat16, [1] * 6, lengths, 16)
    q, k, v, _, lens, tables = step
    exact, naive = (definition(step, kind, window) for kind in (torch.float64, torch.bfloat16))
    for options in ({}, {"num_splits": 7}, {"split_size": 512}):
        options |= {"max_seq_len": 4000, "window": window}
        ours = paged_attention_decode(q, k, v, tables, lens, **options)
        assert_as_good_as_plain_torch([ours], [naive], [exact])
    for i in range(6):
        alone = paged_attention_decode(
            q[i : i + 1], k, v, tables[i : i + 1], lens[i : i + 1], max_seq_len=lengths[i],
            split_size=512, window=window,
        )  # fmt: skip
        assert torch.equal(alone[0], ours[i])


def test_shared_prefixes_equal_the_cpu_path_and_repeat_bitwise():
    cuts, parents = [0, 500, 700, 701, 1200, 1500, 2000], [-1, 0, 1, 2, 1, 4]
    qkv = random_qkv(2000, 2000, (8, 2, 64), torch.float32)

    def attend(dtype):
        return lambda q, k, v: SharedPrefixContext(cuts, parents).attend(0, q, k, v)

    leaves = [x.cpu().double().requires_grad_() for x in qkv]
    out = attend(torch.float64)(*leaves)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    exact = [out, *torch.autograd.grad(out, leaves, weights.double())]
    first, again = (with_gradients(attend(torch.float32), qkv, torch.float32) for _ in "12")
    for a, b, e in zip(first, again, exact, strict=True):
        assert torch.equal(a, b)
        assert (a.cpu() - e).norm() <= 1e-5 * e.norm()
