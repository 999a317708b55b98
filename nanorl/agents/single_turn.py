"""One output, one score: no tool. For tasks that are answered from the prompt alone."""

from __future__ import annotations

from nanoengine.model.tokenizer import ChatTokenizer
from nanoinfer.params import SamplingParams
from nanorl.agents.loop import Generator, Reward
from nanorl.agents.tokens import Limits, TurnBuilder
from nanorl.agents.tool import generate_turn
from nanorl.envs.actions import parse_answer
from nanorl.envs.base import Environment, InfrastructureError
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
    """One turn; the environment opens the chat and its format says how an answer is marked."""
    builder = TurnBuilder(
        tokenizer, limits, task_id=task.task_id, group_id=group_id, rollout_id=rollout_id
    )
    try:
        builder.start(await env.reset(task))
        await generate_turn(builder, generator, sampling)
    except InfrastructureError:
        return builder.close(0.0, Status.FAILED)
    finally:
        await env.close()
    answer = None
    if builder.is_parseable:
        answer = parse_answer(builder.action_text(), env.format.answer)
    metrics = {"answered": float(answer is not None)}
    return builder.close(reward(answer, task.answer), metrics=metrics)
