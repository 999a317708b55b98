"""A cache of fp8 on a CPU: attention over it has the bits of attention over its values in the
queries' dtype, and widens what it gathered, never the cache."""

import pytest
import torch

from kernels import make_kv_cache, make_paged_plan, paged_attention, reshape_and_cache

FP8 = torch.float8_e4m3fn
LENGTHS, COUNTS = [40, 7, 130, 16], [1, 7, 20, 1]


def make_caches(num_blocks, scales):
    """fp8 caches whose unused blocks are NaN, block tables, and what the used blocks hold."""
    torch.manual_seed(0)
    low = [make_kv_cache((num_blocks, 16, 2, 8), FP8, "cpu") for _ in "kv"]
    for cache in low:
        cache.view(torch.uint8).fill_(0x7F)
    order = torch.randperm(num_blocks).tolist()
    tables = torch.zeros(4, 9, dtype=torch.int64)
    for i, length in enumerate(LENGTHS):
        for j in range(-(-length // 16)):
            tables[i, j] = order.pop()
            for cache in low:
                cache.view(torch.uint8)[tables[i, j]] = 0
        at = torch.arange(length)
        k, v = torch.randn(length, 2, 8), torch.randn(length, 2, 8) * 3
        reshape_and_cache(k, v, *low, tables[i, at // 16] * 16 + at % 16, *scales)
    return low, tables


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(
    ("scales", "window"), [((1.0, 1.0), None), ((0.125, 4.0), None), ((0.125, 4.0), 19)]
)
def test_attention_over_fp8_equals_attention_over_its_values(dtype, scales, window):
    scale_tensors = [torch.tensor(s) for s in scales]
    low, tables = make_caches(40, scale_tensors)
    wide = [(c.float() * s).to(dtype) for c, s in zip(low, scales, strict=True)]
    q = torch.randn(sum(COUNTS), 4, 8).to(dtype)
    starts = [0, *torch.tensor(COUNTS).cumsum(0).tolist()]
    step = (starts, LENGTHS, tables)
    limits = {"max_query_len": 20, "max_seq_len": 130, "window": window}
    plan = make_paged_plan(*step, cache=low[0], num_heads=4, dtype=dtype)
    ours = paged_attention(
        q, *low, *step, **limits, k_scale=scale_tensors[0], v_scale=scale_tensors[1], plan=plan
    )
    expected = paged_attention(q, *wide, *step, **limits, backend="torch")  # fp8 goes that way
    assert ours.isfinite().all() and torch.equal(ours, expected)


def test_what_is_widened_does_not_grow_with_the_cache():
    scales = [torch.tensor(1.0)] * 2
    sizes = []
    for num_blocks in (40, 4000):
        low, tables = make_caches(num_blocks, scales)
        q = torch.randn(4, 4, 8)
        step = ([0, 1, 2, 3, 4], LENGTHS, tables)
        plan = make_paged_plan(*step, cache=low[0], num_heads=4, dtype=torch.float32)
        limits = {"max_query_len": 1, "max_seq_len": 130}
        with torch.profiler.profile(profile_memory=True) as profile:
            paged_attention(
                q, *low, *step, **limits, k_scale=scales[0], v_scale=scales[1], plan=plan
            )
        sizes.append(max(event.self_cpu_memory_usage for event in profile.key_averages()))
    assert sizes[1] == sizes[0] < 4000 * 16 * 2 * 8
