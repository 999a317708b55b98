"""Tools: functions as tools, the program tool, and the calls of one turn."""

import asyncio
import threading
from dataclasses import dataclass
from enum import Enum
from typing import Any, Literal

import pytest
from agent_doubles import FakeSandbox, exec_result
from typing_extensions import TypedDict

import nanorl
from nanoinfer.chat.base import ToolCall, ToolCallError
from nanoinfer.chat.hermes import HermesParser
from nanorl.envs.tools.base import Submitted, ToolContext, ToolError
from nanorl.envs.tools.function import FunctionTool, function_tool, method_tools
from nanorl.envs.tools.python import python
from nanorl.envs.tools.tool_calls import TurnResults, answer_calls
from nanorl.sandbox.base import SandboxFailure
from nanorl.task import Task
from nanorl.types import InfrastructureError

TASK = Task(task_id="t", kind="k", prompt="p", answer="a", files={"data.txt": "1"})


def context_of(**fields: Any) -> ToolContext:
    return ToolContext(task=TASK, **fields)


def run(tool: Any, /, **arguments: Any) -> str:
    return asyncio.run(tool.run(context_of(), arguments))


class Color(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass
class Point:
    x: int
    y: int = 0


class Options(TypedDict):
    depth: int


def google(
    word: str, count: int = 3, mode: Literal["fast", "slow"] = "fast", color: Color | None = None
) -> str:
    """Find a word.

    It is searched in the whole book.

    Args:
        word: as it is written
        count (int): how many
            results to show
        mode: speed
    """
    return f"{word} {count!r} {mode} {color}"


def numpy_style(word, point: Point, options: Options, names: list[str], table: dict[str, float]):
    """Find a word.

    Parameters
    ----------
    word : str
        as it is written
    point : Point
        where to begin
    """
    return {"word": word, "point": point, "names": names, "table": table, "options": options}


def rest(word: str, is_exact: bool) -> str:
    """Find a word.

    :param word: as it is written
    :param is_exact: no stems
    """
    return f"{word} {is_exact!r}"


def parameters_of(tool: FunctionTool) -> dict[str, Any]:
    return tool.schema["function"]["parameters"]


def test_the_schema_says_what_annotations_and_docstring_say() -> None:
    assert function_tool(google).schema == {
        "type": "function",
        "function": {
            "name": "google",
            "description": "Find a word.\n\nIt is searched in the whole book.",
            "parameters": {
                "type": "object",
                "additionalProperties": False,
                "required": ["word"],
                "$defs": {"Color": {"enum": ["red", "blue"], "type": "string"}},
                "properties": {
                    "word": {"type": "string", "description": "as it is written"},
                    "count": {
                        "type": "integer",
                        "description": "how many\nresults to show",
                        "default": 3,
                    },
                    "mode": {
                        "type": "string",
                        "enum": ["fast", "slow"],
                        "description": "speed",
                        "default": "fast",
                    },
                    "color": {
                        "anyOf": [{"$ref": "#/$defs/Color"}, {"type": "null"}],
                        "default": None,
                    },
                },
            },
        },
    }


@pytest.mark.parametrize("fn", [numpy_style, rest])
def test_descriptions_are_read_from_numpy_and_rest_docstrings(fn: Any) -> None:
    tool = function_tool(fn)
    assert tool.schema["function"]["description"] == "Find a word."
    properties = parameters_of(tool)["properties"]
    assert properties["word"]["description"] == "as it is written"
    second = list(properties)[1]
    assert properties[second]["description"] in ("where to begin", "no stems")


def test_a_parameter_called_title_keeps_its_place_in_the_schema() -> None:
    def book(title: str, properties: list[str]) -> str:
        return title

    assert set(parameters_of(function_tool(book))["properties"]) == {"title", "properties"}
    assert run(function_tool(book), title="T", properties=["title"]) == "T"


def test_arguments_are_converted_before_the_call() -> None:
    tool = function_tool(google)
    assert run(tool, word="a", count="7", color="blue") == "a 7 fast Color.BLUE"
    assert run(tool, word=42) == "42 3 fast None"
    said = run(
        function_tool(numpy_style),
        word="é", point={"x": 1}, options={"depth": 2}, names=["n"], table={"a": 1},
    )  # fmt: skip
    assert said == (
        '{"word": "é", "point": {"x": 1, "y": 0}, "names": ["n"], "table": {"a": 1.0}, '
        '"options": {"depth": 2}}'
    )
    assert run(function_tool(rest), word="a", is_exact="true") == "a True"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "wrong arguments for google: 'word' is missing"),
        ({"word": "a", "wrod": 1}, "there is no 'wrod', only word, count, mode, color"),
        ({"word": "a", "count": "many"}, "'count': Input should be a valid integer.*not \"many\""),
        ({"word": "a", "mode": "x"}, "'mode': Input should be 'fast' or 'slow', not \"x\""),
        ({"word": ["x" * 500]}, r"x\.\.\.$"),
    ],
)
def test_a_wrong_argument_is_explained_to_the_model(arguments: dict, text: str) -> None:
    with pytest.raises(ToolError, match=text) as caught:
        run(function_tool(google), **arguments)
    assert "pydantic" not in str(caught.value) and len(str(caught.value)) < 400


def test_an_exception_of_the_function_is_named_without_a_trace() -> None:
    def stop(how: str) -> str:
        raise {"value": ValueError("bad"), "iter": StopIteration(), "exit": SystemExit(3)}[how]

    tool = function_tool(stop)
    for how, text in (("value", "ValueError: bad"), ("iter", "RuntimeError"), ("exit", "SystemE")):
        with pytest.raises(ToolError) as caught:
            run(tool, how=how)
        assert str(caught.value).startswith(text) and ".py" not in str(caught.value)


def test_what_ends_an_episode_passes_through_a_function() -> None:
    def end(how: str) -> str:
        raise {"submit": Submitted("42"), "infra": InfrastructureError("no disk")}[how]

    with pytest.raises(Submitted) as caught:
        run(function_tool(end), how="submit")
    assert caught.value.answer == "42"
    with pytest.raises(InfrastructureError):
        run(function_tool(end), how="infra")


def test_a_function_that_asks_for_the_context_is_given_it() -> None:
    async def files(context: ToolContext, name: str) -> str:
        return context.task.files[name]

    tool = function_tool(files)
    assert list(parameters_of(tool)["properties"]) == ["name"]
    assert run(tool, name="data.txt") == "1"


def test_plain_functions_run_side_by_side_off_the_loop_and_methods_take_turns() -> None:
    both = threading.Barrier(2)

    def meet() -> str:
        both.wait(timeout=30)  # only the two together get past this
        return threading.current_thread().name

    tools = {"meet": function_tool(meet)}
    results = asyncio.run(answer_calls([ToolCall("meet")] * 2, tools, context_of()))
    assert results.texts == ["tool", "tool"]

    class Counter:
        num_inside = 0
        most = 0

        def count(self) -> int:
            self.num_inside += 1
            self.most = max(self.most, self.num_inside)
            threading.Event().wait(0.01)
            self.num_inside -= 1
            return self.most

    methods = {tool.name: tool for tool in method_tools(Counter())}
    results = asyncio.run(answer_calls([ToolCall("count")] * 3, methods, context_of()))
    assert results.texts == ["1", "1", "1"]


def test_a_function_that_hangs_is_answered_at_the_time_limit() -> None:
    release = threading.Event()
    tool = function_tool(lambda: release.wait(60), name="hang")
    with pytest.raises(ToolError, match=r"hang timed out after 0\.05 s"):
        asyncio.run(tool.run(context_of(timeout_s=0.05), {}))
    release.set()

    async def own() -> None:
        raise TimeoutError("the server did not answer")

    with pytest.raises(ToolError, match="TimeoutError: the server did not answer"):
        run(function_tool(own))


def test_public_methods_are_tools_and_the_rest_is_not() -> None:
    class Game:
        limit = 3

        def reset(self, **kwargs: Any) -> None: ...
        def step(self, text: str) -> None: ...
        def close(self) -> None: ...
        def _help(self) -> None: ...

        @property
        def reward(self) -> float:
            raise RuntimeError("a property is not read")

        @staticmethod
        def rules() -> str:
            return "none"

        def guess(self, word: str) -> str:
            """Guess the word.

            Args:
                word: five letters
            """
            return f"{word}{self.limit}"

    tools = {tool.name: tool for tool in method_tools(Game())}
    assert list(tools) == ["guess", "rules"]
    assert run(tools["guess"], word="crane") == "crane3" and run(tools["rules"]) == "none"
    assert parameters_of(tools["guess"])["properties"]["word"]["description"] == "five letters"


def test_functions_that_cannot_be_tools_are_named_before_any_work() -> None:
    def star(*words: str) -> None: ...
    def unknown(x: "Nowhere") -> None: ...  # noqa: F821
    def lock(x: threading.Thread) -> None: ...

    with pytest.raises(ValueError, match=r"parameter \*words: str cannot be given by name"):
        function_tool(star)
    with pytest.raises(ValueError, match=r"Nowhere.*import it at the top"):
        function_tool(unknown)
    with pytest.raises(ValueError, match="cannot be read from JSON"):
        function_tool(lock)
    with pytest.raises(ValueError, match="tool name '<lambda>'"):
        function_tool(lambda: 1)


def answer(calls: list[Any], **fields: Any) -> TurnResults:
    def add(a: int, b: int) -> int:
        return a + b

    def submit(answer: str) -> None:
        raise Submitted(answer)

    def half() -> str:
        return "\ud800"

    tools = {tool.name: tool for tool in map(function_tool, (add, submit, half))}
    return asyncio.run(answer_calls(calls, {**tools, "python": python}, context_of(**fields)))


def test_calls_of_a_turn_are_answered_in_order_and_errors_in_their_place() -> None:
    results = answer(
        [
            ToolCall("add", {"a": 1, "b": 2}),
            ToolCallError("the call is not JSON"),
            ToolCall("nothing"),
            ToolCall("add", {"a": 1}),
            ToolCall("half"),
        ]
    )
    assert results == TurnResults(
        texts=[
            "3",
            "Error: the call is not JSON",
            "Error: there is no tool 'nothing'; the tools are: add, submit, half, python",
            "Error: wrong arguments for add: 'b' is missing",
            "?",
        ],
        num_malformed=1,
        num_errors=2,
    )
    assert answer([]) == TurnResults(texts=[])


def test_the_first_submission_of_a_turn_counts() -> None:
    calls = [ToolCall("add", {"a": 1, "b": 1})]
    calls += [ToolCall("submit", {"answer": text}) for text in ("x", "y")]
    submitted = answer(calls).submitted
    assert submitted is not None and submitted.answer == "x"
    assert answer(calls[:1]).submitted is None


def test_the_program_tool_runs_in_the_sandbox_with_the_files_of_the_task() -> None:
    sandbox = FakeSandbox([exec_result(stdout=b"7\n"), exec_result("timeout")])
    calls = [ToolCall("python", {"code": f"print({i})"}) for i in range(2)]
    results = answer(calls, sandbox=sandbox, timeout_s=2.0)
    assert results.texts == ["7", "timed out"]
    assert sandbox.programs[0] == ("print(0)", {"data.txt": "1"}, 2.0)
    wrong = [ToolCall("python", bad) for bad in ({}, {"code": 3}, {"code": "", "x": 1})]
    assert all("takes one argument" in text for text in answer(wrong, sandbox=sandbox).texts)


def test_a_sandbox_that_fails_is_infrastructure_and_ends_the_other_calls() -> None:
    ended = asyncio.Event()

    async def wait() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    sandbox = FakeSandbox([SandboxFailure("gone")])
    tools = {"wait": function_tool(wait), "python": python}
    calls = [ToolCall("wait"), ToolCall("python", {"code": "1"})]
    with pytest.raises(InfrastructureError, match="the sandbox failed: gone"):
        asyncio.run(answer_calls(calls, tools, context_of(sandbox=sandbox)))
    assert ended.is_set()
    with pytest.raises(InfrastructureError, match="needs a sandbox"):
        answer(calls[1:])


def test_a_session_is_opened_once_by_the_first_who_asks_and_closed_with_the_episode() -> None:
    class Session:
        num_closed = 0

        async def close(self) -> None:
            self.num_closed += 1

    opened: list[Session] = []

    async def open_session() -> Session:
        await asyncio.sleep(0)
        opened.append(Session())
        return opened[-1]

    async def episode() -> None:
        context = context_of(open_session=open_session)
        first, second = await asyncio.gather(context.session(), context.session())
        assert first is second
        await context.close()
        await context.close()
        await context_of().close()
        with pytest.raises(InfrastructureError, match="opens none"):
            await context_of().session()

    asyncio.run(episode())
    assert len(opened) == 1 and opened[0].num_closed == 1
    with pytest.raises(ValueError, match="timeout_s=0"):
        context_of(timeout_s=0)


class Told(nanorl.Env):
    """A tool that says what it was given."""

    def tasks(self, rng: Any) -> nanorl.Task:
        return nanorl.Task("Say it.")

    def told(self, text: str) -> str:
        """Say a text."""
        return f"told {text}"

    tools = (told,)

    def step(self, text: str) -> Any:
        return self.done(reward=0.0, answer=text)


def test_a_mark_of_reasoning_inside_an_argument_is_text() -> None:
    text = "grep '</think>' '<think>' x"
    written = HermesParser().write(ToolCall("told", {"text": text}))
    played = nanorl.rehearse(Told, turns=[f"<think>\nHm.\n</think>\n\n{written}", "a</think> b"])
    (observed,) = played.observations
    assert f"told {text}" in observed
    assert played.is_done
