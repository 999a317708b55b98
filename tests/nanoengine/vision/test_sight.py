"""How many pictures go through the tower at once, where no graph is kept."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor

from nanoengine.model.config import ModelConfig
from nanoengine.spans import ImageSpan
from nanoengine.vision import sight
from nanoengine.vision.seeing_transformer import SeeingTransformer
from nanoengine.vision.sight import Sight
from nanorl.envs.tasks.tiny_vision_model import tiny_vision_config

GRIDS = [(1, 2, 2), (1, 6, 6), (1, 2, 4), (1, 4, 4), (1, 4, 2), (1, 2, 2)]
"""Of 4, 36, 8, 16, 8 and 4 patches; 2 x 2 patches are a token."""
SPANS = [
    ImageSpan(start=0, length=grid[1] * grid[2] // 4, key=f"k{place}", grid=grid, sha256="s")
    for place, grid in enumerate(GRIDS)
]


class Noise:
    """Has pixels for every key."""

    def values(self, span: ImageSpan) -> Tensor:
        seed = torch.Generator().manual_seed(random.Random(span.key).randrange(2**31))
        patches = span.grid[1] * span.grid[2]
        return torch.randn(patches, 3 * 2 * 8 * 8, generator=seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_pass_has_few_patches_and_every_picture_the_same_bits(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    config: Any = ModelConfig.from_hf_dict(tiny_vision_config())
    model = SeeingTransformer(config, dtype)
    model.init_weights(0)
    sizes: list[list[int]] = []

    def noted(_: Any, given: tuple[Any, ...]) -> None:
        sizes.append([height * width for _, height, width in given[1]])

    model.visual.register_forward_pre_hook(noted)
    whole = Sight(model, Noise())
    monkeypatch.setattr(sight, "PASS_PATCHES", 24)
    some = Sight(model, Noise())
    rows = some.rows(placed(SPANS))
    assert sizes == [[4], [36], [8, 16], [8, 4]]
    monkeypatch.setattr(sight, "PASS_PATCHES", 1000)
    together = whole.rows(placed(SPANS))
    assert sizes[4:] == [[4, 36, 8, 16, 8, 4]]
    assert rows.features_PE.equal(together.features_PE)
    assert [one.equal(other) for one, other in zip(rows.deep, together.deep, strict=True)] == [True]


def placed(spans: list[ImageSpan]) -> list[sight.Placed]:
    """One after the other."""
    found, row = [], 0
    for span in spans:
        found.append(sight.Placed(span, 0, row, span.length))
        row += span.length
    return found
