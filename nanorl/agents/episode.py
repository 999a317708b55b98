"""`Episode`: what an agent loop is given of one rollout.

    async def loop(episode):                       # the whole of the loop "tool"
        await episode.start()
        while (text := await episode.turn()) is not None:
            step = await episode.step(text)
            if step.is_done or not episode.observe(step):
                return

A loop decides when the policy speaks, and what it reads; it never touches a token. When it returns,
the episode has ended: with an answer, or cut off.
Next: loops.py (the loops that come with the project), loop.py (`Agent`, who plays a loop).
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from nanoengine.model.chat_template import Message
from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.params import SamplingParams
from nanorl.agents.context import Context, Generator
from nanorl.agents.tokens import Limits, TurnBuilder
from nanorl.envs.base import Environment, Opening, TimeStep
from nanorl.rewards.base import Score, Transcript
from nanorl.types import Rollout, Status, Task, derive_seed


class Names(NamedTuple):
    """Which rollout of which group this is."""

    group_id: str
    rollout_id: str


class Episode:
    """One rollout in the making: a task, its environment, and one context or several."""

    def __init__(
        self,
        task: Task,
        env: Environment,
        *,
        generator: Generator,
        tokenizer: ChatTokenizer,
        limits: Limits,
        sampling: SamplingParams,
        names: Names,
    ) -> None:
        self.task = task
        self.env = env
        self.tokenizer = tokenizer
        self.limits = limits
        self.opening: Opening | None = None
        self.answer: str | None = None
        self.score: Score | None = None
        """Set by a loop that scores by itself; None: the environment's score of the episode."""
        self._generator = generator
        self._sampling = sampling
        self._names = names
        self._contexts: list[Context] = []
        self.context = self.new_context()

    # -- what a loop calls -----------------------------------------------------------------------

    async def start(self) -> None:
        """Reset the environment and encode its opening."""
        self.opening = await self.env.reset(self.task)
        self.context.begin(self.opening.messages, self.opening.tools)

    async def turn(self) -> str | None:
        """The policy's next turn; None where it was cut off, and the episode should end."""
        return await self.context.turn()

    async def step(self, text: str) -> TimeStep:
        """The environment's reply to a turn. One that ends the episode sets `answer`."""
        step = await self.env.step(text)
        self.context.builder.note(step.reward, step.metrics)
        if step.is_done:
            self.answer = step.answer
        return step

    def observe(self, reply: TimeStep | str | list[Message]) -> bool:
        """Have the policy read a reply; False where it does not fit, and the episode should end."""
        said = reply.observation if isinstance(reply, TimeStep) else reply
        assert said is not None, "an episode that has ended says nothing more"
        return self.context.observe(self.env.format_observation(said))

    async def judge(self) -> Score:
        """The environment's score of what was said so far."""
        return await self.env.score(self.rollout(Score(0.0)), self.transcript())

    def new_context(self, *, is_main: bool = True) -> Context:
        """A further token sequence, still empty. The main one is where the episode goes on; others
        are those of sub-agents."""
        number = len(self._contexts)
        seed = self._sampling.seed
        if number:
            seed = derive_seed(seed, "context", number)
        builder = TurnBuilder(
            self.tokenizer,
            self.limits,
            task_id=self.task.task_id,
            group_id=self._names.group_id,
            rollout_id=self._names.rollout_id,
        )
        context = Context(builder, self._generator, replace(self._sampling, seed=seed))
        self._contexts.append(context)
        if is_main:
            self.context = context
        return context

    # -- what is made of it ----------------------------------------------------------------------

    def transcript(self) -> Transcript:
        """The main context as text."""
        said = [m["content"] for m in self.context.messages if m["role"] == "assistant"]
        return Transcript(
            messages=list(self.context.messages),
            text=said[-1] if said else "",
            answer=self.answer,
            is_truncated=self.context.builder.truncation is not None,
        )

    def rollout(self, score: Score | None, error: str = "") -> Rollout:
        """Everything that was sampled; without a score it FAILED, for the reason `error`."""
        rollout = self.context.builder.close(0.0, Status.FAILED if score is None else None)
        rollout.branches = [
            context.builder.branch()
            for context in self._contexts
            if context is not self.context and context.builder.num_turns
        ]
        rollout.error = error
        if score is not None:
            rollout.reward = score.total
            rollout.turn_rewards = list(score.turns) or rollout.turn_rewards
            rollout.metrics |= {f"reward/{name}": value for name, value in score.parts.items()}
        return rollout
