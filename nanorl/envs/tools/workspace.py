"""The tools of a workspace: commands, an interpreter, files, and the end of the work.

    tools = [bash, read, write, edit, submit]        # or python_session

They share the episode's session (nanorl/sandbox/session.py): a folder that holds the task's files,
without a network. The calls of one turn run one after the other, in their order. What a call did
wrong is a `ToolError` that says how to do it right; a program that fails is an observation.
Left out: cutting long outputs (agents/tokens.py), snapshots (an environment's own affair).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from nanorl.envs.tools.base import Submitted, ToolContext, ToolError, tool_schema
from nanorl.envs.tools.result_text import KILLED, NO_OUTPUT, describe
from nanorl.sandbox.base import ExecResult, ExecStatus, SandboxFailure, SandboxUnavailable
from nanorl.sandbox.session import Session, WorkspaceError
from nanorl.types import InfrastructureError

Properties = Mapping[str, Mapping[str, str]]
_TEXT = "string"


class WorkspaceTool:
    """A tool over the session: `name`, `description`, `properties` and `act` make one."""

    name: ClassVar[str]
    description: ClassVar[str]
    properties: ClassVar[Properties]
    optional: ClassVar[frozenset[str]] = frozenset()
    needs_sandbox: ClassVar[bool] = True
    needs_processes: ClassVar[str] = ""
    """Why it cannot do without processes, which WebAssembly lacks; empty: it can."""

    @property
    def schema(self) -> dict[str, Any]:
        properties = {name: dict(one) for name, one in self.properties.items()}
        return tool_schema(self.name, self.description, properties, self.optional)

    async def run(self, context: ToolContext, arguments: Mapping[str, Any]) -> str:
        """Does what `act` does, once the calls before it are done."""
        self._check(arguments)
        try:
            session: Session = await context.session()
            async with session.turn:
                return await self.act(session, context, arguments)
        except WorkspaceError as error:
            raise ToolError(str(error)) from error
        except (SandboxFailure, SandboxUnavailable) as error:
            raise InfrastructureError(f"the sandbox failed: {error}") from error

    async def act(
        self, session: Session, context: ToolContext, arguments: Mapping[str, Any]
    ) -> str:
        raise NotImplementedError

    def _check(self, arguments: Mapping[str, Any]) -> None:
        for name in arguments.keys() - self.properties.keys():
            known = ", ".join(self.properties)
            raise ToolError(f"{self.name} takes no argument {name!r}, only: {known}")
        for name, schema in self.properties.items():
            if name not in arguments:
                if name not in self.optional:
                    raise ToolError(f"{self.name} needs the argument {name!r}")
                continue
            is_text = schema["type"] == _TEXT
            if type(arguments[name]) is not (str if is_text else int):
                kind = "a text" if is_text else "a whole number"
                raise ToolError(f"{self.name}: {name} must be {kind}")


def _properties(**properties: str) -> Properties:
    """Texts by their descriptions."""
    return MappingProxyType(
        {name: {"type": _TEXT, "description": text} for name, text in properties.items()}
    )


class BashTool(WorkspaceTool):
    name = "bash"
    needs_processes = "shell"
    description = (
        "Run a command line with bash in the working folder and read what it prints. Files stay "
        "from call to call; processes do not, and nothing has a network."
    )
    properties = _properties(command="The command line; it may have several lines.")

    async def act(
        self, session: Session, context: ToolContext, arguments: Mapping[str, Any]
    ) -> str:
        if not arguments["command"].strip():
            raise ToolError("bash: the command is empty")
        result = await session.shell(arguments["command"], context.timeout_s)
        return _counted(context, result, _both_streams(result))


class PythonSessionTool(WorkspaceTool):
    name = "python_session"
    needs_processes = "kept interpreter"
    description = (
        "Run Python code in an interpreter that keeps its variables from call to call. Prints, "
        "and the value of a last expression, are what you see."
    )
    properties = _properties(code="The code to run next.")

    async def act(
        self, session: Session, context: ToolContext, arguments: Mapping[str, Any]
    ) -> str:
        if not arguments["code"].strip():
            raise ToolError("python_session: the code is empty")
        result = await session.repl(arguments["code"], context.timeout_s)
        return _counted(context, result, describe(result))


class ReadTool(WorkspaceTool):
    name = "read"
    description = "Read a text file of the working folder."
    optional = frozenset({"first_line", "num_lines"})
    properties = MappingProxyType(
        {
            **_properties(path="The file, relative to the working folder."),
            "first_line": {"type": "integer", "description": "Where to begin; 1 by default."},
            "num_lines": {"type": "integer", "description": "How many lines; all by default."},
        }
    )

    async def act(
        self, session: Session, context: ToolContext, arguments: Mapping[str, Any]
    ) -> str:
        path = arguments["path"]
        text = await _text_of(session, path)
        if not arguments.keys() & self.optional:
            return text or "(the file is empty)"
        lines = text.splitlines(keepends=True)
        first, count = arguments.get("first_line", 1), arguments.get("num_lines", len(lines))
        if not 1 <= first <= max(len(lines), 1) or count < 1:
            raise ToolError(f"{path} has {len(lines)} lines, counted from 1")
        return "".join(lines[first - 1 : first - 1 + count])


class WriteTool(WorkspaceTool):
    name = "write"
    description = "Write a whole text file of the working folder, new or in place of an old one."
    properties = _properties(
        path="The file, relative to the working folder.", text="All that it shall hold."
    )

    async def act(
        self, session: Session, context: ToolContext, arguments: Mapping[str, Any]
    ) -> str:
        data = _encoded(arguments["text"])
        await session.write(arguments["path"], data)
        return f"wrote {len(data)} bytes to {arguments['path']}"


class EditTool(WorkspaceTool):
    name = "edit"
    description = "Replace a piece of text in a file. The old text must occur exactly once."
    properties = _properties(
        path="The file, relative to the working folder.",
        old="The text to replace, with its exact blanks and line breaks.",
        new="The text to put in its place.",
    )

    async def act(
        self, session: Session, context: ToolContext, arguments: Mapping[str, Any]
    ) -> str:
        path, old, new = (arguments[name] for name in ("path", "old", "new"))
        if not old:
            raise ToolError("edit: old is empty; use write to make a file")
        if old == new:
            raise ToolError("edit: old and new are the same")
        text = await _text_of(session, path)
        num_found = text.count(old)
        if num_found != 1:
            raise ToolError(_why_not(text, old, num_found, path))
        await session.write(path, _encoded(text.replace(old, new)))
        line = text[: text.index(old)].count("\n") + 1
        return f"edited {path} at line {line}"


class SubmitTool:
    """Ends the episode; needs no session."""

    name: ClassVar[str] = "submit"

    @property
    def schema(self) -> dict[str, Any]:
        answer = {"type": "string", "description": "The answer, or a line that says what you did."}
        about = "Hand in the work as it is now. This ends the task."
        return tool_schema(self.name, about, {"answer": answer}, {"answer"})

    async def run(self, context: ToolContext, arguments: Mapping[str, Any]) -> str:
        answer = arguments.get("answer", "")
        if arguments.keys() - {"answer"} or not isinstance(answer, str):
            raise ToolError('submit takes one argument, a text: "answer"')
        raise Submitted(answer)


bash = BashTool()
python_session = PythonSessionTool()
read = ReadTool()
write = WriteTool()
edit = EditTool()
submit = SubmitTool()
"""The tools themselves: `tools = [bash, read, write, edit, submit]`."""


async def _text_of(session: Session, path: str) -> str:
    try:
        return (await session.read(path)).decode()
    except UnicodeDecodeError:
        raise ToolError(f"{path} is no text file (not UTF-8); look at it with a program") from None


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "replace")  # half a surrogate pair is in no file


def _why_not(text: str, old: str, num_found: int, path: str) -> str:
    """Why an edit cannot be made, and what would help."""
    if num_found > 1:
        places = [n for n, line in enumerate(text.splitlines(), 1) if old.splitlines()[0] in line]
        lines = ", ".join(map(str, places[:5]))
        return (
            f"the old text occurs {num_found} times in {path} (lines {lines}): "
            "give more of the lines around it"
        )
    if "".join(old.split()) in "".join(text.split()):
        return f"the old text is in {path} with other blanks or line breaks: copy it from there"
    return f"the old text is not in {path}: read the file again"


def _both_streams(result: ExecResult) -> str:
    """The text that a shell would show: both streams, then how the program ended if not well."""
    streams = [result.stdout, result.stderr]
    parts = [text for one in streams if (text := one.decode("utf-8", "replace").rstrip())]
    if result.status is ExecStatus.ERROR:
        parts.append(f"exit code {result.exit_code}")
    elif result.status is not ExecStatus.OK:
        parts.append(KILLED[result.status])
    return "\n".join(parts) or NO_OUTPUT


def _counted(context: ToolContext, result: ExecResult, text: str) -> str:
    """What the model reads of a program that ran; the episode counts how it ended."""
    context.metrics[f"num_exec_{result.status}"] += 1
    return _with_notice(text, result)


def _with_notice(text: str, result: ExecResult) -> str:
    return f"{text}\n({result.notice})" if result.notice else text
