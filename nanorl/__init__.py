"""nanorl: agents that read a task, act, see what came of it, and learn from the score.

    import nanorl

    class Shout(nanorl.Env):
        def tasks(self, rng): return nanorl.Task(f"Say {rng.randint(1, 99)} louder.")
        def step(self, text): return self.done(reward=float(text.isupper()))

    nanorl.train("smollm2", env=Shout, steps=20)

docs/environments.md says what else an environment may do. Inside, the root is the loop. Read
types.py first, then, in the order of a run:

api.py, cli.py          the library and the console command (commands/, a file a verb)
options/, plugins.py    every option, how it is given, two sets of them that work; names of a
                        user's own code
parts.py, sizes.py      tasks, tokenizer and the options of the engines, sized for the machine
roles/                  who computes what: engines, agents, store; here (inline.py) or in processes
run/                    the phases of a run and who is told of them; its parts, sized for the
                        machine; checkpoints, what it leaves behind
trainer.py              the RL loop: which rollouts may start, which groups make a batch
collector.py            plays the rollouts of a group
batching.py             groups become samples with advantages and weights
learner.py              samples become an optimizer step, and its weights the engine's
rehearsal.py            an episode without a model, for an environment's tests
evaluation.py, store.py success on held-out tasks; every rollout, kept
publisher.py            how the rollout engine gets the weights

Around it: algorithms/ (advantages and losses), agents/ (one rollout), envs/ (what answers the
agent), tools/ (what it may call; nanoinfer/chat: how calls are written), sandbox/ (where programs
run), hosting/ (where a user's code runs), http_record/ (its HTTP, recorded and replayed), tasks/,
rewards/, store/, report/, trackers/, weights/ (how they reach engines in other processes),
monitor/ (who looks on) and trajectories/ (rollouts in formats of other tools).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nanoengine  # noqa: F401 (before torch: it tells OpenMP how long to spin)

if TYPE_CHECKING:
    from nanoinfer.chat.base import ToolCall
    from nanorl.api import TrainedRun, evaluate, export, train
    from nanorl.envs.env import Env, final_answer, last_number
    from nanorl.rehearsal import Rehearsal, rehearse
    from nanorl.rewards.base import Score, Transcript
    from nanorl.rewards.judge import JudgeReward
    from nanorl.rewards.math import MathReward
    from nanorl.rewards.reward_model import ModelReward
    from nanorl.rewards.rule import RuleReward
    from nanorl.rewards.tests import UnitTestReward
    from nanorl.rewards.weighted import WeightedReward
    from nanorl.tools.base import ToolError
    from nanorl.tools.mcp import mcp_tools
    from nanorl.tools.python import python
    from nanorl.tools.workspace import bash, edit, python_session, read, submit, write
    from nanorl.types import InfrastructureError, Rollout, Task

# What `nanorl.NAME` is. Imported when it is asked for: most programs need a few, and torch none.
_HOMES = {
    "Env": "nanorl.envs.env:Env",
    "InfrastructureError": "nanorl.types:InfrastructureError",
    "JudgeReward": "nanorl.rewards.judge:JudgeReward",
    "MathReward": "nanorl.rewards.math:MathReward",
    "ModelReward": "nanorl.rewards.reward_model:ModelReward",
    "Rehearsal": "nanorl.rehearsal:Rehearsal",
    "Rollout": "nanorl.types:Rollout",
    "RuleReward": "nanorl.rewards.rule:RuleReward",
    "Score": "nanorl.rewards.base:Score",
    "Task": "nanorl.types:Task",
    "ToolCall": "nanoinfer.chat.base:ToolCall",
    "ToolError": "nanorl.tools.base:ToolError",
    "TrainedRun": "nanorl.api:TrainedRun",
    "Transcript": "nanorl.rewards.base:Transcript",
    "UnitTestReward": "nanorl.rewards.tests:UnitTestReward",
    "WeightedReward": "nanorl.rewards.weighted:WeightedReward",
    "bash": "nanorl.tools.workspace:bash",
    "edit": "nanorl.tools.workspace:edit",
    "evaluate": "nanorl.api:evaluate",
    "export": "nanorl.api:export",
    "final_answer": "nanorl.envs.env:final_answer",
    "last_number": "nanorl.envs.env:last_number",
    "mcp_tools": "nanorl.tools.mcp:mcp_tools",
    "python": "nanorl.tools.python:python",
    "python_session": "nanorl.tools.workspace:python_session",
    "read": "nanorl.tools.workspace:read",
    "rehearse": "nanorl.rehearsal:rehearse",
    "submit": "nanorl.tools.workspace:submit",
    "train": "nanorl.api:train",
    "write": "nanorl.tools.workspace:write",
}
__all__ = [
    "Env",
    "InfrastructureError",
    "JudgeReward",
    "MathReward",
    "ModelReward",
    "Rehearsal",
    "Rollout",
    "RuleReward",
    "Score",
    "Task",
    "ToolCall",
    "ToolError",
    "TrainedRun",
    "Transcript",
    "UnitTestReward",
    "WeightedReward",
    "bash",
    "edit",
    "evaluate",
    "export",
    "final_answer",
    "last_number",
    "mcp_tools",
    "python",
    "python_session",
    "read",
    "rehearse",
    "submit",
    "train",
    "write",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'nanorl' has no attribute {name!r}")
    import importlib

    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
