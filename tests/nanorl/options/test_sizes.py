"""Sizes that nobody gave: the preset's on a CPU, the memory's on a GPU; what was given stays."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nanoengine.plan.estimate import model_shape
from nanoinfer.config import InferConfig
from nanoinfer.gpu.sizes import sized as engine_sized
from nanorl.options import run_sizes as sizes
from nanorl.options.engine_config import EngineLimits
from nanorl.options.phase_config import RLConfig
from nanorl.options.presets import PRESETS, smollm2
from nanorl.options.run_sizes import activation_bytes, gpu_sizes, resident_bytes, sized

CPU = torch.device("cpu")
SHAPE = model_shape("qwen3-0.6b")
GIB = 1 << 30


@pytest.mark.parametrize("name", PRESETS)
def test_a_cpu_has_the_presets_sizes(name: str) -> None:
    found = sized(PRESETS[name].config(), SHAPE, CPU)
    limits = {
        "smollm2": (1024, 64, 1024, 512),
        "tiny": (8192, 192, 4096, 256),
        "tiny_vision": (8192, 512, 4096, 256),
    }[name]
    engine = found.engine
    assert limits == (
        engine.micro_batch_tokens,
        engine.max_num_seqs,
        engine.max_batch_tokens,
        engine.cache_mb,
    )
    assert found.device == "cpu"
    assert sized(found, SHAPE, CPU) == found


def test_what_was_given_stays_and_the_rest_goes_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "free_bytes", lambda device: 80 * GIB)
    for device in (CPU, torch.device("cuda:0")):
        few = replace(smollm2(), engine=EngineLimits(max_batch_tokens=32, cache_mb=7))
        engine = sized(few, SHAPE, device).engine
        assert (engine.max_batch_tokens, engine.cache_mb, engine.max_num_seqs) == (32, 7, 32)
        many = replace(smollm2(), engine=EngineLimits(max_num_seqs=10_000))
        assert sized(many, SHAPE, device).engine.max_batch_tokens >= 10_000


@pytest.mark.parametrize("max_staleness", [0, 2])
@pytest.mark.parametrize("gib", [24, 80])
def test_on_a_gpu_everything_fits_at_its_worst(gib: int, max_staleness: int) -> None:
    """Cache and activations take turns in a synchronous run, and lie side by side otherwise."""
    rl = RLConfig(max_staleness=max_staleness, tasks_per_step=64, group_size=16)
    config = replace(smollm2(), rl=rl)
    found = gpu_sizes(config, SHAPE, gib * GIB)
    kept = activation_bytes(config, SHAPE, found["micro_batch_tokens"])
    cache = found["cache_mb"] << 20
    turns = max(kept, cache) if max_staleness == 0 else kept + cache
    assert resident_bytes(config, SHAPE) + turns < gib * GIB
    assert found["micro_batch_tokens"] >= 1024 and cache > GIB


def test_what_stays_is_counted_for_the_models_that_there_are() -> None:
    """Qwen3-0.6B has 596 M parameters: 18 bytes each to train in bf16, 2 more to roll out."""
    assert resident_bytes(smollm2(), SHAPE) == pytest.approx(596e6 * 20, rel=0.01)
    fp32 = replace(smollm2(), dtype="fp32")
    assert resident_bytes(fp32, SHAPE) == pytest.approx(596e6 * 20, rel=0.01)
    spec = replace(smollm2().rl.algorithm, advantage="gae", kl_coef=0.1)
    both = replace(smollm2(), rl=replace(smollm2().rl, algorithm=spec))
    assert resident_bytes(both, SHAPE) == pytest.approx(596e6 * (20 + 18 + 2), rel=0.01)


def test_a_model_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--device auto: 74\.9 GiB.*24\.0 GiB.*--device cpu"):
        gpu_sizes(smollm2(), model_shape("qwen3-4b"), 24 * GIB)


def test_a_cache_is_no_larger_than_its_sequences_can_use() -> None:
    found = gpu_sizes(smollm2(), SHAPE, 1000 * GIB)
    per_token = 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 2
    assert found["cache_mb"] == 256 * 512 * per_token >> 20


def test_an_engine_on_a_cpu_keeps_its_sizes_and_on_a_gpu_takes_the_memory() -> None:
    from nanoengine.model.transformer import Transformer

    model = Transformer(replace(SHAPE, num_layers=1, vocab_size=512), device="cpu")
    config = engine_sized(InferConfig(), model)
    assert (config.cache_bytes, config.max_batch_tokens, config.max_num_seqs) == (GIB, 512, 64)
    assert engine_sized(InferConfig(max_batch_tokens=16), model).max_num_seqs == 16
    pytest.importorskip("triton", reason="Triton exists on Linux only")
    from fake_cuda import MEMORY, fake_gpu

    with fake_gpu():
        there = Transformer(SHAPE, torch.bfloat16, "cuda:0")
        config = engine_sized(InferConfig(), there)
        assert 0.5 * MEMORY < config.cache_bytes < 0.85 * MEMORY
        assert (config.max_batch_tokens, config.max_num_seqs) == (8192, 256)
        assert engine_sized(InferConfig(cache_bytes=GIB), there).cache_bytes == GIB
