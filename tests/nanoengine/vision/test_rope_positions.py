"""Positions of tokens among pictures: by hand, in pieces, and as transformers counts them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from nanoengine.spans import ImageSpan
from nanoengine.vision.rope_positions import merged_grid, rope_positions

IMAGE, START, END = 90, 91, 92


def grid_span(start: int, rows: int, columns: int) -> ImageSpan:
    """A picture of rows x columns tokens, each of 2 x 2 patches."""
    return ImageSpan(
        start=start, length=rows * columns, key="k", grid=(1, 2 * rows, 2 * columns), sha256="s"
    )


def test_a_tall_picture_by_hand() -> None:
    """Two texts, three rows of two, a text: the picture takes three positions, not six."""
    assert rope_positions(0, 9, [grid_span(2, 3, 2)]).tolist() == [
        [0, 0, 0], [1, 1, 1],
        [2, 2, 2], [2, 2, 3], [2, 3, 2], [2, 3, 3], [2, 4, 2], [2, 4, 3],
        [5, 5, 5],
    ]  # fmt: skip


def test_a_wide_picture_at_the_end_and_two_that_touch() -> None:
    assert rope_positions(0, 7, [grid_span(0, 1, 3), grid_span(3, 1, 3)]).tolist() == [
        [0, 0, 0], [0, 0, 1], [0, 0, 2],
        [3, 3, 3], [3, 3, 4], [3, 3, 5],
        [6, 6, 6],
    ]  # fmt: skip


def test_a_piece_has_the_positions_of_the_whole() -> None:
    rng = random.Random(5)
    for _ in range(200):
        images, at = [], 0
        for _ in range(rng.randint(0, 4)):
            at += rng.randint(0, 3)
            images.append(grid_span(at, rng.randint(1, 4), rng.randint(1, 4)))
            at = images[-1].end
        whole = rope_positions(0, at + 6, images)
        first = rng.randrange(at + 6)
        end = rng.randint(first + 1, at + 6)
        assert (rope_positions(first, end, images) == whole[first:end]).all()


def test_a_grid_that_makes_no_such_number_of_tokens_is_refused() -> None:
    assert merged_grid(grid_span(0, 1, 4)) == (1, 4)
    wrong = ImageSpan(start=3, length=5, key="k", grid=(1, 4, 6), sha256="s")
    with pytest.raises(ValueError, match="at token 3 has 5 tokens"):
        merged_grid(wrong)


def test_they_are_those_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
    configuration = pytest.importorskip("transformers.models.qwen3_vl.configuration_qwen3_vl")
    config = configuration.Qwen3VLConfig(
        text_config={
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
            "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 100,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]
            },
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2,
            "out_hidden_size": 16, "num_position_embeddings": 16, "deepstack_visual_indexes": [],
        },
        image_token_id=IMAGE, vision_start_token_id=START, vision_end_token_id=END,
        video_token_id=93,
    )  # fmt: skip
    model = modeling.Qwen3VLModel(config)
    rng = random.Random(7)
    for _ in range(20):
        ids: list[int] = []
        images: list[ImageSpan] = []
        for _ in range(rng.randint(1, 3)):
            ids += [*(rng.randrange(80) for _ in range(rng.randint(0, 4))), START]
            images.append(grid_span(len(ids), rng.randint(1, 5), rng.randint(1, 5)))
            ids += [*[IMAGE] * images[-1].length, END]
        ids += [7, 8]
        grids = torch.tensor([span.grid for span in images])
        kinds = torch.tensor([[int(one == IMAGE) for one in ids]])
        theirs, _ = model.get_rope_index(
            torch.tensor([ids]), mm_token_type_ids=kinds, image_grid_thw=grids
        )
        ours = rope_positions(0, len(ids), images)
        assert np.array_equal(theirs[:, 0].T.numpy(), ours)
