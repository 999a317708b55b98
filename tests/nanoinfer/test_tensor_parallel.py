"""An engine on each tensor-parallel rank says what one process says, and all ranks the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import tensor_parallel_cases as cases
from pool import WorkerPool
from tiny_models import save_reference

from nanoinfer.params import Output


def check(found: list[list[Output]], expected: list[Output]) -> None:
    for outputs in found:
        for mine, true in zip(outputs, expected, strict=True):
            assert mine.ids == true.ids
            assert mine.logps == pytest.approx(true.logps, abs=1e-4)
            if true.prompt_logps:
                assert mine.prompt_logps == pytest.approx(true.prompt_logps, abs=1e-4)
    for outputs in found[1:]:
        assert [o.logps for o in outputs] == [o.logps for o in found[0]]


@pytest.mark.parametrize(
    ("shape", "sequence_parallel"),
    [("llama-gqa-tied", False), ("qwen3-bias", True), ("qwen3-moe", False)],
)
def test_two_ranks_say_what_one_process_says(
    pool: WorkerPool, tmp_path: Path, shape: str, sequence_parallel: bool
) -> None:
    save_reference(shape, tmp_path)
    alone = cases.make_engine(str(tmp_path), num_blocks=200)
    expected = cases.outputs(alone)
    by_rank = pool.run(2, cases.on_rank, str(tmp_path), sequence_parallel)
    check([outputs for outputs, _, _ in by_rank], expected)
    for _, num_preemptions, cache_elements in by_rank:
        assert num_preemptions > 0  # the ranks stayed in step through them
        assert cache_elements * 200 * 2 == alone._runner.cache.data.numel() * 7


def test_weights_are_updated_in_place_on_every_rank(pool: WorkerPool, tmp_path: Path) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    alone = cases.make_engine(str(tmp_path), num_blocks=200)
    alone.update_weights(cases.doubled(str(tmp_path)), version=1)
    expected = cases.outputs(alone)
    check(pool.run(2, cases.update, str(tmp_path)), expected)
