"""Keys and values in fp8: how much fits, how far log-probs move, and that nothing else changes.

The log-probs are compared with the training forward pass over the same tokens, which an exact
cache repeats (test_engine_exactness.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
import tensor_parallel_cases as cases
import torch
from pool import WorkerPool
from tiny_models import make_reference, save_reference

from kernels import linear_logprob
from nanoengine.formats.hf import load_model
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.model.transformer import Transformer
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output, SamplingParams
from nanoinfer.variants.fp8_cache import calibrated_scales

SHAPE = "llama-bias"
FP8 = torch.float8_e4m3fn
DTYPES = (torch.float32, torch.bfloat16)
GENERATOR = torch.Generator().manual_seed(6)
PROMPTS = [
    torch.randint(3, 211, (n,), generator=GENERATOR).tolist() for n in (1, 3, 15, 17, 33, 64, 140)
]
CALIBRATION = tuple(torch.randint(3, 211, (48,), generator=GENERATOR).tolist())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(SHAPE)
    save_reference(SHAPE, path)
    return path


def make(model: Transformer, **options: object) -> LLMEngine:
    sizes = {"num_blocks": 200, "max_batch_tokens": 96, "max_num_seqs": 16}
    return LLMEngine(model, InferConfig(**{**sizes, "kv_cache_dtype": "fp8", **options}))  # type: ignore[arg-type]


def params(num: int, max_tokens: int = 24) -> list[SamplingParams]:
    return [SamplingParams(max_tokens=max_tokens, seed=i, ignore_eos=True) for i in range(num)]


def told(outputs: list[Output]) -> list[tuple[list[int], list[float]]]:
    return [(output.ids, output.logps) for output in outputs]


@torch.no_grad()
def gaps(model: Transformer, engine: LLMEngine) -> torch.Tensor:
    """|engine's log-prob − trainer's| of every sampled token."""
    found = []
    outputs = engine.generate(PROMPTS, params(len(PROMPTS)))
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        ids = torch.tensor(prompt + output.ids)
        context = PackedContext.from_lengths([len(ids)])
        hidden = model(ids, packed_positions([len(ids)]), context)[len(prompt) - 1 : -1]
        logp = linear_logprob(
            hidden, model.lm_head_weight, ids[len(prompt) :], packed=model.lm_head_packed
        )
        found.append((logp - torch.tensor(output.logps)).abs())
    return torch.cat(found)


def test_the_same_memory_holds_two_or_four_times_the_blocks(folder: Path) -> None:
    """A token: 2 · 3 layers · 2 heads · 8 = 96 values; a block of 16: 1536 bytes in fp8."""
    for dtype, times in ((torch.bfloat16, 2), (torch.float32, 4)):
        model = load_model(folder, dtype)
        counts = [
            LLMEngine(model, InferConfig(cache_bytes=1536 * 100, kv_cache_dtype=kind))
            for kind in ("fp8", "auto")
        ]
        low, plain = (engine._runner.cache for engine in counts)
        assert (low.num_blocks, plain.num_blocks) == (100, 100 // times)
        assert low.data.nbytes == plain.data.nbytes == 1536 * 100
        assert low.dtype == FP8 and plain.dtype == dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_batching_chunking_caching_preemption_and_sleep_do_not_change_a_bit(
    folder: Path, dtype: torch.dtype
) -> None:
    model = load_model(folder, dtype)
    each = params(len(PROMPTS))
    alone = make(model, prefix_caching=False)
    expected = told([alone.generate([p], s)[0] for p, s in zip(PROMPTS, each, strict=True)])
    chunked = make(model, max_batch_tokens=17)
    assert told(chunked.generate(PROMPTS, each)) == expected
    chunked.sleep()
    chunked.wake()
    assert told(chunked.generate(PROMPTS, each)) == expected
    assert told(chunked.generate(PROMPTS, each)) == expected  # from the prefix cache
    assert chunked.metrics()["cached_tokens"] > 200
    tight = make(model, num_blocks=14)
    assert told(tight.generate(PROMPTS, each)) == expected
    assert tight.metrics()["num_preemptions"] > 0


def test_a_group_whose_members_get_a_copied_block_samples_as_each_alone(folder: Path) -> None:
    model = load_model(folder)
    each = params(6)
    alone = [make(model, prefix_caching=False).generate([PROMPTS[4]], p)[0] for p in each]
    engine = make(model)
    assert told(engine.generate([PROMPTS[4]] * 6, each)) == told(alone)
    assert engine.metrics()["computed_tokens"] == 33 + 5 + 6 * 23  # 32 of 33 shared or copied


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16"])
def test_log_probs_move_but_stay_near_the_trainers(folder: Path, dtype: torch.dtype) -> None:
    model = load_model(folder, dtype)
    assert gaps(model, make(model, kv_cache_dtype="auto")).max() == 0
    gap = gaps(model, make(model))
    assert 1e-4 < gap.mean() < 0.1
    assert gap.max() < 1.0


def test_calibration_measures_the_model_with_its_windows_and_scale(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, seen = load_model(folder), []
    for layer in model.layers:
        layer.window, layer.scale = layer.index or None, 0.3
    attend = PackedContext.attend

    def spy(self, layer, q, k, v, **options):  # type: ignore[no-untyped-def]
        seen.append(options)
        return attend(self, layer, q, k, v, **options)

    monkeypatch.setattr(PackedContext, "attend", spy)
    calibrated_scales(model, CALIBRATION)
    assert seen == [{"scale": 0.3, "window": window, "sinks": None} for window in (None, 1, 2)]


def test_scales_are_the_powers_of_two_that_leave_room_for_four_times_the_text(folder: Path) -> None:
    model = load_model(folder)
    largest = torch.zeros(3, 2)

    class Spy(PackedContext):
        def attend(self, layer, q, k, v, **options):  # type: ignore[no-untyped-def]
            largest[layer] = torch.stack([k.abs().max(), v.abs().max()])
            return super().attend(layer, q, k, v, **options)

    with torch.no_grad():
        cu_seqlens = torch.tensor([0, 48], dtype=torch.int32)
        model(torch.tensor(CALIBRATION), torch.arange(48), Spy(cu_seqlens, 48))
    scales = calibrated_scales(model, CALIBRATION)
    assert (largest / scales <= 112).all() and (largest / scales > 56).all()
    assert torch.equal(scales.log2(), scales.log2().round())


def test_calibration_saves_a_model_whose_values_saturate(folder: Path) -> None:
    """Values times 1024, undone by the output projection, is the same model; with scales that
    follow, by powers of two, to the bit."""
    model, large = load_model(folder), load_model(folder)
    with torch.no_grad():
        for layer in large.layers:
            layer.qkv.weight[48 + 16 :] *= 1024  # q and k come first
            layer.qkv.bias[48 + 16 :] *= 1024
            layer.out.weight /= 1024
    large.repack()
    each = params(len(PROMPTS))
    same = [make(m, kv_calibration_ids=CALIBRATION).generate(PROMPTS, each) for m in (model, large)]
    assert told(same[0]) == told(same[1])
    assert gaps(large, make(large)).mean() > 5 * gaps(model, make(model)).mean()


def test_scales_follow_the_weights_and_not_the_requests(folder: Path) -> None:
    model = load_model(folder)
    engine = make(model, kv_calibration_ids=CALIBRATION)
    scales = engine._runner.cache.scales
    assert scales is not None
    address, first = scales.data_ptr(), scales.clone()
    engine.generate(PROMPTS, params(len(PROMPTS)))
    assert torch.equal(scales, first)
    state = {name: x * 8 for name, x in make_reference(SHAPE, 1).state_dict().items()}
    engine.update_weights(iter(state.items()), 1)
    assert scales.data_ptr() == address and not torch.equal(scales, first)
    after = told(engine.generate(PROMPTS, params(len(PROMPTS))))
    fresh = make(model, kv_calibration_ids=CALIBRATION)
    assert told(fresh.generate(PROMPTS, params(len(PROMPTS)))) == after


def test_two_ranks_agree_and_hold_half_of_the_fp8_cache_each(
    pool: WorkerPool, tmp_path: Path
) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    by_rank = pool.run(2, cases.on_rank_fp8, str(tmp_path))
    for outputs, num_bytes in by_rank:
        assert told(outputs) == told(by_rank[0][0])
        assert num_bytes == 7 * 16 * 2 * 3 * 1 * 8  # blocks, tokens, k and v, layers, heads, dims


def test_what_makes_no_sense_is_refused(folder: Path) -> None:
    model = load_model(folder)
    with pytest.raises(ValueError, match="kv_cache_dtype='int8'"):
        make(model, kv_cache_dtype="int8")
    with pytest.raises(ValueError, match="set kv_cache_dtype='fp8'"):
        make(model, kv_cache_dtype="auto", kv_calibration_ids=(1, 2))
    with pytest.raises(ValueError, match="2 ids from 1 to 211"):
        make(model, kv_calibration_ids=(1, 211))
