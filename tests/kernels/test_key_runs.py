"""A cache whose keys lie in runs, as C++ multiplies them: it holds what one with rows holds,
PyTorch reads and writes it too, and where keys cannot lie so they stay rows."""

from importlib import import_module

import pytest
import torch
from native_cases import DTYPES, bounds, causal_attention, shuffled_cache, split_qkv

from kernels import (
    make_kv_cache,
    make_paged_plan,
    paged_attention,
    paged_attention_decode,
    reshape_and_cache,
)
from kernels.cpp.ops import run_shape
from kernels.kv_cache import cache_rows, keys_in_runs
from kernels.torch.kv_cache import key_rows
from nanoengine.model.config import ModelConfig
from nanoinfer.kv_cache import CacheLayout, KVCache

LENGTHS = [1, 16, 17, 40, 100]


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 64, 80])
@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_keys_lie_word_by_word_in_runs(dtype, head_dim, backend):
    """Each element where the layout says, found by arithmetic on flat memory."""
    num_keys, per_word = run_shape(dtype)
    k = torch.randn(70, 3, head_dim).to(dtype)
    raw = make_kv_cache((4, 32, 3, head_dim), dtype, "cpu").fill_(torch.nan)
    values = torch.zeros_like(raw)
    slots = torch.randperm(4 * 32)[:70]
    reshape_and_cache(k, k, keys_in_runs(raw), values, slots, backend=backend)
    memory = raw.transpose(1, 2).flatten()
    assert memory.data_ptr() == raw.data_ptr()
    token, head, element = torch.meshgrid(*(torch.arange(n) for n in k.shape), indexing="ij")
    slot = slots[token]
    run = (slot // 32 * 3 + head) * (32 // num_keys) + slot % 32 // num_keys
    word = (run * (head_dim // per_word) + element // per_word) * num_keys + slot % num_keys
    places = (word * per_word + element % per_word).flatten()
    assert torch.equal(memory[places], k.flatten())
    memory[places] = torch.nan
    assert memory.isnan().all()
    assert torch.equal(values[slots // 32, slots % 32], k)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_both_back_ends_store_the_same_and_attend_alike(dtype):
    torch.manual_seed(0)
    q, k, v = split_qkv(sum(LENGTHS), 2, 3, 40, dtype)
    k_cache, v_cache, tables = shuffled_cache(k, v, LENGTHS, 16, "runs")
    for cache in (k_cache, v_cache):  # PyTorch reads what is behind a sequence, with weight 0
        cache.nan_to_num_(3.0)
    step = (bounds(LENGTHS), LENGTHS, tables)
    limits = {"max_query_len": max(LENGTHS), "max_seq_len": max(LENGTHS)}
    plain = key_rows(k_cache)
    assert plain.shape == v_cache.shape and plain.transpose(1, 2).is_contiguous()
    native = paged_attention(q, k_cache, v_cache, *step, **limits, backend="cpp")
    by_rows = paged_attention(q, plain, v_cache, *step, **limits, backend="cpp")
    assert torch.equal(native, by_rows)
    by_torch = paged_attention(q, k_cache, v_cache, *step, **limits, backend="torch")
    expected = paged_attention(q, plain, v_cache, *step, **limits, backend="torch")
    assert torch.equal(by_torch, expected)
    exact = causal_attention(q, k, v, LENGTHS)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(by_torch.double(), exact, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("native")
def test_keys_stay_rows_where_they_cannot_lie_in_runs():
    num_keys, _ = run_shape(torch.float32)
    _, per_word = run_shape(torch.bfloat16)

    def is_row_by_row(cache):
        return keys_in_runs(cache) is cache

    def make(block_size=2 * num_keys, head_dim=8, dtype=torch.float32):
        return make_kv_cache((3, block_size, 2, head_dim), dtype, "cpu")

    assert not is_row_by_row(make()) and not is_row_by_row(make(dtype=torch.bfloat16))
    assert is_row_by_row(make(block_size=num_keys + 1)) and is_row_by_row(make(num_keys // 2))
    assert is_row_by_row(make(head_dim=7, dtype=torch.bfloat16)) == (per_word == 2)
    for dtype in (torch.float64, torch.float16, torch.float8_e4m3fn):
        assert is_row_by_row(make(dtype=dtype))
    assert is_row_by_row(torch.zeros(3, 2 * num_keys, 2, 8))  # tokens first


@pytest.mark.usefixtures("no_native")
def test_keys_stay_rows_without_a_compiler():
    cache = make_kv_cache((3, 32, 2, 8), torch.float32, "cpu")
    assert keys_in_runs(cache) is cache


@pytest.mark.usefixtures("native")
def test_rows_are_counted_in_values_and_runs_must_be_theirs():
    values = make_kv_cache((3, 32, 2, 8), torch.float32, "cpu")
    keys = keys_in_runs(make_kv_cache((3, 32, 2, 8), torch.float32, "cpu"))
    q, table = torch.zeros(1, 2, 8), torch.tensor([[0]])
    with pytest.raises(ValueError, match="cache: keys in runs have no rows"):
        make_paged_plan([0, 1], [1], table, cache=keys, num_heads=2, dtype=torch.float32)
    with pytest.raises(ValueError, match="cache: keys in runs have no rows"):
        cache_rows(torch.tensor([0]), keys)
    limits = {"max_query_len": 1, "max_seq_len": 1}
    assert not paged_attention(q, keys, values, [0, 1], [1], table, **limits).any()
    for bad in (keys[:2], keys.transpose(3, 4), keys.flatten(4).unsqueeze(4)):
        with pytest.raises(ValueError, match=r"k_cache: keys in runs .* must be keys_in_runs of"):
            paged_attention(q, bad, values, [0, 1], [1], table, **limits)
        with pytest.raises(ValueError, match=r"k_cache: keys in runs .* must be keys_in_runs of"):
            reshape_and_cache(q, q, bad, values, torch.tensor([0]))
    with pytest.raises(ValueError, match=r"k_cache: keys in runs .* must be keys_in_runs of"):
        paged_attention(q, keys, values.contiguous(), [0, 1], [1], table, **limits)


@pytest.mark.usefixtures("native")
def test_triton_refuses_keys_in_runs(monkeypatch):
    """It would read them as rows."""
    keys = keys_in_runs(make_kv_cache((3, 32, 2, 8), torch.float32, "cpu"))
    values = make_kv_cache((3, 32, 2, 8), torch.float32, "cpu")
    for module in ("paged.reshape_and_cache", "paged.paged_attention", "gpu.paged_attention"):
        found = import_module(f"kernels.{module}")
        monkeypatch.setattr(found, "use_triton", lambda *_, **__: True)
    q, table, lens = torch.zeros(1, 2, 8), torch.tensor([[0]]), torch.tensor([1])
    with pytest.raises(ValueError, match="cache: keys in runs have no rows"):
        reshape_and_cache(q, q, keys, values, torch.tensor([0]))
    with pytest.raises(ValueError, match="cache: keys in runs have no rows"):
        paged_attention(q, keys, values, [0, 1], lens, table, max_query_len=1, max_seq_len=1)
    with pytest.raises(ValueError, match="cache: keys in runs have no rows"):
        paged_attention_decode(q, keys, values, table, lens, max_seq_len=1)


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("dtype", DTYPES)
def test_blocks_of_an_engines_cache_are_copied_with_their_runs(dtype):
    shape = ModelConfig(
        model_type="llama", vocab_size=64, hidden_size=64, intermediate_size=64, num_layers=2,
        num_heads=4, num_kv_heads=2, head_dim=16,
    )  # fmt: skip
    cache = KVCache(shape, CacheLayout(num_blocks=6, block_size=16, dtype=dtype))
    k, v = (torch.randn(32, 2, 16).to(dtype) for _ in "kv")
    for keys, values in cache.layers:
        assert keys.dim() == 6 and values.shape == (6, 16, 2, 16)
        reshape_and_cache(k, v, keys, values, torch.arange(16, 48))
    cache.copy_blocks(torch.tensor([[1, 5], [2, 1]]))
    for keys, values in cache.layers:
        for block, tokens in ((5, slice(0, 16)), (1, slice(16, 32)), (2, slice(16, 32))):
            assert torch.equal(key_rows(keys)[block], k[tokens])
            assert torch.equal(values[block], v[tokens])
        assert not keys[[0, 3, 4]].any()
