"""Decoding from static buffers, all but CUDA's own capture and replay: on a CPU the work is called.

A row's arithmetic does not depend on the other rows (kernels/linear.py,
kernels/torch/attention.py), so padding must not change a bit.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from tiny_models import make_reference, save_reference

from kernels.torch.kv_cache import key_rows
from nanoengine.formats.hf import export_state, load_model
from nanoengine.model.linear import PackedLinear
from nanoengine.model.transformer import Transformer
from nanoinfer.batch import RunnerOutput, StepInput
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.gpu.cuda_graph import (
    Capture,
    CudaCapture,
    StaticDecode,
    Work,
    can_capture,
    ladder,
    run_plainly,
)
from nanoinfer.kv_cache import CacheLayout
from nanoinfer.params import Output, SamplingParams
from nanoinfer.variants.fp8_cache import make_cache
from nanoinfer.variants.full_runner import FullRunner

SHAPE = "qwen3-bias"
GENERATOR = torch.Generator().manual_seed(4)
PROMPTS = [
    torch.randint(3, 211, (n,), generator=GENERATOR).tolist() for n in (1, 3, 15, 16, 17, 40, 64)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(SHAPE)
    save_reference(SHAPE, path)
    return path


def config(**options: object) -> InferConfig:
    sizes = {"num_blocks": 80, "max_batch_tokens": 64, "max_num_seqs": 18}
    return InferConfig(**{**sizes, **options})  # type: ignore[arg-type]


def make_static(
    model: Transformer, capture: Capture = run_plainly, **options: object
) -> tuple[LLMEngine, StaticDecode]:
    """An engine as one on a GPU is made."""
    engine = LLMEngine(model, config(**options))
    layout = CacheLayout(
        num_blocks=engine._blocks.num_blocks,
        block_size=engine.config.block_size,
        dtype=model.dtype,
        has_padding_block=True,
    )
    cache = make_cache(model.config, layout, engine.config.kv_cache_dtype)
    decode = StaticDecode(model, cache, engine.config.max_num_seqs, capture)
    engine._runner = FullRunner(model, cache, decode=decode)
    return engine, decode


class Recorder:
    """A capture that calls the work, and notes what was captured and replayed, in order. As CUDA's
    it runs the work when it captures it."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.replayed: list[int] = []

    def __call__(self, work: Work) -> Work:
        index = self.num_captured
        self.num_captured += 1
        work()

        def replay() -> None:
            self.replayed.append(index)
            work()

        return replay


def requests() -> tuple[list[list[int]], list[SamplingParams]]:
    """They end one after the other, so that a run meets every batch size from 14 down."""
    prompts = PROMPTS + PROMPTS[::-1]
    return prompts, [
        SamplingParams(max_tokens=20 + 3 * i, seed=i, ignore_eos=True) for i in range(len(prompts))
    ]


def told(outputs: list[Output]) -> list[tuple[list[int], list[float]]]:
    return [(output.ids, output.logps) for output in outputs]


def test_sizes_are_powers_of_two_then_steps_of_16_and_end_with_the_largest_batch() -> None:
    assert ladder(1) == [1]
    assert ladder(6) == [1, 2, 4, 6]
    assert ladder(16) == [1, 2, 4, 8, 16]
    assert ladder(50) == [1, 2, 4, 8, 16, 32, 48, 50]


@pytest.mark.parametrize("kind", ["auto", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_padded_decode_steps_have_the_bits_of_unpadded_ones(
    folder: Path, dtype: torch.dtype, kind: str
) -> None:
    model = load_model(folder, dtype)
    expected = told(LLMEngine(model, config(kv_cache_dtype=kind)).generate(*requests()))
    recorder = Recorder()
    engine, decode = make_static(model, recorder, kv_cache_dtype=kind)
    assert told(engine.generate(*requests())) == expected
    assert list(decode._replays) == [16, 8, 4, 2, 1]  # once each, when they were needed
    assert recorder.num_captured == 5 and set(recorder.replayed) == set(range(5))
    engine.check()


def test_preemption_and_prefix_copies_go_through_the_same_steps(folder: Path) -> None:
    model = load_model(folder)
    prompts = [PROMPTS[6]] * 5
    each = [SamplingParams(max_tokens=40, seed=i, ignore_eos=True) for i in range(5)]
    expected = told(LLMEngine(model, config(prefix_caching=False)).generate(prompts, each))
    engine, _ = make_static(model, num_blocks=14, block_size=12)
    assert told(engine.generate(prompts, each)) == expected
    assert engine.metrics()["num_preemptions"] > 0
    assert engine.metrics()["cached_tokens"] > 0


def test_rows_of_padding_write_to_the_padding_block_alone(folder: Path) -> None:
    """Every cell of the cache that a step changes is one of its slots, or the padding's."""
    engine, decode = make_static(load_model(folder), prefix_caching=False)  # no block copies
    runner, cache = engine._runner, engine._runner.cache
    assert cache.data.shape[2] == 81 and cache.padding_block == 80
    run = runner.run
    seen = set()

    def contents() -> torch.Tensor:
        """[layers, 2, blocks, block_size, K, D], however the keys lie."""
        return torch.stack([torch.stack((key_rows(k), v)) for k, v in cache.layers])

    def checked(step: StepInput) -> RunnerOutput:
        before = contents()
        result = run(step)
        changed = (contents() != before).flatten(4).any(-1).any(0).any(0)
        slots = changed.flatten().nonzero().flatten().tolist()
        allowed = set(step.slots_T.tolist())
        if decode.padded(step) is not None:
            seen.add(len(step.seq_lens))
            allowed.add(80 * cache.block_size)
            num = len(step.seq_lens)
            size = next(size for size in decode.sizes if size >= num)
            assert (decode._inputs[size].tables[num:, 0] == 80).all()
        assert set(slots) <= allowed
        return result

    runner.run = checked  # type: ignore[method-assign]
    engine.generate(*requests())
    assert seen == set(range(1, 15))


def test_weights_are_written_in_place_and_the_graphs_stay(folder: Path) -> None:
    model = load_model(folder)
    recorder = Recorder()
    engine, decode = make_static(model, recorder)
    engine.generate(*requests())
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    packed = [id(m.packed) for m in model.modules() if isinstance(m, PackedLinear)]
    state = make_reference(SHAPE, 1).state_dict()
    engine.update_weights(iter(state.items()), 1)
    assert addresses == {name: p.data_ptr() for name, p in model.named_parameters()}
    assert len(packed) == 3 * 4  # layers, matrices
    assert packed == [id(m.packed) for m in model.modules() if isinstance(m, PackedLinear)]
    after = told(engine.generate(*requests()))
    assert recorder.num_captured == len(decode._replays) == 5
    assert after == told(LLMEngine(model, config()).generate(*requests()))


def test_weights_that_moved_are_captured_again(folder: Path) -> None:
    model = load_model(folder)
    recorder = Recorder()
    engine, decode = make_static(model, recorder)
    engine.generate(*requests())
    model.norm.data = model.norm.data * 2
    engine.update_weights(export_state(model), 1)
    after = told(engine.generate(*requests()))
    assert recorder.num_captured == 2 * len(decode._replays) == 10
    assert after == told(LLMEngine(model, config()).generate(*requests()))


def test_a_sleeper_forgets_its_graphs_and_captures_them_again(folder: Path) -> None:
    model = load_model(folder)
    recorder = Recorder()
    engine, decode = make_static(model, recorder)
    before = told(engine.generate(*requests()))
    engine.sleep()
    assert not decode._replays and engine._runner.cache.data.numel() == 0
    engine.wake()
    assert told(engine.generate(*requests())) == before
    assert recorder.num_captured == 2 * len(decode._replays) == 10


def test_what_is_prepared_is_not_captured_again(folder: Path) -> None:
    recorder = Recorder()
    engine, decode = make_static(load_model(folder), recorder)
    decode.prepare()
    assert list(decode._replays) == decode.sizes[::-1]
    engine.generate(*requests())
    decode.prepare()
    assert recorder.num_captured == len(decode.sizes)


def test_a_capture_writes_to_no_block_of_a_sequence(folder: Path) -> None:
    """It runs the work on what the buffers hold: after a sleep, the rows of the last step before.
    With few blocks, those are the blocks of the sequences that run now."""
    model = load_model(folder)
    prompts, each = requests()
    engine, _ = make_static(model, Recorder(), num_blocks=45, prefix_caching=False)
    engine.generate(prompts, each)
    for seed in range(4):
        engine.sleep()
        engine.wake()
        others = [[3 + (7 * i + seed) % 200 for i in prompt] for prompt in prompts[seed:]]
        found = told(engine.generate(others, each[seed:]))
        assert found == told(LLMEngine(model, config()).generate(others, each[seed:]))


def test_the_buffers_stay_where_they_are(folder: Path) -> None:
    engine, decode = make_static(load_model(folder))

    def addresses() -> list[int]:
        buffers = [decode._hidden]
        for inputs in decode._inputs.values():
            buffers += [inputs.ids, inputs.positions, inputs.slots, inputs.lens]
            buffers += [inputs.tables, inputs.starts]
        return [buffer.data_ptr() for buffer in buffers]

    before = addresses()
    engine.generate(*requests())
    assert addresses() == before


def test_a_cpu_has_no_graphs(folder: Path) -> None:
    model = load_model(folder)
    assert not can_capture(model)
    engine = LLMEngine(model, config(cuda_graphs=True))
    assert not isinstance(engine._runner, FullRunner)
    assert engine._runner.cache.data.shape[2] == 80  # and no block for padding


def test_a_capture_does_not_mind_what_other_threads_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's default mode ends a capture when any thread allocates, as the optimizer's does."""
    cuda = fake_cuda(monkeypatch)
    calls: list[int] = []
    replay = CudaCapture(torch.device("cuda:0"))(lambda: calls.append(cuda.num_begun))
    assert calls == [0, 0, 1]  # two warm-ups, and what is captured
    assert cuda.modes == ["thread_local"] and cuda.num_ended == 1
    assert replay.__self__.__class__ is cuda.CUDAGraph  # type: ignore[attr-defined]


def test_graphs_share_a_pool_until_all_of_them_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's pool goes with the last graph that uses it: a capture into it then ends in an
    internal assertion (seen on an H100, after a sleep)."""
    cuda = fake_cuda(monkeypatch)
    capture = CudaCapture(torch.device("cuda:0"))
    replays = [capture(lambda: None) for _ in range(3)]
    del replays[0]
    replays.append(capture(lambda: None))
    assert cuda.pools == [1, 1, 1, 1]
    replays.clear()
    replays += [capture(lambda: None), capture(lambda: None)]
    assert cuda.pools[4:] == [2, 2]


def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a capture needs of `torch.cuda`, with notes of what it was asked for."""
    cuda = MagicMock(device=lambda device: nullcontext(), stream=lambda stream: nullcontext())
    cuda.modes, cuda.pools, cuda.num_begun, cuda.num_ended, cuda.num_pools = [], [], 0, 0, 0

    class CUDAGraph:
        def capture_begin(self, pool: int, capture_error_mode: str = "global") -> None:
            cuda.num_begun += 1
            cuda.pools.append(pool)
            cuda.modes.append(capture_error_mode)

        def capture_end(self) -> None:
            cuda.num_ended += 1

        def replay(self) -> None:
            pass

    def graph_pool_handle() -> int:
        cuda.num_pools += 1
        return int(cuda.num_pools)

    cuda.CUDAGraph, cuda.graph_pool_handle = CUDAGraph, graph_pool_handle
    monkeypatch.setattr(torch, "cuda", cuda)
    return cuda
