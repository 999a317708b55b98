"""The samples of the warm start: copy drills first, then a teacher's traces.

`WarmStart.samples` is a function of (seed, step), so a resumed run trains on the same; the traces
of an earlier epoch, which it does not have any more, it plays again with the same result.

Traces are played by a script in the real environment. It takes the engine's place in the ordinary
agent loop (`ScriptedGenerator`), so traces obey the same token rules as rollouts: the teacher's
text is encoded once, ends with the end-of-turn token, and alone carries loss; observations are what
the sandbox really printed.

Drills are random tokens followed by themselves, to grow induction heads before the traces. A model
that starts from random weights learns the manners of tool use quickly and copying the arguments of
the question slowly, since few tokens of a trace show it. A drill is nothing else. Its tokens are
uniform, not lists of numbers: text with a shape of its own offers shortcuts (which number is
frequent, what follows a comma), and the model learns those instead.
Left out: the steps themselves (warm_start_phase.py), what a trace is (envs/tasks/teachers.py).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from nanoengine.packing import Sample
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.params import Output, SamplingParams
from nanorl.envs.env_kind import Demonstrator, TaskSet, shown_action
from nanorl.envs.images import observed
from nanorl.envs.tasks.tiny_model import CHAT_MARKERS
from nanorl.options.agent_kit import AgentKit
from nanorl.options.run_config import RunConfig
from nanorl.task import Task, derive_seed
from nanorl.types import Rollout, Status

SHORTEST, LONGEST = 6, 20  # tokens of the period that a drill repeats


class WarmStart:
    """The samples of a run's supervised steps."""

    def __init__(self, config: RunConfig, kit: AgentKit) -> None:
        self.config, self.kit = config, kit
        self._played: dict[int, list[Sample]] = {}  # while a later epoch needs them again

    @cached_property
    def tasks(self) -> TaskSet:
        """The environment's own, whatever the run trains on: of those somebody knows the way. Of
        several environments those that have a teacher."""
        tasks = self.kit.kind.tasks(derive_seed(self.config.seed, "warm-start"))
        return getattr(tasks, "taught", tasks)

    async def samples(self, step: int) -> list[Sample]:
        """May be called ahead of time: the teacher plays in the sandbox while an optimizer runs."""
        warm = self.config.warm_start
        num_drills = warm.num_drills
        if step < num_drills:
            return self._drills(step)
        an_epoch = max(1, math.ceil((warm.steps - num_drills) / warm.epochs))
        number = num_drills + (step - num_drills) % an_epoch
        samples = self._played.get(number)
        if samples is None:
            samples = await self._play(number)
            if warm.epochs > 1:
                self._played[number] = samples
        return samples

    def _drills(self, step: int) -> list[Sample]:
        rng = random.Random(derive_seed(self.config.seed, "drill", step))
        vocab, count = self.kit.tokenizer.vocab_size, self.config.warm_start.traces_per_step
        return drill_samples([copy_drill(rng, vocab) for _ in range(count)])

    async def _play(self, number: int) -> list[Sample]:
        tasks = self.tasks.batch(number, self.config.warm_start.traces_per_step)
        plays = [
            self.play_teacher(task, rollout_id=f"teacher-{number}-{i}")
            for i, task in enumerate(tasks)
        ]
        traces = await asyncio.gather(*plays)
        played = [trace for trace in traces if trace.status is not Status.FAILED]
        if not played:
            raise ValueError(
                f"warm start: all {len(traces)} episodes that the teacher played failed, the first "
                f"of: {traces[0].error or 'an unknown cause'}"
            )
        return sft_samples(played)

    async def play_teacher(self, task: Task, *, rollout_id: str) -> Rollout:
        """One trace of a demonstrator, as a rollout whose actions carry the loss."""
        config, kit = self.config, self.kit
        rng = random.Random(derive_seed(config.seed, "teacher", rollout_id))
        env = RecordingEnv(kit.environment())
        script = kit.kind.demonstrator(task, rng, kit.tokenizer, env)
        generator = ScriptedGenerator(
            script,
            lambda: env.observations,
            kit.tokenizer,
            min(kit.tokenizer.eos_ids),
        )
        return await kit.agent(generator).play(
            task,
            env,
            group_id=rollout_id,
            rollout_id=rollout_id,
            sampling=SamplingParams(max_tokens=config.agent.max_context_tokens),
        )


class RecordingEnv:
    """Passes everything on to an environment and keeps the observations for the script."""

    def __init__(self, env: Any) -> None:
        self.env = env
        self.observations: list[Any] = []

    async def step(self, action: str) -> Any:
        result = await self.env.step(action)
        if result.observation is not None:
            said = self.env.format_observation(result.observation)
            self.observations.append(observed(said))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.env, name)


class ScriptedGenerator:
    """Answers like an inference engine, with a script's text instead of a model's."""

    def __init__(
        self,
        script: Demonstrator,
        observations: Callable[[], Sequence[Any]],
        tokenizer: ChatTokenizer,
        end_of_turn_id: int,
    ) -> None:
        self.script = script
        self.observations = observations
        self.tokenizer = tokenizer
        self.end_of_turn_id = end_of_turn_id

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        text = await shown_action(self.script, self.observations())
        new_ids = [*self.tokenizer.encode(text, allow_special=True), self.end_of_turn_id]
        return Output(
            ids=new_ids,
            logps=[0.0] * len(new_ids),
            versions=[0] * len(new_ids),
            finish_reason="stop",
        )


def sft_samples(rollouts: Sequence[Rollout]) -> list[Sample]:
    """Samples whose loss is on the action tokens; sequences without one are left out. All are of
    one group: what they begin with alike, the system prompt at least, is forwarded once."""
    return [
        Sample(
            tokens=sequence.tokens,
            loss_mask=sequence.loss_mask,
            images=sequence.images,
            group="traces",
        )
        for rollout in rollouts
        for sequence in rollout.sequences
        if sequence.num_action_tokens
    ]


def drill_samples(drills: Sequence[tuple[list[int], list[int]]]) -> list[Sample]:
    """Samples of (ids, loss mask) pairs, as `copy_drill` makes them."""
    return [Sample(tokens=ids, loss_mask=mask) for ids, mask in drills]


def copy_drill(
    rng: random.Random, vocab_size: int, num_tokens: int = 64
) -> tuple[list[int], list[int]]:
    """Token ids and loss mask: a random period, then the same one as often as fits.

    The first period cannot be foreseen and carries no loss. Chat markers do not occur.
    """
    if num_tokens < 2 * LONGEST:
        raise ValueError(
            f"num_tokens={num_tokens} is too short to repeat {LONGEST} tokens; "
            f"use {2 * LONGEST} or more"
        )
    length = rng.randint(SHORTEST, LONGEST)
    period = [rng.randrange(len(CHAT_MARKERS), vocab_size) for _ in range(length)]
    times = num_tokens // length
    return period * times, [0] * length + [1] * (length * (times - 1))
