"""The code environment: an action is a program, the observation is what it printed.

A program that fails, runs too long or uses too much memory is answered with that fact; only a
failure of the sandbox itself raises. The hidden answer never comes here in any form that is sent
to the sandbox: programs see the task's `files` and nothing else.
Left out: isolation and the retry on a fresh worker (nanorl.sandbox), scoring (nanorl.rewards).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Protocol

from nanorl.envs.actions import ToolCall, ToolCallError, ToolFormat, parse_action
from nanorl.envs.base import InfrastructureError, StepResult
from nanorl.types import Task

ExecStatus = Literal["ok", "error", "signal", "timeout", "oom", "output_limit"]


class ExecResult(Protocol):
    """What a sandbox returns for one program."""

    @property
    def status(self) -> str: ...
    @property
    def exit_code(self) -> int | None: ...
    @property
    def stdout(self) -> bytes: ...
    @property
    def stderr(self) -> bytes: ...
    @property
    def truncated(self) -> bool: ...


class CodeSandbox(Protocol):
    """Runs one program in a fresh working directory that holds `files`."""

    async def run(self, code: str, *, files: Mapping[str, str], timeout_s: float) -> ExecResult: ...


class CodeEnv:
    """One episode of writing code, reading its output and answering."""

    def __init__(
        self,
        sandbox: CodeSandbox,
        *,
        tool_format: ToolFormat | None = None,
        system_prompt: str | None = None,
        timeout_s: float = 5.0,
        max_executions: int = 4,
        max_chars: int = 2000,
        is_tool_enabled: bool = True,
        sandbox_failures: tuple[type[Exception], ...] = (),
    ) -> None:
        """`sandbox_failures` are the exceptions that mean infrastructure, not the program."""
        if timeout_s <= 0:
            raise ValueError(f"timeout_s={timeout_s}: must be positive")
        if max_executions < 0:
            raise ValueError(f"max_executions={max_executions}: must not be negative")
        if max_chars < 1:
            raise ValueError(f"max_chars={max_chars}: must be at least 1")
        self._format = tool_format or ToolFormat()
        self._sandbox = sandbox
        self._system_prompt = system_prompt
        self._timeout_s = timeout_s
        self._max_executions = max_executions
        self._max_chars = max_chars
        self._is_tool_enabled = is_tool_enabled
        self._failures = sandbox_failures
        self._files: Mapping[str, str] = {}
        self._num_executions = 0

    @property
    def format(self) -> ToolFormat:
        return self._format

    async def reset(self, task: Task) -> list[dict[str, Any]]:
        self._files = dict(task.files)
        self._num_executions = 0
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return [*system, {"role": "user", "content": task.prompt}]

    async def step(self, action_text: str) -> StepResult:
        try:
            action = parse_action(action_text, self._format)
            if action.call is None:
                has_answer = action.answer is not None
                metrics = {} if has_answer else {"num_no_action": 1.0}
                return StepResult(is_done=True, answer=action.answer, metrics=metrics)
            code = _code_of(action.call)
        except ToolCallError as error:
            return StepResult(observation=f"Error: {error}", metrics={"num_malformed_calls": 1.0})
        if not self._is_tool_enabled:
            return StepResult(
                observation=self._format.unavailable, metrics={"num_refused_calls": 1.0}
            )
        if self._num_executions >= self._max_executions:
            return StepResult(
                observation=self._format.no_more_calls, metrics={"num_refused_calls": 1.0}
            )
        self._num_executions += 1
        result = await self._run(code)
        metrics = {"num_executions": 1.0, f"num_exec_{result.status}": 1.0}
        return StepResult(
            observation=describe(result, self._format, self._max_chars), metrics=metrics
        )

    async def close(self) -> None:
        """Executions are stateless: there is nothing to give back."""

    async def _run(self, code: str) -> ExecResult:
        try:
            return await self._sandbox.run(code, files=self._files, timeout_s=self._timeout_s)
        except self._failures as error:
            raise InfrastructureError(f"the sandbox failed: {error}") from error


def describe(result: ExecResult, form: ToolFormat, max_chars: int) -> str:
    """What the model reads: the output, then for a failure the reason in one line."""
    stdout = shorten_text(result.stdout.decode("utf-8", errors="replace").rstrip(), max_chars)
    parts = [stdout] if stdout else []
    reason = _reason(result, form)
    if reason:
        parts.append(shorten_text(reason, max_chars))
    elif result.truncated:
        parts.append(form.too_much_output)
    return "\n".join(parts) or form.no_output


def last_error_lines(stderr: str) -> str:
    """The line that names the error, with the source line of the program it happened in."""
    lines = [line for line in stderr.rstrip().splitlines() if line.strip()]
    if not lines:
        return ""
    places = [i for i, line in enumerate(lines) if line.lstrip().startswith("File ")]
    where = ""
    if places and (number := lines[places[-1]].partition(", line ")[2]):
        where = f"line {number.split(',')[0].strip()}: "
    return where + lines[-1].strip()


def shorten_text(text: str, max_chars: int) -> str:
    """Both ends of a text that is too long, with the number of characters left out."""
    if len(text) <= max_chars:
        return text
    head, tail = (max_chars + 1) // 2, max_chars // 2
    omitted = len(text) - head - tail
    return f"{text[:head]}\n... {omitted} characters ...\n{text[len(text) - tail :]}"


def _reason(result: ExecResult, form: ToolFormat) -> str:
    if result.status == "ok":
        return ""
    if result.status == "error":
        stderr = result.stderr.decode("utf-8", errors="replace")
        return last_error_lines(stderr) or f"exit code {result.exit_code}"
    reasons = {
        "timeout": form.timed_out,
        "oom": form.out_of_memory,
        "output_limit": form.too_much_output,
        "signal": form.killed,
    }
    if result.status not in reasons:
        raise InfrastructureError(f"the sandbox returned the unknown status {result.status!r}")
    return reasons[result.status]


def _code_of(call: ToolCall) -> str:
    code = call.arguments.get("code")
    if call.name != "python" or not isinstance(code, str):
        raise ToolCallError('the only tool is "python" with the argument "code"')
    return code
