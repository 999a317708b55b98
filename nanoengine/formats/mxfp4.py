"""MXFP4 checkpoints, widened as they are read: the form in which gpt-oss is published.

A matrix lies in groups of 32 numbers of a row. `NAME_blocks` [experts, rows, groups, 16] of bytes
holds two numbers each, the first in the low half, as sign, two bits of exponent and one of mantissa
(e2m1); `NAME_scales` [experts, rows, groups] holds the power of two that multiplies a group, plus
127 (e8m0). bf16 holds every such product exactly, the smallest ones as subnormal numbers, but for
those from 2^128 on, which have no place in it: a folder with one of them, or with the scale that
stands for NaN (255), is refused. Source: OCP Microscaling Formats (MX) v1.0.

Left out: to compute with such weights, and to write them: a model is saved in its own dtype. A
folder is widened whole before it is loaded, so that takes the memory of the bf16 weights once more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from kernels.memory import all_finite

_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_POSITIVE, *(-value for value in _POSITIVE))
_BIAS = 127  # of e8m0
_NAN_SCALE = 255
_LARGE_SCALE = 253  # 4 and 6 times 2^126 are more than bf16 has
_ENDINGS = ("_blocks", "_scales")


def widen_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """The matrices [experts, in, out] in bf16 from blocks [experts, out, in / 32, 16]. `ValueError`
    for numbers that bf16 does not have."""
    if blocks.dtype != torch.uint8 or scales.dtype != torch.uint8:
        raise ValueError(f"blocks, scales: {blocks.dtype}, {scales.dtype}; must be uint8 bytes")
    if blocks.dim() != 4 or blocks.shape[:-1] != scales.shape:
        raise ValueError(
            f"scales: shape {tuple(scales.shape)} must be blocks' {tuple(blocks.shape)} without "
            "its last dimension, [experts, rows, groups]"
        )
    # the two numbers of each byte side by side: one look-up a byte
    table = torch.tensor(_E2M1, dtype=torch.bfloat16)
    byte = torch.arange(256)
    pairs = torch.stack((table[byte & 15], table[byte >> 4]), -1)
    experts, rows, groups, num_bytes = blocks.shape
    out = torch.empty(experts, rows, groups * num_bytes * 2, dtype=torch.bfloat16)
    exponents = scales.to(torch.int32).sub_(_BIAS).unsqueeze(-1)
    for expert in range(experts):  # one at a time: indices take eight times a block's bytes
        values = pairs[blocks[expert].long()].flatten(-2)
        out[expert] = torch.ldexp(values, exponents[expert]).flatten(-2)
    largest = int(scales.max()) if scales.numel() else 0
    if largest == _NAN_SCALE or (largest >= _LARGE_SCALE and not all_finite([out])[0]):
        raise ValueError(
            f"scales: {largest} "
            + ("stands for NaN" if largest == _NAN_SCALE else "makes numbers that bf16 cannot hold")
            + "; fetch the model again"
        )
    return out.transpose(1, 2)


def widened(state: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """The same tensors, with `NAME` for each pair of `NAME_blocks` and `NAME_scales`. `ValueError`
    names a half that came without the other."""
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in state:
        ending = name[-len(_ENDINGS[0]) :]
        if ending not in _ENDINGS:
            yield name, tensor
            continue
        stem = name.removesuffix(ending)
        found = waiting.setdefault(stem, {})
        found[ending] = tensor
        if len(found) == len(_ENDINGS):
            del waiting[stem]
            try:
                wide = widen_mxfp4(*(found[each] for each in _ENDINGS))
            except ValueError as error:
                raise ValueError(f"{stem}: {error}") from None
            yield stem, wide
    if waiting:
        stem, found = next(iter(waiting.items()))
        raise ValueError(
            f"{stem}{next(iter(found))} alone, MXFP4 needs both {' and '.join(_ENDINGS)}; fetch "
            "the model again"
        )
