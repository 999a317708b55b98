"""A short fingerprint of a tensor's bytes, computed where the tensor lies, at the speed of memory.

On a CPU it is CRC-32, as in checkpoints: 2.4 GB/s on one core, so that the weights of a step cost a
thousandth of the step. On a GPU, from which a copy would cost more than the step's own kernels, it
is a sum of 64 bits: words are folded (so that a change of a high bit reaches the low ones),
multiplied by odd numbers that differ from place to place, and added. Either finds every change of a
single word, and others but for one in 2**32; they are for accidents, not for forgeries.
Left out: what differs, which only the tensors themselves can tell, and comparing a CPU with a GPU.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131
"""2**64 over the golden ratio, as a signed word: the usual multiplier (Knuth, TAOCP 3, 6.4)."""
_CHUNK_WORDS = 1 << 22
"""So many words are folded at a time: 32 MB of copies."""
_LOW_HALF = 0xFFFF_FFFF


def fingerprints(state: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Name -> hexadecimal digits, of each tensor alone."""
    return {name: fingerprint(tensor) for name, tensor in state}


@torch.no_grad()
def fingerprint(tensor: Tensor) -> str:
    """8 digits of a tensor on a CPU, 16 of one on a GPU."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.device.type == "cpu":
        return f"{zlib.crc32(flat.numpy().data):08x}"
    return f"{folded_sum(flat) & (1 << 64) - 1:016x}"


def folded_sum(flat: Tensor) -> int:
    """The signed sum over bytes, which zeros make up to whole words."""
    if rest := -len(flat) % 8:
        flat = torch.cat([flat, flat.new_zeros(rest)])
    words = (flat.clone() if flat.data_ptr() % 8 else flat).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for begin in range(0, len(words), _CHUNK_WORDS):
        chunk = words[begin : begin + _CHUNK_WORDS]
        folded = chunk ^ ((chunk >> 32) & _LOW_HALF)
        place = torch.arange(begin, begin + len(chunk), device=words.device)
        total += (folded * ((2 * place + 1) * _GOLDEN)).sum()
    return int(total)
