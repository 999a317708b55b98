"""Training over pipelines, alone and with every other axis, equals training in one process; so do
resuming in another layout and exporting from one."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pipeline_engine_cases as cases
import pytest
import torch
from closed_forms import peak_live_closed_form
from parallel_cases import Case, Result, make_samples
from pipeline_engine_cases import Run, Saved
from pool import WorkerPool
from test_parallel_training import compare

from nanoengine.config import EngineConfig
from nanoengine.formats.hf import hf_views, load_model
from nanoengine.packing import Sample
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.pipeline_engine import PipelineEngine
from nanoengine.parallel.schedules import make_schedule
from nanoengine.state.checkpoint import open_checkpoint
from nanoengine.state.whole_engine import Engine

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}


def pipeline(schedule: str = "1f1b", chunks: int = 1, **settings: object) -> Run:
    return Run(case=Case(**settings), schedule=schedule, chunks=chunks)  # type: ignore[arg-type]


TWO = [
    pipeline("gpipe", layout=Layout(pp=2)),
    pipeline("1f1b", layout=Layout(pp=2), tied=False, family="qwen3"),
    pipeline("interleaved", 2, layout=Layout(pp=2), family="qwen2"),
    pipeline("zb_h1", layout=Layout(pp=2), tied=False, budget=40),
    pipeline("zb_h1", layout=Layout(pp=2), budget=40, activation_checkpointing=True),
    pipeline("1f1b", layout=Layout(pp=2), family="granite"),
    pipeline("interleaved", 2, layout=Layout(pp=2), tied=False, family="olmo3"),
    pipeline("1f1b", layout=Layout(pp=2), family="gemma3_text"),
    pipeline("gpipe", layout=Layout(pp=2), family="smollm3"),
    pipeline("zb_h1", layout=Layout(pp=2), family="gpt_oss", tied=False, budget=40),
]
FOUR = [
    pipeline("1f1b", layout=Layout(pp=2, dp=2), deal="masked"),
    pipeline("zb_h1", layout=Layout(pp=2, dp=2), zero=1, family="qwen3", budget=40),
    pipeline("interleaved", 2, layout=Layout(pp=2, dp=2), zero=2, tied=False, deal="empty"),
    pipeline("gpipe", layout=Layout(pp=2, tp=2), family="qwen3"),
    pipeline("zb_h1", layout=Layout(pp=2, tp=2), sequence_parallel=True, budget=40),
    pipeline("1f1b", layout=Layout(pp=2, cp=2), zero=1),
    pipeline("zb_h1", layout=Layout(pp=4), budget=40),
    pipeline("1f1b", layout=Layout(pp=2, ep=2), family="qwen3_moe", deal="empty"),
    pipeline("zb_h1", layout=Layout(pp=2, ep=2), zero=2, family="qwen3_moe", budget=40),
    pipeline("gpipe", layout=Layout(pp=2, tp=2), family="qwen3_moe", sequence_parallel=True),
]
EIGHT = [
    pipeline("1f1b", layout=Layout(pp=2, dp=2, tp=2), zero=1, sequence_parallel=True),
    pipeline("zb_h1", layout=Layout(pp=2, dp=2, tp=2), zero=2, family="qwen3", budget=40),
    pipeline("interleaved", 2, layout=Layout(pp=2, cp=2, tp=2), tied=False),
    pipeline("1f1b", layout=Layout(pp=4, tp=2), sequence_parallel=True, budget=40),
]


def name(run: Run) -> str:
    case = run.case
    parts = [str(case.layout), run.schedule, f"zero{case.zero}", case.family]
    parts += ["sp"] if case.sequence_parallel else []
    return "-".join([*parts, "tied" if case.tied else "untied"])


@functools.cache
def reference(case: Case) -> Result:
    return cases.reference(case)


def reference_of(case: Case) -> Result:
    return reference(
        Case(
            family=case.family,
            tied=case.tied,
            dtype=case.dtype,
            budget=10_000,
            steps=case.steps,
            max_grad_norm=case.max_grad_norm,
        )
    )


def check(pool: WorkerPool, run: Run) -> None:
    runs = [run, replace(run, case=replace(run.case, dtype="fp32"))]
    by_rank = pool.run(run.case.layout.world, cases.train, runs)
    for i, one in enumerate(runs):
        results = [found[i][0] for found in by_rank]
        expected = reference_of(one.case)
        # a pipeline's ranks all report the log-probs of the samples they were given
        difference = compare(results, expected)
        limit = TOLERANCE[one.case.dtype]
        assert difference.gradient <= limit, (one, difference)
        assert difference.norm <= limit, (one, difference)
        assert difference.loss <= limit, (one, difference)
        assert difference.weights <= limit, (one, difference)
        after = [found[i][1] for found in by_rank]
        for other in after[1:]:
            for mine, theirs in zip(after[0], other, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


@pytest.mark.parametrize("run", [*TWO, *FOUR], ids=name)
def test_gradients_and_norm_equal_those_of_one_process(pool: WorkerPool, run: Run) -> None:
    check(pool, run)


@pytest.mark.slow
@pytest.mark.parametrize("run", EIGHT, ids=name)
def test_gradients_and_norm_equal_those_of_one_process_on_eight_ranks(
    pool: WorkerPool, run: Run
) -> None:
    check(pool, run)


def test_three_clipped_steps_equal_those_of_one_process(pool: WorkerPool) -> None:
    check(pool, pipeline("zb_h1", layout=Layout(pp=2), steps=3, max_grad_norm=0.5, budget=40))


def test_every_chunk_of_a_rank_computes_with_the_weights_of_the_last_step(pool: WorkerPool) -> None:
    check(pool, pipeline("interleaved", 2, layout=Layout(pp=2), tied=False, steps=2))


def test_log_probs_and_entropies_reach_every_rank_of_a_pipeline(pool: WorkerPool) -> None:
    run = pipeline(layout=Layout(pp=2), budget=60)
    alone = cases.make_engine(Run(case=replace(run.case, layout=Layout())))
    expected = alone.forward_logprobs(make_samples(), temperature=0.7, entropy=True)
    for found in pool.run(2, cases.scores, run):
        for mine, true in zip(found, expected, strict=True):  # log-probs, then entropies
            for a, b in zip(mine, true, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-6)
                assert len(b) < 3 or b.any()


def test_live_activations_of_a_training_step_are_those_of_theory(pool: WorkerPool) -> None:
    runs = [pipeline(s, layout=Layout(pp=2), budget=40) for s in ("gpipe", "1f1b", "zb_h1")]
    by_rank = pool.run(2, cases.train, runs)
    for i, run in enumerate(runs):
        num_micro = 6  # 200 rows in micro-batches of at most 40
        schedule = make_schedule(run.schedule, 2, num_micro)
        live = [found[i][2] for found in by_rank]
        assert live == [peak_live_closed_form(schedule, rank) for rank in range(2)]


def test_tied_gradients_that_are_not_summed_are_found(pool: WorkerPool) -> None:
    run = replace(pipeline(layout=Layout(pp=2)), bug="tied gradients not summed")
    by_rank = pool.run(2, cases.train, [run])
    try:
        difference = compare([found[0][0] for found in by_rank], reference_of(run.case))
    except AssertionError as error:  # the two copies drift apart
        assert "differ" in str(error)
        return
    assert difference.gradient > 1e-3


def test_a_pipeline_of_one_rank_or_of_unknown_order_is_refused() -> None:
    with pytest.raises(ValueError, match="pp=1: there is no pipeline"):
        PipelineEngine([], EngineConfig(), Mesh(Layout()))
    with pytest.raises(ValueError, match="schedule='zbv': must be one of"):
        PipelineEngine([], EngineConfig(), Mesh(Layout()), schedule="zbv")


# -- checkpoints ---------------------------------------------------------------------------------

WRITERS = {
    "single": pipeline(layout=Layout(), dtype="fp32"),
    "pp2-dp2": pipeline("zb_h1", layout=Layout(pp=2, dp=2), zero=1, dtype="fp32", budget=40),
    "tp2-dp2": pipeline(layout=Layout(tp=2, dp=2), zero=3, dtype="fp32", sequence_parallel=True),
    "pp2-tp2": pipeline("interleaved", 2, layout=Layout(pp=2, tp=2), dtype="fp32"),
    "moe-single": pipeline(layout=Layout(), dtype="fp32", family="qwen3_moe"),
    "moe-ep2-dp2": pipeline(layout=Layout(ep=2, dp=2), zero=3, dtype="fp32", family="qwen3_moe"),
    "moe-pp2-tp2": pipeline(layout=Layout(pp=2, tp=2), dtype="fp32", family="qwen3_moe"),
}


def equal(found: Saved, expected: Saved, tolerance: float) -> None:
    assert found.cursor == {"step": 5}
    assert found.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        error = (found.state[name] - tensor).norm() / tensor.norm().clamp(min=1e-12)
        assert float(error) <= tolerance, (name, float(error))


@pytest.mark.parametrize(
    ("writer", "readers"),
    [
        ("pp2-dp2", ["pp2-dp2", "single", "tp2-dp2"]),
        ("tp2-dp2", ["tp2-dp2", "pp2-tp2"]),
        ("single", ["single", "pp2-tp2"]),
        ("moe-ep2-dp2", ["moe-ep2-dp2", "moe-single", "moe-pp2-tp2"]),
    ],
)
def test_a_run_resumes_in_another_layout_and_bit_equal_in_its_own(
    pool: WorkerPool, tmp_path: Path, writer: str, readers: list[str]
) -> None:
    run = WRITERS[writer]
    saved = pool.run(run.case.layout.world, cases.save_midway, run, str(tmp_path), True)
    for reader in readers:
        other = WRITERS[reader]
        found = pool.run(other.case.layout.world, cases.resume, other, str(tmp_path))
        equal(found[0], saved[0], 0.0 if reader == writer else 1e-5)
        for rank, one in enumerate(found):
            source = saved[rank] if len(found) == len(saved) else saved[0]
            assert one.random == source.random  # each rank's own generators, or rank 0's


def test_a_damaged_part_or_another_model_is_refused_by_all_ranks(
    pool: WorkerPool, tmp_path: Path
) -> None:
    run = WRITERS["pp2-dp2"]
    pool.run(4, cases.save_midway, run, str(tmp_path), False)
    larger = replace(run, case=replace(run.case, family="qwen3"))
    for message, is_same in pool.run(4, cases.load_refused, larger, str(tmp_path)):
        assert "of another model" in message and "q_norm is missing" in message
        assert is_same
    part = open_checkpoint(tmp_path).folder / "rank_00002.safetensors"
    body = bytearray(part.read_bytes())
    body[len(body) // 2] ^= 1
    part.write_bytes(body)
    for message, is_same in pool.run(4, cases.load_refused, run, str(tmp_path)):
        assert "rank_00002.safetensors: the checksum does not match" in message
        assert is_same


# -- export --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "phi3", "olmo2", "gpt_oss"])
def test_a_tp2_pp2_run_is_exported_bit_equal(pool: WorkerPool, tmp_path: Path, family: str) -> None:
    found = pool.run(4, cases.export, str(tmp_path / "hf"), family)
    expected = found[0]["exported"]
    assert all(rank["num_plans"] == 1 for rank in found)
    (full,) = found[0]["full"]
    assert full.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(full[name], tensor), name
        for rank in found[1:]:
            assert torch.equal(rank["exported"][name], tensor), name
    assert found[0]["bytes"] == sum(t.nbytes for t in expected.values())
    for rank in (2, 3):
        (half,) = found[rank]["halves"]
        for name, begin, tensor in half:
            where = tuple(slice(b, b + n) for b, n in zip(begin, tensor.shape, strict=True))
            assert torch.equal(tensor, expected[name][where]), name
    loaded = hf_views(load_model(tmp_path / "hf"))
    assert all(torch.equal(loaded[name], tensor) for name, tensor in expected.items())
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf").state_dict()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "run",
    [
        pipeline(layout=Layout(pp=2, ep=2), dtype="fp32", family="qwen3_moe"),
        pipeline(layout=Layout(ep=4), zero=3, dtype="fp32", family="qwen3_moe"),
        pipeline(layout=Layout(pp=2, ep=2), dtype="fp32", family="gpt_oss", tied=False),
        pipeline(layout=Layout(ep=4), zero=3, dtype="fp32", family="gpt_oss", tied=False),
    ],
    ids=name,
)
def test_experts_on_many_ranks_are_exported_and_loaded_bit_equal(
    pool: WorkerPool, tmp_path: Path, run: Run
) -> None:
    expected = hf_views(cases.whole_model(run.case))
    for exported, reloaded in pool.run(4, cases.export_experts, run, str(tmp_path / "hf")):
        for state, factor in ((exported, 1), (reloaded, 2)):
            assert list(state) != [] and state.keys() == expected.keys()
            assert all(torch.equal(state[name], t * factor) for name, t in expected.items())
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    ids = torch.tensor([[5, 17, 3, 99, 4, 4, 60]])
    mine = cases.whole_model(run.case)
    sample = Sample(tokens=ids[0].tolist(), loss_mask=[0] + [1] * 6)
    (logps,) = Engine(mine, EngineConfig()).forward_logprobs([sample])
    with torch.no_grad():
        all_logps = torch.log_softmax(theirs(ids).logits[0], -1)
    torch.testing.assert_close(
        logps[1:], all_logps[:-1].gather(1, ids[0, 1:, None]).squeeze(1), rtol=0, atol=2e-5
    )
