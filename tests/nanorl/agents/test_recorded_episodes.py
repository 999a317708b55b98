"""What a recording makes of its calls: an answer in two pieces, and the rollout of an episode."""

from __future__ import annotations

import asyncio

from agent_doubles import EOS, ScriptedGenerator, output_of, tiny_tokenizer

from nanoinfer.params import SamplingParams
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.limits import Limits
from nanorl.types import Rollout, Status

PROMPT = [1, 2, 3]
LIMITS = Limits(max_turns=9, max_turn_tokens=20, max_context_tokens=400)


def recording_of(*script: object) -> tuple[Recording, ScriptedGenerator]:
    tokenizer = tiny_tokenizer()
    generator = ScriptedGenerator(tokenizer, list(script))  # type: ignore[arg-type]
    return Recording(generator, tokenizer, limits=LIMITS, sampling=SamplingParams()), generator


def test_an_answer_that_was_aborted_is_joined_from_both_pieces_and_no_longer_than_asked() -> None:
    pieces = (output_of([65, 66], "abort", version=1), output_of([67, EOS], version=2))
    recording, generator = recording_of(*pieces)
    [whole] = asyncio.run(recording.complete(PROMPT, SamplingParams(max_tokens=7)))
    assert (whole.ids, whole.versions) == ([65, 66, 67, EOS], [1, 1, 2, 2])
    assert whole.logps == pieces[0].logps + pieces[1].logps
    assert whole.finish_reason == "stop"
    assert [(ids, one.max_tokens) for ids, one in generator.calls] == [
        (PROMPT, 7),
        ([*PROMPT, 65, 66], 5),
    ]
    assert len({one.seed for _, one in generator.calls}) == 1


def played(**fields: object) -> Rollout:
    nothing: dict[str, object] = {"tokens": [], "loss_mask": [], "logps": [], "versions": []}
    names = {"rollout_id": "r", "task_id": "t", "group_id": "g"}
    return Rollout(reward=0.5, **(names | nothing | fields))  # type: ignore[arg-type]


def test_a_rollout_has_the_tokens_of_its_calls_and_what_turns_earned_at_its_last_turn() -> None:
    recording, _ = recording_of(output_of([65, EOS]), output_of([66, EOS]))

    async def talk() -> None:
        first = await recording.complete(PROMPT, SamplingParams(max_tokens=7))
        await recording.complete([*PROMPT, *first[0].ids, 9], SamplingParams(max_tokens=7))

    asyncio.run(talk())
    rollout = recording.rollout(played(turn_rewards=[0.25, 0.5], metrics={"own": 1.0}))
    assert rollout.tokens == [*PROMPT, 65, EOS, 9, 66, EOS]
    assert rollout.loss_mask == [0, 0, 0, 1, 1, 0, 1, 1]
    assert rollout.turn_rewards == [0.0, 0.75]
    assert rollout.metrics == {"own": 1.0, "num_calls": 2.0}
    assert (rollout.reward, rollout.status, rollout.branches) == (0.5, Status.FINISHED, [])


def test_an_episode_without_a_call_has_no_tokens() -> None:
    one = played(turn_rewards=[0.25])
    assert recording_of()[0].rollout(one) == one
