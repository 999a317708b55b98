"""`python`: the tool that runs a program in the sandbox and answers with what it printed.

A program sees the files of its task and nothing else; every call is a fresh process.
Left out: an interpreter that keeps its names from call to call (workspace.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from nanorl.tools.base import ToolContext, ToolError
from nanorl.tools.result_text import describe
from nanorl.types import InfrastructureError

SCHEMA: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "python",
        "description": "Run a Python program and read what it prints.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string", "description": "the program"}},
            "required": ["code"],
        },
    },
}


@dataclass(frozen=True)
class PythonTool:
    """Runs `code`. A program that fails, or is killed, is answered with that fact."""

    name: ClassVar[str] = "python"
    needs_sandbox: ClassVar[bool] = True

    @property
    def schema(self) -> dict[str, Any]:
        return dict(SCHEMA)

    async def run(self, context: ToolContext, arguments: Mapping[str, Any]) -> str:
        code = arguments.get("code")
        if not isinstance(code, str) or not code.strip():
            raise ToolError("python: give the program as a text, in `code`")
        if context.sandbox is None:
            raise InfrastructureError("the tool python was called, and there is no sandbox")
        result = await context.sandbox.run(
            code, files=context.task.files, timeout_s=context.timeout_s
        )
        context.metrics[f"num_exec_{result.status}"] += 1
        return describe(result)


python = PythonTool()
