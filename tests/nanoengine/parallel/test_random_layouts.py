"""Layouts and models drawn at random train as one process does, and none of them hangs.

The suite runs a few draws. More, from the root of the repository on:

    cd tests/nanoengine
    PYTHONPATH=../..:. python parallel/test_random_layouts.py --cases 50

prints a line a draw, goes on after a failure, and ends with the number of failures.
"""

from __future__ import annotations

import argparse
import sys
import time

import pipeline_engine_cases as cases
import pytest
import torch
from layout_draws import IN_TURN, draw_run
from parallel_cases import Case
from pipeline_engine_cases import Run
from pool import RankFailed, WorkerPool
from test_parallel_training import compare

from nanoengine.parallel.layout import Layout

LIMIT_S = 120.0  # a draw takes one to four seconds on an idle machine; what never ends hangs
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4}  # of two steps, the second after a rounded first


def check(pool: WorkerPool, run: Run) -> None:
    """Loss, gradients, norm, weights and log-probs after two steps; a failure names the run."""
    case = run.case
    try:
        by_rank = pool.run(case.layout.world, cases.train, [run], timeout_s=LIMIT_S)
    except RankFailed as failure:
        raise AssertionError(f"{case.layout} failed or hung: {run}") from failure
    plain = Case(
        family=case.family,
        tied=case.tied,
        dtype=case.dtype,
        budget=10_000,
        steps=case.steps,
        max_grad_norm=case.max_grad_norm,
        shape=case.shape,
        lengths=case.lengths,
    )
    difference = compare([found[0][0] for found in by_rank], cases.reference(plain))
    limit = TOLERANCE[case.dtype]
    assert difference.gradient <= limit, (run, difference)
    assert difference.norm <= limit, (run, difference)
    assert difference.loss <= limit, (run, difference)
    assert difference.weights <= limit, (run, difference)
    assert difference.logps <= max(limit, 1e-6), (run, difference)


@pytest.mark.parametrize("seed", range(len(IN_TURN)))
def test_a_random_layout_trains_a_random_model_as_one_process_does(
    pool: WorkerPool, seed: int
) -> None:
    check(pool, draw_run(seed))


@pytest.mark.parametrize("zero", [0, 1])
def test_a_pipeline_stage_without_experts_meets_those_with_them(
    pool: WorkerPool, zero: int
) -> None:
    """The first stage's layers are dense, so it has no expert whose gradient has a norm."""
    case = Case(
        layout=Layout(pp=2, ep=2),
        family="qwen3_moe",
        zero=zero,
        max_grad_norm=0.5,
        shape=(("num_layers", 4), ("dense_layers", (0, 1))),
    )
    check(pool, Run(case=case))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, default=40, help="the number of draws")
    options = parser.parse_args()
    torch.set_num_threads(1)
    pool = WorkerPool()
    num_failures = 0
    for seed in range(options.first, options.first + options.cases):
        begin = time.monotonic()
        run = draw_run(seed)
        try:
            check(pool, run)
            outcome = "equal"
        except AssertionError as error:
            num_failures += 1
            outcome = f"FAILED {error}\n{error.__cause__ or ''}"
        took = f"{time.monotonic() - begin:.1f} s"
        print(seed, run.case.family, str(run.case.layout), run.schedule, took, outcome, flush=True)
    pool.close()
    print(f"{num_failures} of {options.cases} failed")
    return int(num_failures > 0)


if __name__ == "__main__":
    sys.exit(main())
