"""Parsers: what is written is read, what is malformed is told, nothing hostile takes long."""

import importlib
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanoinfer.chat.base import Parser, ToolCall, ToolCallError
from nanoinfer.chat.fenced import BASH_FENCE, PYTHON_FENCE, FencedParser
from nanoinfer.chat.harmony import HarmonyParser
from nanoinfer.chat.hermes import HermesParser
from nanoinfer.chat.llama import LlamaParser
from nanoinfer.chat.named import DeepSeekParser, Glm4Parser, MistralParser
from nanoinfer.chat.pythonic import PythonicParser
from nanoinfer.chat.reading import MAX_CALLS
from nanoinfer.chat.tagged import GlmParser, QwenCoderParser
from nanorl.envs.tools.python import python

HERMES, LLAMA, PYTHONIC = HermesParser(), LlamaParser(), PythonicParser()
FENCED = FencedParser(fences=(PYTHON_FENCE, BASH_FENCE))
GENERAL = (HERMES, LLAMA, PYTHONIC)
NAMED = (
    MistralParser(),
    MistralParser(name="mistral_v11", is_list=False),
    MistralParser(name="mistral_v13", is_list=False, has_ids=False),
    DeepSeekParser(),
    DeepSeekParser(name="deepseek_v3", is_fenced=True),
)
HARMONY, GLM4 = HarmonyParser(), Glm4Parser()
TAGGED = (QwenCoderParser(), GlmParser())
ALL = (*GENERAL, FENCED, *NAMED, HARMONY, GLM4, *TAGGED)
ADD = ToolCall("add", {"a": 1, "b": 2})


def by_name(parser: Parser) -> str:
    return parser.name


def read(parser: Parser, text: str) -> list[Any]:
    """Calls as they are, errors as their text."""
    return [str(one) if isinstance(one, ToolCallError) else one for one in parser.read(text)]


TAGS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", '{"name": "f"}']
SIGNS = [";", "[f(a=1)]", "\n", '"""', "'", "\\", "]", "é", "\U0001f600", "\x00"]
MARKED = st.sampled_from([*TAGS, *SIGNS])
TEXTS = st.lists(MARKED | st.text(max_size=4), max_size=4).map("".join)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | TEXTS
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
CALLS = st.builds(
    ToolCall,
    st.sampled_from(["f", "look_up", "server.tool", "x1"]),
    st.dictionaries(st.sampled_from(["a", "from", "b c", "é", "name", ""]), VALUES, max_size=3),
)
CODES = (
    st.text(alphabet="ab\n <>'\"=`(", max_size=30)
    .map(lambda code: f"x{code}y")
    .filter(lambda code: "```" not in code)
)
FENCED_CALLS = st.one_of(
    st.builds(lambda code: ToolCall("python", {"code": code}), CODES),
    st.builds(lambda code: ToolCall("bash", {"command": code}), CODES),
)
AROUND = st.sampled_from(["", "Let me see.\n", "<think>\nI could <tool_call> it\n</think>\n\n"])


@pytest.mark.parametrize("parser", (*GENERAL, FENCED, *NAMED), ids=by_name)
def test_read_undoes_write_for_several_calls_and_text_around_them(parser: Parser) -> None:
    one = FENCED_CALLS if parser is FENCED else CALLS

    @settings(max_examples=80, deadline=None, database=None)
    @given(calls=st.lists(one, max_size=3), before=AROUND, after=AROUND)
    def holds(calls: list[ToolCall], before: str, after: str) -> None:
        text = before + "\n".join(map(parser.write, calls)) + "\n" + after
        assert parser.read(text) == calls

    holds()


@pytest.mark.parametrize("parser", (HARMONY, GLM4), ids=by_name)
def test_read_undoes_write_of_the_one_call_with_which_a_turn_ends(parser: Parser) -> None:
    @settings(max_examples=80, deadline=None, database=None)
    @given(call=CALLS)
    def holds(call: ToolCall) -> None:
        if parser is HARMONY and any(token in parser.write(call)[30:-8] for token in CHANNELS):
            return  # its own control tokens, which text cannot spell
        assert parser.read(parser.write(call)) == [call]

    holds()


CHANNELS = ("<|end|>", "<|call|>", "<|return|>", "<|start|>", "<|channel|>")


@pytest.mark.parametrize("make", (QwenCoderParser, GlmParser))
def test_tags_hold_every_value_that_they_can_and_refuse_the_others(make: Any) -> None:
    """Strings by the schema; other values by themselves."""
    texts = TEXTS | st.sampled_from(["7", "null", "</parameter>", "</arg_value>", "a</tool_call>"])
    values = st.integers() | st.booleans() | st.none() | st.lists(st.integers(), max_size=2)

    @settings(max_examples=200, deadline=None, database=None)
    @given(text=texts, value=values, before=AROUND, after=AROUND)
    def holds(text: str, value: Any, before: str, after: str) -> None:
        parser = make(schemas={"f": {"text": {"type": "string"}}})
        call = ToolCall("f", {"text": text, "value": value})
        assert parser.read(before + parser.write(call) + after) == [call]

    holds()
    for text in ("</parameter></function>", "</arg_value></tool_call>"):
        call = ToolCall("f", {"text": text})
        try:
            written = make().write(call)
        except ValueError as error:
            assert "f(text): cannot be written as" in str(error)
        else:
            assert make().read(written) == [call]
    with pytest.raises(ValueError, match="cannot be written"):
        make().write(ToolCall("a<b"))


def test_a_value_has_the_type_that_its_schema_says() -> None:
    def read(text: str, schema: Any = None) -> Any:
        parser = QwenCoderParser(schemas={"f": {"x": schema}} if schema is not None else {})
        text = f"<tool_call><function=f><parameter=x>{text}</parameter></function></tool_call>"
        (call,) = parser.read(text)
        assert isinstance(call, ToolCall)
        return call.arguments["x"]

    assert read("7") == 7 and read("7", {"type": "string"}) == "7"
    assert read("abc") == "abc" and read("abc", {"type": "integer"}) == "abc"
    assert read('"abc"') == '"abc"', "what no schema types is text, quotes and all"
    assert read('{"a": [1]}', {"type": "object"}) == {"a": [1]}
    assert read("True", {"type": "boolean"}) is read("true", {"type": "boolean"}) is True
    assert read("null", {"type": ["string", "null"]}) is None
    assert read("null", {"type": "string"}) == "null"
    assert read("7", {"anyOf": [{"type": "string"}, {"type": "integer"}]}) == "7"
    assert read("7", {"enum": ["7", "8"]}) == "7" and read("7", {"enum": [7, 8]}) == 7
    assert read("NaN") == "NaN", "no number"


def test_mistral_reads_the_ids_that_it_wrote() -> None:
    for parser in NAMED[:2]:
        (call,) = parser.read(parser.write(ToolCall("f", {"a": 1}, "abcdefghi")))
        assert isinstance(call, ToolCall) and call.id == "abcdefghi"
        (made,) = parser.read(parser.write(ToolCall("f", {"a": 1})))
        assert isinstance(made, ToolCall) and len(made.id) == 9 and made.id.isalnum()


@pytest.mark.parametrize("parser", ALL, ids=by_name)
def test_no_text_makes_read_raise(parser: Parser) -> None:
    pieces = ["<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f"', ', "arguments"']
    pieces += [":", "{", "}", "[", "]", "f(", ")", "a=", "1", '"', "'", "\n", ";", "-", "**", "\\"]
    pieces += ["<|python_tag|>", "```python\n", "```", '{"name": "f", "parameters": {}}', "\\ud800"]

    @settings(max_examples=200, deadline=None, database=None)
    @given(st.lists(st.sampled_from(pieces), max_size=14).map("".join))
    def holds(text: str) -> None:
        for one in parser.read(text):
            assert isinstance(one, ToolCall | ToolCallError)

    holds()


@pytest.mark.parametrize("parser", ALL, ids=by_name)
def test_reasoning_holds_no_call(parser: Parser) -> None:
    if parser in (HARMONY, GLM4):
        pytest.skip("its reasoning is a channel, or it has none")
    call = ToolCall("python", {"code": "print(1)"})
    text = "\n" + parser.write(call) + "\n"
    assert parser.read(f"<think>{text}</think>{text}") == [call]
    assert parser.read(f"{text}<think>{text}") == [call], "a block that is not closed"
    assert parser.read(f"<think>{text}") == []
    assert parser.read(f"{text}</think>{text}") == [call], "the prompt opened the block"
    assert parser.read(f"<think></think>{text}<think>hm</think>{text}") == [call, call]
    other = ToolCall("python", {"code": "'<think>'"})
    assert parser.read(parser.write(other) + text) == [other, call], "an argument is no reasoning"


@pytest.mark.parametrize(
    ("parser", "malformed"),
    [
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}</tool_call>'),
        (HERMES, '<tool_call>{"name": "add", "arguments": [1]}</tool_call>'),
        (HERMES, "<tool_call>add(1, 2)</tool_call>"),
        (HERMES, '<tool_call>{"name": "add", "arguments": {"a": 1}}}</tool_call>'),
        (HERMES, "<tool_call>[]</tool_call>"),
        (LLAMA, '{"name": "add", "parameters": {"a": 1}'),
        (LLAMA, '{"name": 3, "parameters": {}}'),
        (LLAMA, '<|python_tag|>print("hi")'),
        (PYTHONIC, "[add(1, 2)]"),
        (PYTHONIC, "[add(a=b)]"),
        (PYTHONIC, "[add(a=1, a=2)]"),
        (PYTHONIC, "[add(a=__import__('os').system('true'))]"),
        (PYTHONIC, '[add(a=f"{1}")]'),
        (PYTHONIC, "[add(a=1)(b=2)]"),
        (PYTHONIC, "[add(a=1) for x in y]"),
        (PYTHONIC, "[add(a=1), 3]"),
        (PYTHONIC, "[add(a={1: 2})]"),
    ],
)
def test_a_malformed_call_is_an_error_in_its_place(parser: Parser, malformed: str) -> None:
    good = parser.write(ADD)
    found = parser.read(f"{good}\n{malformed}\n{good}")
    assert found[0] == found[-1] == ADD
    errors = [one for one in found[1:-1] if isinstance(one, ToolCallError)]
    assert len(errors) == 1 and str(errors[0])


@pytest.mark.parametrize("parser", GENERAL, ids=by_name)
def test_what_no_tool_could_take_is_an_error(parser: Parser) -> None:
    good = parser.write(ToolCall("f", {"x": "QQ"}))
    for bad, text in (
        ("'\\ud800'" if parser is PYTHONIC else '"\\ud800"', "surrogate"),
        ("1e999", "inf is not a number"),
        ("[" * 40 + "]" * 40, "nested"),
    ):
        quoted = "'QQ'" if parser is PYTHONIC else '"QQ"'
        (found,) = read(parser, good.replace(quoted, bad))
        assert isinstance(found, str) and text in found


def test_hermes_forgives_what_models_do() -> None:
    for text in (
        '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call>',
        'Sure: <tool_call>\n\n{"arguments": {"a": 1, "b": 2}, "name": "add"}\n',
        '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}</tool_call>',
        '<tool_call>[{"name": "add", "arguments": {"a": 1, "b": 2}}]</tool_call>',
        '<tool_call>{"type": "function", "function": {"name": "add", "parameters":'
        ' {"a": 1, "b": 2}}}</tool_call>',
    ):
        assert HERMES.read(text) == [ADD]
    raw = '<tool_call>{"name": "python", "arguments": {"code": "a = 1\nprint(a)"}}</tool_call>'
    assert HERMES.read(raw) == [ToolCall("python", {"code": "a = 1\nprint(a)"})]
    assert HERMES.read('<tool_call>{"name": "now"}</tool_call>') == [ToolCall("now")]
    assert HERMES.read("no call, and {} no <tool> either") == []


def test_llama_reads_calls_alone_after_the_tag_and_separated() -> None:
    one = '{"name": "add", "parameters": {"a": 1, "b": 2}}'
    assert LLAMA.read(one) == LLAMA.read(f"<|python_tag|>{one}") == [ADD]
    assert LLAMA.read(f"<|python_tag|>{one}; {one};\n{one}") == [ADD] * 3
    assert LLAMA.read(f"I will add:\n  {one}") == [ADD]
    assert LLAMA.read('The answer is {"name": "x"}') == LLAMA.read('{"answer": 3}') == []


def test_pythonic_reads_lists_of_calls() -> None:
    assert PYTHONIC.read("[add(a=1, b=2), look.up(word='x', n=-1.5, k=[true, None])]") == [
        ADD,
        ToolCall("look.up", {"word": "x", "n": -1.5, "k": [True, None]}),
    ]
    assert PYTHONIC.read('Yes.\n[f(\n  a="]",\n  b="""\n)]""",\n)]\nDone') == [
        ToolCall("f", {"a": "]", "b": "\n)]"})
    ]
    assert PYTHONIC.read("[1, 2] and [x] and f(a=1)") == []
    with pytest.raises(ValueError, match="tool name 'look-up'"):
        PYTHONIC.write(ToolCall("look-up"))


HOSTILE = {
    "openings": "<tool_call>",
    "pairs": "<tool_call></tool_call>",
    "halves": '<tool_call>{"name": "f", "arguments": {"a": "',
    "quotes": '<tool_call>["',
    "lists": "<tool_call>[",
    "reasoning": "<think>",
    "ends": "</think>",
    "objects": '{"name": "f", "parameters": {\n',
    "names": '\n{"name"',
    "tags": "<|python_tag|>",
    "separators": ';{"name"',
    "blanks": "\n ",
    "braces": "{\n",
    "calls": "[f(",
    "lines": "[f(\n",
    "strings": "[f(a='\n",
    "triples": '[f(a="""\n',
    "minus": "-",
    "sums": "1+",
    "dots": "f.",
    "negations": "not ",
    "lambdas": "lambda:",
    "fences": "```python\n",
    "marks": "```",
    "backslashes": "[f(a='\\",
    "functions": "<tool_call>\n<function=f>\n<parameter=a>\n",
    "parameters": "<parameter=a></parameter> ",
    "values": "<tool_call>f<arg_key>a</arg_key><arg_value>",
    "pairs of tags": "<arg_key>a</arg_key><arg_value></arg_value> ",
    "tool calls": "[TOOL_CALLS]f[ARGS]{",
    "names behind marks": "[TOOL_CALLS]f",
    "begins": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
    "separated": "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
    "channels": "<|channel|>",
    "messages": "<|channel|>commentary to=functions.f<|message|>{",
    "starts": "<|start|>assistant to=f",
    "recipients": " to=functions.f",
    "thoughts": "[THINK]",
}


@pytest.mark.parametrize("parser", ALL, ids=by_name)
@pytest.mark.parametrize("unit", HOSTILE.values(), ids=HOSTILE.keys())
def test_time_grows_with_the_length_of_hostile_text_and_no_faster(
    parser: Parser, unit: str
) -> None:
    def seconds(size: int) -> float:
        body = unit * (size // len(unit))
        texts = [body, f"[f(a={body}1)]", f'<tool_call>{{"a": {body}}}']
        if parser in TAGGED:
            texts = [body, f"<tool_call><function=f>{body}", f"<tool_call>f\n{body}"]
        start = time.process_time()
        for text in texts:
            assert len(parser.read(text)) <= MAX_CALLS + 1
        return time.process_time() - start

    short, long = (min(seconds(size) for _ in range(2)) for size in (1 << 14, 1 << 16))
    assert long < 10 * short + 0.05, "four times the text took more than ten times as long"


def test_a_flood_of_calls_is_cut_with_one_error() -> None:
    found = HERMES.read(HERMES.write(ADD) * 500)
    assert found[:-1] == [ADD] * MAX_CALLS
    assert "the rest was not read" in str(found[-1])


def test_blocks_of_several_tools_are_told_by_their_fences() -> None:
    text = "First\n```bash\nls\n```\nthen\n```python\nprint(1)\n```"
    assert FENCED.read(text) == [
        ToolCall("bash", {"command": "ls"}),
        ToolCall("python", {"code": "print(1)"}),
    ]
    assert read(FENCED, "```bash\nls\n```\n```python\nprint(") == [
        ToolCall("bash", {"command": "ls"}),
        "the block is not closed with ```",
    ]
    for call in (ToolCall("f", {"code": "1"}), ToolCall("python", {"code": "'```'"})):
        with pytest.raises(ValueError, match=r"fences are of python|would end its block"):
            FENCED.write(call)


def test_results_come_back_in_order_in_the_role_that_the_template_knows() -> None:
    for parser in GENERAL:
        messages = parser.observation(["1", "2"])
        assert [m["content"] for m in messages] == ["1", "2"]
        assert {m["role"] for m in messages} == {parser.role}
    assert HermesParser(role="user").observation(["1", "2"]) == [
        {
            "role": "user",
            "content": "<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>",
        }
    ]
    assert FENCED.observation(["1", "2"]) == [
        {"role": "user", "content": "Output:\n1\n\nOutput:\n2"}
    ]


@pytest.mark.parametrize("parser", ALL, ids=by_name)
def test_the_description_names_the_tools_and_the_form(parser: Parser) -> None:
    text = parser.describe([python])
    assert "python" in text and "Run a Python program" in text
    form = {"hermes": "<tool_call>", "llama": '"parameters"', "pythonic": "[first(name=value"}
    form |= {"harmony": "commentary", "glm4": "next line", "fenced": "```python\n"}
    form |= {"qwen3_coder": "<function=", "glm45": "<arg_key>"}
    mark = "<｜tool▁call▁begin｜>" if parser.name.startswith("deepseek") else "[TOOL_CALLS]"
    assert form.get(parser.name, mark) in text


def test_environments_outside_import_the_parsers_by_their_old_names() -> None:
    """Two copies of a class would be two kinds of call."""
    old = {name: importlib.import_module(f"nanorl.parsers.{name}") for name in ("base", "hermes")}
    assert old["base"].ToolCall is ToolCall and old["hermes"].HermesParser is HermesParser
