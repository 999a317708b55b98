"""Masters in two halves, against their bits in NumPy: what comes back, and the weight beside it."""

import numpy as np
import pytest
import torch

from kernels import fused_adamw_
from kernels.torch.split_master import join_master, split_master_

UPPER = [0x0000, 0x8000, 0x0001, 0x8001, 0x007F, 0x0080, 0x3F80, 0x3F81, 0xBF80, 0xBF81, 0x7F7E,
         0x7F7F, 0xFF7F]  # fmt: skip
"""Zeros, the smallest and the largest numbers below the normal ones, the smallest normal one, one
and its neighbour, the largest, of either sign."""


def every_master() -> np.ndarray:
    """All lower halves behind each of the upper ones, and the infinities: uint32."""
    lower = np.arange(2**16, dtype=np.uint32)
    finite = [(np.uint32(upper) << np.uint32(16)) + lower for upper in UPPER]
    return np.concatenate([*finite, np.array([0x7F800000, 0xFF800000], np.uint32)])


def split(bits: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    master = torch.from_numpy(bits.view(np.float32).copy())
    weight = torch.empty(len(bits), dtype=torch.bfloat16)
    remainder = torch.empty(len(bits), dtype=torch.int16)
    split_master_(weight, remainder, master)
    return weight, remainder


def bits_of(x: torch.Tensor) -> np.ndarray:
    return x.view(torch.int32).numpy().view(np.uint32)


def test_every_master_comes_back_but_the_one_half_way_above_an_even_weight():
    bits = every_master()
    weight, remainder = split(bits)
    upper, lower = bits >> np.uint32(16), bits & np.uint32(0xFFFF)
    rounded = upper + ((lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1)))
    assert np.array_equal(weight.view(torch.int16).numpy().view(np.uint16), rounded)
    is_moved = (lower == 0x8000) & (upper % 2 == 0)
    assert is_moved.sum() == sum(x % 2 == 0 for x in UPPER)
    whole = join_master(weight, remainder)
    assert np.array_equal(bits_of(whole), bits - is_moved)


def test_to_split_again_changes_nothing():
    weight, remainder = split(every_master())
    again = split(bits_of(join_master(weight, remainder)))
    assert torch.equal(again[1], remainder)
    assert torch.equal(again[0].view(torch.int16), weight.view(torch.int16))


def test_a_nan_stays_one():
    bits = np.array([0x7F800001, 0xFF800001, 0x7FC00000, 0xFFFFFFFF], np.uint32)
    weight, remainder = split(bits)
    assert weight.isnan().all() and join_master(weight, remainder).isnan().all()


@pytest.mark.usefixtures("cpu_path")
def test_a_step_of_zero_leaves_every_master_as_it_is():
    weight, remainder = split(every_master()[:-2])
    before = weight.clone(), remainder.clone()
    zeros = [torch.zeros(len(weight)) for _ in range(3)]
    fused_adamw_(
        [weight], [zeros[0]], [zeros[1]], [zeros[2]], None, remainders=[remainder], lr=0.0,
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, step=1,
    )  # fmt: skip
    is_zero = before[0] == 0  # -0 + 0 is 0
    assert torch.equal(weight[~is_zero], before[0][~is_zero])
    assert torch.equal(join_master(weight, remainder), join_master(*before))


@pytest.mark.usefixtures("cpu_path")
def test_a_step_that_ends_half_way_between_two_weights_by_hand():
    """With betas of 0 the step is lr times the gradient's sign: from 1 up by half a unit of bf16,
    where rounding goes down to the even 1; from its odd neighbour up, where it goes up."""
    start, half = torch.tensor([1.0, 1 + 2**-7]), 2**-8
    weight, remainder = start.bfloat16(), torch.zeros(2, dtype=torch.int16)
    moments = torch.zeros(2), torch.zeros(2)
    fused_adamw_(
        [weight], [torch.tensor([-4.0, -4.0])], [moments[0]], [moments[1]], None,
        remainders=[remainder], lr=half, betas=(0.0, 0.0), eps=1e-30, weight_decay=0.0, step=1,
    )  # fmt: skip
    assert weight.tolist() == [1.0, 1 + 2**-6]
    assert remainder.tolist() == [2**15 - 1, -(2**15)]
    assert join_master(weight, remainder).tolist() == [1 + half - 2**-23, 1 + 2**-7 + half]
