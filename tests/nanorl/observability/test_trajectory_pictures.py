"""Messages that are read back out of tokens have their pictures as parts, and open none."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from agent_doubles import output_of
from seeing_runs import (
    BLUE,
    GREEN,
    LIMITS,
    RED,
    SPELLED,
    coloured,
    filled_run,
    played,
    seeing_run,
    sha_of,
    with_hash,
)

from nanoengine.sft.chats import chat_sample
from nanoengine.text.chat_template import Message
from nanoengine.text.tokenizer import ChatTokenizer
from nanoengine.vision.seeing_tokenizer import SeeingTokenizer, seeing_tokenizer
from nanoinfer.chat.hermes import HermesParser
from nanorl import cli
from nanorl.agents.tokens import TurnBuilder
from nanorl.envs.images import with_pictures
from nanorl.observability.trajectories.base import (
    TrajectoryReader,
    TrajectorySequence,
    _results,
)
from nanorl.shown_pictures import RunPictures, pieces, told
from nanorl.types import Rollout

# As Qwen3-VL's: tools in the system message, results as what a user says.
QWEN_VL = (
    "{% macro said(content) %}{% if content is string %}{{ content }}{% else %}"
    "{% for part in content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endmacro %}"
    "{% if tools %}<usr>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}<bot>{{ said(m.content) }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "</tool_call>{% endfor %}<eos>"
    "{% elif m.role == 'tool' %}<out>{{ said(m.content) }}"
    "{% else %}<usr>{{ said(m.content) }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "page", "parameters": {"type": "object", "properties": {}}},
}
CALL = '<tool_call>{"name": "page", "arguments": {}}</tool_call>'


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> SeeingTokenizer:
    return seeing_run(tmp_path_factory.mktemp("runs") / "seeing")[1]


def read(tokenizer: ChatTokenizer, rollout: Rollout, parsers: Sequence[Any] = ()) -> Any:
    return TrajectoryReader(tokenizer, parsers).read(rollout, step=0, phase="rl").main


def image(colour: tuple[int, int, int], number: int) -> Message:
    return {"type": "image", "sha256": sha_of(coloured(colour)), "number": number}


def text(words: str) -> Message:
    return {"type": "text", "text": words}


def test_pictures_are_parts_where_they_stood(seeing: SeeingTokenizer) -> None:
    opening = ["<|vision_start|>", coloured(RED), coloured(GREEN), " and <|image_pad|>"]
    rollout = played(seeing, "r", opening, ("hm", ["Then:", coloured(BLUE)]), ("yes", []))
    main: TrajectorySequence = read(seeing, rollout)
    assert main.chat.is_exact, "the template makes the same text of it again"
    assert main.messages() == [
        {
            "role": "user",
            "content": [
                text("<|vision_start|>"),  # what somebody wrote, not what the template did
                image(RED, 1),
                image(GREEN, 2),
                text(" and <|image_pad|>"),
            ],
        },
        {"role": "assistant", "content": "hm"},
        {"role": "user", "content": [text("Then:"), image(BLUE, 3)]},
        {"role": "assistant", "content": "yes"},
    ]
    third = main.pictures[2]
    line = f"[picture 3: 48 x 48, 9 tokens, sha256 {sha_of(coloured(BLUE))[:12]}]"
    assert (
        third.line == line and main.text_of(main.turns[0].further[0]["content"]) == f"Then:{line}"
    )


def test_a_missing_picture_is_read_alike(seeing: SeeingTokenizer) -> None:
    rollout = played(seeing, "r", ["Which?", coloured(RED)], ("r", []))
    for name in ("0" * 64, "../x", ""):
        main = read(seeing, with_hash(rollout, 0, name))
        assert main.chat.is_exact, "no picture is opened to read a chat"
        assert main.chat.messages[0]["content"][1]["sha256"] == name


@pytest.mark.parametrize("grid", [(), (1, 2), (1, "a" * 9, 2), (1, 10**30, 1), (1, -1, 2)])
def test_a_grid_that_lies_gives_no_size(seeing: SeeingTokenizer, grid: Any) -> None:
    rollout = with_hash(played(seeing, "r", [coloured(RED)], ("r", [])), 0, "0" * 64, grid=grid)
    assert read(seeing, rollout).pictures[0].line == "[picture 1: 9 tokens, sha256 000000000000]"


def test_results_of_tools_have_theirs_where_the_template_lists_the_tools(
    seeing: SeeingTokenizer, tmp_path: Path
) -> None:
    seeing.save(tmp_path)
    tools = SeeingTokenizer.from_folder(tmp_path)
    tools = SeeingTokenizer(
        tools._tokenizer, eos_ids=seeing.eos_ids, chat_template=QWEN_VL, config=tools._config
    )
    tools.store = seeing.store
    builder = TurnBuilder(tools, LIMITS, task_id="t", group_id="g", rollout_id="r")
    asked = with_pictures(["What is on page 1?", coloured(RED)], tools)
    builder.start(asked, [TOOL])
    builder.append_action(output_of([*tools.encode(CALL + CALL), *tools.eos_ids]))
    results = [
        {"role": "tool", "content": [{"type": "text", "text": "one"}, image_part(tools, GREEN)]},
        {"role": "tool", "content": "two"},
    ]
    assert builder.append_observation(results)
    builder.append_action(output_of([*tools.encode("green"), *tools.eos_ids]))
    main = read(tools, builder.close(1.0), [HermesParser()])
    assert main.chat.are_tools_listed and main.chat.tools == [TOOL]
    assert main.chat.messages[-1]["content"][1] == image(RED, 1)
    first, second = main.turns[0].calls
    assert first.result == [text("one"), image(GREEN, 2)] and second.result == "two"


def image_part(tokenizer: SeeingTokenizer, colour: tuple[int, int, int]) -> Message:
    return {"type": "image", "sha256": tokenizer.store.add(coloured(colour).data())}


def test_pieces_of_a_stretch_hold_every_token_once(seeing: SeeingTokenizer) -> None:
    rollout = played(seeing, "r", ["a", coloured(RED), coloured(GREEN), "b"], ("r", []))
    first, second = rollout.images
    known = RunPictures.of(seeing)
    for start in range(len(rollout.tokens)):
        for end in range(start, len(rollout.tokens) + 1):
            ids, shown = [], []
            for piece in pieces(rollout, start, end, known):
                if isinstance(piece, list):
                    assert piece
                    ids += piece
                else:
                    shown.append(piece.number)
            inside = set(range(first.start, first.end)) | set(range(second.start, second.end))
            assert ids == [rollout.tokens[i] for i in range(start, end) if i not in inside]
            starts = [first.start, second.start]
            assert shown == [n for n, at in enumerate(starts, 1) if start <= at < end]


def test_text_without_pictures_is_decoded_as_before(seeing: SeeingTokenizer) -> None:
    rollout = replace(played(seeing, "r", ["a", coloured(RED)], ("r", [])), images=[])
    asked: list[list[int]] = []

    def decode(ids: list[int]) -> str:
        asked.append(ids)
        return "text"

    assert told(rollout, 1, 5, decode) == "text" and asked == [rollout.tokens[1:5]]


def exported(run: Path, to: str, *words: str) -> Path:
    out = run / f"out-{to}"
    assert cli.main(["export", str(run), "--to", to, "--out", str(out), *words]) == 0
    return out


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return filled_run(tmp_path_factory.mktemp("runs") / "filled")[0]


def test_atif_carries_the_files(run: Path) -> None:
    atif = pytest.importorskip("atif")
    for words in ((), ("--force",)):  # a folder with its own pictures is replaced
        folder = exported(run, "atif", *words)
    read = {file.stem: json.loads(file.read_text("utf-8")) for file in folder.glob("*.json")}
    for data in read.values():
        assert atif.Trajectory.model_validate(data).to_json_dict() == data
    before, seen, after = read["right"]["steps"][0]["message"]
    assert (before["text"], after["text"]) == ("Look:", "Which?")
    assert seen["source"]["media_type"] == "image/png"
    assert (folder / seen["source"]["path"]).read_bytes() == coloured(RED).data()
    [_, _, shown, _] = read["right"]["steps"]
    assert (folder / shown["message"][0]["source"]["path"]).read_bytes() == coloured(GREEN).data()
    copied = {file.name for file in (folder / "pictures").iterdir()}
    assert copied == {f"{sha_of(coloured(one))}.png" for one in (RED, GREEN, BLUE)}
    [line] = read["missing"]["steps"][0]["message"]
    assert line["text"].startswith("[picture 1: 48 x 48, 9 tokens, sha256 ")
    hostile = read["hostile"]["steps"][0]["message"]
    assert [part["type"] for part in hostile] == ["text"] * 6
    (folder / "pictures" / "theirs.txt").write_text("x")
    assert cli.main(["export", str(run), "--to", "atif", "--out", str(folder), "--force"]) == 2


def test_jsonl_and_parquet_name_pictures_alike(run: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    rows = {
        row["rollout_id"]: row
        for row in map(json.loads, exported(run, "jsonl").read_text("utf-8").splitlines())
    }
    content = rows["right"]["messages"][0]["content"]
    assert content == [text("Look:"), image(RED, 1), text("Which?")]
    assert rows["right"]["images"][0]["sha256"] == content[1]["sha256"]
    table = parquet.read_table(exported(run, "parquet")).to_pylist()
    columns = {row["rollout_id"]: row for row in table}
    assert set(columns) == set(rows)
    assert json.loads(columns["right"]["messages"][0]["content"]) == content
    assert columns["right"]["messages"][1]["content"] == "hm"


def test_spans_name_the_files_of_pictures(run: Path) -> None:
    pytest.importorskip("opentelemetry.sdk")
    written = exported(run, "otel").read_text("utf-8")
    assert "image_pad" not in written.replace(SPELLED, "")
    messages = next(
        json.loads(attribute["value"]["stringValue"])
        for line in written.splitlines()
        for resource in json.loads(line)["resourceSpans"]
        for scope in resource["scopeSpans"]
        for span in scope["spans"]
        for attribute in span["attributes"]
        if attribute["key"] == "gen_ai.input.messages" and "Look:" in str(attribute)
    )
    assert messages[0]["parts"] == [
        {"type": "text", "content": "Look:"},
        {"type": "uri", "modality": "image", "uri": f"pictures/{sha_of(coloured(RED))}"},
        {"type": "text", "content": "Which?"},
    ]


def test_an_exported_chat_is_read_again_with_its_pictures(run: Path) -> None:
    rows = map(json.loads, exported(run, "jsonl", "--force").read_text("utf-8").splitlines())
    row = next(one for one in rows if one["rollout_id"] == "right")
    tokenizer = seeing_tokenizer(run / "model-trained", run / "pictures")
    sample = chat_sample(tokenizer, row["messages"], row["tools"] or None)
    assert sample.tokens == row["tokens"]
    assert [asdict(span) for span in sample.images] == [
        {**span, "grid": tuple(span["grid"])} for span in row["images"]
    ]
    assert sample.loss_mask == row["loss_mask"]
    with pytest.raises(ValueError, match="a part of type 'image' in a message of 'user'"):
        chat_sample(ChatTokenizer.from_folder(run / "model-trained"), row["messages"])


def test_pictures_behind_results_that_share_a_message_are_the_last_one_s() -> None:
    both = "<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response>"
    reply = [{"role": "user", "content": [text(both), image(RED, 1)]}]
    assert _results(2, reply) == (["a", [text("b"), image(RED, 1)]], [])
    assert _results(3, reply) == ([None] * 3, reply)
