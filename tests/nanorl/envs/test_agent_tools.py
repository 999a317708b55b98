"""What an action means, what an observation says, and which answers count."""

import asyncio
from dataclasses import dataclass, replace

import pytest
from agent_doubles import CodeEpisode, FakeSandbox, exec_result

from nanoinfer.chat.base import ToolCall, ToolCallError
from nanorl.envs.actions import COMPACT, MARKDOWN, ActionFormat, program
from nanorl.envs.base import TimeStep
from nanorl.envs.rewards.rule import RuleReward, parse_number
from nanorl.envs.tasks.teachers import NOTICES, is_failure
from nanorl.envs.tools.result_text import describe, last_error_line
from nanorl.sandbox.base import ExecResult, ExecStatus, SandboxFailure
from nanorl.task import Task
from nanorl.types import InfrastructureError

TASK = Task(task_id="t", kind="k", prompt="p", answer="SECRET", files={"data.txt": "1 2"})
CODE = "```python\nprint(1)\n```"


def call_of(code: str) -> list[ToolCall]:
    return [program(code)]


def test_a_fenced_block_is_a_call_and_an_answer_beside_it_is_ignored() -> None:
    assert MARKDOWN.read("Let me see.\n" + CODE) == call_of("print(1)")
    assert MARKDOWN.read(CODE + "\nAnswer: 7") == call_of("print(1)")
    call = MARKDOWN.read('```python\nif x:\n    print("Answer: 3")\n```')
    assert call == call_of('if x:\n    print("Answer: 3")')


def test_the_blanks_inside_of_the_markers_are_not_required() -> None:
    assert MARKDOWN.read("```python print(1)```") == call_of(" print(1)")
    assert MARKDOWN.answer_in("Answer:7") == "7"


def test_compact_markers_read_the_same_way_and_observations_have_a_role() -> None:
    assert COMPACT.read("<run>print(1)</run>") == call_of("print(1)")
    assert COMPACT.answer_in("so <ans>42") == "42"
    assert COMPACT.observation(["5"]) == [{"role": "tool", "content": "5"}]
    assert MARKDOWN.observation(["5"]) == [{"role": "user", "content": "Output:\n5"}]


@pytest.mark.parametrize("form", [MARKDOWN, COMPACT], ids=lambda form: form.name)
def test_what_is_written_is_read_back(form: ActionFormat) -> None:
    for call in (program("x = 1\n\nprint(x)"), program("  print(1)")):
        assert form.read(form.write(call)) == [call]
        assert form.read(f"I think:\n{form.write(call)}\n") == [call]
    assert form.answer_in(form.write_answer("-4.5")) == "-4.5"
    assert form.answer_in(f"I think:\n{form.write_answer('-4.5')}\n") == "-4.5"


def test_the_written_form_that_models_were_trained_on_does_not_change() -> None:
    assert MARKDOWN.write(program("print(1)")) == CODE
    assert MARKDOWN.write_answer("7") == "Answer: 7"
    assert COMPACT.write(program("print(1)")) == "<run>print(1)</run>"
    assert COMPACT.write_answer("7") == "<ans>7"


def test_the_last_answer_counts_and_ends_with_its_line() -> None:
    assert MARKDOWN.answer_in("Answer: 1\nNo.\nAnswer:  2 \nbye") == "2"
    assert MARKDOWN.answer_in("Answer: 1 Answer: 2") == "2"
    assert MARKDOWN.answer_in("Answer:") == ""
    assert MARKDOWN.answer_in("just talk") is MARKDOWN.answer_in("") is None
    assert MARKDOWN.read("just talk") == MARKDOWN.read("") == []


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("```python\nprint(1)", "not closed"),
        ("```python\n\n```", "empty"),
        (CODE + CODE, "more than one"),
    ],
)
def test_malformed_blocks_are_typed_errors(text: str, match: str) -> None:
    (error,) = MARKDOWN.read(text)
    assert isinstance(error, ToolCallError) and match in str(error)


def test_a_format_without_a_marker_is_refused() -> None:
    with pytest.raises(ValueError, match=r"answer='.n': a marker must not be blank"):
        replace(MARKDOWN, answer="\n")


def steps(env: CodeEpisode, *texts: str) -> list[TimeStep]:
    async def episode() -> list[TimeStep]:
        await env.reset(TASK)
        return [await env.step(text) for text in texts]

    return asyncio.run(episode())


def said(step: TimeStep) -> str:
    assert isinstance(step.observation, list)
    (message,) = step.observation
    return message["content"]


def test_code_is_run_with_the_files_and_never_with_the_answer() -> None:
    sandbox = FakeSandbox([exec_result(stdout=b"1\n")])
    (result,) = steps(CodeEpisode(sandbox, MARKDOWN, timeout_s=2.0), CODE)
    assert said(result) == "Output:\n1" and not result.is_done
    assert sandbox.programs == [("print(1)", {"data.txt": "1 2"}, 2.0)]
    assert "SECRET" not in repr(sandbox.programs)


def test_a_name_error_is_an_observation_with_its_last_line() -> None:
    stderr = (
        b'Traceback (most recent call last):\n  File "<program>", line 3, in <module>\n'
        b"    foo\nNameError: name 'foo' is not defined\n"
    )
    sandbox = FakeSandbox([exec_result("error", b"before\n", stderr, 1)])
    (result,) = steps(CodeEpisode(sandbox, MARKDOWN), CODE)
    assert said(result) == "Output:\nbefore\nline 3: NameError: name 'foo' is not defined"
    assert result.metrics == {"num_executions": 1.0, "num_exec_error": 1.0}


@pytest.mark.parametrize(
    ("result", "said"),
    [
        (exec_result("timeout", b"a"), "a\ntimed out"),
        (exec_result("oom"), "out of memory"),
        (exec_result("signal"), "killed"),
        (exec_result("output_limit", b"aaa"), "aaa\ntoo much output"),
        (exec_result("ok"), "(no output)"),
        (exec_result("error", exit_code=3), "exit code 3"),
        (exec_result("ok", b"\xff\xfe"), "\ufffd\ufffd"),
    ],
)
def test_every_way_to_end_is_described(result: ExecResult, said: str) -> None:
    assert describe(result) == said


def test_a_teacher_knows_every_notice_and_every_failed_status_for_a_failure() -> None:
    assert all(is_failure(notice) for notice in NOTICES)
    for status in ExecStatus:
        stderr = b"ValueError: x" if status is ExecStatus.ERROR else b""
        said = describe(exec_result(status, b"5", stderr))
        assert is_failure(said) == (status is not ExecStatus.OK), said


def test_the_last_line_of_an_error_is_found() -> None:
    assert last_error_line("") == ""
    assert last_error_line("SystemExit: 2\n") == "SystemExit: 2"


def test_the_tool_can_be_switched_off() -> None:
    off = FakeSandbox([])
    results = steps(CodeEpisode(off, MARKDOWN, is_tool_enabled=False), CODE, "Answer: 3")
    assert said(results[0]) == "Output:\ntool unavailable" and results[1].answer == "3"
    assert off.programs == []


def test_a_malformed_call_is_an_observation() -> None:
    (result,) = steps(CodeEpisode(FakeSandbox([]), MARKDOWN), "```python\nprint(1)")
    assert said(result) == "Output:\nError: the block is not closed with ```" and not result.is_done
    assert result.metrics == {"num_malformed_calls": 1.0}


def test_neither_code_nor_answer_ends_the_episode_unanswered() -> None:
    (result,) = steps(CodeEpisode(FakeSandbox([]), MARKDOWN), "I give up")
    assert result.is_done and result.answer is None and result.observation is None


def test_a_sandbox_failure_is_infrastructure_and_anything_else_is_a_defect() -> None:
    with pytest.raises(InfrastructureError, match="gone"):
        steps(CodeEpisode(FakeSandbox([SandboxFailure("gone")]), MARKDOWN), CODE)
    with pytest.raises(KeyError):
        steps(CodeEpisode(FakeSandbox([KeyError("bug")]), MARKDOWN), CODE)


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
