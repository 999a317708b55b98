"""Tools in a prompt: signatures are the short form, and `nanorl check` says what they cost."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any, Literal

import pytest
from agent_doubles import tiny_tokenizer

import nanorl
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.signatures import signature
from nanorl.commands.new import write_files
from nanorl.envs.base import Opening, Services
from nanorl.envs.catalog import as_kind, load_kind
from nanorl.envs.env_kind import EnvKind
from nanorl.envs.judged import JudgedKind
from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.envs.tools.function import function_tool
from nanorl.inspection.doctor.tool_tokens import described_tools, tools_finding
from nanorl.run.parse import parse_arguments


def look(
    word: str, kind: Literal["noun", "verb"], num_lines: int = 3, tags: list[str] | None = None
) -> str:
    """Find a word in the dictionary and show the beginning of its entry.

    Args:
        word: the word as it is written in the text
        num_lines: how much of the entry to show
    """
    return word


def test_a_signature_says_all_that_the_schema_says() -> None:
    schema = function_tool(look).schema
    assert signature(schema) == (
        "def look(word: str, kind: Literal['noun', 'verb'], num_lines: int = 3, "
        "tags: list[str] | None = None)\n"
        "  Find a word in the dictionary and show the beginning of its entry.\n"
        "  word: the word as it is written in the text\n"
        "  num_lines: how much of the entry to show"
    )
    assert len(signature(schema)) < len(json.dumps(schema)) / 2


@pytest.mark.parametrize(
    "parameter",
    [
        {"type": "object", "properties": {"a": {"type": "integer"}}},
        {"$ref": "#/$defs/Point"},
        {"type": "integer", "minimum": 3},
        {"type": ["integer", "null"]},
    ],
)
def test_what_a_signature_cannot_say_is_left_as_json(parameter: dict[str, Any]) -> None:
    properties = {"type": "object", "properties": {"a": parameter}}
    schema = {"type": "function", "function": {"name": "f", "parameters": properties}}
    assert json.loads(signature(schema)) == schema


def test_parameters_that_python_could_not_name_are_left_as_json_and_required_ones_come_first() -> (
    None
):
    def of(names: list[str], required: list[str]) -> str:
        properties = {name: {"type": "integer"} for name in names}
        parameters = {"type": "object", "properties": properties, "required": required}
        return signature({"type": "function", "function": {"name": "f", "parameters": parameters}})

    assert of(["a", "b"], ["b"]) == "def f(b: int, a: int = ...)"
    assert of(["max-tokens"], []).startswith("{") and of(["class"], []).startswith("{")


class Two(nanorl.Env):
    system = "Find the way."
    tools = (look,)

    def tasks(self, rng: Any) -> nanorl.Task:
        return nanorl.Task("Where?", answer=rng.randint(1, 9))


class TwoShort(Two):
    parser = "pythonic"


def opening_of(kind: EnvKind, tokenizer: ChatTokenizer) -> Opening:
    episode = kind.open(Services(tokenizer=tokenizer, sandbox=None, timeout_s=1.0))
    return asyncio.run(episode.reset(kind.tasks(0).batch(0, 1)[0]))


def length(opening: Opening, tokenizer: ChatTokenizer) -> int:
    ids = tokenizer.encode_chat(opening.messages, add_generation_prompt=True, tools=opening.tools)
    return len(ids)


def test_the_note_counts_the_tools_and_what_pythonic_would_make_of_them() -> None:
    tokenizer = tiny_tokenizer()
    kind = JudgedKind(as_kind(Two), lambda rollout: 0.0)  # type: ignore[arg-type,return-value]
    opening = opening_of(kind, tokenizer)
    note = tools_finding(tokenizer, opening, described_tools(kind))
    assert note is not None

    class Bare(Two):
        tools = ()

    whole = length(opening, tokenizer)
    bare = length(opening_of(as_kind(Bare), tokenizer), tokenizer)
    short = length(opening_of(as_kind(TwoShort), tokenizer), tokenizer)
    assert note.seen == f"{whole - bare} of {whole} prompt tokens are the tools"
    assert f"`parser = 'pythonic'` makes it {short}," in note.remedy and short < 0.6 * whole
    least = re.search(r"shorter docstrings make it (\d+)", note.remedy)
    assert least is not None and bare < int(least[1]) < whole


def test_few_tools_and_none_are_no_note() -> None:
    def go() -> None: ...

    class Small(TwoShort):
        system = "Find the way. " * 40
        tools = (go,)

    class Without(Two):
        tools = ()

    for cls in (Small, Without):
        kind, tokenizer = as_kind(cls), tiny_tokenizer()
        opening = opening_of(kind, tokenizer)
        assert tools_finding(tokenizer, opening, described_tools(kind)) is None


def test_the_tiny_model_can_hold_what_nanorl_new_writes(tmp_path: Path) -> None:
    file, _ = write_files("my_game", tmp_path)
    config = parse_arguments(["--env", str(file), "--preset", "tiny"])
    tokenizer = ChatTokenizer.from_folder(build_tiny_model(tmp_path / "model"), {})
    prompt = length(opening_of(load_kind(str(file), {}), tokenizer), tokenizer)
    limits = config.agent
    assert prompt + limits.max_turns * limits.max_turn_tokens < limits.max_context_tokens
