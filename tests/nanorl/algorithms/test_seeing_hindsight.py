"""A teacher with hindsight sees what the policy saw, in its opening and in its turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nanoengine.spans import ImageSpan, content_ids
from nanoengine.vision.png import write_png
from nanoengine.vision.seeing_tokenizer import SeeingTokenizer, seeing_tokenizer
from nanorl.algorithms.hindsight import HindsightWriter
from nanorl.algorithms.recipes import named_spec
from nanorl.algorithms.self_distillation import teacher_samples
from nanorl.batching import samples_of
from nanorl.envs.base import Opening
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model
from nanorl.observability.store import RolloutStore
from nanorl.rollout_json import from_json, to_json
from nanorl.task import Task
from nanorl.types import Rollout, TurnSpan

TASK = Task("Which side?", answer="left")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> SeeingTokenizer:
    folder = tmp_path_factory.mktemp("seeing")
    return seeing_tokenizer(build_tiny_vision_model(folder / "model"), folder / "pictures")


def shown(tokenizer: SeeingTokenizer, level: int) -> dict[str, str]:
    data = write_png(np.full((48, 48, 3), level, np.uint8))
    return {"type": "image", "sha256": tokenizer.store.add(data)}


def opening(tokenizer: SeeingTokenizer, level: int) -> Opening:
    """A message behind that of the user, too: what is shown stands before and after the text."""
    parts: list[Any] = [shown(tokenizer, level), {"type": "text", "text": "Which side?"}]
    last: Any = {"role": "tool", "content": [shown(tokenizer, 7), {"type": "text", "text": "map"}]}
    return Opening(messages=[{"role": "user", "content": parts}, last])


def played(tokenizer: SeeingTokenizer, level: int) -> Rollout:
    """Two turns, with a picture between them."""
    messages = opening(tokenizer, level).messages
    prompt = tokenizer.encode_chat(messages, add_generation_prompt=True)
    reply: Any = [{"role": "user", "content": [shown(tokenizer, 90)]}]
    seen = tokenizer.encode_chat(reply, add_generation_prompt=True)
    said = tokenizer.encode("go left")
    start, end = len(prompt), len(prompt) + len(said)
    tokens = [*prompt, *said, *seen, *said]
    mask = [0] * start + [1] * len(said) + [0] * len(seen) + [1] * len(said)
    return Rollout(
        task_id="t", group_id="g", rollout_id="g-m0", tokens=tokens, loss_mask=mask,
        logps=[-0.5 * one for one in mask], versions=[one - 1 for one in mask],
        images=[
            *tokenizer.images_in(prompt, messages, 0), *tokenizer.images_in(seen, reply, end)
        ],
        turn_spans=[
            TurnSpan(action_start=start, action_end=end, observation_end=end + len(seen)),
            TurnSpan(
                action_start=end + len(seen), action_end=len(tokens), observation_end=len(tokens)
            ),
        ],
    )  # fmt: skip


def written(tokenizer: SeeingTokenizer, rollout: Rollout, level: int) -> Rollout:
    writer = HindsightWriter(named_spec("sdft"), tokenizer)
    writer.openings[rollout.rollout_id] = opening(tokenizer, level)
    writer.write(TASK, [rollout])
    return rollout


def test_the_teacher_sees_every_picture_at_its_new_place(tokenizer: SeeingTokenizer) -> None:
    rollout = written(tokenizer, played(tokenizer, 10), 10)
    assert "This is a right solution:" in tokenizer.decode(rollout.hindsight)
    (own,) = samples_of([rollout], version=0)
    (sample,) = teacher_samples([rollout], [own])
    by = len(sample.tokens) - len(rollout.tokens)
    before, behind, between = rollout.images
    first, second, third = sample.images
    assert (first.key, first.start) == (before.key, before.start)
    assert (second.key, second.start) == (behind.key, behind.start + by)
    assert (third.key, third.start) == (between.key, between.start + by)
    assert len({one.key for one in sample.images}) == 3 and by > 10
    tail = len(rollout.tokens) - behind.start
    theirs, ours = (content_ids(one.tokens, one.images) for one in (sample, rollout))
    assert theirs[-tail:] == ours[-tail:]


def test_another_picture_in_the_opening_is_another_opening(tokenizer: SeeingTokenizer) -> None:
    """Equal tokens: a teacher would judge what somebody else saw."""
    rollout = written(tokenizer, played(tokenizer, 10), 11)
    assert (rollout.hindsight, rollout.hindsight_images) == ([], [])


def test_hindsight_with_pictures_is_kept_and_travels(
    tokenizer: SeeingTokenizer, tmp_path: Path
) -> None:
    rollout = written(tokenizer, played(tokenizer, 10), 10)
    assert [type(one) for one in rollout.hindsight_images] == [ImageSpan] * 2
    assert from_json(to_json(rollout)) == rollout
    with RolloutStore(tmp_path / "r.sqlite") as store:
        store.add_group([rollout], step=0, version=0)
        assert store.get("g-m0") == rollout
