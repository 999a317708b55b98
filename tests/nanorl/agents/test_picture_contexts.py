"""What a compacted context keeps of pictures, and what a sub-agent is given."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
from typing import Any

import pytest
from seer import Seer, png

import nanorl
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.compact import Compact
from nanorl.agents.limits import Limits
from nanorl.agents.loop import Agent
from nanorl.agents.queue_agent import QueueLoop
from nanorl.agents.sub_agents import SubAgents
from nanorl.envs.base import Services
from nanorl.envs.env_class import EnvClassKind
from nanorl.task import Task
from nanorl.types import Rollout


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer.make(tmp_path_factory.mktemp("seer"))


def sha(level: int) -> str:
    return hashlib.sha256(png(level)).hexdigest()


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def output(*ids: int) -> Output:
    return Output(
        ids=list(ids), logps=[-1.0] * len(ids), versions=[0] * len(ids), finish_reason="stop"
    )


# -- compacted contexts ----------------------------------------------------------------------------


class Film(nanorl.Env):
    """Every turn is answered with another picture, each darker than the last."""

    def reset(self) -> Any:
        self.level = 20
        return None

    def step(self, text: str) -> Any:
        self.level += 10
        return nanorl.Image(png(self.level))


def filmed(seer: Seer, keep_images: str | int) -> Rollout:
    services = Services(tokenizer=seer.tokenizer, sandbox=None, timeout_s=5.0)
    task = Task(["Watch", nanorl.Image(png(10))])
    loop = Compact(share=0.2, keep_images=keep_images, request="Sum.", heading="So far:")
    env = EnvClassKind(Film).open(services)
    return seer.play(env, task, loop, max_turns=9, max_context_tokens=500)


@pytest.mark.parametrize("keep_images", ["none", "first", 1, 2])
def test_a_compacted_context_keeps_the_pictures_that_were_asked_for(
    seer: Seer, keep_images: str | int
) -> None:
    rollout = filmed(seer, keep_images)
    contexts = [*(one for one in rollout.branches if one.is_history), rollout.sequences[0]]
    assert len(contexts) >= 2
    for before, after in itertools.pairwise(contexts):
        first, *later = [span.sha256 for span in before.images]
        wanted = {"none": [], "first": later[:1]}.get(str(keep_images))
        wanted = later[-int(keep_images) :] if wanted is None else wanted
        prompt = after.turn_spans[0].action_start
        shown = [span.sha256 for span in after.images if span.end <= prompt]
        assert shown == [sha(10), *wanted] == [first, *wanted]
    assert seer.gap(rollout) == 0.0


@pytest.mark.parametrize("wrong", ["last", 0, -1, 1.5])
def test_other_words_for_what_is_kept_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match=r"keep_images=.*: must be none, first, or how many"):
        Compact(keep_images=wrong)


# -- sub-agents ------------------------------------------------------------------------------------


class Says:
    """Says one text after the other."""

    def __init__(self, seer: Seer, *texts: str) -> None:
        self.tokenizer, self.texts, self.asked = seer.tokenizer, list(texts), list[Any]()

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        self.asked.append(params.images)
        return output(*self.tokenizer.encode(self.texts.pop(0)), min(self.tokenizer.eos_ids))


class Plain(nanorl.Env):
    pass


def test_a_sub_agent_sees_none_of_the_pictures(seer: Seer) -> None:
    call = json.dumps({"name": "delegate", "arguments": {"task": "Count to two."}})
    generator = Says(seer, f"<tool_call>\n{call}\n</tool_call>", "1 2", "two")
    system = {"role": "system", "content": [said("Look."), nanorl.Image(png(20))]}
    task = Task([system, *user("How many?", nanorl.Image(png(10)))], "two")
    services = Services(tokenizer=seer.tokenizer, sandbox=None, timeout_s=5.0)
    agent = Agent(
        generator=generator, tokenizer=seer.tokenizer, limits=Limits(max_context_tokens=1200),
        loop=SubAgents(),
    )  # fmt: skip
    playing = agent.play(
        task, EnvClassKind(Plain).open(services), group_id="g", rollout_id="r",
        sampling=SamplingParams(seed=1),
    )  # fmt: skip
    rollout = asyncio.run(playing)
    assert [len(images) for images in generator.asked] == [2, 0, 2]
    (branch,) = rollout.branches
    assert not branch.images and "Look." in seer.tokenizer.decode(branch.tokens)
    assert rollout.reward == 1.0


# -- queues ----------------------------------------------------------------------------------------


def asked_by_queue(seer: Seer, task: Task, written: Any) -> Rollout:
    """The rollout of a function that puts what `written` makes of the prompt, and then ends."""

    async def collect_trajectory(prompt: str, env: Any, obs_queue: Any, act_queue: Any) -> float:
        await obs_queue.put(written(prompt))
        await act_queue.get()
        return 1.0

    services = Services(tokenizer=seer.tokenizer, sandbox=None, timeout_s=5.0)
    agent = Agent(
        generator=Says(seer, "7"), tokenizer=seer.tokenizer,
        limits=Limits(max_context_tokens=900), loop=QueueLoop(lambda: collect_trajectory),
    )  # fmt: skip
    playing = agent.play(
        task, EnvClassKind(Plain).open(services), group_id="g", rollout_id="r",
        sampling=SamplingParams(seed=1),
    )  # fmt: skip
    return asyncio.run(playing)


def test_a_prompt_that_is_put_in_a_queue_shows_its_pictures_where_it_names_them(seer: Seer) -> None:
    task = Task(["Left:", nanorl.Image(png(10)), "right:", nanorl.Image(png(20)), "Which?"])
    asked, (left, right) = task.messages(), (f"[picture {sha(level)[:8]}]" for level in (10, 20))
    pictures = [{"type": "image", "sha256": sha(level)} for level in (10, 20)]
    for written, content in (
        (lambda prompt: prompt, asked[0]["content"]),
        (lambda prompt: f"{right} or {left}?", [pictures[1], said(" or "), pictures[0], said("?")]),
        (lambda prompt: f"Only {right}", [pictures[0], said("Only "), pictures[1]]),
        (lambda prompt: "Which?", [*pictures, said("Which?")]),
    ):
        rollout = asked_by_queue(seer, task, written)
        ids = seer.tokenizer.encode_chat(user(*content), add_generation_prompt=True)
        start = rollout.turn_spans[0].action_start
        assert rollout.tokens[:start] == ids
        assert rollout.images == seer.tokenizer.images_in(ids, user(*content), 0)
