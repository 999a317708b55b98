"""The kernel benchmark records what fails instead of ending, and leaves slow peers to the end."""

import importlib.util
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts")]

import bench_kernels  # noqa: E402
from kernel_bench import _peers  # noqa: E402
from kernel_bench.case import BenchCase  # noqa: E402

CEILINGS = {"TB/s": 1.0, "TFLOP/s": 1.0}


def step(name, log):
    return lambda: log.append(name)


def broken():
    raise RuntimeError("no such instruction")


def test_a_peer_that_fails_costs_its_own_row_only():
    case = BenchCase("op", "op", "s", "bf16", lambda: None, {"bad": broken, "good": lambda: None})
    bad, good = bench_kernels.run_case(case, case.peers, "cpu", CEILINGS)
    assert bad["peer_error"] == "RuntimeError: no such instruction" and "ratio" not in bad
    assert good["ratio"] > 0 and good["ms"] == bad["ms"]


def test_rate_and_share_of_the_bound_by_hand(monkeypatch):
    monkeypatch.setattr(bench_kernels, "measure", lambda step, device: (2.0, 1.0, 3.0))
    case = BenchCase("op", "op", "s", "bf16", lambda: None, bytes=10**9)
    (row,) = bench_kernels.run_case(case, {}, "cpu", CEILINGS)
    assert row["value"] == 0.5 and row["unit"] == "TB/s"  # 1 GB in 2 ms
    assert row["bound_ratio"] == 0.5


def test_a_case_is_bounded_by_products_of_its_dtype_and_copies_of_its_size():
    sizes = dict(zip(bench_kernels.MOVED_BYTES, (9.0, 7.0, 5.0, 3.0, 1.0), strict=True))
    ceilings = {f"TB/s of {size}": rate for size, rate in sizes.items()}
    ceilings |= {"TFLOP/s float32": 2.0, "TFLOP/s bfloat16": 4.0}

    def bound(unit, **work):
        case = BenchCase("op", "op", "s", "bfloat16", lambda: None, **work)
        return bench_kernels.ceiling_of(case, unit, ceilings)

    assert bound("TFLOP/s", flops=1) == 4.0
    assert bound("TB/s", bytes=100) == 9.0  # smaller than the smallest: the fastest there is
    assert bound("TB/s", bytes=1 << 20) == 5.0
    assert bound("TB/s", bytes=(1 << 23) - 1) == 5.0
    assert bound("TB/s", bytes=1 << 40) == 1.0
    assert bound("us") is None


def test_a_bound_that_was_beaten_is_left_out(monkeypatch, capsys):
    monkeypatch.setattr(bench_kernels, "measure", lambda step, device: (2.0, 1.0, 3.0))
    case = BenchCase("op", "op", "s", "bf16", lambda: None, bytes=10**10)
    (row,) = bench_kernels.run_case(case, {}, "cpu", CEILINGS)
    assert row["value"] == 5.0 and row["bound"] is row["bound_ratio"] is None
    assert "beats its bound" in capsys.readouterr().err


def test_slow_peers_come_after_every_case_and_an_op_that_fails_is_an_error_at_the_end(
    monkeypatch, tmp_path
):
    log = []
    cases = [
        BenchCase("a", "a", "s", "bf16", step("a", log), slow_peers={"slow": step("slow", log)}),
        BenchCase("b", "b", "s", "bf16", broken),
        BenchCase("c", "c", "s", "bf16", step("c", log), {"fast": step("fast", log)}),
    ]
    monkeypatch.setattr(bench_kernels, "find_cases", lambda device: iter(cases))
    monkeypatch.setattr(bench_kernels, "measure_ceilings", lambda device: CEILINGS)
    monkeypatch.setattr(bench_kernels, "measure", lambda step, device: (step(), (1.0,) * 3)[1])
    target = tmp_path / "rows.json"
    monkeypatch.setattr(sys, "argv", ["bench_kernels.py", "--json", str(target)])
    assert bench_kernels.main() == 1
    assert log == ["a", "c", "fast", "a", "slow"]
    written = json.loads(target.read_text())
    assert [row["peer"] for row in written["rows"]] == [None, None, "fast", "slow"]
    assert "no such instruction" in written["rows"][1]["error"]
    assert written["ceilings"] == CEILINGS and written["skipped"] == []


def installed(monkeypatch, **modules):
    """Stand-ins for the peers' modules; all others are absent."""
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec",
        lambda name, *rest: object() if name in modules else (
            None if name in _peers.OPTIONAL.values() else found(name, *rest)
        ),
    )  # fmt: skip
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def test_peers_that_are_not_installed_are_named_and_left_out(monkeypatch):
    installed(monkeypatch)
    assert _peers.absent() == ["flash-attn", "flash-attn-3", "flashinfer", "liger"]
    q, caches = torch.zeros(2, 4, 8), [torch.zeros(32, 16, 2, 8) for _ in "kv"]
    tables, lens = torch.arange(32).view(2, 16), torch.tensor([256, 256])
    assert _peers.varlen_attention(lens, 256) == {}
    assert _peers.paged_decode(q, caches, tables, lens) == {}
    assert _peers.paged_prefill(q, lens, caches, tables) == {}


def flash_attn_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
    softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None,
    deterministic=False, return_attn_probs=False, block_table=None,
):  # fmt: skip
    """The signature of flash_attn 2.8; what it computes is not asked here."""
    assert causal and max_seqlen_q == max_seqlen_k == 3 and cu_seqlens_q.tolist() == [0, 3]
    return q * 2


def flash_attn_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None,
    cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, causal=False,
    window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0,
    return_softmax_lse=False,
):  # fmt: skip
    assert q.shape == (2, 1, 4, 8) and k_cache.shape == v_cache.shape == (2, 256, 2, 8)
    assert block_table.dtype == torch.int32 and sorted(block_table.flatten().tolist()) == [0, 1]
    assert cache_seqlens.tolist() == [256, 256] and causal
    return "decoded"


def test_flash_attention_is_called_as_its_interface_asks(monkeypatch):
    two = SimpleNamespace(
        flash_attn_varlen_func=flash_attn_varlen_func,
        flash_attn_with_kvcache=flash_attn_with_kvcache,
    )
    three = SimpleNamespace(
        flash_attn_varlen_func=lambda *args, causal: (
            flash_attn_varlen_func(*args, causal=causal),
            0,
        )
    )
    installed(monkeypatch, flash_attn=two, flash_attn_interface=three)
    q = torch.ones(3, 4, 8)
    ops = _peers.varlen_attention(torch.tensor([0, 3]), 3)
    assert list(ops) == ["flash-attn", "flash-attn-3"]
    assert all(torch.equal(op(q, q, q), 2 * q) for op in ops.values())
    caches = [torch.zeros(32, 16, 2, 8) for _ in "kv"]
    tables, lens = torch.arange(32).view(2, 16), torch.tensor([256, 256])
    steps = _peers.paged_decode(torch.zeros(2, 4, 8), caches, tables, lens)
    assert list(steps) == ["flash-attn"] and steps["flash-attn"]() == "decoded"


class PagedWrapper:
    """FlashInfer's two wrappers, planned once and run many times."""

    plans = 0

    def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False):
        assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"

    def run(self, q, paged_kv_cache):
        assert isinstance(paged_kv_cache, tuple) and len(paged_kv_cache) == 2
        return q


class DecodeWrapper(PagedWrapper):
    def plan(
        self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
        pos_encoding_mode="NONE", window_left=-1, logits_soft_cap=None, q_data_type="float16",
        kv_data_type=None, data_type=None, sm_scale=None, rope_scale=None, rope_theta=None,
    ):  # fmt: skip
        PagedWrapper.plans += 1
        assert indptr.tolist() == [0, 16, 32] and len(indices) == 32
        assert last_page_len.tolist() == [16, 16]
        assert (num_qo_heads, num_kv_heads, head_dim, page_size) == (4, 2, 8, 16)
        assert {x.dtype for x in (indptr, indices, last_page_len)} == {torch.int32}
        assert q_data_type == torch.float32


class PrefillWrapper(PagedWrapper):
    def plan(
        self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
        num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None,
        packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
        rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None,
    ):  # fmt: skip
        assert qo_indptr.tolist() == [0, 1, 2] and causal
        DecodeWrapper.plan(
            self, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
            num_kv_heads, head_dim_qk, page_size, q_data_type=q_data_type,
        )  # fmt: skip


def test_flashinfer_is_planned_once_and_called_as_its_documentation_says(monkeypatch):
    module = SimpleNamespace(
        BatchDecodeWithPagedKVCacheWrapper=DecodeWrapper,
        BatchPrefillWithPagedKVCacheWrapper=PrefillWrapper,
        norm=SimpleNamespace(rmsnorm=lambda input, weight, eps=1e-6, out=None: input * weight),
        activation=SimpleNamespace(silu_and_mul=lambda input, out=None: input[..., :2]),
    )
    installed(monkeypatch, flashinfer=module)
    monkeypatch.setattr(PagedWrapper, "plans", 0)
    q, caches = torch.ones(2, 4, 8), [torch.zeros(32, 16, 2, 8) for _ in "kv"]
    tables, starts = torch.arange(32).view(2, 16), torch.tensor([0, 1, 2])
    steps = [
        _peers.paged_decode(q, caches, tables, torch.tensor([256, 256]))["flashinfer"],
        _peers.paged_prefill(q, starts, caches, tables)["flashinfer"],
    ]
    assert all(torch.equal(step(), q) for step in steps * 2)
    assert PagedWrapper.plans == 2
    assert torch.equal(_peers.rms_norm(q, 2 * torch.ones(8)), 2 * q)
    assert _peers.swiglu(q).shape == (2, 4, 2)
