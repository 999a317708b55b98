"""Hidden unit tests against the function that the policy wrote: 1.0 if all pass, else 0.0.

    Task(prompt, data={"tests": "assert add(1, 2) == 3", "entry_point": "add"})

Tests and code never share a process. The grader runs the tests in one sandbox and asks what calls
of the function return; the code, in another that is fresh, makes these calls; the grader runs
again with the results. So code has no test to read, no checker to patch and no verdict to print:
it has arguments, and can only return values. Tests that make further calls depending on results
take another round.
Left out: functions that change their arguments, take functions or return objects with state: only
plain values are compared. Next: inside.py (both programs).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from nanorl.envs.rewards import inside
from nanorl.envs.rewards.base import Score, Transcript
from nanorl.sandbox.base import (
    ExecResult,
    ExecStatus,
    Sandbox,
    SandboxFailure,
    SandboxSpec,
    check_safety,
)
from nanorl.task import Task
from nanorl.types import InfrastructureError, Rollout

_PROGRAM = Path(inside.__file__)
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
_OUTPUT_BYTES = 1 << 20


class UnitTestReward:
    """Reads `task.data`: `tests` (statements, or a `check(candidate)` as HumanEval has it),
    `entry_point` (the function's name) and `helpers` (code that both sides may use; optional)."""

    def __init__(
        self,
        sandbox: Sandbox | str = "auto",
        *,
        timeout_s: float = 10.0,
        max_rounds: int = 50,
        allow_unsafe_sandbox: bool = False,
    ) -> None:
        """`sandbox`: one that is open, or the name of the kind that it shall start for itself.
        `timeout_s` is one program's; code whose results lead the tests to ever new calls fails
        after `max_rounds`."""
        self._name = sandbox if isinstance(sandbox, str) else ""
        if self._name:
            check_safety(self._name, allow_unsafe_sandbox)
        self._sandbox = None if isinstance(sandbox, str) else sandbox
        self._own: Any = None
        self._timeout_s = timeout_s
        self._max_rounds = max_rounds

    async def score(self, rollout: Rollout, task: Task, transcript: Transcript) -> Score:
        given = _test_data(task)
        source = code_in(transcript)
        if source is None:
            return Score(0.0)
        known: dict[str, Any] = {}
        for _ in range(self._max_rounds):
            verdict = await self._grade(given, known)
            if not known and not verdict["wanted"]:
                raise ValueError(
                    f"the tests of task {task.task_id} never call {given['entry_point']} "
                    f'({verdict["error"] or "they end without an error"}); data["tests"] must'
                )
            if verdict["is_passed"] or not verdict["wanted"]:
                return Score(float(verdict["is_passed"]))
            outcomes = await self._run_code(given, source, verdict["wanted"])
            if outcomes is None:
                return Score(0.0)
            known |= dict(zip(verdict["wanted"], outcomes, strict=True))
        return Score(0.0)  # what the function returns leads the tests in a circle

    def close(self) -> None:
        """End the sandbox that it started. Closing twice is fine."""
        own, self._own = self._own, None
        if own is not None:
            self._sandbox = None
            own.close()

    async def _grade(self, given: dict[str, str], known: dict[str, Any]) -> dict[str, Any]:
        """The grader runs our code, so a verdict that cannot be read is no fault of the policy;
        where results bring it down, the code has failed its tests."""
        result = await self._execute(given | {"known": known})
        if result.status is ExecStatus.OK:
            return json.loads(result.stdout)
        if known:
            return {"is_passed": False, "wanted": []}
        stderr = result.stderr.decode(errors="replace")
        raise InfrastructureError(f"the tests themselves end with {result.status}: {stderr[-300:]}")

    async def _run_code(
        self, given: dict[str, str], source: str, calls: list[str]
    ) -> list[Any] | None:
        """Run the calls, and return what they returned; None where the code does not answer them
        all."""
        visible = {"helpers": given["helpers"], "entry_point": given["entry_point"]}
        result = await self._execute(visible | {"source": source, "calls": calls})
        if result.status is not ExecStatus.OK:
            return None
        try:
            outcomes = json.loads(result.stdout)
        except (ValueError, RecursionError):
            return None
        is_whole = isinstance(outcomes, list) and len(outcomes) == len(calls)
        return outcomes if is_whole else None

    async def _execute(self, given: dict[str, Any]) -> ExecResult:
        if self._sandbox is None:
            self._sandbox = self._own = _start_sandbox(self._name, self._timeout_s)
        files = {inside.INPUT: json.dumps(given)}
        try:
            code = _PROGRAM.read_text()
            return await self._sandbox.run(code, files=files, timeout_s=self._timeout_s)
        except SandboxFailure as error:
            raise InfrastructureError(f"the sandbox failed: {error}") from error


def code_in(transcript: Transcript) -> str | None:
    """The last block of code in the answer, or else in what was said last; an answer without a
    block is code as a whole."""
    for text in (transcript.answer, transcript.text):
        blocks = _BLOCK.findall(text or "")
        if blocks:
            return blocks[-1]
    return transcript.answer


def _test_data(task: Task) -> dict[str, str]:
    data = {"helpers": "", **task.data}
    for name in ("tests", "entry_point", "helpers"):
        if not isinstance(data.get(name), str) or (name != "helpers" and not data[name].strip()):
            raise ValueError(
                f"task {task.task_id}: data[{name!r}] is {data.get(name)!r:.80}; unit tests need "
                'data={"tests": code, "entry_point": name of the function}'
            )
    return {name: data[name] for name in ("tests", "entry_point", "helpers")}


def _start_sandbox(name: str, timeout_s: float) -> Sandbox:
    from nanorl.sandbox.backends import open_sandbox  # one that is given needs no second one

    spec = SandboxSpec(timeout_s=timeout_s, max_output_bytes=_OUTPUT_BYTES)
    return open_sandbox(name, spec, allow_unsafe=True)
