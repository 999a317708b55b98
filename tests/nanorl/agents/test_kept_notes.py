"""What was kept, from an engine's answers into the sequences of a rollout."""

from __future__ import annotations

import asyncio

import pytest

from nanoinfer.params import Output, SamplingParams
from nanorl.agents.kept_notes import KeptNotes
from nanorl.rollout_json import from_json, to_json
from nanorl.types import Branch, Rollout

PARAMS = SamplingParams(logps_mode="kept", top_p=0.9)


def answer(ids: list[int], kept: list[list[int]], logp: float = -0.5) -> Output:
    tops = [[(token, -0.5) for token in row] for row in kept]
    return Output(ids=ids, logps=[logp] * len(ids), versions=[0] * len(ids), top_logps=tops)


class Engine:
    def __init__(self, *outputs: Output) -> None:
        self.outputs = list(outputs)

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        return self.outputs.pop(0)


def noted(rollout: Rollout, *calls: tuple[list[int], Output]) -> Rollout:
    notes = KeptNotes(Engine(*(output for _, output in calls)))

    async def ask() -> None:
        for prompt, _ in calls:
            await notes.generate(prompt, PARAMS)

    asyncio.run(ask())
    return notes.noted(rollout)


def rollout(tokens: list[int], mask: list[int], *branches: Branch, logp: float = -0.5) -> Rollout:
    return Rollout(
        task_id="t", group_id="g", rollout_id="r", tokens=tokens, loss_mask=mask,
        logps=[logp * m for m in mask], versions=[m - 1 for m in mask], branches=list(branches),
    )  # fmt: skip


def test_two_turns_with_an_observation_between_them() -> None:
    found = noted(
        rollout([1, 2, 7, 8, 5, 9], [0, 0, 1, 1, 0, 1]),
        ([1, 2], answer([7, 8], [[8, 7], [8]])),
        ([1, 2, 7, 8, 5], answer([9], [[4, 9]])),
    )
    assert found.kept == [[], [], [7, 8], [8], [], [4, 9]]


def test_an_end_that_was_taken_back_and_a_piece_after_an_abort() -> None:
    """The 3 that was sampled last is in no prompt; the second answer goes on inside the turn."""
    found = noted(
        rollout([1, 7, 8, 6], [0, 1, 1, 0]),
        ([1], answer([7], [[7, 2]])),
        ([1, 7], answer([8, 3], [[8], [3]])),
    )
    assert found.kept == [[], [2, 7], [8], []]


def test_branches_have_their_own_and_what_they_repeat_stays_empty() -> None:
    branch = Branch(
        tokens=[1, 7, 4], loss_mask=[0, 0, 1], logps=[0.0, 0.0, -0.5], versions=[-1, -1, 0]
    )
    found = noted(
        rollout([1, 7, 8], [0, 1, 1], branch),
        ([1], answer([7], [[7, 9]])),
        ([1, 7], answer([8], [[8, 9]])),
        ([1, 7], answer([4], [[4, 5]])),
    )
    assert found.kept == [[], [7, 9], [8, 9]]
    assert found.branches[0].kept == [[], [], [4, 5]]


def test_of_two_equal_answers_under_other_weights_the_one_with_its_log_prob_counts() -> None:
    found = noted(
        rollout([1, 7], [0, 1], logp=-0.5),
        ([1], answer([7], [[7, 9]])),
        ([1], answer([7], [[7, 3]], logp=-0.4)),
    )
    assert found.kept == [[], [7, 9]]


def test_a_token_that_no_answer_has_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing says what was kept when its token 2 was drawn"):
        noted(rollout([1, 7, 8], [0, 1, 1]), ([1], answer([7], [[7]])))


def test_an_engine_that_does_not_report_it_is_an_error() -> None:
    plain = Output(ids=[7], logps=[-0.5], versions=[0])
    with pytest.raises(ValueError, match="the engine does not report it"):
        noted(rollout([1, 7], [0, 1]), ([1], plain))


def test_rollouts_come_back_from_json_with_it() -> None:
    whole = noted(rollout([1, 7], [0, 1]), ([1], answer([7], [[7, 9]])))
    assert from_json(to_json(whole)) == whole
    old = {name: value for name, value in to_json(whole).items() if name != "kept"}
    assert from_json(old).kept == []
