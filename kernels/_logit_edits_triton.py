"""Triton kernels of `logit_edits`: one program a row and a run of the vocabulary. Penalties leave a
neutral row before reading it; the bitmask never reads the logits, it stores where a bit is 0."""

import triton
import triton.language as tl
from torch import Tensor

from kernels._launch import launch

_BLOCK = 4096
_WORDS = 128


@triton.jit
def penalties_kernel(
    logits_ptr, count_ptr, prompt_ptr, repetition_ptr, frequency_ptr, presence_ptr, vocab,
    row_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    repetition = tl.load(repetition_ptr + row).to(tl.float32)
    frequency = tl.load(frequency_ptr + row).to(tl.float32)
    presence = tl.load(presence_ptr + row).to(tl.float32)
    if (repetition != 1) | (frequency != 0) | (presence != 0):
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        inside = at < vocab
        z = tl.load(logits_ptr + row * row_stride + at, inside, other=0.0).to(tl.float32)
        count = tl.load(count_ptr + row * vocab + at, inside, other=0).to(tl.float32)
        seen = count > 0
        if prompt_ptr is not None:
            seen = seen | (tl.load(prompt_ptr + row * vocab + at, inside, other=0) != 0)
        z = tl.where(seen, tl.where(z > 0, z / repetition, z * repetition), z)
        z = z - frequency * count - presence * (count > 0).to(tl.float32)
        tl.store(logits_ptr + row * row_stride + at, z.to(logits_ptr.dtype.element_ty), inside)


@triton.jit
def bitmask_kernel(logits_ptr, mask_ptr, vocab, num_words, row_stride, WORDS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    words = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    word = tl.load(mask_ptr + row * num_words + words, words < num_words, other=-1)
    bit = tl.arange(0, 32)[None, :]
    at = words[:, None] * 32 + bit
    is_banned = ((word[:, None] >> bit) & 1) == 0
    low = tl.full([WORDS, 32], -float("inf"), tl.float32).to(logits_ptr.dtype.element_ty)
    tl.store(logits_ptr + row * row_stride + at, low, is_banned & (at < vocab))


def apply_penalties(
    logits: Tensor, counts: Tensor, prompt_mask: Tensor | None, repetition: Tensor,
    frequency: Tensor, presence: Tensor,
) -> None:  # fmt: skip
    num_rows, vocab = logits.shape
    if logits.numel():
        launch(penalties_kernel, (num_rows, triton.cdiv(vocab, _BLOCK)))(
            logits, counts.contiguous(), None if prompt_mask is None else prompt_mask.contiguous(),
            repetition.contiguous(), frequency.contiguous(), presence.contiguous(), vocab,
            logits.stride(0), BLOCK=_BLOCK, num_warps=8,
        )  # fmt: skip


def apply_token_bitmask(logits: Tensor, bitmask: Tensor) -> None:
    num_rows, num_words = bitmask.shape
    if logits.numel():
        launch(bitmask_kernel, (num_rows, triton.cdiv(num_words, _WORDS)))(
            logits,
            bitmask.contiguous(),
            logits.shape[1],
            num_words,
            logits.stride(0),
            WORDS=_WORDS,
        )
