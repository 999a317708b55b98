"""Windows, lse, queries and keys of different lengths, fp8 caches on a CPU, against PyTorch's own
attention with an explicit mask."""

import pytest
import torch
import torch.nn.functional as F

from kernels import (
    flash_attn_varlen,
    make_varlen_plan,
    paged_attention,
    paged_attention_decode,
    reshape_and_cache,
)

CU_Q, CU_K = [0, 3, 4, 9], [0, 5, 12, 17]


def masked_attention(q, k, v, causal, window):
    """One sequence [n, H, D] by scaled_dot_product_attention; queries end where keys end."""
    n, m = len(q), len(k)
    position, key = torch.arange(m - n, m)[:, None], torch.arange(m)
    seen = key <= position if causal else torch.ones(n, m, dtype=torch.bool)
    if window is not None:
        seen = seen & (key > position - window)
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True).transpose(0, 1)


@pytest.mark.parametrize(("causal", "window"), [(True, None), (True, 1), (True, 4), (False, None)])
def test_options_equal_masked_attention_and_lse_is_the_log_of_the_sum(causal, window):
    torch.manual_seed(0)
    q = torch.randn(9, 4, 8, dtype=torch.float64)
    k, v = (torch.randn(17, 2, 8, dtype=torch.float64) for _ in "kv")
    options = {"causal": causal, "window": window}
    o, lse = flash_attn_varlen(q, k, v, CU_Q, CU_K, 5, 7, **options, return_lse=True)
    expected = [
        masked_attention(q[a:b], k[c:d], v[c:d], causal, window)
        for a, b, c, d in zip(CU_Q, CU_Q[1:], CU_K, CU_K[1:], strict=False)
    ]
    assert torch.allclose(o, torch.cat(expected), rtol=0, atol=1e-12)
    if window is None:  # the second sequence has one query, which sees all seven keys
        scores = torch.einsum("hd,khd->hk", q[3], k[5:12].repeat_interleave(2, 1)) * 8**-0.5
        assert torch.allclose(lse[3], scores.exp().sum(-1).log(), rtol=0, atol=1e-12)
    plain = flash_attn_varlen(q, k, v, CU_Q, CU_K, 5, 7, **options)
    assert torch.equal(plain, o)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_a_positive_number(scale):
    q = torch.randn(4, 1, 16)
    with pytest.raises(ValueError, match=r"softmax_scale=.*: must be a positive number"):
        flash_attn_varlen(q, q, q, [0, 4], [0, 4], 4, 4, softmax_scale=scale)


def test_bad_options_name_the_argument():
    q = torch.zeros(4, 2, 8)
    plan = make_varlen_plan([0, 4])
    for name, change in {
        "window=0": {"window": 0},
        "window=3": {"window": 3, "causal": False},
        "plan": {"plan": plan, "return_lse": True},
        "cu_seqlens_q": {"cu_seqlens_q": [0, 3]},
        "cu_seqlens_k": {"cu_seqlens_k": [0, 2, 4]},
        "backend": {"backend": "cuda"},
        "Triton runs on a GPU": {"backend": "triton"},
    }.items():
        bounds = {"cu_seqlens_q": [0, 4], "cu_seqlens_k": [0, 4]}
        with pytest.raises(ValueError, match=name):
            flash_attn_varlen(q, q, q, max_seqlen_q=4, max_seqlen_k=4, **(bounds | change))


def test_a_cache_of_fp8_is_attended_to_with_its_scales():
    torch.manual_seed(0)
    k, v = torch.randn(20, 2, 8), torch.randn(20, 2, 8)
    scales = torch.tensor([0.5]), torch.tensor([2.0])
    caches = [torch.zeros(2, 16, 2, 8).to(torch.float8_e4m3fn) for _ in "kv"]
    reshape_and_cache(k, v, *caches, torch.arange(20), *scales)
    q, table = torch.randn(1, 4, 8), torch.tensor([[0, 1]])
    back = [
        (x / s).to(torch.float8_e4m3fn).float() * s for x, s in zip((k, v), scales, strict=True)
    ]
    out = torch.full((1, 4, 8), torch.nan)
    ours = paged_attention_decode(
        q, *caches, table, [20], max_seq_len=20, k_scale=scales[0], v_scale=scales[1], out=out
    )
    assert ours is out
    assert torch.allclose(ours, masked_attention(q, *back, True, None), rtol=0, atol=1e-5)


def test_indices_out_of_range_are_named_in_debug_mode():
    cache, q = torch.zeros(3, 16, 2, 8), torch.zeros(1, 2, 8)
    limits = {"max_query_len": 1, "max_seq_len": 20}
    with pytest.raises(ValueError, match=r"block_tables\[0, 1\]=3"):
        step = ([0, 1], [20], torch.tensor([[0, 3]]))
        paged_attention(q, cache, cache, *step, **limits, debug=True)
    with pytest.raises(ValueError, match=r"slot_mapping\[0\]=48"):
        reshape_and_cache(q, q, cache, cache, torch.tensor([48]), debug=True)
