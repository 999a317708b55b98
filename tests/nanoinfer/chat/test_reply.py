"""One reader: the trainer's parser, the whole reply and the streamed one agree on every turn."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reply_cases import ALL, CASES, Case

from nanoinfer.chat.base import Parser, ToolCall, ToolCallError
from nanoinfer.chat.chat import visible
from nanoinfer.chat.hermes import HermesParser
from nanoinfer.chat.reply import ReplyReader, ReplyStream, SplitReply
from nanoinfer.server.tool_calls import split_calls

TABLE = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def by_name(parser: Parser) -> str:
    return parser.name


def streamed(reader: ReplyReader, pieces: list[str], *, is_cut: bool = False) -> SplitReply:
    stream = ReplyStream(reader)
    parts = [*map(stream.push, pieces), stream.finish(is_cut=is_cut)]
    return SplitReply(
        reasoning="".join(part.reasoning for part in parts),
        content="".join(part.content for part in parts),
        calls=parts[-1].calls,
    )


@TABLE
def test_a_turn_is_read_as_the_table_says(case: Case) -> None:
    reply = ReplyReader(case.parser, case.opened).read(case.text, is_cut=case.is_cut)
    content = case.text if case.content is None else case.content
    assert reply == SplitReply(reasoning=case.reasoning, content=content, calls=case.calls)


@TABLE
def test_the_trainer_reads_the_same_calls(case: Case) -> None:
    found = [] if case.is_cut else case.parser.read(case.text)  # it reads no turn that was cut
    is_read = not any(isinstance(one, ToolCallError) for one in found)
    assert (found if is_read else []) == list(case.calls)


@TABLE
def test_a_server_without_a_model_reads_hermes_the_same_way(case: Case) -> None:
    if isinstance(case.parser, HermesParser) and not case.is_cut:
        found = split_calls(case.text)[1]
        assert [one.name for one in found] == [one.name for one in case.calls]


@TABLE
def test_a_stream_cut_anywhere_says_the_same(case: Case) -> None:
    reader = ReplyReader(case.parser, case.opened)
    whole = reader.read(case.text, is_cut=case.is_cut)
    text = case.text
    assert streamed(reader, list(text), is_cut=case.is_cut) == whole
    for i in range(len(text) + 1):
        assert streamed(reader, [text[:i], text[i:]], is_cut=case.is_cut) == whole, text[:i]


@TABLE
def test_a_turn_that_offers_no_tools_calls_nothing(case: Case) -> None:
    reader = ReplyReader(None, case.opened)
    whole = reader.read(case.text)
    assert whole.calls == () and whole.reasoning == case.reasoning
    assert streamed(reader, list(case.text)) == whole


PIECES = [
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    '{"name": "f"',
    ', "arguments": {',
    "}",
]
PIECES += [
    "[TOOL_CALLS]",
    "f[ARGS]",
    "{}",
    "[THINK]",
    "[/THINK]",
    "[f(",
    "a=1",
    ")]",
    "\n",
    " ",
    ";",
]
PIECES += ["<function=f>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>a</arg_key>"]
PIECES += [
    "<arg_value>",
    "</arg_value>",
    "<|channel|>",
    "analysis",
    "final",
    "<|message|>",
    "<|end|>",
]
PIECES += ["<|start|>assistant", " to=functions.f", "<|call|>", "<｜tool▁calls▁begin｜>"]
PIECES += [
    "<｜tool▁call▁begin｜>",
    "f<｜tool▁sep｜>",
    "<｜tool▁call▁end｜>",
    "```python\n",
    "```",
    "f",
    "<",
]
PIECES += ["<|python_tag|>", '{"name": "f", "parameters": {}}', "t", "to", "<|assistant|>", "f\n{"]


@pytest.mark.parametrize("parser", ALL, ids=by_name)
def test_a_stream_of_any_text_is_the_whole_turn(parser: Parser) -> None:
    @settings(max_examples=150, deadline=None, database=None)
    @given(
        st.lists(st.sampled_from(PIECES), max_size=12),
        st.sampled_from(["", "<think>", "[THINK]"]),
        st.booleans(),
    )
    def holds(pieces: list[str], opened: str, is_cut: bool) -> None:
        text = "".join(pieces)
        reader = ReplyReader(parser, opened)
        whole = reader.read(text, is_cut=is_cut)
        assert streamed(reader, pieces, is_cut=is_cut) == whole
        assert streamed(reader, list(text), is_cut=is_cut) == whole
        assert all(isinstance(call, ToolCall) for call in whole.calls)

    holds()


def test_what_is_sure_is_handed_out_at_once() -> None:
    stream = ReplyStream(ReplyReader(HermesParser()))
    parts = [
        stream.push(piece) for piece in ("<think>a", "b</think>", "c", " <tool", "x", "<tool_call>")
    ]
    assert [part.reasoning for part in parts] == ["a", "b", "", "", "", ""]
    assert [part.content for part in parts] == ["", "", "c", "", " <toolx", ""]


def test_control_tokens_are_read_and_not_shown() -> None:
    reader = ReplyReader(CASES["mistral v13"].parser, hidden=("[TOOL_CALLS]", "[ARGS]"))
    assert reader.read("[TOOL_CALLS]ls[ARGS]{}").calls == (ToolCall("ls"),)
    assert reader.read("a [TOOL_CALLS]ls[ARGS]{", is_cut=True).content == "a ls{"
    assert streamed(reader, ["a ", "[TOOL_CALLS]", "ls", "[ARGS]", "{"]).content == "a ls{"


def test_a_turn_without_its_reasoning() -> None:
    assert visible("<think>a</think>\n\nb") == visible("a</think>b") == "b"
    assert visible("[THINK]a[/THINK]b") == "b"
    assert visible(CASES["harmony, final"].text) == "It is 3."


@pytest.mark.parametrize("parser", ALL, ids=by_name)
@pytest.mark.parametrize("unit", ["a ", "<tool_call>", "{", "\n", "<", '\n{"name', "[f", "to="])
def test_the_time_of_a_stream_grows_with_its_length(parser: Parser, unit: str) -> None:
    def seconds(num: int) -> float:
        stream = ReplyStream(ReplyReader(parser))
        start = time.process_time()
        for _ in range(num):
            stream.push(unit)
        stream.finish()
        return time.process_time() - start

    short, long = (min(seconds(num) for _ in range(3)) for num in (500, 2000))
    assert long < 16 * short + 0.1, "four times the pieces took more than sixteen times as long"
