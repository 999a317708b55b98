"""Copy drills: every token with loss can be foreseen from the period before it."""

from __future__ import annotations

import random

import pytest

from nanorl.distributed.warm_start import copy_drill


def test_every_token_with_loss_occurred_one_period_before() -> None:
    rng = random.Random(0)
    for _ in range(200):
        ids, mask = copy_drill(rng, 512)
        period = mask.index(1)
        assert len(ids) == len(mask) <= 64
        assert 6 <= period <= 20 and sum(mask) >= period
        assert mask == [0] * period + [1] * (len(ids) - period)
        assert all(ids[i] == ids[i - period] for i in range(period, len(ids)))
        assert all(6 <= token < 512 for token in ids)  # 0 to 5 are the chat markers


def test_drills_cover_the_vocabulary_and_follow_the_seed() -> None:
    def seen(seed: int) -> list[int]:
        rng = random.Random(seed)
        return [token for _ in range(400) for token in copy_drill(rng, 512)[0]]

    assert set(seen(1)) == set(range(6, 512))
    assert seen(1) == seen(1) != seen(2)


def test_a_drill_without_room_to_repeat_is_refused() -> None:
    with pytest.raises(ValueError, match="num_tokens=30 is too short"):
        copy_drill(random.Random(0), 512, num_tokens=30)
