"""The multi-turn loop: generate, step the environment, append what it says, until an answer.

Follow one rollout here; the token bookkeeping is in tokens.py, what an action means in actions.py.
Left out: retries of failed rollouts (the caller re-submits the task).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.params import SamplingParams
from nanorl.agents.loop import Generator, Reward, turn_seed
from nanorl.agents.tokens import Limits, TurnBuilder
from nanorl.envs.base import Environment, InfrastructureError, format_observation
from nanorl.types import Rollout, Status, Task


async def run(
    task: Task,
    *,
    group_id: str,
    rollout_id: str,
    generator: Generator,
    env: Environment,
    tokenizer: ChatTokenizer,
    sampling: SamplingParams,
    limits: Limits,
    reward: Reward,
) -> Rollout:
    """One rollout. `sampling.seed` is the rollout's seed; every turn derives its own.

    A rollout that hits a limit keeps its tokens and scores as unanswered. `InfrastructureError`
    gives status FAILED; everything else that raises is a defect and propagates.
    """
    builder = TurnBuilder(
        tokenizer, limits, task_id=task.task_id, group_id=group_id, rollout_id=rollout_id
    )
    metrics: defaultdict[str, float] = defaultdict(float)
    try:
        builder.start(await env.reset(task))
        answer = await _converse(builder, metrics, generator, env, sampling)
    except InfrastructureError:
        return builder.close(0.0, Status.FAILED, metrics=metrics)
    finally:
        await env.close()
    metrics["answered"] = float(answer is not None)
    return builder.close(reward(answer, task.answer), metrics=metrics)


async def _converse(
    builder: TurnBuilder,
    metrics: defaultdict[str, float],
    generator: Generator,
    env: Environment,
    sampling: SamplingParams,
) -> str | None:
    """Turns until an answer or a limit; the answer, or None."""
    while True:
        await generate_turn(builder, generator, sampling)
        if not builder.is_parseable:
            return None
        result = await env.step(builder.action_text())
        for name, value in result.metrics.items():
            metrics[name] += value
        if result.observation is None:
            return result.answer
        if builder.num_turns >= builder.limits.max_turns:
            builder.truncation = "context"
            return None
        if not builder.append_observation(format_observation(result.observation, env.format)):
            return None


async def generate_turn(
    builder: TurnBuilder, generator: Generator, sampling: SamplingParams
) -> None:
    """One turn of as many tokens as the limits leave (`sampling.max_tokens` is not read).

    An output that was aborted for a weight update is continued by re-prefill.
    """
    turn = builder.num_turns
    while True:
        room, kind = builder.room()
        if room == 0:
            builder.truncation = kind
            return
        # The same seed for the pieces of an aborted turn: sampling depends on (seed, position).
        seed = turn_seed(sampling.seed, turn)
        params = replace(sampling, max_tokens=room, seed=seed)
        output = await generator.generate(builder.prompt_ids, params)
        builder.append_action(output)
        if output.finish_reason != "abort":
            return
