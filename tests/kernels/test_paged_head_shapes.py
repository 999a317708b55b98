"""Decoding repeats the bits of the full forward pass for heads of any shape."""

import random

import pytest
import torch

from kernels import flash_attn_varlen, paged_attention

SHAPES = [(4, 6, 1), (12, 2, 3), (64, 3, 3), (80, 3, 2), (96, 1, 7), (128, 2, 4)]  # D, K, group
LENGTHS = [1, 5, 16, 33, 127, 128, 129, 200, 300]
BLOCK = 16


def paged(x_TKD: torch.Tensor, blocks: list[list[int]]) -> torch.Tensor:
    """A cache that holds each sequence's rows in its blocks."""
    cache = torch.zeros(sum(map(len, blocks)), BLOCK, *x_TKD.shape[1:], dtype=x_TKD.dtype)
    for x, table in zip(x_TKD.split(LENGTHS), blocks, strict=True):
        for t, row in enumerate(x):
            cache[table[t // BLOCK], t % BLOCK] = row
    return cache


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES)
def test_decode_has_the_bits_of_the_full_pass(shape: tuple, dtype: torch.dtype) -> None:
    head_dim, num_kv, group = shape
    torch.manual_seed(head_dim)
    num_tokens, rng = sum(LENGTHS), random.Random(0)
    q = torch.randn(num_tokens, num_kv * group, head_dim).to(dtype)
    k, v = (torch.randn(num_tokens, num_kv, head_dim).to(dtype) for _ in range(2))
    starts = torch.tensor([0, *LENGTHS]).cumsum(0)
    full = flash_attn_varlen(
        q, k, v, starts, starts, max(LENGTHS), max(LENGTHS), softmax_scale=head_dim**-0.5
    )

    counts = [-(-n // BLOCK) for n in LENGTHS]
    order = list(range(sum(counts)))
    rng.shuffle(order)
    blocks = [[order.pop() for _ in range(n)] for n in counts]
    table = torch.tensor([b + [0] * (max(counts) - len(b)) for b in blocks])
    lens = [rng.randint(1, n) for n in LENGTHS]  # decode at any point, beside what comes later
    rows = [int(starts[i]) + n - 1 for i, n in enumerate(lens)]
    o = paged_attention(
        q[rows],
        paged(k, blocks),
        paged(v, blocks),
        list(range(len(lens) + 1)),
        lens,
        table,
        max_query_len=1,
        max_seq_len=max(lens),
        softmax_scale=head_dim**-0.5,
    )
    assert torch.equal(o, full[rows])
