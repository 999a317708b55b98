"""What a client of the training service asks a sampler for reaches the engine, field by field."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_text import make_text_engine, save_folder
from waiting import LIMIT_S, turns, until

from nanoengine.formats.hf import read_state
from nanoinfer.params import SamplingParams
from nanorl.serving.training_service.service_requests import SampleBody
from nanorl.serving.training_service.service_sampling import Samplers


def params(asked: dict[str, Any], **fields: Any) -> SamplingParams:
    body = SampleBody(
        sampling_session_id="s", seq_id=0, prompt={"chunks": [{"tokens": [5]}]},
        sampling_params=asked, **fields,
    )  # fmt: skip
    return body.params(room=40, seed=11)


@pytest.mark.parametrize(
    "asked, changed",
    [
        ({}, {}),
        ({"max_tokens": 7}, {"max_tokens": 7}),
        ({"seed": 0}, {"seed": 0}),
        ({"temperature": 0.5}, {"temperature": 0.5}),
        ({"top_p": 0.25}, {"top_p": 0.25}),
        ({"top_k": 3}, {"top_k": 3}),
        ({"stop": "end"}, {"stop": ("end",), "ignore_eos": True}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b"), "ignore_eos": True}),
        ({"stop": [2, 3]}, {"stop_token_ids": (2, 3), "ignore_eos": True}),
    ],
)
def test_each_field_changes_its_own_and_no_other(
    asked: dict[str, Any], changed: dict[str, Any]
) -> None:
    plain = {"max_tokens": 40, "seed": 11, "logps_mode": "raw"}
    assert params(asked) == SamplingParams(**{**plain, **changed})


def test_log_probs_are_asked_for_by_the_larger_number() -> None:
    both = params({}, topk_prompt_logprobs=2, topk_sample_logprobs=5, num_samples=3)
    assert (both.top_logps, both.prompt_logps, both.n) == (5, True, 3)
    assert not params({}, topk_sample_logprobs=5).prompt_logps
    assert params({}, prompt_logprobs=True).prompt_logps


def test_a_request_that_is_given_up_twice_gives_its_engine_back(tmp_path: Path) -> None:
    """The second time comes while it waits to give it back: another snapshot is being read."""
    save_folder(tmp_path)

    def asked(room: int) -> SamplingParams:
        return SamplingParams(max_tokens=room, ignore_eos=True)

    async def run(executor: ThreadPoolExecutor) -> None:
        samplers = Samplers(make_text_engine, executor, 1)
        one = asyncio.create_task(samplers.sample("a", lambda: read_state(tmp_path), [5], asked))
        await until(lambda: [slot for slot in samplers._slots if slot.engine.engine.num_unfinished])
        (slot,) = samplers._slots
        async with samplers._freed:
            one.cancel()
            await until(lambda: not slot.engine.engine.num_unfinished)
            await turns(20)
            one.cancel()
            await turns(20)
        with pytest.raises(asyncio.CancelledError):
            await one
        assert slot.num_users == 0
        other = samplers.sample("b", lambda: read_state(tmp_path), [5], asked)
        assert await asyncio.wait_for(other, LIMIT_S)
        await samplers.close()

    with ThreadPoolExecutor(1) as executor:
        asyncio.run(run(executor))
