"""Triton kernels of `sampling`: the edits of logits, and the draw.

Edits: one program a row and a run of the vocabulary. Penalties leave a neutral row before reading
it; the bitmask never reads the logits, it stores where a bit is 0.

`sample`: one program a row, which it reads a few times from the L2 cache.

1. Largest logit and Σ exp((z − max) / τ), kept lane by lane and combined once.
2. Only where a row truncates by k or p: the pivot. For any x, "fewer than k logits above x, and
   less than p of the mass" holds from some x on; the largest x where it fails, or the largest at
   which nothing more can change, is found by trying three values a pass between two bounds.
   Bounds are the bits of a float in an order-preserving int32, so at most 16 passes are exact;
   the search ends earlier once a single token lies between the bounds.
3. Argmax of z / τ − log E over the kept tokens, and their Σ exp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.launch import launch
from kernels.triton.tiles import power_of_2

_BLOCK = 4096  # logits of a program that penalises
_WORDS = 128  # 32 logits each, of a program that masks
_SAMPLE_BLOCK, _NUM_WARPS = 4096, 8
_SMALL_BLOCK = 256


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
        z = z - (frequency * count + presence * (count > 0).to(tl.float32))
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


@triton.jit
def _key_to_float(key):
    """The inverse of the order-preserving map of a float's bits to int32."""
    bits = key.to(tl.int32)
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _float_to_key(x):
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def _load_logits(row_ptr, at, vocab):
    return tl.load(row_ptr + at, at < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def _exponential(bits):
    """−log(1 − u) for u = (bits + ½) / 2³², by its series near 0, where 1 − u would round."""
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.99999994)
    series = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4 + u / 5))))
    return tl.where(u < 0.03, series, -tl.log(1 - u))


@triton.jit
def _max_and_total(row_ptr, vocab, inverse, BLOCK: tl.constexpr):
    lane_max = tl.full([BLOCK], -float("inf"), tl.float32)
    lane_sum = tl.zeros([BLOCK], dtype=tl.float32)
    count = tl.zeros([BLOCK], dtype=tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        z = _load_logits(row_ptr, start + tl.arange(0, BLOCK), vocab)
        larger = tl.maximum(lane_max, z)
        shift = tl.where(larger == -float("inf"), 0.0, larger)
        lane_sum = lane_sum * tl.exp((lane_max - shift) * inverse) + tl.exp((z - shift) * inverse)
        lane_max = larger
        count += (z > -float("inf")).to(tl.int32)
    top = tl.max(lane_max, 0)
    total = tl.sum(lane_sum * tl.exp((lane_max - top) * inverse), 0)
    return top, total, tl.sum(count, 0)


@triton.jit
def _find_pivot(row_ptr, vocab, top, inverse, count, k, mass_limit, is_on, BLOCK: tl.constexpr):
    """The x such that exactly the logits above x are kept."""
    low = tl.full((), -2139095041, tl.int64)
    high = _float_to_key(top)
    num_low = count
    num_high = count * 0
    while is_on & (high - low > 1) & (num_low - num_high > 1):
        key1, key2 = low + (high - low) // 4, low + (high - low) // 2
        key3 = low + (high - low) * 3 // 4
        x1, x2, x3 = _key_to_float(key1), _key_to_float(key2), _key_to_float(key3)
        n1 = tl.zeros([BLOCK], dtype=tl.int32)
        n2 = tl.zeros([BLOCK], dtype=tl.int32)
        n3 = tl.zeros([BLOCK], dtype=tl.int32)
        mass1 = tl.zeros([BLOCK], dtype=tl.float32)
        mass2 = tl.zeros([BLOCK], dtype=tl.float32)
        mass3 = tl.zeros([BLOCK], dtype=tl.float32)
        for start in tl.range(0, vocab, BLOCK, num_stages=3):
            z = _load_logits(row_ptr, start + tl.arange(0, BLOCK), vocab)
            weight = tl.exp((z - top) * inverse)
            n1 += (z > x1).to(tl.int32)
            n2 += (z > x2).to(tl.int32)
            n3 += (z > x3).to(tl.int32)
            mass1 += tl.where(z > x1, weight, 0.0)
            mass2 += tl.where(z > x2, weight, 0.0)
            mass3 += tl.where(z > x3, weight, 0.0)
        num1, num2, num3 = tl.sum(n1, 0), tl.sum(n2, 0), tl.sum(n3, 0)
        fits1 = (num1 < k) & (tl.sum(mass1, 0) < mass_limit)
        fits2 = (num2 < k) & (tl.sum(mass2, 0) < mass_limit)
        fits3 = (num3 < k) & (tl.sum(mass3, 0) < mass_limit)
        num_low = tl.where(fits1, num_low, tl.where(fits2, num1, tl.where(fits3, num2, num3)))
        low = tl.where(fits1, low, tl.where(fits2, key1, tl.where(fits3, key2, key3)))
        num_high = tl.where(fits1, num1, tl.where(fits2, num2, tl.where(fits3, num3, num_high)))
        high = tl.where(fits1, key1, tl.where(fits2, key2, tl.where(fits3, key3, high)))
    return _key_to_float(low)


@triton.jit
def sample_kernel(
    logits_ptr, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, seed_ptr, position_ptr,
    token_ptr, logp_ptr, raw_ptr, vocab, row_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * row_stride
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    is_greedy = temperature == 0
    inverse = 1 / tl.where(is_greedy, 1.0, temperature)
    top, total, count = _max_and_total(row_ptr, vocab, inverse, BLOCK)
    pivot = -float("inf")
    if (top_k_ptr is not None) or (top_p_ptr is not None):
        k = vocab
        mass_limit = float("inf")
        if top_k_ptr is not None:
            asked = tl.load(top_k_ptr + row).to(tl.int32)
            k = tl.where(asked > 0, asked, vocab)
        if top_p_ptr is not None:
            p = tl.load(top_p_ptr + row).to(tl.float32)
            mass_limit = tl.where(p < 1, p * total, float("inf"))
        is_on = (k < vocab) | (mass_limit < float("inf"))
        is_on = is_on & (temperature > 0)
        pivot = _find_pivot(row_ptr, vocab, top, inverse, count, k, mass_limit, is_on, BLOCK=BLOCK)
    floor = -float("inf")
    if min_p_ptr is not None:
        floor = tl.log(tl.load(min_p_ptr + row).to(tl.float32))
    seed = tl.load(seed_ptr + row)
    position = tl.load(position_ptr + row).to(tl.int64)
    lane_best = tl.full([BLOCK], -float("inf"), tl.float32)
    lane_token = tl.zeros([BLOCK], dtype=tl.int32)
    lane_mass = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        at = start + tl.arange(0, BLOCK)
        z = _load_logits(row_ptr, at, vocab)
        scaled = (z - top) * inverse
        keep = (z > pivot) & (scaled >= floor)
        counter = (start // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
        zero = counter * 0
        low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
        w0, w1, w2, w3 = tl.philox(seed, counter, zero + low, zero + high, zero)
        bits = tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))
        score = scaled - tl.log(_exponential(bits))
        score = tl.where(is_greedy, scaled, tl.where(keep, score, -float("inf")))
        lane_token = tl.where(score > lane_best, at, lane_token)
        lane_best = tl.maximum(score, lane_best)
        lane_mass += tl.where(keep, tl.exp(scaled), 0.0)
    best = tl.max(lane_best, 0)
    token = tl.min(tl.where(lane_best == best, lane_token, vocab), 0)
    chosen = (tl.load(row_ptr + token).to(tl.float32) - top) * inverse
    tl.store(token_ptr + row, token.to(tl.int64))
    logp = chosen - tl.log(tl.sum(lane_mass, 0))
    tl.store(logp_ptr + row, tl.where(is_greedy, 0.0, logp))
    tl.store(raw_ptr + row, chosen - tl.log(total))


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor | None, top_p: Tensor | None,
    min_p: Tensor | None, seeds: Tensor, positions: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """tokens, logprobs, raw_logprobs. Rows may be padded: any row stride will do."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    logps, raw = (
        torch.empty(num_rows, dtype=torch.float32, device=logits.device) for _ in range(2)
    )
    options = [None if x is None else x.contiguous() for x in (top_k, top_p, min_p)]
    block = min(_SAMPLE_BLOCK, max(_SMALL_BLOCK, power_of_2(vocab)))
    if num_rows:
        launch(sample_kernel, (num_rows,))(
            logits, temperature.contiguous(), *options, seeds.contiguous(), positions.contiguous(),
            tokens, logps, raw, vocab, logits.stride(0), BLOCK=block,
            num_warps=max(1, _NUM_WARPS * block // _SAMPLE_BLOCK),
        )  # fmt: skip
    return tokens, logps, raw
