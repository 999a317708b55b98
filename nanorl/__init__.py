"""nanorl: agents that read a task, act, see what came of it, and learn from the score.

    import nanorl

    class Shout(nanorl.Env):
        def tasks(self, rng): return nanorl.Task(f"Say {rng.randint(1, 99)} louder.")
        def step(self, text): return self.done(reward=float(text.isupper()))

    nanorl.train("smollm2", env=Shout, steps=20)

docs/environments.md says what else an environment may do. Inside, the root is the book: a GRPO
step, from rollouts to new weights. Read it in this order.

types.py            rollouts, and which of them cannot be trained on; task.py: tasks and seeds
grpo.py             the algorithm, the places where another may change a stage, and the names of the
                    numbers that travel with a token
batching.py         groups become samples; group_advantage.py, policy_loss.py: two of its stages
batch_metrics.py    what a batch says of itself, and how far the two engines are apart
learner.py          samples become an optimizer step, and its weights the rollout engine's

plugins.py, bounds.py, unpacking.py   code that a user names, what a number may be, bytes of others
rollout_json.py     a rollout as JSON, for who sends or keeps one
shown_pictures.py   pictures among tokens, as people read them
cli.py, serve_training.py, version.py   the doors of the shell

The rooms, from the bottom up; none imports one above it (scripts/book.py):

sandbox/        where programs run
envs/           what answers the agent: tools/, rewards/, tasks/, hosting/, http_record/, shipped/
agents/         one rollout, and the group that it is one of; endpoint/: an API that agents call
algorithms/     all algorithms but GRPO, a file a family
flow/           which rollouts may start, and which groups make a batch
options/        every option, and what it makes: presets, parts, sizes, the environment of a run
scorers/        models beside the policy: references, a critic
serving/        environments and training for clients elsewhere
observability/  store/, report/, trackers/, monitor/, alarms/, diagnosis/, trajectories/
distributed/    roles/ (who computes what, here or in processes), weights/ (how they get there)
run/            the phases of a run, the RL loop (trainer.py), checkpoints, the papers of a run
inspection/     doctor/, viewer/, replay/, simulate/, exports
commands/       a file a verb; api.py: the same from Python; parsers/: old names of nanoinfer/chat
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import nanoengine  # noqa: F401 (before torch: it tells OpenMP how long to spin)

if TYPE_CHECKING:
    from nanoinfer.chat.base import ToolCall
    from nanorl.commands.api import TrainedRun, evaluate, export, train
    from nanorl.commands.rehearsal import Rehearsal, rehearse
    from nanorl.envs.env import Env, final_answer, last_number
    from nanorl.envs.images import Image
    from nanorl.envs.rewards.base import Score, Transcript
    from nanorl.envs.rewards.judge import JudgeReward
    from nanorl.envs.rewards.math_reward import MathReward
    from nanorl.envs.rewards.reward_model import ModelReward
    from nanorl.envs.rewards.rule import RuleReward
    from nanorl.envs.rewards.tests import UnitTestReward
    from nanorl.envs.rewards.weighted import WeightedReward
    from nanorl.envs.tools.base import ToolError
    from nanorl.envs.tools.mcp import mcp_tools
    from nanorl.envs.tools.python import python
    from nanorl.envs.tools.python_pictures import PythonPictures
    from nanorl.envs.tools.workspace import bash, edit, python_session, read, submit, write
    from nanorl.task import Task
    from nanorl.types import InfrastructureError, Rollout

# What `nanorl.NAME` is. Imported when it is asked for: most programs need a few, and torch none.
_HOMES = {
    "Env": "nanorl.envs.env:Env",
    "Image": "nanorl.envs.images:Image",
    "InfrastructureError": "nanorl.types:InfrastructureError",
    "JudgeReward": "nanorl.envs.rewards.judge:JudgeReward",
    "MathReward": "nanorl.envs.rewards.math_reward:MathReward",
    "ModelReward": "nanorl.envs.rewards.reward_model:ModelReward",
    "PythonPictures": "nanorl.envs.tools.python_pictures:PythonPictures",
    "Rehearsal": "nanorl.commands.rehearsal:Rehearsal",
    "Rollout": "nanorl.types:Rollout",
    "RuleReward": "nanorl.envs.rewards.rule:RuleReward",
    "Score": "nanorl.envs.rewards.base:Score",
    "Task": "nanorl.task:Task",
    "ToolCall": "nanoinfer.chat.base:ToolCall",
    "ToolError": "nanorl.envs.tools.base:ToolError",
    "TrainedRun": "nanorl.commands.api:TrainedRun",
    "Transcript": "nanorl.envs.rewards.base:Transcript",
    "UnitTestReward": "nanorl.envs.rewards.tests:UnitTestReward",
    "WeightedReward": "nanorl.envs.rewards.weighted:WeightedReward",
    "bash": "nanorl.envs.tools.workspace:bash",
    "edit": "nanorl.envs.tools.workspace:edit",
    "evaluate": "nanorl.commands.api:evaluate",
    "export": "nanorl.commands.api:export",
    "final_answer": "nanorl.envs.env:final_answer",
    "last_number": "nanorl.envs.env:last_number",
    "mcp_tools": "nanorl.envs.tools.mcp:mcp_tools",
    "python": "nanorl.envs.tools.python:python",
    "python_session": "nanorl.envs.tools.workspace:python_session",
    "read": "nanorl.envs.tools.workspace:read",
    "rehearse": "nanorl.commands.rehearsal:rehearse",
    "submit": "nanorl.envs.tools.workspace:submit",
    "train": "nanorl.commands.api:train",
    "write": "nanorl.envs.tools.workspace:write",
}
__all__ = [
    "Env",
    "Image",
    "InfrastructureError",
    "JudgeReward",
    "MathReward",
    "ModelReward",
    "PythonPictures",
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
    import importlib  # here: `import nanorl` needs it for nothing else

    module, _, attribute = _HOMES[name].partition(":")
    return getattr(importlib.import_module(module), attribute)
