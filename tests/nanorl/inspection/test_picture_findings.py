"""What `nanorl check` says of pictures: templates that do not show them, contexts that are full."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from seeing_runs import GREEN, RED, coloured, played, seeing_run
from tiled_chats import chat_of, tiling_tokenizer

from nanoengine.vision.seeing_tokenizer import SeeingTokenizer
from nanorl.cli import main
from nanorl.envs.tasks.tiny_vision_model import CHAT_TEMPLATE, build_tiny_vision_model
from nanorl.inspection.doctor.model_check import check_model
from nanorl.inspection.doctor.picture_findings import context_finding, pictures_summary
from nanorl.options.run_config import RunConfig
from nanorl.types import Rollout

MARKS = "<|vision_start|><|image_pad|><|vision_end|>"
OPTIONS = ["--env", "look_back", "--env-args", "size=4", "num_moves=3", "--threads", "1"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision_model(tmp_path_factory.mktemp("seeing") / "model")


@pytest.fixture(scope="module")
def seeing(tmp_path_factory: pytest.TempPathFactory) -> SeeingTokenizer:
    return seeing_run(tmp_path_factory.mktemp("runs") / "seeing")[1]


def with_template(model: Path, template: str) -> Path:
    file = model / "tokenizer_config.json"
    config = json.loads(file.read_text()) | {"chat_template": template}
    file.write_text(json.dumps(config))
    return model


@pytest.mark.parametrize(
    ("old", "new", "name", "words"),
    [
        (MARKS, MARKS, None, ""),
        (MARKS, "<|image_pad|>", "picture_without_marks", "a<|image_pad|>b"),
        (MARKS, "<|image_pad|><|vision_end|>", "picture_without_marks", "a<|image_pad|><|vision"),
        (MARKS, "", "template_without_pictures", "prints 0 placeholders"),
        (MARKS, 2 * MARKS, "template_without_pictures", "prints 2 placeholders"),
        ("{% if content is string %}", "{% if true %}", "template_without_pictures", "prints 0 pl"),
    ],
)
def test_a_template_has_to_print_a_picture_between_its_marks(
    model: Path, old: str, new: str, name: str | None, words: str
) -> None:
    found = check_model(with_template(model, CHAT_TEMPLATE.replace(old, new)))
    of_pictures = [one for one in found.findings if "picture" in one.name]
    assert [one.name for one in of_pictures] == ([name] if name else [])
    for one in of_pictures:
        assert words in one.seen and MARKS in one.remedy
        assert one.seen in found.text(), "people read it"


def test_a_context_has_to_hold_the_pictures_of_all_turns(seeing: SeeingTokenizer) -> None:
    turns = [("N", [coloured(GREEN)]), ("N", [coloured(RED)]), ("N", [])]
    rollout = played(seeing, "r", [coloured(RED)], *turns)
    # <usr> and nine tokens between two marks, and <bot>; a letter and <eos>; the same again
    opening, said, shown = 13, 2, 13
    assert [rollout.turn_spans[0].action_start, len(rollout.tokens)] == [13, 13 + 3 * 2 + 2 * 13]
    needed = opening + 8 * said + 7 * shown

    def config(most: int) -> RunConfig:
        plain = RunConfig()
        limits = replace(plain.agent, max_turns=8, max_context_tokens=most, max_turn_tokens=4)
        return replace(plain, agent=limits)

    assert context_finding([rollout], config(needed)) is None
    found = context_finding([rollout], config(needed - 1))
    assert found is not None and f"need about {needed} tokens" in found.seen
    assert f"--agent.max-context-tokens {needed}" in found.remedy
    text = played(seeing, "r", ["hi"], ("N", ["on"]), ("N", []))
    assert context_finding([text], config(9)) is None and pictures_summary([text]) == ""
    assert pictures_summary([rollout, text]).startswith("pictures: 1.5 a rollout, 9 tokens each, ")


def test_the_tokens_of_a_picture_are_those_of_its_tiles(tmp_path: Path) -> None:
    tiling = tiling_tokenizer(tmp_path)
    chat = chat_of(tiling, (64, 64), (20, 64))
    ids = tiling.encode_chat(chat, add_generation_prompt=False)
    images = tiling.images_in(ids, chat, 0)
    nothing = {"loss_mask": [0] * len(ids), "logps": [0.0] * len(ids), "versions": [-1] * len(ids)}
    rollout = Rollout(
        task_id="t", group_id="g", rollout_id="r", tokens=ids, images=images, **nothing
    )
    assert pictures_summary([rollout]).startswith("pictures: 2.0 a rollout, 12 to 20 tokens each, ")


def test_check_plays_with_pictures_and_says_what_they_take(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with_template(model, CHAT_TEMPLATE)
    assert main(["check", "--model", str(model), *OPTIONS]) == 0
    text = capsys.readouterr().out
    assert "9 tokens each, " in text and "sees    [picture 1: 48 x 48, 9 tokens, sha256 " in text
    assert "image_pad" not in text and not list(tmp_path.iterdir())
