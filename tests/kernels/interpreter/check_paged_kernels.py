"""Triton's cache write and paged attention, interpreted, against their definitions in fp64.

Unwritten cache rows are NaN: a kernel that reads one, even with weight 0, fails.
"""

import pytest
import torch

from kernels import paged_attention, reshape_and_cache
from kernels.kv_cache import reshape_and_cache_ref
from kernels.paged_attention import paged_attention_ref

BLOCK = 16


def bounds(counts):
    return torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cache_write_skips_negative_slots_and_touches_nothing_else(dtype):
    torch.manual_seed(0)
    fused = torch.randn(5, 8, 20).to(dtype)
    k, v = fused[:, :3].contiguous(), fused[:, 4:7].contiguous()
    slots = torch.tensor([3, 17, -1, 0, 79])
    ours = [torch.full((5, BLOCK, 3, 20), torch.nan).to(dtype) for _ in "kv"]
    expected = [c.clone() for c in ours]
    reshape_and_cache(k, v, *ours, slots, backend="triton")
    reshape_and_cache_ref(k, v, *expected, slots)
    for a, e in zip(ours, expected, strict=True):
        assert torch.equal(a.view(torch.uint8), e.view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("heads", [(9, 3, 64), (7, 1, 32), (2, 2, 24)])
@pytest.mark.parametrize("counts", [[1, 1, 1, 1], [1, 19, 40, 3]])
def test_paged_attention(dtype, heads, counts):
    torch.manual_seed(0)
    h, num_kv, d = heads
    lengths = [1, 19, 130, 64]
    num_blocks = 40
    caches = [torch.full((num_blocks, BLOCK, num_kv, d), torch.nan).to(dtype) for _ in "kv"]
    order = torch.randperm(num_blocks)
    tables = torch.full((4, 10), -1, dtype=torch.int32)
    at = 0
    for i, n in enumerate(lengths):
        width = -(-n // BLOCK)
        tables[i, :width] = order[at : at + width].int()
        at += width
        slots = torch.tensor([int(tables[i, t // BLOCK]) * BLOCK + t % BLOCK for t in range(n)])
        k, v = torch.randn(n, num_kv, d).to(dtype), torch.randn(n, num_kv, d).to(dtype)
        reshape_and_cache_ref(k, v, *caches, slots)
    q = torch.randn(sum(counts), h, d).to(dtype)
    lens = torch.tensor(lengths, dtype=torch.int32)
    ours = paged_attention(
        q, *caches, bounds(counts), lens, tables,
        max_query_len=max(counts), max_seq_len=130, backend="triton",
    )  # fmt: skip

    def definition(kind):
        wide = [x.to(kind) for x in (q, *caches)]
        return paged_attention_ref(*wide, bounds(counts), lens, tables.long(), d**-0.5).double()

    exact, plain = definition(torch.float64), definition(dtype)
    assert (ours.double() - exact).norm() <= 2 * (plain - exact).norm()
