"""A number that is none reaches no advantage, no loss and no database, wherever it comes from."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from agent_doubles import ScriptedGenerator, tiny_tokenizer
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_cases import MAX_TOKENS, VERSION
from test_split_independence import groups_of, guess, guess_top, specs

from nanoengine.packing import Sample, TopTokens
from nanoinfer.params import SamplingParams
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent
from nanorl.algorithms.batch_scoring import Scoring
from nanorl.algorithms.recipes import RECIPES
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import build_batch
from nanorl.envs.base import Services, TimeStep
from nanorl.envs.env import Env
from nanorl.envs.env_episode import EnvEpisode
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.envs.tools.base import Done
from nanorl.rollout_json import to_json
from nanorl.task import Task
from nanorl.types import Branch, Rollout, Status, unusable

NO_NUMBERS = [math.nan, math.inf, -math.inf]
TINY = tiny_tokenizer()


# -- where a rollout ends --------------------------------------------------------------------------


class Odd(Env):
    """Says one number in one of the ways in which an environment can."""

    def __init__(self, way: str, number: float) -> None:
        self.way, self.number = way, number

    def step(self, text: str) -> Any:
        number = self.number
        if self.way == "reward":
            self.reward(number)
        elif self.way == "metric":
            self.metric("reward/right", number)
        elif self.way == "done":
            return self.done(reward=number)
        elif self.way == "a Done":
            return Done(reward=number, answer=None)
        elif self.way == "a TimeStep":
            return TimeStep(is_done=True, answer=text, reward=number)
        elif self.way == "metrics of a TimeStep":
            return TimeStep(is_done=True, answer=text, metrics={"reward/right": number})
        return self.done(answer=text)

    def score(self, transcript: Transcript) -> Any:
        number = self.number
        scores: dict[str, Any] = {
            "a number": number,
            "total": Score(number),
            "turns": Score(1.0, turns=[number]),
            "parts": Score(1.0, parts={"right": number}),
        }
        return scores.get(self.way, 1.0)


class Unchecked(EnvEpisode):
    """An environment of the full protocol, whose score nobody has looked at."""

    async def score(self, rollout: Rollout, transcript: Transcript) -> Score:
        assert isinstance(self.env, Odd)
        return self.env.score(transcript)


def play(env: Odd, episode: type[EnvEpisode] = EnvEpisode) -> Rollout:
    services = Services(tokenizer=TINY, sandbox=None, timeout_s=5.0)
    agent = Agent(
        generator=ScriptedGenerator(TINY, ["hi"]), tokenizer=TINY, limits=Limits(max_turns=2)
    )
    playing = agent.play(
        Task("Go."), episode(env, (), None, services),
        group_id="g", rollout_id="g-m0", sampling=SamplingParams(seed=1),
    )  # fmt: skip
    return asyncio.run(playing)


WAYS = ["reward", "metric", "done", "a Done", "a TimeStep", "metrics of a TimeStep", "a number",
        "total", "turns", "parts"]  # fmt: skip


@pytest.mark.parametrize("number", [*NO_NUMBERS, 1e39, -1e39])
@pytest.mark.parametrize("way", WAYS)
def test_a_rollout_whose_environment_says_no_number_has_failed_and_says_why(
    way: str, number: float
) -> None:
    """What fp32 cannot hold is none either."""
    assert play(Odd(way, 0.5)).status is Status.FINISHED
    rollout = play(Odd(way, number))
    assert rollout.status is Status.FAILED and rollout.reward == 0.0
    assert f"{number:g}" in rollout.error or str(number) in rollout.error
    # Neither the store nor a report meets it.
    json.dumps(to_json(rollout), allow_nan=False)
    assert rollout.turn_rewards == []


@pytest.mark.parametrize("number", NO_NUMBERS)
@pytest.mark.parametrize("way", ["total", "turns", "parts"])
def test_the_score_of_a_foreign_environment_is_looked_at_too(way: str, number: float) -> None:
    rollout = play(Odd(way, number), Unchecked)
    assert rollout.status is Status.FAILED and str(number) in rollout.error


def test_what_cannot_be_trained_on_is_named() -> None:
    rollout = play(Odd("reward", 0.5))
    assert rollout.turn_rewards == [0.5] and unusable(rollout) == ""
    assert "its reward is nan in turn 1" in unusable(replace(rollout, turn_rewards=[math.nan]))
    beside = Branch(tokens=[1], loss_mask=[1], logps=[0.0], versions=[0], turn_rewards=[math.inf])
    assert "its reward is inf in turn 1" in unusable(replace(rollout, branches=[beside]))
    assert "its metric 'seen' is nan" in unusable(replace(rollout, metrics={"seen": math.nan}))
    assert "from -1e+30 to 1e+30" in unusable(replace(rollout, reward=-2e30))
    assert unusable(replace(rollout, reward=1e30, metrics={"bytes": 1e300})) == ""


# -- where a batch is made -------------------------------------------------------------------------


def in_reward(rollout: Rollout, number: float) -> None:
    rollout.reward = number


def in_turn(rollout: Rollout, number: float) -> None:
    rollout.turn_rewards[-1] = number


def in_part(rollout: Rollout, number: float) -> None:
    rollout.metrics["reward/right"] = number


def in_metric(rollout: Rollout, number: float) -> None:
    rollout.metrics["num_looks"] = number


def in_logp(rollout: Rollout, number: float) -> None:
    rollout.logps[rollout.loss_mask.index(1)] = number


def in_branch(rollout: Rollout, number: float) -> None:
    one = rollout.sequences[0]
    rollout.branches = [replace(one, turn_rewards=[*one.turn_rewards[:-1], number])]


OF_ROLLOUTS = [in_reward, in_turn, in_part, in_metric, in_logp, in_branch]
OF_MODELS = ["old", "sharp", "reference", "teacher", "values", "top", "entropies"]


def spoilt(
    score: Callable[[Sequence[Sample]], Any], number: float
) -> Callable[[Sequence[Sample]], Any]:
    """The word of a model with one number that is none, at the last token that was sampled."""

    def spoil(samples: Sequence[Sample]) -> Any:
        said = score(samples)
        held = [i for i, sample in enumerate(samples) if any(sample.loss_mask)]
        for i in held[-1:]:
            place = max(j for j, mark in enumerate(samples[i].loss_mask) if mark)
            found = said[i].logps if isinstance(said[i], TopTokens) else said[i]
            found[place] = number
        return said

    return spoil


def scoring_of(spec: AlgorithmSpec) -> dict[str, Callable[[Sequence[Sample]], Any]]:
    """Everybody who is asked, by the fields of `Scoring`."""
    asked = {
        "old": guess("old") if spec.needs_old_logp else None,
        "sharp": guess("sharp") if spec.needs_sharp_logp else None,
        "reference": guess("reference") if spec.needs_ref_logp else None,
        "teacher": guess("teacher") if spec.loss == "opd" and spec.has_hindsight else None,
        "values": guess("critic") if spec.needs_critic else None,
        "top": guess_top(spec.top_k) if spec.loss == "opd_topk" else None,
        "entropies": guess("entropies") if spec.chooses_by_entropy else None,
    }
    return {name: score for name, score in asked.items() if score is not None}


def with_logps(seed: int) -> list[list[Rollout]]:
    groups = groups_of(seed)
    for one in (rollout for group in groups for rollout in group):
        one.logps = [-1.0 * mark for mark in one.loss_mask]
    return groups


GDPO = AlgorithmSpec(advantage="gdpo", reward_parts=("right", "short=-0.1"))


@pytest.mark.sweep
@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    spec=specs() | st.sampled_from([GDPO, *(recipe.spec for recipe in RECIPES.values())]),
    seed=st.integers(0, 1000),
    number=st.sampled_from(NO_NUMBERS),
    place=st.sampled_from(OF_ROLLOUTS),
)
def test_no_recipe_trains_on_a_rollout_with_a_number_that_is_none(
    spec: AlgorithmSpec, seed: int, number: float, place: Callable[[Rollout, float], None]
) -> None:
    buffer = min(spec.overlong_buffer, MAX_TOKENS)  # of short rollouts
    spec = replace(spec, dynamic_sampling=False, overlong_buffer=buffer)
    groups = with_logps(seed)
    scoring = Scoring(**scoring_of(spec))
    build_batch(groups, spec, max_tokens=MAX_TOKENS, version=VERSION, scoring=scoring)
    dice = random.Random(seed)
    one = dice.choice(dice.choice(groups))
    place(one, number)
    with pytest.raises(ValueError, match=rf"rollout {one.rollout_id}: .*{number}"):
        build_batch(groups, spec, max_tokens=MAX_TOKENS, version=VERSION, scoring=scoring)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(spec=specs(), seed=st.integers(0, 1000), number=st.sampled_from(NO_NUMBERS), data=st.data())
def test_no_recipe_trains_on_what_a_damaged_model_says(
    spec: AlgorithmSpec, seed: int, number: float, data: Any
) -> None:
    spec = replace(spec, dynamic_sampling=False)
    asked = scoring_of(spec)
    if not asked:
        return
    who = data.draw(st.sampled_from(sorted(asked)))
    scoring = Scoring(**{**asked, who: spoilt(asked[who], number)})
    with pytest.raises(ValueError, match=r"rollout g\d-m\d: the (model behind|teacher)"):
        build_batch(with_logps(seed), spec, max_tokens=MAX_TOKENS, version=VERSION, scoring=scoring)


def test_everybody_who_is_asked_was_drawn() -> None:
    """Else the property above says nothing of somebody."""
    every = [*(recipe.spec for recipe in RECIPES.values()), AlgorithmSpec(entropy_share=0.5)]
    asked = {name for spec in every for name in scoring_of(spec)}
    assert asked == set(OF_MODELS)


def test_what_a_model_says_of_a_token_that_nobody_sampled_does_not_count() -> None:
    spec = AlgorithmSpec(distill_coef=0.5)
    groups = with_logps(3)

    def dirty(salt: str) -> Callable[[Sequence[Sample]], list[torch.Tensor]]:
        def score(samples: Sequence[Sample]) -> list[torch.Tensor]:
            said = guess(salt)(samples)
            marks = [torch.tensor(sample.loss_mask, dtype=torch.bool) for sample in samples]
            return [torch.where(m, one, math.nan) for m, one in zip(marks, said, strict=True)]

        return score

    def advantages(scoring: Scoring) -> list[list[float]]:
        batch = build_batch(groups, spec, max_tokens=MAX_TOKENS, version=VERSION, scoring=scoring)
        return [sample.fields["advantage"] for sample in batch.samples]

    clean = advantages(Scoring(old=guess("old"), reference=guess("reference")))
    assert advantages(Scoring(old=dirty("old"), reference=dirty("reference"))) == clean


def test_an_advantage_of_the_user_s_that_is_no_number_names_the_rollout(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "def broken(reward_R, group_ids):\n    return 0 * reward_R / (0 * reward_R)\n"
    )
    spec = AlgorithmSpec(advantage=f"{tmp_path / 'mine.py'}:broken")
    with pytest.raises(ValueError, match=r"rollout g\d-m\d: its advantage is nan .*broken, reward"):
        build_batch(with_logps(1), spec, max_tokens=MAX_TOKENS, version=VERSION)
