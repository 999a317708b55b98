"""The code environment: an action is a program, the observation is what it printed.

A program that fails, runs too long or uses too much memory is answered with that fact; only a
failure of the sandbox itself raises. The hidden answer never comes here in any form that is sent
to the sandbox: programs see the task's `files` and nothing else.
Left out: isolation and the retry on a fresh worker (nanorl.sandbox), cutting long observations
(agents/tokens.py: only there is it known how many tokens they have) and scoring (nanorl.rewards).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from nanorl.envs.actions import ActionFormat, ToolCall, ToolCallError
from nanorl.envs.base import TimeStep
from nanorl.sandbox.base import ExecResult, ExecStatus, Sandbox, SandboxFailure
from nanorl.types import InfrastructureError, Task

NO_OUTPUT = "(no output)"
TOOL_UNAVAILABLE = "tool unavailable"
NO_CALLS_LEFT = "no calls left, give the final answer"
KILLED: Mapping[ExecStatus, str] = MappingProxyType(
    {
        ExecStatus.TIMEOUT: "timed out",
        ExecStatus.OOM: "out of memory",
        ExecStatus.OUTPUT_LIMIT: "too much output",
        ExecStatus.SIGNAL: "killed",
    }
)
"""The words in which the model reads that its program did not come to its own end."""

NOTICES = (NO_OUTPUT, TOOL_UNAVAILABLE, NO_CALLS_LEFT, *KILLED.values())
"""All that an observation says in the environment's own words: a teacher knows failures by them."""


class CodeEnv:
    """One episode of writing code, reading its output and answering."""

    def __init__(
        self,
        sandbox: Sandbox,
        action_format: ActionFormat,
        *,
        timeout_s: float = 5.0,
        max_executions: int = 4,
        is_tool_enabled: bool = True,
    ) -> None:
        """With the tool off the agent may still answer, but its calls are refused.

        `timeout_s` is the wall-clock limit of one program.
        """
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be positive")
        if max_executions < 0:
            raise ValueError(f"max_executions={max_executions}: must not be negative")
        self._format = action_format
        self._sandbox = sandbox
        self._timeout_s = timeout_s
        self._max_executions = max_executions
        self._is_tool_enabled = is_tool_enabled
        self._files: Mapping[str, str] = {}
        self._num_executions = 0

    @property
    def format(self) -> ActionFormat:
        return self._format

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        self._files = dict(task.files)
        self._num_executions = 0
        text = self._format.system
        system = [{"role": "system", "content": text}] if text else []
        return [*system, *(dict(message) for message in task.messages())]

    async def step(self, action_text: str) -> TimeStep:
        try:
            action = self._format.read(action_text)
        except ToolCallError as error:
            return TimeStep(observation=f"Error: {error}", metrics={"num_malformed_calls": 1.0})
        if action is None:
            return TimeStep(is_done=True, metrics={"num_no_action": 1.0})
        if not isinstance(action, ToolCall):
            return TimeStep(is_done=True, answer=action.value)
        if not self._is_tool_enabled:
            return TimeStep(observation=TOOL_UNAVAILABLE, metrics={"num_refused_calls": 1.0})
        if self._num_executions >= self._max_executions:
            return TimeStep(observation=NO_CALLS_LEFT, metrics={"num_refused_calls": 1.0})
        self._num_executions += 1
        result = await self._run(action.code)
        metrics = {"num_executions": 1.0, f"num_exec_{result.status}": 1.0}
        return TimeStep(observation=describe(result), metrics=metrics)

    async def close(self) -> None:
        """Executions are stateless: there is nothing to give back."""

    async def _run(self, code: str) -> ExecResult:
        try:
            return await self._sandbox.run(code, files=self._files, timeout_s=self._timeout_s)
        except SandboxFailure as error:
            raise InfrastructureError(f"the sandbox failed: {error}") from error


def describe(result: ExecResult) -> str:
    """The text that the model reads: the output, then for a failure the reason in one line."""
    stdout = result.stdout.decode("utf-8", errors="replace").rstrip()
    return "\n".join(part for part in (stdout, _reason(result)) if part) or NO_OUTPUT


def last_error_line(stderr: str) -> str:
    """The line that names the error, after the number of the program's line that raised it."""
    lines = [line for line in stderr.rstrip().splitlines() if line.strip()]
    if not lines:
        return ""
    places = [i for i, line in enumerate(lines) if line.lstrip().startswith("File ")]
    where = ""
    if places and (number := lines[places[-1]].partition(", line ")[2]):
        where = f"line {number.split(',')[0].strip()}: "
    return where + lines[-1].strip()


def _reason(result: ExecResult) -> str:
    if result.status is ExecStatus.OK:
        return ""
    if result.status is ExecStatus.ERROR:
        stderr = result.stderr.decode("utf-8", errors="replace")
        return last_error_line(stderr) or f"exit code {result.exit_code}"
    return KILLED[result.status]
