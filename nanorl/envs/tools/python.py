"""`python`: runs a program in the sandbox and answers with what it printed.

Every call starts afresh in a working directory that holds the task's files; a program that fails,
runs too long or prints too much is answered with that fact, in the words of result_text.py.
Left out: a Python that keeps its variables from call to call.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from nanorl.envs.tools.base import Shown, ToolContext, ToolError, tool_schema
from nanorl.envs.tools.result_text import describe
from nanorl.sandbox.base import SandboxFailure
from nanorl.types import InfrastructureError


class PythonTool:
    """Stateless programs; needs a context with a sandbox."""

    name: ClassVar[str] = "python"
    needs_sandbox: ClassVar[bool] = True

    @property
    def schema(self) -> dict[str, Any]:
        code = {"type": "string", "description": "The whole program; only what it prints is seen."}
        about = "Run a Python program in a fresh process and read what it prints."
        return tool_schema(self.name, about, {"code": code})

    async def run(self, context: ToolContext, arguments: Mapping[str, Any]) -> str | Shown:
        """Run the program and return what it printed; `InfrastructureError` where the sandbox is to
        blame."""
        code = self.checked(arguments)
        if context.sandbox is None:
            raise InfrastructureError(
                "the tool python needs a sandbox: give the ToolContext one (nanorl.sandbox)"
            )
        try:
            result = await context.sandbox.run(
                code, files=context.task.files, timeout_s=context.timeout_s
            )
        except SandboxFailure as error:
            # Not an observation: a policy that reads of our broken machine would learn from it.
            raise InfrastructureError(f"the sandbox failed: {error}") from error
        # How programs end is the first curve to look at when a run does not learn.
        context.metrics[f"num_exec_{result.status}"] += 1
        return describe(result)

    def checked(self, arguments: Mapping[str, Any]) -> str:
        """The program; a model writes the arguments, so anything can stand in them."""
        code = arguments.get("code")
        if len(arguments) != 1 or not isinstance(code, str):
            raise ToolError('python takes one argument, the text of the program: "code"')
        if not code.strip():
            raise ToolError("the program is empty")
        return code


python = PythonTool()
"""The tool itself: `tools = [nanorl.python]`."""
