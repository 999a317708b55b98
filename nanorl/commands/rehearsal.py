"""`rehearse`: an episode of an environment without a model, for its tests and for a first look.

    played = nanorl.rehearse(Guess)                            # the teacher plays a task
    played = nanorl.rehearse(Guess, task, turns=["10", "7"])   # or these turns are said
    assert played.reward == 1.0

It runs in this process and thread, so `breakpoint()` in the environment works. Left out: tokens and
their limits. Calls are written as Hermes has them, or in code blocks, where the parser is "auto".
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from nanoengine.text.chat_template import Message
from nanorl.commands.api import run_to_end
from nanorl.envs.base import Environment, Services
from nanorl.envs.catalog import as_kind, load_kind
from nanorl.envs.env_kind import Demonstrator, EnvKind, shown_action
from nanorl.envs.images import observed, words_of
from nanorl.envs.rewards.base import Transcript
from nanorl.options.presets import get_preset
from nanorl.run.parse import with_options
from nanorl.sandbox.backends import open_sandbox
from nanorl.sandbox.base import SandboxSpec
from nanorl.task import Task
from nanorl.types import Rollout

_TIMEOUT_S = 10.0


@dataclass(kw_only=True)
class Rehearsal:
    """A played episode: the words and the rewards. `reward` is the whole episode's, beside those of
    single turns; `is_done` says whether the environment ended it."""

    task: Task
    messages: list[Message] = field(default_factory=list)
    turns: list[str] = field(default_factory=list)
    observations: list[Any] = field(default_factory=list)
    """Texts; one with pictures is the list of its parts, which name them by their hash."""
    turn_rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    reward: float = 0.0
    is_done: bool = False

    def _repr_html_(self) -> str:
        # Here: only a notebook asks.
        from nanorl.observability.report.notebook import rehearsal_html

        ended = "ended by the environment" if self.is_done else "not ended by the environment"
        outcome = f"reward {self.reward:g}, {ended}"
        told = [{**one, "content": words_of(one["content"])} for one in self.messages]
        return rehearsal_html(told, self.turn_rewards, outcome)


def rehearse(
    env: Any,
    task: Task | None = None,
    *,
    turns: Sequence[str] | None = None,
    seed: int = 0,
    sandbox: str = "auto",
) -> Rehearsal:
    """Play one episode of `env`, a class or a text as `--env` takes it.

    Without `task` it is one of its training tasks. Without `turns` its teacher plays. As in a run,
    there are no more turns than `agent.max_turns` of its `defaults`, or else of the default preset.
    `sandbox`: the kind in which its tools run programs (`--sandbox`). ValueError where it has no
    teacher; InfrastructureError where one of its methods raises, TeacherError where its teacher
    does.
    """
    kind = load_kind(env, {}) if isinstance(env, str) else as_kind(env)
    spec = SandboxSpec(timeout_s=_TIMEOUT_S)
    opened = open_sandbox(sandbox, spec) if kind.needs_sandbox else None
    try:
        played = Rehearsal(task=kind.tasks(seed).batch(0, 1)[0] if task is None else task)
        tokenizer: Any = _PlainTemplate()
        services = Services(tokenizer=tokenizer, sandbox=opened, timeout_s=_TIMEOUT_S)
        episode = kind.open(services)
        script = _Script(kind, episode, turns, seed, tokenizer)
        run_to_end(_play(episode, script, played, most=_most_turns(kind)))
        return played
    finally:
        if opened is not None:
            opened.close()
        kind.close()


def _most_turns(kind: EnvKind) -> int:
    """The number of turns that an agent has in a run of this environment, unless a flag says
    otherwise."""
    return with_options(
        get_preset("smollm2").config(), kind.defaults, where=kind.name
    ).agent.max_turns


class _Pictures:
    """In place of a run's picture store: files by their SHA-256."""

    def __init__(self) -> None:
        self._files: dict[str, bytes] = {}

    def add(self, data: bytes) -> str:
        from nanoengine.vision.pictures import read_picture  # here: most show none

        read_picture(data)  # what a run would refuse is refused
        sha256 = hashlib.sha256(data).hexdigest()
        self._files[sha256] = data
        return sha256

    def holds(self, sha256: str) -> bool:
        return sha256 in self._files

    def data(self, sha256: str) -> bytes:
        return self._files[sha256]


class _PlainTemplate:
    """In place of a model's tokenizer: its chat template knows no calls, and results as most do, as
    messages of the role "tool" that say what the tool said and nothing else. It takes pictures."""

    def __init__(self) -> None:
        self.store = _Pictures()

    def render(self, messages: Sequence[Message], **options: Any) -> str:
        known = ("system", "user", "assistant", "tool")
        return "\n".join(str(one["content"]) for one in messages if one["role"] in known)


class _Script:
    """The script that speaks in place of the policy: the given turns, or the environment's
    teacher."""

    def __init__(
        self,
        kind: EnvKind,
        episode: Environment,
        turns: Sequence[str] | None,
        seed: int,
        tokenizer: Any,
    ) -> None:
        if turns is None and not kind.has_teacher:
            raise ValueError(
                f"rehearse: {kind.name} has no method teacher(observations, rng); give the turns, "
                "as turns=['10', '7']"
            )
        self._kind, self._episode, self._turns = kind, episode, turns
        self._rng, self._tokenizer = random.Random(seed), tokenizer
        self._teacher: Demonstrator | None = None

    async def next_turn(self, played: Rehearsal) -> str | None:
        number = len(played.turns)
        if self._turns is not None:
            return self._turns[number] if number < len(self._turns) else None
        if self._teacher is None:
            self._teacher = self._kind.demonstrator(
                played.task, self._rng, self._tokenizer, self._episode
            )
        return await shown_action(self._teacher, played.observations)


async def _play(episode: Environment, script: _Script, played: Rehearsal, *, most: int) -> None:
    answer = None
    try:
        played.messages += (await episode.reset(played.task)).messages
        while not played.is_done and len(played.turns) < most:
            if (text := await script.next_turn(played)) is None:
                break
            step = await episode.step(text)
            played.turns.append(text)
            played.messages.append({"role": "assistant", "content": text})
            played.turn_rewards.append(step.reward)
            for name, value in step.metrics.items():
                played.metrics[name] = played.metrics.get(name, 0.0) + value
            played.is_done, answer = step.is_done, step.answer
            if step.observation is not None:
                said = episode.format_observation(step.observation)
                played.messages += said
                played.observations.append(observed(said))
        transcript = Transcript(
            messages=played.messages,
            text=played.turns[-1] if played.turns else "",
            answer=answer,
            is_truncated=not played.is_done,
        )
        played.reward = (await episode.score(_empty_rollout(played.task), transcript)).total
    finally:
        await episode.close()


def _empty_rollout(task: Task) -> Rollout:
    """The rollout that `score` is given: it has no token."""
    nothing: list[Any] = []
    return Rollout(
        task_id=task.task_id,
        group_id="rehearsal",
        rollout_id="rehearsal",
        tokens=list(nothing),
        loss_mask=list(nothing),
        logps=list(nothing),
        versions=list(nothing),
    )
