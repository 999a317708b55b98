"""`Harbor`: tasks from directories in the Harbor layout (nanorl/tasks/harbor.py).

    nanorl train --env harbor --env-args path=my_tasks

The policy works in the task's folder with the tools of a workspace; the tests come in only when it
has ended, into a copy of the folder in a sandbox of its own. test.sh decides as it does for Harbor;
where there is none, the share of test functions that pass is the reward (grading.py says what
either can promise). What the policy breaks is its own affair; a task whose set-up fails is not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from nanorl.envs.env import Done, Env
from nanorl.rewards.base import Score, Transcript
from nanorl.sandbox.base import ExecStatus
from nanorl.sandbox.grading import grade, verify
from nanorl.sandbox.pool import SandboxPool
from nanorl.sandbox.session import Session
from nanorl.tasks.harbor import read_harbor_tasks, read_tests, read_workplace
from nanorl.tools.workspace import bash, edit, read, submit, write
from nanorl.types import InfrastructureError, Task

_SET_UP_LIMIT_S = 60.0


class Harbor(Env):
    """One task directory. `path`: the folder that holds them."""

    system = "Work in the folder that the tools show you until the task is done, then submit."
    tools = (bash, read, write, edit, submit)

    def __init__(self, path: str) -> None:
        self.path = path

    def tasks(self) -> list[Task]:  # type: ignore[override]
        return read_harbor_tasks(self.path)

    async def open_session(self, sandbox: SandboxPool) -> Session:
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

    @property
    def _folder(self) -> Path:
        return Path(self.task.data["path"])
