"""The worked numbers of docs/inference.md."""

import torch
from cache_oracle import CacheRunner, make_engine, replay

from nanoengine.model.config import ModelConfig
from nanoinfer.batch import RunnerOutput, StepInput
from nanoinfer.engine_memory import bytes_per_block
from nanoinfer.params import SamplingParams


class Recorder(CacheRunner):
    """Keeps the steps it ran."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.steps: list[StepInput] = []

    def run(self, step: StepInput) -> RunnerOutput:
        self.steps.append(step)
        return super().run(step)


def test_the_life_of_one_request() -> None:
    engine, _ = make_engine(num_blocks=16, block_size=4, max_num_seqs=4, max_batch_tokens=32)
    recorder = Recorder(16, 4)
    engine._runner = recorder  # type: ignore[assignment]
    prompt = [1, 2, 3, 4, 5, 6, 0, 1, 2, 3]
    handles = [engine.add(prompt, SamplingParams(max_tokens=4)) for _ in range(3)]
    outputs = {}

    engine.step()
    first = recorder.steps[0]
    assert len(first.ids_T) == 10 and first.block_tables.tolist() == [[0, 1, 2]]

    engine.step()
    second = recorder.steps[1]
    assert second.block_tables.tolist() == [[0, 1, 2], [0, 1, 3], [0, 1, 4]]
    assert second.copies is not None and second.copies.tolist() == [[2, 3], [2, 4]]
    assert second.ids_T.tolist()[1:] == [prompt[9]] * 2
    assert second.seq_lens == [11, 10, 10]
    assert [block.ref_count for block in engine._blocks._blocks[:5]] == [3, 3, 1, 1, 1]

    while engine.num_unfinished:
        outputs.update(engine.step())
    assert len(recorder.steps) == 5
    assert engine.metrics()["computed_tokens"] == 10 + 2 + 9 == 21
    assert engine.metrics()["sampled_tokens"] == 12
    assert [outputs[handle].num_cached_tokens for handle in handles] == [0, 9, 9]
    assert outputs[handles[0]].ids == replay(prompt, [0] * 4)

    turn = prompt + outputs[handles[1]].ids + [4, 5, 6]
    again = engine.generate([turn], SamplingParams(max_tokens=1))[0]
    assert len(turn) == 17 and again.num_cached_tokens == 13
    assert len(recorder.steps[5].ids_T) == 4


def test_the_size_of_the_cache() -> None:
    smollm2 = ModelConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
    )
    assert bytes_per_block(smollm2, 1, torch.float32) == 46_080
    block = bytes_per_block(smollm2, 16, torch.float32)
    assert block == 737_280 and (1 << 30) // block == 1456 and 1456 * 16 == 23_296
