"""Pictures and the limits of a context: all of one, or nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from agent_doubles import output_of
from seer import Seer, png
from tiled_chats import chat_of, tiling_tokenizer

from nanoinfer.http.api_error import ApiError
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.conversation import picture_line
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.limits import Limits
from nanorl.agents.tokens import PromptTooLongError, TurnBuilder
from nanorl.envs.images import with_text
from nanorl.types import Status


@pytest.fixture(scope="module")
def seer(tmp_path_factory: pytest.TempPathFactory) -> Seer:
    return Seer.make(tmp_path_factory.mktemp("seer"))


def part(seer: Seer, level: int) -> dict[str, str]:
    return {"type": "image", "sha256": seer.tokenizer.store.add(png(level))}


def user(*parts: Any) -> list[Any]:
    return [{"role": "user", "content": list(parts)}]


def said(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def builder_of(seer: Seer, **limits: int) -> TurnBuilder:
    given = {"max_context_tokens": 300, "max_turn_tokens": 8, **limits}
    return TurnBuilder(seer.tokenizer, Limits(**given), task_id="t", group_id="g", rollout_id="r")


def output(*ids: int) -> Output:
    return Output(
        ids=list(ids), logps=[-1.0] * len(ids), versions=[0] * len(ids), finish_reason="stop"
    )


@pytest.mark.parametrize(
    ("limits", "wrong"),
    [
        ({"max_images": 1}, "2 pictures of 18 tokens, max_images is 1"),
        ({"max_image_tokens": 17}, "2 pictures of 18 tokens, max_image_tokens is 17"),
    ],
)
def test_a_prompt_of_too_many_pictures_is_refused(
    seer: Seer, limits: dict[str, int], wrong: str
) -> None:
    opening = user(part(seer, 10), part(seer, 20))
    builder = builder_of(seer, **limits)
    with pytest.raises(PromptTooLongError, match=f"task 't': its prompt shows {wrong}"):
        builder.start(opening)
    assert not builder.images and not builder.num_tokens
    builder_of(seer, max_images=2, max_image_tokens=18).start(opening)


@pytest.mark.parametrize("limits", [{"max_images": 2}, {"max_image_tokens": 26}])
@pytest.mark.parametrize("ends", [True, False])
def test_a_picture_too_many_leaves_neither_tokens_nor_spans(
    seer: Seer, limits: dict[str, int], ends: bool
) -> None:
    builder = builder_of(seer, **limits)
    builder.start(user(part(seer, 10)))
    eos = min(seer.tokenizer.eos_ids)
    builder.append_action(output(40, 41, *([eos] if ends else [])))
    assert builder.append_observation(user(said("and"), part(seer, 20)))
    builder.append_action(output(42, *([eos] if ends else [])))
    before = builder.prompt_ids, list(builder.images), list(builder.spans)
    assert not builder.append_observation(user(said("and"), part(seer, 30)))
    assert (builder.prompt_ids, builder.images, builder.spans) == before
    rollout = builder.close(0.0)
    assert rollout.status is Status.TRUNCATED_CONTEXT and len(rollout.images) == 2
    builder = builder_of(seer, **limits)
    builder.start(user(part(seer, 10)))
    builder.append_action(output(40, 41))
    assert not builder.append_observation(user(part(seer, 20), part(seer, 30)))
    assert len(builder.images) == 1, "one of the two would have fitted"


@pytest.fixture
def tiling(tmp_path: Path) -> Any:
    return tiling_tokenizer(tmp_path)


def test_a_picture_in_tiles_is_one_picture_of_a_context(tiling: Any) -> None:
    """Two of them, of five tiles and of three, four tokens each."""
    opening = chat_of(tiling, (64, 64), (20, 64))

    def opened(**limits: int) -> TurnBuilder:
        sizes = {"max_context_tokens": 300, "max_turn_tokens": 8, **limits}
        builder = TurnBuilder(tiling, Limits(**sizes), task_id="t", group_id="g", rollout_id="r")
        builder.start(opening)
        return builder

    assert len(opened(max_images=2, max_image_tokens=32).images) == 8
    for limits in ({"max_images": 1}, {"max_image_tokens": 31}):
        with pytest.raises(PromptTooLongError, match="shows 2 pictures of 32 tokens"):
            opened(**limits)


class SaysNothing:
    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        return output_of([0])


def test_a_picture_in_tiles_is_one_picture_of_a_call(tiling: Any) -> None:
    chat = chat_of(tiling, (64, 64), (20, 64))
    ids = tiling.encode_chat(chat, add_generation_prompt=True)
    params = SamplingParams(max_tokens=4, images=tuple(tiling.images_in(ids, chat, 0)))

    def asked(max_images: int) -> Recording:
        limits = Limits(max_context_tokens=300, max_images=max_images)
        recording = Recording(SaysNothing(), tiling, limits=limits, sampling=SamplingParams(seed=5))
        asyncio.run(recording.complete(ids, params))
        return recording

    assert asked(2).num_answers == 1
    with pytest.raises(ApiError, match="one prompt with 2 pictures of 32 tokens, max_images is 1"):
        asked(1)


def test_a_chats_line_for_a_picture_in_tiles_is_about_all_of_them(tiling: Any) -> None:
    parts = chat_of(tiling, (64, 64), (20, 64))[0]["content"][::2]
    lines = [picture_line(tiling, part["sha256"], number) for number, part in enumerate(parts, 1)]
    assert lines[0].startswith("[picture 1: 20 tokens, sha256 ")
    assert lines[1].startswith("[picture 2: 12 tokens, sha256 ")


def test_texts_lose_their_middle_and_pictures_nothing(seer: Seer) -> None:
    builder = builder_of(seer, max_observation_tokens=12)
    builder.start(user(said("look")))
    builder.append_action(output(40))
    assert builder.append_observation(user(said("7 " * 200), part(seer, 10), part(seer, 20)))
    assert [span.length for span in builder.images] == [9, 9]
    assert builder.num_tokens < 80 and builder.metrics["num_cut_observations"] == 1.0


def test_a_request_behind_pictures_is_a_text_of_its_own() -> None:
    picture = {"type": "image", "sha256": "9e"}
    (message,) = user(picture)
    assert with_text(message, "Sum up.")["content"] == [picture, said("\n\nSum up.")]
    assert with_text({"role": "tool", "content": "5"}, "Sum up.")["content"] == "5\n\nSum up."


@pytest.mark.parametrize("name", ["max_images", "max_image_tokens"])
def test_a_limit_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}=0: must be at least 1"):
        Limits(**{name: 0})
