"""The one table of turns: what trainer, endpoint and server read of them, whole and streamed."""

from __future__ import annotations

from dataclasses import dataclass

from nanoinfer.chat.base import Parser, ToolCall
from nanoinfer.chat.fenced import BASH_FENCE, PYTHON_FENCE, FencedParser
from nanoinfer.chat.harmony import HarmonyParser
from nanoinfer.chat.hermes import HermesParser
from nanoinfer.chat.llama import LlamaParser
from nanoinfer.chat.named import DeepSeekParser, Glm4Parser, MistralParser
from nanoinfer.chat.pythonic import PythonicParser
from nanoinfer.chat.tagged import GlmParser, QwenCoderParser

TYPES = {
    "sh": {"cmd": {"type": "string"}},
    "add": {"a": {"type": "integer"}, "b": {"type": ["integer", "null"]}},
    "set": {"on": {"type": "boolean"}, "to": {"type": "object"}, "name": {"type": "string"}},
}
HERMES, LLAMA, PYTHONIC = HermesParser(), LlamaParser(), PythonicParser()
FENCED = FencedParser(fences=(PYTHON_FENCE, BASH_FENCE))
CODER, GLM = QwenCoderParser(schemas=TYPES), GlmParser(schemas=TYPES)
MISTRAL, DEEPSEEK, HARMONY, GLM4 = MistralParser(), DeepSeekParser(), HarmonyParser(), Glm4Parser()
ALL = (HERMES, LLAMA, PYTHONIC, FENCED, CODER, GLM, MISTRAL, DEEPSEEK, HARMONY, GLM4)
ADD = ToolCall("add", {"a": 1, "b": 2})
LS = ToolCall("ls")


def sh(cmd: str) -> ToolCall:
    return ToolCall("sh", {"cmd": cmd})


@dataclass(frozen=True)
class Case:
    """A turn; `content` None: it is the text as it was written."""

    parser: Parser
    text: str
    calls: tuple[ToolCall, ...] = ()
    content: str | None = ""
    reasoning: str = ""
    opened: str = ""
    is_cut: bool = False


def hermes(inner: str) -> str:
    return f"<tool_call>\n{inner}\n</tool_call>"


ONE = '{"name": "add", "arguments": {"a": 1, "b": 2}}'
INNER = "grep '</tool_call>' x; echo '<tool_call>' '<think>' '</think>'"
CALLED = HERMES.write(ADD)
THOUGHT = f"I could {CALLED} it"
CODED = CODER.write(ADD)
GLMED = GLM.write(ADD)
DS_B, DS_E, DS_1, DS_2, DS_S = (
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    *("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"),
)
TO_ADD = (
    '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "b": 2}<|call|>'
)
ANALYSIS = "<|channel|>analysis<|message|>Two numbers. 1 < 2<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>It is 3."

CASES = {
    # Hermes: each of these is decided here, once.
    "plain": Case(HERMES, "  No call <tool here.\n", content=None),
    "one": Case(HERMES, CALLED, (ADD,)),
    "two": Case(HERMES, f"{CALLED}\n{HERMES.write(LS)}", (ADD, LS)),
    "tags inside arguments": Case(HERMES, HERMES.write(sh(INNER)), (sh(INNER),)),
    "no arguments": Case(HERMES, hermes('{"name": "ls"}'), (LS,)),
    "null arguments": Case(HERMES, hermes('{"name": "ls", "arguments": null}'), (LS,)),
    "parameters": Case(HERMES, hermes('{"name": "add", "parameters": {"a": 1, "b": 2}}'), (ADD,)),
    "outer form": Case(HERMES, hermes(f'{{"type": "function", "function": {ONE}}}'), (ADD,)),
    "JSON in JSON": Case(
        HERMES, hermes('{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": 2}"}'), (ADD,)
    ),
    "a list": Case(HERMES, hermes(f"[{ONE}, {ONE}]"), (ADD, ADD)),
    "two in one pair of tags": Case(HERMES, hermes(f"{ONE}\n{ONE}"), (ADD, ADD)),
    "a code fence inside the tags": Case(HERMES, hermes(f"```json\n{ONE}\n```"), (ADD,)),
    "a raw newline": Case(
        HERMES, hermes('{"name": "sh", "arguments": {"cmd": "a\nb"}}'), (sh("a\nb"),)
    ),
    "a key given twice": Case(
        HERMES, hermes('{"name": "sh", "arguments": {"cmd": "a", "cmd": "b"}}'), (sh("b"),)
    ),
    "text around": Case(HERMES, f"Let me see.\n{CALLED}\nDone. ", (ADD,), "Let me see.\nDone."),
    "text between": Case(HERMES, f" a\n\n{CALLED} b {CALLED}", (ADD, ADD), " a\nb"),
    "not closed": Case(HERMES, f"<tool_call>{ONE}", (ADD,)),
    "cut off": Case(HERMES, f"a <tool_call>{ONE[:20]}", content=None),
    "cut by a limit": Case(HERMES, f"a {CALLED} b", content=None, is_cut=True),
    "no JSON": Case(HERMES, hermes("add(1, 2)"), content=None),
    "arguments that are no object": Case(
        HERMES, hermes('{"name": "add", "arguments": [1]}'), content=None
    ),
    "one good, one bad": Case(HERMES, f"{CALLED}<tool_call>{{</tool_call>", content=None),
    "not finite": Case(HERMES, hermes('{"name": "f", "arguments": {"x": NaN}}'), content=None),
    # Reasoning.
    "thought": Case(HERMES, f"<think>\n{THOUGHT}\n</think>\n\nNo.", (), "No.", THOUGHT),
    "thought, then called": Case(
        HERMES, f"<think>{THOUGHT}</think>{HERMES.write(LS)}", (LS,), "", THOUGHT
    ),
    "not thought to the end": Case(HERMES, f"\n<think>\n{THOUGHT}", (), "", THOUGHT),
    "the prompt opened it": Case(
        HERMES, f"{THOUGHT}\n</think>\n\nYes.{CALLED}", (ADD,), "Yes.", THOUGHT, "<think>"
    ),
    "it opened it again": Case(HERMES, "<think>a</think>b", (), "b", "a", "<think>"),
    "the prompt opened it, and that is all": Case(
        HERMES, THOUGHT, (), "", THOUGHT, "<think>", is_cut=True
    ),
    "empty reasoning": Case(HERMES, "<think>\n\n</think>\n\nHi", (), "Hi", ""),
    "a mark in the middle is text": Case(HERMES, f"a <think>{CALLED}</think> b", content=None),
    "a stray end unsays calls": Case(HERMES, f"a {CALLED}</think> b", content=None),
    # Others.
    "llama": Case(LLAMA, 'So:\n{"name": "add", "parameters": {"a": 1, "b": 2}}', (ADD,), "So:"),
    "llama, tag": Case(LLAMA, f"<|python_tag|>{LLAMA.write(ADD)}; {LLAMA.write(LS)}", (ADD, LS)),
    "llama, no call": Case(LLAMA, '{"answer": 3}\n {"nam', content=None),
    "pythonic": Case(PYTHONIC, "Yes.\n [add(a=1, b=2), ls()]", (ADD, LS), "Yes."),
    "pythonic, no call": Case(PYTHONIC, "[see\n[1, 2] [x", content=None),
    "fenced": Case(FENCED, "a\n```bash\nls\n```", (ToolCall("bash", {"command": "ls"}),), "a"),
    "fenced, other": Case(FENCED, "```js\n1\n```", content=None),
    "coder": Case(CODER, f"Sure.\n\n{CODED}", (ADD,), "Sure."),
    "coder, several": Case(CODER, f"{CODED}\n{CODER.write(LS)}", (ADD, LS)),
    "coder, types": Case(
        CODER,
        "<tool_call>\n<function=set>\n<parameter=on>\nTrue\n</parameter>\n<parameter=to>\n"
        '{"a": [1]}\n</parameter>\n<parameter=name>\n7\n</parameter>\n</function>\n</tool_call>',
        (ToolCall("set", {"on": True, "to": {"a": [1]}, "name": "7"}),),
    ),
    "coder, null": Case(
        CODER,
        "<tool_call><function=add><parameter=a>1</parameter><parameter=b>null</parameter>"
        "</function></tool_call>",
        (ToolCall("add", {"a": 1, "b": None}),),
    ),
    "coder, lines and tags": Case(
        CODER, CODER.write(sh(f"\ta\n{INNER}</parameter>\n")), (sh(f"\ta\n{INNER}</parameter>\n"),)
    ),
    "coder, without the outer tags": Case(CODER, "<function=ls>\n</function>", (LS,)),
    "coder, not closed": Case(CODER, CODED[: CODED.index("</function>")], content=None),
    "coder, half a tag": Case(CODER, "a <tool_call>\n<fun", content=None),
    "glm": Case(GLM, f"<think>Hm</think>\nOk\n{GLMED}{GLMED}", (ADD, ADD), "Ok", "Hm"),
    "glm, tags": Case(GLM, GLM.write(sh(f"{INNER}</arg_value>")), (sh(f"{INNER}</arg_value>"),)),
    "glm, no arguments": Case(GLM, "<tool_call>ls\n</tool_call>", (LS,)),
    "glm, not closed": Case(GLM, "<tool_call>ls\n<arg_key>a</arg_key><arg_value>1", content=None),
    "mistral v3": Case(MISTRAL, f'[TOOL_CALLS] [{ONE[:-1]}, "id": "abcdefghi"}}]', (ADD,)),
    "mistral v7": Case(MISTRAL, f"Ok[TOOL_CALLS][{ONE}, {ONE}]", (ADD, ADD), "Ok"),
    "mistral v11": Case(MISTRAL, '[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"a": 1, "b": 2}', (ADD,)),
    "mistral v13": Case(
        MISTRAL, '[TOOL_CALLS]add[ARGS]{"a": 1, "b": 2}[TOOL_CALLS]ls[ARGS]{}', (ADD, LS)
    ),
    "mistral, thought": Case(
        MISTRAL, "[THINK]Hm [TOOL_CALLS]ls[ARGS]{}[/THINK]Hi", (), "Hi", "Hm [TOOL_CALLS]ls[ARGS]{}"
    ),
    "mistral, bad": Case(MISTRAL, "a [TOOL_CALLS]add[ARGS]{", content=None),
    "deepseek v3": Case(
        DEEPSEEK,
        f'Ok.{DS_B}{DS_1}function{DS_S}add\n```json\n{{"a": 1, "b": 2}}\n```{DS_2}\n{DS_1}function'
        f"{DS_S}ls\n```json\n{{}}\n```{DS_2}{DS_E}",
        (ADD, LS),
        "Ok.",
    ),
    "deepseek v3.1": Case(
        DEEPSEEK,
        f'{DS_B}{DS_1}add{DS_S}{{"a": 1, "b": 2}}{DS_2}{DS_1}ls{DS_S}{{}}{DS_2}{DS_E}',
        (ADD, LS),
    ),
    "deepseek, bad": Case(DEEPSEEK, f"a {DS_B}{DS_1}ls{DS_2}", content=None),
    "glm4": Case(GLM4, 'add\n{"a": 1, "b": 2}', (ADD,)),
    "glm4, no call": Case(GLM4, 'It is\nadd\n{"a": 1}', content=None),
    "harmony": Case(
        HARMONY, f"{ANALYSIS}<|start|>assistant{TO_ADD}", (ADD,), "", "Two numbers. 1 < 2"
    ),
    "harmony, the recipient first": Case(
        HARMONY, ' to=functions.add<|channel|>commentary json<|message|>{"a": 1, "b": 2}', (ADD,)
    ),
    "harmony, final": Case(HARMONY, ANALYSIS + FINAL, (), "It is 3.", "Two numbers. 1 < 2"),
    "harmony, a word before": Case(
        HARMONY,
        "<|channel|>commentary<|message|>I add.<|end|><|start|>assistant" + TO_ADD,
        (ADD,),
        "I add.",
    ),
    "harmony, thought twice": Case(
        HARMONY,
        f"{ANALYSIS}<|start|>assistant{ANALYSIS}{FINAL}",
        (),
        "It is 3.",
        "Two numbers. 1 < 2\nTwo numbers. 1 < 2",
    ),
    "harmony, a call in a thought": Case(
        HARMONY,
        '<|channel|>analysis<|message|>to=functions.add {"a": 1}<|end|>' + FINAL,
        (),
        "It is 3.",
        'to=functions.add {"a": 1}',
    ),
    "harmony, cut": Case(
        HARMONY,
        f"{ANALYSIS}<|start|>assistant{TO_ADD[:-12]}",
        (),
        '{"a": 1, "b"',
        "Two numbers. 1 < 2",
        is_cut=True,
    ),
    "harmony, bad": Case(HARMONY, TO_ADD.replace("{", "("), (), '("a": 1, "b": 2}'),
    "harmony, nothing yet": Case(HARMONY, "<|channel|>ana", (), ""),
}
