"""What a reward may return, what a plain function may ask for, and what is never a zero."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from nanorl.envs.rewards.base import Score, Transcript
from nanorl.envs.rewards.function_reward import as_reward, score_rollout
from nanorl.envs.rewards.load import REWARDS, load_reward
from nanorl.envs.rewards.rule import RuleReward
from nanorl.envs.rewards.weighted import WeightedReward
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout

TASK = Task(task_id="t", kind="sum", prompt="17 + 25?", answer="42")
ROLLOUT = Rollout(
    task_id="t", group_id="g", rollout_id="r", tokens=[1, 2], loss_mask=[0, 1],
    logps=[0.0, -1.0], versions=[-1, 0],
)  # fmt: skip
TRANSCRIPT = Transcript(
    messages=[{"role": "user", "content": "17 + 25?"}], text="So it is 42.", answer="42"
)


def score(given: Any) -> Score:
    return asyncio.run(score_rollout(as_reward(given), ROLLOUT, TASK, TRANSCRIPT))


def test_a_function_is_given_what_it_names() -> None:
    def named(text: str, answer: str, task: Task) -> float:
        return 0.5 if (text, answer, task) == ("So it is 42.", "42", TASK) else 0.0

    async def later(rollout: Rollout, transcript: Transcript) -> float:
        await asyncio.sleep(0)
        return 0.25 if (rollout, transcript) == (ROLLOUT, TRANSCRIPT) else 0.0

    def everything(**given: Any) -> float:
        return len(given)

    assert [score(one).total for one in (named, later, everything)] == [0.5, 0.25, 6.0]


@pytest.mark.parametrize(
    "function",
    [lambda text, anwser: 1.0, lambda *text: 1.0, lambda text, strict=True: 1.0],
    ids=["a typo", "by place", "an option"],
)
def test_a_parameter_that_nobody_fills_is_refused_up_front(function: Callable[..., float]) -> None:
    with pytest.raises(ValueError, match="rollout, task, transcript, text, answer"):
        as_reward(function)


@pytest.mark.parametrize(
    "value", [1, 0.5, True, np.float32(0.5), np.bool_(True), torch.tensor(0.5), Fraction(1, 2)]
)
def test_numbers_of_any_kind_are_scores(value: Any) -> None:
    scored = score(lambda: value)
    assert scored == Score(float(value)) and type(scored.total) is float


@pytest.mark.parametrize(
    "value",
    [None, "1.0", [1.0], float("nan"), float("inf"), {}, np.array([1.0]), Score("1"),
     Score(1.0, turns=[None]), Score(1.0, parts={"a": float("nan")})],
    ids=repr,
)  # fmt: skip
def test_what_is_no_score_is_infrastructure_and_says_what_it_was(value: Any) -> None:
    def odd() -> Any:
        return value

    with pytest.raises(InfrastructureError, match="the reward odd returned"):
        score(odd)


@pytest.mark.parametrize("error", [KeyError("k"), SystemExit(0), ZeroDivisionError("z")])
def test_what_a_reward_raises_is_infrastructure_and_says_where(error: BaseException) -> None:
    def broken() -> float:
        raise error

    with pytest.raises(InfrastructureError, match=r"broken raised .*test_reward_contract.py:\d+"):
        score(broken)


def test_a_reward_a_class_and_a_function_are_rewards_and_nothing_else_is() -> None:
    assert isinstance(as_reward(RuleReward), RuleReward)
    rule = RuleReward()
    assert as_reward(rule) is rule
    with pytest.raises(ValueError, match="is no reward"):
        as_reward(0.5)


def test_a_score_keeps_its_turns_and_parts() -> None:
    given = Score(0.5, turns=[0.0, 1], parts={"style": np.float64(0.25)})
    assert score(lambda: given) == Score(0.5, [0.0, 1.0], {"style": 0.25})


def test_the_rule_reads_an_answer_of_any_kind_and_refuses_a_task_without_one() -> None:
    def total(expected: Any, answer: str | None) -> float:
        task = Task(task_id="t", kind="k", prompt="p", answer=expected)
        transcript = Transcript(messages=[], text="", answer=answer)
        return asyncio.run(score_rollout(RuleReward(), ROLLOUT, task, transcript)).total

    assert total(42, "42.0") == total(0.5, "0.50") == total("yes", " yes ") == 1.0
    assert total(42, "41") == total(42, None) == total(0, "") == 0.0
    for absent in (None, "", " "):
        with pytest.raises(InfrastructureError, match="no answer to compare with"):
            total(absent, "None")


def test_a_weighted_sum_records_its_parts_and_adds_turns() -> None:
    def style() -> Score:
        return Score(0.5, turns=[0.0, 1.0], parts={"brief": 1.0})

    weighted = WeightedReward({"rule": (1.0, RuleReward()), "style": (-0.2, as_reward(style))})
    scored = score(weighted)
    assert scored.total == pytest.approx(0.9)
    assert scored.turns == pytest.approx([0.0, -0.2])
    assert scored.parts == {"rule": 1.0, "style": 0.5, "style/brief": 1.0}


def test_one_part_that_says_nothing_fails_the_whole_sum() -> None:
    weighted = WeightedReward({"rule": (1.0, RuleReward()), "none": (0.1, as_reward(lambda: None))})
    with pytest.raises(InfrastructureError, match="returned None"):
        score(weighted)


@pytest.mark.parametrize("weight", [0.0, float("nan"), float("inf")])
def test_weights_that_weigh_nothing_are_refused(weight: float) -> None:
    with pytest.raises(ValueError, match="the weight of rule"):
        WeightedReward({"rule": (weight, RuleReward())})
    with pytest.raises(ValueError, match="at least one"):
        WeightedReward({})


def test_rewards_are_found_by_name_and_made_with_their_arguments() -> None:
    assert load_reward("rule", {"ignore_case": True}) == RuleReward(ignore_case=True)
    with pytest.raises(ValueError, match=r"rule: .*ignore_cas"):
        load_reward("rule", {"ignore_cas": True})
    with pytest.raises(ValueError, match="group_judge, judge, math, model, rule, tests"):
        load_reward("rool", {})
    assert sorted(REWARDS) == ["group_judge", "judge", "math", "model", "rule", "tests"]
