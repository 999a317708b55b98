"""Training split over processes equals training in one: gradients, global norm, weights, log-probs.

The reference is the single-process engine, which test_engine.py compares with transformers. The
same comparison is shown to fail for bugs planted on purpose.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import parallel_cases
import pytest
import torch
from parallel_cases import Case, Owned, Result
from pool import WorkerPool
from torch import Tensor

from nanoengine.parallel.layout import Layout

TOLERANCE = {"fp64": 1e-10, "fp32": 1e-5}
PLANTED = 1e-3  # a bug must show at least this


@dataclass
class Difference:
    """Relative errors against one process; the worst over parameters, and its name."""

    gradient: float
    parameter: str
    norm: float
    loss: float
    weights: float
    logps: float


@functools.cache
def reference(case: Case) -> Result:
    return parallel_cases.run(case)


def reference_of(case: Case) -> Result:
    plain = replace(
        case, layout=Layout(), zero=0, sequence_parallel=False, deal="round", bug="",
        bucket_bytes=Case.bucket_bytes, activation_checkpointing=False, budget=10_000,
    )  # fmt: skip
    return reference(plain)


def put_together(results: Sequence[Result], kind: str) -> dict[str, Tensor]:
    """Whole tensors from what the ranks own. Ranks that own the same elements must hold the same
    bits; every element must have an owner."""
    whole: dict[str, Tensor] = {}
    for result in results:
        for part in result.owned:
            shape = part.shape
            if part.where is not None:
                shape = part.where.whole_shape(torch.Size(shape))
            values = getattr(part, kind)
            empty = torch.full(tuple(shape), float("nan"), dtype=values.dtype)
            target = whole.setdefault(part.name, empty).flatten()
            index = indices(part)
            known = ~target[index].isnan()
            assert torch.equal(target[index][known], values[known]), f"{part.name} differs"
            target[index] = values
            whole[part.name] = target.view(shape)
    for name, tensor in whole.items():
        assert not tensor.isnan().any(), f"{name} is incomplete"
    return whole


def indices(part: Owned) -> Tensor:
    """Positions in the whole flattened parameter."""
    if part.where is None:
        return torch.arange(part.lo, part.hi)
    shape = part.where.whole_shape(torch.Size(part.shape))
    every = torch.arange(shape.numel()).view(shape)
    return part.where.take(every).flatten()[part.lo : part.hi]


def compare(results: Sequence[Result], expected: Result) -> Difference:
    gradients = put_together(results, "gradient")
    weights = put_together(results, "master")
    truth = {part.name: part for part in expected.owned}
    assert gradients.keys() == truth.keys()
    errors = {}
    worst_weight = 0.0
    for name, gradient in gradients.items():
        true = truth[name].gradient
        errors[name] = float((gradient.flatten() - true).norm() / true.norm())
        error = (weights[name].flatten() - truth[name].master).norm() / truth[name].master.norm()
        worst_weight = max(worst_weight, float(error))
    parameter = max(errors, key=errors.__getitem__)
    last = results[0].steps[-1], expected.steps[-1]
    assert all(result.steps == results[0].steps for result in results), "ranks report differently"
    assert last[0]["tokens"] == last[1]["tokens"]
    logps = {index: values for result in results for index, values in result.logps.items()}
    assert logps.keys() == expected.logps.keys()
    gap = max(float((logps[i] - true).abs().max()) for i, true in expected.logps.items())
    return Difference(
        errors[parameter],
        parameter,
        abs(last[0]["grad_norm"] / last[1]["grad_norm"] - 1),
        abs(last[0]["loss"] / last[1]["loss"] - 1),
        worst_weight,
        gap,
    )


def check(pool: WorkerPool, cases: Sequence[Case]) -> None:
    """All cases have the same number of ranks."""
    by_rank = pool.run(cases[0].layout.world, parallel_cases.on_rank, list(cases))
    for i, case in enumerate(cases):
        difference = compare([results[i] for results in by_rank], reference_of(case))
        limit = TOLERANCE[case.dtype]
        assert difference.gradient <= limit, (case, difference)
        assert difference.norm <= limit, (case, difference)
        assert difference.loss <= limit, (case, difference)
        assert difference.weights <= limit, (case, difference)
        assert difference.logps <= (1e-5 if case.dtype == "fp32" else 1e-6), (case, difference)


def name(case: Case) -> str:
    parts = [str(case.layout), f"zero{case.zero}", case.family]
    parts += ["sp"] if case.sequence_parallel else []
    parts += ["tied"] if case.tied else ["untied"]
    return "-".join(parts)


TWO = [
    Case(layout=Layout(dp=2)),
    Case(layout=Layout(dp=2), zero=1, tied=False),
    Case(layout=Layout(dp=2), zero=2, family="qwen3", deal="masked"),
    Case(layout=Layout(dp=2), zero=3, family="qwen2", tied=False),
    Case(layout=Layout(tp=2)),
    Case(layout=Layout(tp=2), zero=1, family="qwen3", tied=False),
    Case(layout=Layout(tp=2), sequence_parallel=True),
    Case(layout=Layout(tp=2), sequence_parallel=True, family="qwen3", tied=False),
    Case(layout=Layout(tp=2), zero=2, sequence_parallel=True),
    Case(layout=Layout(cp=2)),
    Case(layout=Layout(cp=2), zero=3, family="qwen3", tied=False),
    Case(layout=Layout(ep=2), family="qwen3_moe"),
    Case(layout=Layout(ep=2), zero=3, family="qwen3_moe", tied=False, deal="masked", steps=2),
    Case(layout=Layout(tp=2), zero=1, family="qwen3_moe"),
    Case(layout=Layout(tp=2), sequence_parallel=True, family="qwen3_moe", tied=False),
]
SWITCHED = [  # a family for each switch of families.py, its norms with sequence_parallel too
    Case(layout=Layout(tp=2), family="granite"),
    Case(layout=Layout(tp=2), family="olmo3", tied=False),
    Case(layout=Layout(tp=2), family="olmo2", sequence_parallel=True),
    Case(layout=Layout(tp=2), family="phi3", zero=1, tied=False),
    Case(layout=Layout(tp=2), family="gemma3_text"),
    Case(layout=Layout(tp=2), family="gemma3_text", sequence_parallel=True),
    Case(layout=Layout(tp=2), family="glm4", sequence_parallel=True, zero=2),
    Case(layout=Layout(cp=2), family="smollm3"),
    Case(layout=Layout(dp=2), family="gemma3_text", zero=3),
    Case(layout=Layout(tp=2), family="gpt_oss", tied=False),
    Case(layout=Layout(tp=2), family="gpt_oss", sequence_parallel=True, zero=2, tied=False),
    Case(layout=Layout(ep=2), family="gpt_oss", zero=1, tied=False, deal="masked"),
    Case(layout=Layout(cp=2), family="gpt_oss", zero=3, tied=False),
]
FOUR = [
    Case(layout=Layout(dp=4), zero=2, deal="empty"),
    Case(layout=Layout(dp=2, tp=2), deal="masked"),
    Case(layout=Layout(dp=2, tp=2), zero=1, sequence_parallel=True, family="qwen3"),
    Case(layout=Layout(dp=2, tp=2), zero=2, tied=False, family="qwen2", deal="empty"),
    Case(layout=Layout(dp=2, tp=2), zero=3, sequence_parallel=True),
    Case(layout=Layout(tp=4), sequence_parallel=True, tied=False),
    Case(layout=Layout(dp=2, cp=2), zero=1, deal="masked"),
    Case(layout=Layout(dp=2, cp=2), zero=3, deal="empty", activation_checkpointing=True),
    Case(layout=Layout(cp=2, tp=2), sequence_parallel=True, family="qwen3"),
    Case(layout=Layout(cp=4), zero=2, tied=False),
    Case(layout=Layout(dp=2, ep=2), zero=1, family="qwen3_moe", deal="empty"),
    Case(layout=Layout(ep=2, cp=2), zero=2, family="qwen3_moe"),
    Case(layout=Layout(ep=4), zero=3, family="qwen3_moe", activation_checkpointing=True),
    Case(layout=Layout(dp=2, tp=2), zero=2, sequence_parallel=True, family="qwen3_moe"),
    Case(layout=Layout(dp=2, ep=2), zero=3, family="gpt_oss", tied=False, deal="empty"),
]
EIGHT = [
    Case(layout=Layout(dp=2, cp=2, tp=2), zero=3, sequence_parallel=True, family="qwen3"),
    Case(layout=Layout(dp=4, tp=2), zero=1, tied=False, deal="empty"),
    Case(layout=Layout(dp=2, tp=4), zero=2, sequence_parallel=True),
    Case(layout=Layout(dp=8), zero=3, family="qwen2", deal="masked"),
    Case(layout=Layout(cp=2, tp=4), family="qwen3", tied=False),
    Case(layout=Layout(dp=2, cp=4), zero=2),
    Case(layout=Layout(dp=2, ep=2, cp=2), zero=3, family="qwen3_moe", tied=False),
]


@pytest.mark.parametrize("case", [*TWO, *SWITCHED, *FOUR], ids=name)
def test_gradients_and_norm_equal_those_of_one_process(pool: WorkerPool, case: Case) -> None:
    check(pool, [case, replace(case, dtype="fp32")])


@pytest.mark.slow
@pytest.mark.parametrize("case", EIGHT, ids=name)
def test_gradients_and_norm_equal_those_of_one_process_on_eight_ranks(
    pool: WorkerPool, case: Case
) -> None:
    check(pool, [case, replace(case, dtype="fp32")])


def test_three_clipped_steps_equal_those_of_one_process(pool: WorkerPool) -> None:
    settings = {"steps": 3, "max_grad_norm": 0.5, "activation_checkpointing": True}
    layouts = [
        Case(layout=Layout(dp=2, tp=2), zero=zero, sequence_parallel=zero % 2 == 1, **settings)  # type: ignore[arg-type]
        for zero in range(4)
    ]
    check(pool, layouts)


BUGS = {
    "no all-reduce in the tensor-parallel backward": Case(layout=Layout(dp=2, tp=2)),
    "mean of means": Case(layout=Layout(dp=2, tp=2)),
    "no division by the accumulation": Case(layout=Layout(dp=2, tp=2)),
    "gradients not summed over data ranks": Case(layout=Layout(dp=2, tp=2)),
    "experts summed with other experts": Case(layout=Layout(dp=2, ep=2), family="qwen3_moe"),
    "no gradient to the ranks that sent the tokens": Case(
        layout=Layout(dp=2, ep=2), family="qwen3_moe"
    ),
    "norms not summed over tensor-parallel ranks": Case(
        layout=Layout(tp=4), sequence_parallel=True
    ),
}


@pytest.mark.parametrize("bug", BUGS)
def test_the_comparison_finds_a_planted_bug(pool: WorkerPool, bug: str) -> None:
    case = replace(BUGS[bug], bug=bug)
    by_rank = pool.run(4, parallel_cases.on_rank, [case])
    try:
        difference = compare([results[0] for results in by_rank], reference_of(case))
    except AssertionError as error:  # ranks that must agree do not
        assert "differ" in str(error)
        return
    assert difference.gradient > PLANTED, difference


def test_the_comparison_finds_clipping_by_a_local_norm(pool: WorkerPool) -> None:
    """The gradient is right; the norm and the clipped step are not, and ranks drift apart."""
    case = Case(
        layout=Layout(dp=2, tp=2), zero=1, max_grad_norm=0.5, bug="clipping by the local norm"
    )
    by_rank = pool.run(4, parallel_cases.on_rank, [case])
    with pytest.raises(AssertionError, match="differ"):
        compare([results[0] for results in by_rank], reference_of(case))
