"""The tools of a workspace: what they answer, in which order, and what they say of a wrong call."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from nanoinfer.chat.base import ToolCall
from nanorl.envs.tools.base import Submitted, ToolContext
from nanorl.envs.tools.tool_calls import answer_calls
from nanorl.envs.tools.workspace import bash, edit, python_session, read, submit, write
from nanorl.sandbox import SandboxPool, SandboxSpec
from nanorl.task import Task
from nanorl.types import InfrastructureError

pytestmark = pytest.mark.sandbox
TOOLS = {tool.name: tool for tool in (bash, python_session, read, write, edit, submit)}
FILES = {"a.py": "x = 1\ny = 1\n\ndef f():\n    return x\n", "empty": ""}


@pytest.fixture(scope="module")
def pool() -> Iterator[SandboxPool]:
    with SandboxPool(SandboxSpec(timeout_s=60.0, warm_sessions=0)) as pool:
        yield pool


def turns(pool: SandboxPool, *calls: list[tuple[str, dict[str, Any]]]) -> list[list[str]]:
    """The answers to the calls of each turn of one episode."""

    async def main() -> list[list[str]]:
        context = ToolContext(
            task=Task("p"),
            sandbox=pool,
            timeout_s=60,
            open_session=lambda: pool.open_session(FILES),
        )
        try:
            said = []
            for turn in calls:
                read_calls = [ToolCall(name, arguments) for name, arguments in turn]
                said.append((await answer_calls(read_calls, TOOLS, context)).texts)
            return said
        finally:
            await context.close()

    return asyncio.run(main())


def test_tools_share_one_workspace(pool: SandboxPool) -> None:
    said = turns(
        pool,
        [("bash", {"command": "ls; cat nothing"}), ("python_session", {"code": "z = 5"})],
        [
            ("write", {"path": "d/b.txt", "text": "één\ntwo\nthree\n"}),
            ("bash", {"command": "cat d/*"}),
        ],
        [
            ("read", {"path": "d/b.txt", "first_line": 2, "num_lines": 1}),
            ("read", {"path": "empty"}),
        ],
        [("edit", {"path": "a.py", "old": "x = 1", "new": "x = 7"})],
        [("python_session", {"code": "import a\na.f() + z"}), ("bash", {"command": "true"})],
        [("bash", {"command": "exit 3"}), ("bash", {"command": "kill -9 $$"})],
        [("python_session", {"code": "exit()"}), ("python_session", {"code": "z"})],
    )
    assert said[0] == [
        "a.py\nempty\ncat: nothing: No such file or directory\nexit code 1",
        "(no output)",
    ]
    assert said[1] == ["wrote 16 bytes to d/b.txt", "één\ntwo\nthree"]
    assert said[2] == ["two\n", "(the file is empty)"]
    assert said[3] == ["edited a.py at line 1"]
    assert said[4] == ["12", "(no output)"]
    assert said[5] == ["exit code 3", "killed"]
    assert "names are gone" in said[6][0] and "name 'z' is not defined" in said[6][1]


def test_calls_of_one_turn_take_their_turns(pool: SandboxPool) -> None:
    edits = [
        ("edit", {"path": "a.py", "old": f"x = {n}\n", "new": f"x = {n + 1}\n"})
        for n in range(1, 8)
    ]
    said = turns(pool, [*edits, ("read", {"path": "a.py"})])[0]
    assert said == ["edited a.py at line 1"] * 7 + [FILES["a.py"].replace("x = 1", "x = 8")]


WRONG = (
    ("edit", {"path": "a.py", "old": "= 1", "new": "2"}, r"occurs 2 times in a.py \(lines 1, 2\)"),
    ("edit", {"path": "a.py", "old": "return  x", "new": "2"}, "with other blanks"),
    ("edit", {"path": "a.py", "old": "return z", "new": "2"}, "is not in a.py"),
    ("edit", {"path": "a.py", "old": "", "new": "2"}, "old is empty"),
    ("edit", {"path": "a.py", "old": "x", "new": "x"}, "are the same"),
    ("edit", {"path": "no.py", "old": "x", "new": "y"}, "no.py: No such file"),
    ("edit", {"path": "a.py", "old": "x"}, "needs the argument 'new'"),
    ("read", {"path": "../../etc/passwd"}, "outside of the working folder"),
    ("read", {"path": "/usr/bin/env"}, "outside of the working folder"),
    ("read", {"path": "a.py", "first_line": 9}, "a.py has 5 lines"),
    ("read", {"path": "a.py", "first_line": "1"}, "must be a whole number"),
    ("read", {"path": 3}, "must be a text"),
    ("write", {"path": "a.py/b", "text": ""}, "a.py/b: "),
    ("write", {"path": "b", "content": ""}, "no argument 'content', only: path, text"),
    ("bash", {"command": " "}, "the command is empty"),
    ("bash", {"cmd": "ls"}, "no argument 'cmd'"),
    ("python_session", {"code": ""}, "the code is empty"),
    ("submit", {"answer": 3}, "takes one argument"),
)


def test_a_wrong_call_is_told_what_is_wrong(pool: SandboxPool) -> None:
    answers = turns(pool, *[[(name, arguments)] for name, arguments, _ in WRONG])
    for (name, arguments, reason), (said,) in zip(WRONG, answers, strict=True):
        assert said.startswith("Error: ") and re.search(reason, said), (name, arguments, said)


def test_submit_ends_the_episode_and_opens_no_session() -> None:
    with pytest.raises(Submitted) as end:
        asyncio.run(submit.run(ToolContext(task=Task("p")), {"answer": "42"}))
    assert end.value.answer == "42"


def test_a_closed_sandbox_is_the_infrastructures_failure() -> None:
    pool = SandboxPool(SandboxSpec(warm_sessions=0))
    pool.close()
    context = ToolContext(task=Task("p"), open_session=pool.open_session)
    with pytest.raises(InfrastructureError, match="sandbox failed"):
        asyncio.run(bash.run(context, {"command": "ls"}))


@pytest.mark.parametrize("tool", TOOLS.values(), ids=lambda tool: tool.name)
def test_schemas_are_functions_of_texts(tool: Any) -> None:
    function = tool.schema["function"]
    assert tool.schema["type"] == "function" and function["name"] == tool.name
    assert function["parameters"]["additionalProperties"] is False
    assert set(function["parameters"]["required"]) <= set(function["parameters"]["properties"])
