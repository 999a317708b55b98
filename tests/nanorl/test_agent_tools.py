"""What an action means, what an observation says, and which answers count."""

import asyncio
from dataclasses import dataclass

import pytest
from agent_doubles import FakeResult, FakeSandbox

from nanorl.envs.actions import ToolCallError, ToolFormat, hermes_format, parse_action, parse_answer
from nanorl.envs.base import InfrastructureError, StepResult, format_observation
from nanorl.envs.code import CodeEnv, describe, last_error_lines, shorten_text
from nanorl.rewards.rule import RuleReward, parse_number
from nanorl.types import Task

FENCED = ToolFormat()
TASK = Task(task_id="t", kind="k", prompt="p", answer="SECRET", files={"data.txt": "1 2"})
CODE = "```python\nprint(1)\n```"


def code_of(text: str, form: ToolFormat = FENCED) -> str:
    call = parse_action(text, form).call
    assert call is not None
    return call.arguments["code"]


def test_a_fenced_block_is_a_call_and_an_answer_beside_it_is_ignored() -> None:
    assert code_of("Let me see.\n" + CODE) == "print(1)"
    assert parse_action(CODE + "\nAnswer: 7", FENCED).answer is None
    assert code_of('```python\nif x:\n    print("Answer: 3")\n```').endswith('print("Answer: 3")')


def test_compact_markers_of_a_preset_parse_the_same_way() -> None:
    tiny = ToolFormat(open="<run>", close="</run>", answer="<ans>", observation_prefix="")
    assert code_of("<run>print(1)</run>", tiny) == "print(1)"
    assert parse_action("so <ans>42", tiny).answer == "42"
    assert format_observation("5", tiny) == [{"role": "user", "content": "5"}]


def test_the_last_answer_counts_and_ends_with_its_line() -> None:
    assert parse_answer("Answer: 1\nNo.\nAnswer:  2 \nbye", "Answer:") == "2"
    assert parse_answer("no mark", "Answer:") is None
    assert parse_answer("Answer:", "Answer:") == ""
    assert parse_action("just talk", FENCED) == parse_action("", FENCED)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("```python\nprint(1)", "not closed"),
        ("```python\n\n```", "empty"),
        (CODE + CODE, "more than one"),
    ],
)
def test_malformed_blocks_are_typed_errors(text: str, match: str) -> None:
    with pytest.raises(ToolCallError, match=match):
        parse_action(text, FENCED)


def test_hermes_calls_take_objects_and_encoded_objects() -> None:
    form = hermes_format()
    plain = '<tool_call>{"name": "python", "arguments": {"code": "print(\'</x>\')"}}</tool_call>'
    assert code_of(plain, form) == "print('</x>')"
    assert code_of('<tool_call>{"name": "python", "arguments": "{\\"code\\": \\"1\\"}"}</tool_call>', form) == "1"  # fmt: skip  # noqa: E501


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("{", "not valid JSON"),
        ("[1]", "name"),
        ('{"name": 3}', "name"),
        ('{"name": "python", "arguments": [1]}', "must be an object"),
        ('{"name": "python", "arguments": "{"}', "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
    ],
)
def test_malformed_hermes_calls_are_typed_errors(body: str, match: str) -> None:
    with pytest.raises(ToolCallError, match=match):
        parse_action(f"<tool_call>{body}</tool_call>", hermes_format())


def test_impossible_formats_are_refused() -> None:
    with pytest.raises(ValueError, match="parser='xml': choose one of fenced, hermes"):
        ToolFormat(parser="xml")
    with pytest.raises(ValueError, match="close=''"):
        ToolFormat(close="")


def steps(env: CodeEnv, *texts: str) -> list[StepResult]:
    async def episode() -> list[StepResult]:
        await env.reset(TASK)
        return [await env.step(text) for text in texts]

    return asyncio.run(episode())


def test_code_is_run_with_the_files_and_never_with_the_answer() -> None:
    sandbox = FakeSandbox([FakeResult(stdout=b"1\n")])
    (result,) = steps(CodeEnv(sandbox, timeout_s=2.0), CODE)
    assert result.observation == "1" and not result.is_done
    assert sandbox.programs == [("print(1)", {"data.txt": "1 2"}, 2.0)]
    assert "SECRET" not in repr(sandbox.programs)


def test_a_name_error_is_an_observation_with_its_last_line() -> None:
    stderr = (
        b'Traceback (most recent call last):\n  File "<program>", line 3, in <module>\n'
        b"    foo\nNameError: name 'foo' is not defined\n"
    )
    sandbox = FakeSandbox([FakeResult("error", b"before\n", stderr, 1)])
    (result,) = steps(CodeEnv(sandbox), CODE)
    assert result.observation == "before\nline 3: NameError: name 'foo' is not defined"
    assert result.metrics == {"num_executions": 1.0, "num_exec_error": 1.0}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (FakeResult("timeout", b"a"), "a\ntimed out"),
        (FakeResult("oom"), "out of memory"),
        (FakeResult("signal"), "killed"),
        (FakeResult("output_limit", b"aaa", truncated=True), "aaa\ntoo much output"),
        (FakeResult("ok"), "(no output)"),
        (FakeResult("error", exit_code=3), "exit code 3"),
        (FakeResult("ok", b"\xff\xfe"), "\ufffd\ufffd"),
    ],
)
def test_every_way_to_end_is_described(result: FakeResult, said: str) -> None:
    assert describe(result, FENCED, 100) == said


def test_long_outputs_keep_both_ends() -> None:
    assert shorten_text("a" * 50 + "b" * 50, 10) == "aaaaa\n... 90 characters ...\nbbbbb"
    assert shorten_text("ab", 1) == "a\n... 1 characters ...\n"
    assert last_error_lines("") == ""
    assert last_error_lines("SystemExit: 2\n") == "SystemExit: 2"


def test_the_tool_can_be_switched_off_and_used_up() -> None:
    off = FakeSandbox([])
    results = steps(CodeEnv(off, is_tool_enabled=False), CODE, "Answer: 3")
    assert results[0].observation == "tool unavailable" and results[1].answer == "3"
    assert off.programs == []
    sandbox = FakeSandbox([FakeResult(stdout=b"1")] * 2)
    results = steps(CodeEnv(sandbox, max_executions=1), CODE, CODE)
    assert results[1].observation == FENCED.no_more_calls
    assert len(sandbox.programs) == 1


def test_a_malformed_call_and_an_unknown_tool_are_observations() -> None:
    env = CodeEnv(FakeSandbox([]), tool_format=hermes_format())
    text = '<tool_call>{"name": "search", "arguments": {}}</tool_call>'
    results = steps(env, "<tool_call>{", text)
    assert all(r.observation.startswith("Error: ") and not r.is_done for r in results)


def test_neither_code_nor_answer_ends_the_episode_unanswered() -> None:
    (result,) = steps(CodeEnv(FakeSandbox([])), "I give up")
    assert result.is_done and result.answer is None and result.observation is None


class WorkerLost(Exception):  # noqa: N818
    pass


def test_a_sandbox_failure_is_infrastructure_and_anything_else_is_a_defect() -> None:
    env = CodeEnv(FakeSandbox([WorkerLost("gone")]), sandbox_failures=(WorkerLost,))
    with pytest.raises(InfrastructureError, match="gone"):
        steps(env, CODE)
    with pytest.raises(WorkerLost):
        steps(CodeEnv(FakeSandbox([WorkerLost("gone")])), CODE)
    with pytest.raises(InfrastructureError, match="unknown status 'odd'"):
        steps(CodeEnv(FakeSandbox([FakeResult("odd")])), CODE)


@dataclass(frozen=True)
class Case:
    answer: str | None
    expected: str
    score: float


@pytest.mark.parametrize(
    "case",
    [
        Case("42", "42", 1.0),
        Case(" 42 ", "42", 1.0),
        Case("042", "42", 1.0),
        Case("42.0", "42", 1.0),
        Case("42.0000001", "42", 0.0),  # integers are exact, whatever the tolerance
        Case("123456789012345678901", "123456789012345678900", 0.0),
        Case("4.2e1", "42", 1.0),
        Case("3.1416", "3.14159", 1.0),
        Case("3.2", "3.14159", 0.0),
        Case("-0.5", "-.5", 1.0),
        Case("a  b", "a b", 1.0),
        Case("A b", "a b", 0.0),
        Case("nan", "1", 0.0),
        Case("inf", "1.0", 0.0),
        Case("1e999999999", "1.0", 0.0),
        Case("1/2", "0.5", 0.0),
        Case("٤٢", "42", 0.0),
        Case("", "0", 0.0),
        Case(None, "42", 0.0),
    ],
    ids=str,
)
def test_answers_are_matched_exactly_or_within_the_tolerance(case: Case) -> None:
    assert RuleReward(rel_tolerance="1e-4")(case.answer, case.expected) == case.score


def test_case_can_be_ignored_and_tolerances_are_checked() -> None:
    assert RuleReward(ignore_case=True)("Straße", "STRASSE") == 1.0
    assert RuleReward()("0.3", "0.30000000000000004") == 0.0
    assert parse_number("9" * 1001) is None
    with pytest.raises(ValueError, match="rel_tolerance='2'"):
        RuleReward(rel_tolerance="2")
