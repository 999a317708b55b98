"""An engine on each tensor-parallel rank says what one process says, and all ranks the same."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import tensor_parallel_cases as cases
from pool import WorkerPool
from tiny_models import save_reference

from nanoengine.formats.hf import load_model
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Output


def check(found: list[list[Output]], expected: list[Output]) -> None:
    """Sums are taken in another order. Doubled weights make logits, and with them a log-prob's
    rounding, many times as large."""
    for outputs in found:
        for mine, true in zip(outputs, expected, strict=True):
            assert mine.ids == true.ids
            assert mine.logps == pytest.approx(true.logps, rel=3e-5, abs=1e-4)
            if true.prompt_logps:
                assert mine.prompt_logps == pytest.approx(true.prompt_logps, rel=3e-5, abs=1e-4)
    for outputs in found[1:]:
        assert [o.logps for o in outputs] == [o.logps for o in found[0]]


@pytest.mark.parametrize(
    ("shape", "sequence_parallel"),
    [
        ("llama-gqa-tied", False),
        ("qwen3-bias", True),
        ("qwen3-moe", False),
        ("granite", False),
        ("olmo2", False),
        ("olmo3", True),
        ("phi3-longrope", False),
        ("gemma3", False),
        ("glm4", True),
        ("gpt-oss-full", False),
        ("gpt-oss-windows", True),
    ],
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


@pytest.mark.parametrize("shape", ["llama-gqa-tied", "phi3", "gpt-oss"])
def test_weights_are_updated_in_place_on_every_rank(
    pool: WorkerPool, tmp_path: Path, shape: str
) -> None:
    save_reference(shape, tmp_path)
    alone = cases.make_engine(str(tmp_path), num_blocks=200)
    alone.update_weights(cases.doubled(str(tmp_path)), version=1)
    expected = cases.outputs(alone)
    check(pool.run(2, cases.update, str(tmp_path)), expected)


def test_one_rank_leads_and_the_other_follows(pool: WorkerPool, tmp_path: Path) -> None:
    """Coroutines at odd moments, cancelled and aborted ones, refused and new weights: both ranks
    stay in step, and say what one engine alone says."""
    save_reference("llama-gqa-tied", tmp_path)
    engine = LLMEngine(load_model(str(tmp_path)), cases.LED_CONFIG)
    expected, refused = asyncio.run(cases.serve(engine, str(tmp_path)))
    (found, refused_by_two), follower = pool.run(2, cases.led, str(tmp_path))
    assert refused_by_two == refused and len(refused) == 3
    check([found], expected)
    assert {v for output in found for v in output.versions} == {0, 7}
    assert follower["version"] == 7 and follower["num_weight_updates"] == 1
    assert follower["num_finished"] >= len(found)
    assert follower["num_running"] == follower["num_waiting"] == follower["cache_use"] == 0


def test_a_rank_that_fails_alone_is_told_by_all(pool: WorkerPool, tmp_path: Path) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    leader, follower = pool.run(2, cases.lost, str(tmp_path))
    assert "failed" in leader
    assert follower == "rank 1 follows no more: ZeroDivisionError: division by zero"
