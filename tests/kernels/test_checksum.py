"""Checksums: the same number on every path, and no damage of a kind that happens goes unseen."""

from __future__ import annotations

import pytest
import torch

from kernels.memory import all_finite
from kernels.transport.checksum import (
    checksum,
    checksums,
    checksums_and_finite,
    copy_large,
    copy_with_checksums,
)

MODULUS = 1 << 64


def by_definition(x: torch.Tensor) -> int:
    data = bytes(x.contiguous().view(-1).view(torch.uint8).tolist())
    data += bytes(-len(data) % 8)
    words = [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]
    total = sum(word * (2 * i + 1) for i, word in enumerate(words)) % MODULUS
    return total - MODULUS if total >= MODULUS // 2 else total


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("size", [0, 1, 7, 8, 63, 64, 65, 4095, 4096, 40_003])
def test_every_path_follows_the_definition(size: int, dtype: torch.dtype) -> None:
    values = torch.randn(size + 1, generator=torch.Generator().manual_seed(size)) * 50
    x = values.to(dtype)[1:]  # not aligned to words
    out = torch.empty_like(x)
    assert checksum(x) == copy_with_checksums([out], [x])[0] == by_definition(x)
    assert torch.equal(out, x)


@pytest.mark.usefixtures("cpu_path")
def test_threads_and_blocks_change_nothing() -> None:
    x = torch.randn(1 << 18)
    before = torch.get_num_threads()
    try:
        sums = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            sums.append(checksum(x))
    finally:
        torch.set_num_threads(before)
    assert sums == [by_definition(x)] * 3


@pytest.mark.usefixtures("cpu_path")
def test_many_tensors_at_once_are_each_as_alone() -> None:
    sizes = (5, 0, 40_003, 1, 8192, 0, 70_000)
    xs = [torch.randn(size).to(kind) for size in sizes for kind in (torch.float32, torch.bfloat16)]
    outs = [torch.zeros_like(x) for x in xs]
    assert copy_with_checksums(outs, xs) == checksums(xs) == [by_definition(x) for x in xs]
    assert all(torch.equal(out, x) for out, x in zip(outs, xs, strict=True))
    assert checksums([]) == all_finite([]) == copy_with_checksums([], []) == []


@pytest.mark.usefixtures("cpu_path")
def test_damage_changes_the_checksum() -> None:
    x = torch.randint(0, 256, (3000,), dtype=torch.uint8)
    good = checksum(x)
    for place in range(0, 3000, 17):
        for bit in range(8):
            bad = x.clone()
            bad[place] ^= 1 << bit
            assert checksum(bad) != good
    swapped = torch.cat([x[1600:], x[:1600]])
    zeroed = x.clone()
    zeroed[1024:2048] = 0
    late = torch.cat([x[8:], x[:8]])
    assert len({good, checksum(swapped), checksum(zeroed), checksum(late)}) == 4


@pytest.mark.usefixtures("cpu_path")
def test_views_with_gaps_are_summed_as_if_they_were_whole() -> None:
    x = torch.randn(40, 30)
    part, out = x[:, 5:20], torch.zeros(40, 30)[:, 5:20]
    assert checksum(part) == checksum(part.clone()) == copy_with_checksums([out], [part])[0]
    assert torch.equal(out, part)


def test_a_copy_between_unlike_tensors_is_refused() -> None:
    with pytest.raises(ValueError, match="must be alike"):
        copy_with_checksums([torch.empty(4)], [torch.empty(4, dtype=torch.bfloat16)])


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_one_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype) -> None:
    x = torch.randn(20_003).to(dtype)
    x[7], x[8], x[9] = torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0
    assert all_finite([x, x[:0]]) == [True, True]
    for bad in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        for place in (0, 8191, 8192, 16_384, 20_002):
            damaged = x.clone()
            damaged[place] = bad
            assert all_finite([x, damaged, x]) == [True, False, True]
            found = checksums_and_finite([x, damaged])
            assert found == [(checksum(x), True), (checksum(damaged), False)]


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("into", [torch.float32, torch.bfloat16])
def test_a_large_copy_is_a_copy(into: torch.dtype, offset: int) -> None:
    x = torch.randn(600_003)[offset:]
    out = torch.zeros(600_003, dtype=into)[offset:]
    copy_large([out], [x])
    assert torch.equal(out, x.to(into))
    gaps = torch.zeros(len(x), 2)[:, 0]
    copy_large([gaps], [x])
    assert torch.equal(gaps, x)
