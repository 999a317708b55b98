"""Chats with pictures become tokens: where the pictures are, and what nobody can spell.

Beside the tiny model's own template one in the form of Qwen3-VL's, which counts pictures, takes
parts by their keys and puts a tool's results between marks of its own.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine.vision.png import write_png
from nanoengine.vision.seeing_tokenizer import SeeingTokenizer, seeing_tokenizer
from nanoinfer.params import Output
from nanorl.agents.limits import Limits
from nanorl.agents.tokens import TurnBuilder
from nanorl.envs.tasks.tiny_vision_model import CHAT_TEMPLATE, build_tiny_vision_model

LIKE_QWEN = """
{%- set count = namespace(value=0) %}
{%- macro said(content, counts) %}
    {%- if content is string %}{{- content }}
    {%- else %}{%- for item in content %}
        {%- if 'image' in item or 'image_url' in item or item.type == 'image' %}
            {%- if counts %}{%- set count.value = count.value + 1 %}{%- endif %}
            {{- '<|vision_start|><|image_pad|><|vision_end|>' }}
        {%- elif 'text' in item %}{{- item.text }}{%- endif %}
    {%- endfor %}{%- endif %}
{%- endmacro %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}{{- '<bot>' + said(message.content, false) + '<eos>' }}
    {%- elif message.role == 'tool' %}
        {{- '<out>(tool)' + said(message.content, true) + '(/tool)' }}
    {%- else %}{{- '<usr>' + said(message.content, true) }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<bot>' }}{%- endif %}
"""
TEMPLATES = {"ours": CHAT_TEMPLATE, "like Qwen's": LIKE_QWEN}
PAD, END = "<|image_pad|>", 5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision_model(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(params=TEMPLATES)
def tokenizer(request: pytest.FixtureRequest, folder: Path, tmp_path: Path) -> SeeingTokenizer:
    return with_template(folder, tmp_path, TEMPLATES[request.param])


def with_template(folder: Path, tmp_path: Path, template: str) -> SeeingTokenizer:
    for name in ("tokenizer.json", "preprocessor_config.json", "generation_config.json"):
        (tmp_path / name).write_text((folder / name).read_text())
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**config, "chat_template": template})
    )
    return seeing_tokenizer(tmp_path, tmp_path / "pictures")


def image(tokenizer: SeeingTokenizer, level: int) -> dict[str, str]:
    data = write_png(np.full((48, 48, 3), level, np.uint8))
    return {"type": "image", "sha256": tokenizer.store.add(data)}


def text(words: str) -> dict[str, str]:
    return {"type": "text", "text": words}


def told(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def test_nobody_spells_a_placeholder_whoever_speaks(tokenizer: SeeingTokenizer) -> None:
    """In a system's, a user's, an assistant's and a tool's words, as a text and as a part."""
    pad = tokenizer.token_to_id(PAD)
    shown = image(tokenizer, 9)
    chat = [
        {"role": "system", "content": f"a{PAD}b"},
        told("user", text(f"say {PAD}{PAD}"), shown, text(PAD)),
        {"role": "assistant", "content": f"{PAD} I see"},
        {"role": "tool", "content": f"{PAD}"},
    ]
    ids = tokenizer.encode_chat(chat, add_generation_prompt=True)
    (span,) = tokenizer.images_in(ids, chat, 0)
    assert [place for place, one in enumerate(ids) if one == pad] == list(
        range(span.start, span.end)
    )
    assert span.length == 9
    assert tokenizer.decode(ids).count(PAD) == 9 + 6, "what was spelled is there, as text"


def test_no_schema_of_a_tool_spells_a_placeholder(folder: Path, tmp_path: Path) -> None:
    """Nor does a variable of the template: clients write both. Names of fields count as well."""
    lists = "{{ tools | tojson }}{{ mood }}" + CHAT_TEMPLATE
    tokenizer = with_template(folder, tmp_path, lists)
    chat = [told("user", image(tokenizer, 4))]
    tools = [{"type": "function", "function": {"name": PAD, "parameters": {PAD: f"a {PAD}"}}}]
    given: dict[str, Any] = {"tools": tools, "variables": {"mood": f"{PAD}{PAD}"}}
    ids = tokenizer.encode_chat(chat, add_generation_prompt=True, **given)
    (span,) = tokenizer.images_in(ids, chat, 0)
    assert ids.count(tokenizer.token_to_id(PAD)) == span.length == 9
    assert tokenizer.decode(ids).count(PAD) == 9 + 5, "what was spelled is there, as text"
    assert tools[0]["function"] == {"name": PAD, "parameters": {PAD: f"a {PAD}"}}


def test_pictures_of_three_turns_stand_where_they_were_shown(tokenizer: SeeingTokenizer) -> None:
    limits = Limits(max_turns=9, max_turn_tokens=9, max_context_tokens=999)
    builder = TurnBuilder(tokenizer, limits, task_id="t", group_id="g", rollout_id="r")
    levels = [10, 20, 30, 10]
    first, second, third, again = (image(tokenizer, level) for level in levels)
    builder.start([told("user", first, text("and"), second)])
    said = Output(ids=[40, END], logps=[-0.5, -0.1], versions=[0, 0])
    builder.append_action(said)
    assert builder.append_observation([told("user", text("look"), third)])
    builder.append_action(said)
    assert builder.append_observation([told("tool", text("a page"), again)])
    builder.append_action(said)
    rollout = builder.close(0.0)
    pad, opens = tokenizer.token_to_id(PAD), tokenizer.token_to_id("<|vision_start|>")
    starts = [place + 1 for place, one in enumerate(rollout.tokens) if one == opens]
    assert [span.start for span in rollout.images] == starts
    assert {span.length for span in rollout.images} == {9}
    assert rollout.tokens.count(pad) == 36
    keys = [span.key for span in rollout.images]
    assert keys[0] == keys[3]
    assert len(set(keys)) == 3


@pytest.mark.parametrize(
    ("withheld", "is_grey"),
    [("", [False] * 3), ("first picture", [True, False, False]), ("pictures", [True] * 3)],
)
def test_withheld_pictures_are_grey_and_as_large(
    tokenizer: SeeingTokenizer, withheld: Any, is_grey: list[bool]
) -> None:
    """A chat has as many tokens, at the same places; the tower is given grey: 128 of 255."""
    builder = TurnBuilder(
        tokenizer.hiding(withheld),
        Limits(max_turns=9, max_turn_tokens=9, max_context_tokens=999),
        **{"task_id": "t", "group_id": "g", "rollout_id": "r"},
    )
    wide = write_png(np.full((20, 80, 3), 3, np.uint8))
    pictures = [{"type": "image", "sha256": tokenizer.store.add(wide)}]
    pictures += [image(tokenizer, level) for level in (10, 20)]
    builder.start([told("user", *pictures[:2])])
    builder.append_action(Output(ids=[40, END], logps=[-0.5, -0.1], versions=[0, 0]))
    assert builder.append_observation([told("user", pictures[2])])
    images = builder.close(0.0).images
    store = tokenizer.store
    for one, picture, grey in zip(images, pictures, is_grey, strict=True):
        ready = store.ready(picture["sha256"])
        assert (one.length, one.grid) == (ready.num_tokens, ready.grid)
        assert (one.sha256 == picture["sha256"]) is not grey
        assert bool((store.ready(one.sha256).pixels == 128).all()) is grey
    assert tokenizer.hidden == "", "that of others is left alone"


def test_the_first_picture_is_hidden_wherever_it_comes(tokenizer: SeeingTokenizer) -> None:
    """By a tool, behind an opening of text; and once more where a context begins anew with it."""
    hiding = tokenizer.hiding("first picture")
    limits = Limits(max_turns=9, max_turn_tokens=9, max_context_tokens=999)
    builder = TurnBuilder(hiding, limits, task_id="t", group_id="g", rollout_id="r")
    builder.start([told("user", text("look"))])
    for level in (10, 20):
        builder.append_action(Output(ids=[40, END], logps=[-0.5, -0.1], versions=[0, 0]))
        assert builder.append_observation([told("tool", image(tokenizer, level))])
    shown = [image(tokenizer, level)["sha256"] for level in (10, 20)]
    first, second = builder.close(0.0).images
    assert first.sha256 not in shown and second.sha256 == shown[1]
    anew = [told("user", image(tokenizer, 10), image(tokenizer, 20))]
    ids = hiding.encode_chat(anew, add_generation_prompt=True)
    assert [one.sha256 for one in hiding.images_in(ids, anew, 0)] == [first.sha256, shown[1]]


def test_what_does_not_fit_leaves_neither_tokens_nor_a_picture(tokenizer: SeeingTokenizer) -> None:
    """At every limit within the observation: all of it, or nothing."""
    shown = [told("user", text("x"), image(tokenizer, 1)), told("user", image(tokenizer, 2))]
    outcomes = set()
    for most in range(18, 45):
        limits = Limits(max_turns=9, max_turn_tokens=9, max_context_tokens=most)
        builder = TurnBuilder(tokenizer, limits, task_id="t", group_id="g", rollout_id="r")
        builder.start([shown[0]])
        builder.append_action(Output(ids=[END], logps=[-0.5], versions=[0]))
        fits = builder.append_observation([shown[1]])
        rollout = builder.close(0.0)
        assert len(rollout.images) == 1 + fits
        assert rollout.tokens.count(tokenizer.token_to_id(PAD)) == 9 * (1 + fits)
        outcomes.add(fits)
    assert outcomes == {True, False}


def test_a_template_that_leaves_a_picture_out_is_an_error(folder: Path, tmp_path: Path) -> None:
    plain = "{% for m in messages %}<usr>{{ m['content'] | length }}{% endfor %}<bot>"
    tokenizer = with_template(folder, tmp_path, plain)
    with pytest.raises(ValueError, match=r"0 placeholders .* for 1 pictures"):
        tokenizer.encode_chat([told("user", image(tokenizer, 3))], add_generation_prompt=True)


def test_parts_of_other_kinds_are_refused(tokenizer: SeeingTokenizer) -> None:
    for part in ({"type": "video", "video": "x"}, {"type": "image", "url": "http://x"}):
        with pytest.raises(ValueError, match="a part of type"):
            tokenizer.encode_chat([told("user", part)], add_generation_prompt=True)
