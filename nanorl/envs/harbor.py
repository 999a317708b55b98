"""`Harbor`: tasks from directories in the Harbor layout (nanorl/envs/tasks/harbor_tasks.py).

    nanorl train --env harbor --env-args path=my_tasks
    nanorl train --env harbor --env-args path=my_tasks tools=bash

The policy works in the task's folder with the tools of a workspace; the tests come in only when it
has ended, into a copy of the folder in a sandbox of its own. test.sh decides as it does for Harbor;
where there is none, the share of test functions that pass is the reward (grading.py says what
either can promise). What the policy breaks is its own affair; a task whose set-up fails is not.
Where every task has a solution/solve.sh, the teacher of a warm start runs it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nanoinfer.chat.base import ToolCall
from nanorl.envs.env import Done, Env
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.envs.tasks.harbor_tasks import read_harbor_tasks, read_tests, read_workplace
from nanorl.envs.tools.workspace import bash, edit, read, submit, write
from nanorl.sandbox.base import ExecStatus, WorkspaceSandbox
from nanorl.sandbox.grading import grade, verify
from nanorl.sandbox.session import Session
from nanorl.task import Task
from nanorl.types import InfrastructureError

_SET_UP_LIMIT_S = 60.0


_SOLUTION = Path("solution", "solve.sh")


class Harbor(Env):
    """One task directory. `path`: the folder that holds them; `tools`: some of the tools, with
    commas between (a small model does best with bash alone)."""

    system = "Work in the folder that the tools show you until the task is done, then submit."
    tools = (bash, read, write, edit, submit)

    def __init__(self, path: str, *, tools: str = "") -> None:
        self.path = path
        if tools:
            self.tools = _chosen(tools)
        folders = [Path(task.data["path"]) for task in self.tasks()] if path else []
        if not all((folder / _SOLUTION).is_file() for folder in folders):
            self.teacher = None  # type: ignore[assignment,method-assign]

    def tasks(self) -> list[Task]:  # type: ignore[override]
        return read_harbor_tasks(self.path)

    async def open_session(self, sandbox: WorkspaceSandbox) -> Session:
        workplace = read_workplace(self._folder)
        session = await sandbox.open_session(workplace.files, folder=workplace.folder)
        for command in workplace.commands:
            result = await session.shell(command, _SET_UP_LIMIT_S)
            if result.status is not ExecStatus.OK:
                await session.close()
                reason = result.stderr.decode(errors="replace").strip()
                raise InfrastructureError(f"{self._folder}: RUN {command}: {reason}")
        return session

    def step(self, text: str) -> Done:
        """A turn without a call hands in what there is."""
        return self.done(answer=text)

    async def score(self, transcript: Transcript) -> Score:
        session = await self.session()
        tests: dict[str, Any] = dict(read_tests(self._folder))
        limit_s = float(self.task.data["verifier_timeout_s"])
        if "test.sh" in tests:
            verdict = await verify(session, tests, "test.sh", limit_s)
        else:
            verdict = await grade(session, tests, limit_s)
        return Score(verdict.reward, parts=dict(verdict.rewards))

    def teacher(self, observations: Sequence[str], rng: random.Random) -> str | ToolCall:
        """The solution as one command, then the end."""
        if observations:
            return "Done."
        return ToolCall(bash.name, {"command": (self._folder / _SOLUTION).read_text("utf-8")})

    @property
    def _folder(self) -> Path:
        return Path(self.task.data["path"])


def _chosen(names: str) -> tuple[Any, ...]:
    known = {tool.name: tool for tool in Harbor.tools}
    chosen = [name.strip() for name in names.split(",")]
    if unknown := [name for name in chosen if name not in known]:
        raise ValueError(f"--env-args tools={names}: no tool {unknown[0]!r}; {', '.join(known)}")
    return tuple(known[name] for name in chosen)
