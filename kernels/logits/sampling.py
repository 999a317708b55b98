"""Logits to tokens: two edits of logits in place, then `sample`, one token a row without a sort.

`apply_penalties_` changes the logits of tokens that were seen, with c a token's count in the output
so far (the definitions of Keskar et al. 2019 and of OpenAI's API, in this order):

    seen in prompt or output:  z = z / repetition if z > 0 else z · repetition
    z = z − (frequency·c + presence·[c > 0])

The counts are the caller's, one int32 a token and row; a row whose penalties are all neutral is not
touched. `apply_token_bitmask_` writes −inf where the mask's bit is 0: bit v % 32 of word v // 32,
the layout of XGrammar and llguidance.

`sample` has temperature, top-k, top-p and min-p. With p = softmax(z / τ) over the whole vocabulary,
a token is kept if fewer than top_k tokens have a larger logit, if those together hold less than
top_p, and if its p is at least min_p times the largest. Tokens that tie with the last one kept are
kept too. The first two conditions together say "z above some pivot", which is found by bisection on
the bits of a float, exactly.

Among the kept the token is argmax of z / τ − log E with E ~ Exp(1), the Gumbel trick: E of token v
is a hash (Philox 4x32-10, Salmon et al. 2011) of the row's seed and position and of v, so a token
depends on nothing else, on no batch and on no launch shape. Temperature 0 is the argmax of z, the
smaller id where logits tie.

Three results: the token; its log-prob under the distribution sampled from (truncated and
renormalised; 0 when greedy); and its raw log-prob, over the whole tempered vocabulary (greedy:
temperature 1), which is what a trainer computes again.

Left out: top-k log-probs; beam search.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from kernels.backend import Backend, check_integers, check_tensors, compute_dtype, use_triton

_MASK32 = 0xFFFFFFFF
_ROUND_A, _ROUND_B, _KEY_A, _KEY_B = 0xD2511F53, 0xCD9E8D57, 0x9E3779B9, 0xBB67AE85
_FEW = 1024  # tokens that are sorted before all of a vocabulary are
_CHUNK_ELEMENTS = 1 << 20  # logits a chunk on a CPU: 4 MB of fp32 stay in the processor's cache


class SampleOutput(NamedTuple):
    """`tokens` int64 [B]; `logprobs` and `raw_logprobs` fp32 [B], in nats."""

    tokens: Tensor
    logprobs: Tensor
    raw_logprobs: Tensor


def philox(counter: list[Tensor], key: list[Tensor], num_rounds: int = 10) -> list[Tensor]:
    """Philox 4x32 on int64 tensors that hold 32-bit words: four counters, two keys."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(num_rounds):
        high_a, low_a = _multiply(_ROUND_A, c0)
        high_b, low_b = _multiply(_ROUND_B, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + _KEY_A) & _MASK32, (k1 + _KEY_B) & _MASK32
    return [c0, c1, c2, c3]


def _multiply(a: int, b: Tensor) -> tuple[Tensor, Tensor]:
    """High and low word of a 32 x 32 bit product, which may wrap in int64."""
    product = a * b
    return (product >> 32) & _MASK32, product & _MASK32


def exponentials(seeds_B: Tensor, positions_B: Tensor, vocab: int) -> Tensor:
    """fp32 Exp(1) numbers [B, vocab]: token v takes word v % 4 of counter v // 4."""
    counter = torch.arange(-(-vocab // 4), device=seeds_B.device).expand(len(seeds_B), -1)
    seed, position = seeds_B.long().unsqueeze(1), positions_B.long().unsqueeze(1)
    words = philox(
        [counter, position & _MASK32, (position >> 32) & _MASK32, torch.zeros_like(position)],
        [seed & _MASK32, (seed >> 32) & _MASK32],
    )
    bits = torch.stack(words, -1).flatten(1)[:, :vocab]
    u = ((bits.to(torch.float32) + 0.5) * 2.0**-32).clamp(max=1 - 2.0**-24)
    return -torch.log1p(-u)


def kept_tokens(
    z_BV: Tensor,
    gap_BV: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
) -> Tensor:
    """Which tokens the three truncations leave, bool [B, V]. `gap` is (z − max z) / τ."""
    keep = z_BV > -torch.inf
    if top_k is not None or top_p is not None:
        keep &= z_BV >= _lowest_kept(z_BV, gap_BV.double().exp(), top_k, top_p)
    if min_p is not None:
        keep &= gap_BV >= min_p.to(gap_BV.dtype).log().unsqueeze(1)
    return keep


def _lowest_kept(
    z_BV: Tensor, weights_BV: Tensor, top_k: Tensor | None, top_p: Tensor | None
) -> Tensor:
    """[B, 1], by a sort of the likeliest, and of all where these do not suffice. Among equals the
    first decides: before it are the larger ones alone."""
    vocab = z_BV.shape[1]
    total_B1 = weights_BV.sum(-1, keepdim=True)
    for size in (min(_FEW, vocab), vocab):
        z, ids = z_BV.topk(size, -1)
        weights = weights_BV.gather(1, ids)
        before = weights.cumsum(-1) - weights
        fits = torch.ones_like(z, dtype=torch.bool)
        if top_k is not None:
            most = torch.where(top_k > 0, top_k, vocab).unsqueeze(1)
            fits &= torch.arange(size, device=z.device) < most
        if top_p is not None:
            limit = torch.where(top_p < 1, top_p.double(), torch.inf).unsqueeze(1)
            fits &= before < limit * total_B1
        if not fits[:, -1].any():
            break
    return torch.where(fits, z, torch.inf).amin(-1, keepdim=True)


def sample_ref(
    logits_BV: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
) -> SampleOutput:
    """The definition, with a sort and a B x V tensor of noise."""
    z = logits_BV.to(compute_dtype(logits_BV.dtype))
    is_greedy = temperature == 0
    inverse = torch.where(is_greedy, 1.0, temperature).to(z.dtype).reciprocal().unsqueeze(1)
    scaled = (z - z.amax(-1, keepdim=True)) * inverse
    keep = kept_tokens(z, scaled, top_k, top_p, min_p)
    score = scaled - exponentials(seeds, positions, z.shape[1]).to(z.dtype).log()
    score = torch.where(keep, score, -torch.inf)
    tokens = torch.where(is_greedy.unsqueeze(1), scaled, score).argmax(-1)
    chosen = scaled.gather(1, tokens.unsqueeze(1)).squeeze(1)
    raw = chosen - scaled.logsumexp(-1)
    logprobs = chosen - torch.where(keep, scaled, -torch.inf).logsumexp(-1)
    logprobs = torch.where(is_greedy, 0.0, logprobs)
    return SampleOutput(tokens, logprobs.to(torch.float32), raw.to(torch.float32))


def sample(
    logits_BV: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    *,
    backend: Backend = "auto",
) -> SampleOutput:
    """One token a row; every parameter is a tensor [B] on the logits' device.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off, and None is off for all
    rows. `seeds` int64 (64 bits of any meaning), `positions` int64: equal pairs draw equal numbers.
    """
    if logits_BV.dim() != 2 or logits_BV.shape[1] == 0:
        raise ValueError(f"logits: shape {tuple(logits_BV.shape)} must be [rows, vocabulary]")
    rows = (temperature, top_k, top_p, min_p, seeds, positions)
    names = ("temperature", "top_k", "top_p", "min_p", "seeds", "positions")
    named = dict(zip(names, rows, strict=True))
    check_per_row(logits_BV, **named)
    on_triton = use_triton(backend, logits_BV)
    check_tensors(logits_BV, "logits", on_triton, **named)
    check_integers(seeds=seeds, positions=positions)
    if on_triton:
        from kernels.triton import sampling as triton_ops  # here: not every machine has Triton

        return SampleOutput(*triton_ops.sample(logits_BV, *rows))
    step = max(1, _CHUNK_ELEMENTS // logits_BV.shape[1])
    parts = []
    for lo in range(0, max(1, len(logits_BV)), step):
        at = slice(lo, lo + step)
        k, p, lowest = (None if x is None else x[at] for x in (top_k, top_p, min_p))
        parts.append(
            sample_ref(logits_BV[at], temperature[at], k, p, lowest, seeds[at], positions[at])
        )
    return SampleOutput(*(torch.cat(column) for column in zip(*parts, strict=True)))


def apply_penalties_ref(
    logits_BV: Tensor,
    output_counts_BV: Tensor,
    prompt_mask_BV: Tensor | None,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """The definition, out of place."""
    wide = compute_dtype(logits_BV.dtype)
    z, count = logits_BV.to(wide), output_counts_BV.to(wide)
    factor, frequency, presence = (
        x.to(wide).unsqueeze(1) for x in (repetition, frequency, presence)
    )
    seen = count > 0 if prompt_mask_BV is None else (count > 0) | prompt_mask_BV.bool()
    z = torch.where(seen, torch.where(z > 0, z / factor, z * factor), z)
    return (z - (frequency * count + presence * (count > 0))).to(logits_BV.dtype)


@torch.no_grad()
def apply_penalties_(
    logits_BV: Tensor,
    output_counts_BV: Tensor,
    prompt_mask_BV: Tensor | None,
    *,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    backend: Backend = "auto",
) -> None:
    """In place. Counts int32 [B, V]; prompt mask bool [B, V] or None; the penalties are [B] on the
    logits' device, neutral at 1, 0 and 0."""
    for name, table in (("output_counts", output_counts_BV), ("prompt_mask", prompt_mask_BV)):
        if table is not None and table.shape != logits_BV.shape:
            raise ValueError(
                f"{name}: shape {tuple(table.shape)} must be logits' {tuple(logits_BV.shape)}"
            )
    named = {"repetition": repetition, "frequency": frequency, "presence": presence}
    check_per_row(logits_BV, **named)
    tables = {"output_counts": output_counts_BV, "prompt_mask": prompt_mask_BV}
    on_triton = use_triton(backend, logits_BV)
    check_tensors(logits_BV, "logits", on_triton, **named, **tables)
    check_integers(output_counts=output_counts_BV)
    if on_triton:
        from kernels.triton import sampling as triton_ops  # here: not every machine has Triton

        _check_rows(logits_BV)
        triton_ops.apply_penalties(logits_BV, output_counts_BV, prompt_mask_BV, **named)
        return
    is_active = (repetition != 1) | (frequency != 0) | (presence != 0)
    seen = output_counts_BV > 0
    if prompt_mask_BV is not None:
        seen |= prompt_mask_BV.bool()
    seen[~is_active] = False
    # What was seen is a small part of a vocabulary, and the rest keeps its logits.
    at = _places(seen)
    rows = at // logits_BV.shape[1]
    z, counts, prompt = (
        x.reshape(-1)[at].unsqueeze(1) for x in (logits_BV, output_counts_BV, seen)
    )
    penalised = apply_penalties_ref(z, counts, prompt, *(x[rows] for x in named.values()))
    logits_BV[rows, at % logits_BV.shape[1]] = penalised.squeeze(1)


def _places(mask_BV: Tensor) -> Tensor:
    """The indices of the true entries in the flat mask. NumPy skips runs of zeros, PyTorch reads
    them one by one, which takes ten times as long."""
    if mask_BV.device.type != "cpu":
        return mask_BV.flatten().nonzero().squeeze(1)
    return torch.from_numpy(np.flatnonzero(mask_BV.numpy()))


def apply_token_bitmask_ref(logits_BV: Tensor, bitmask_BW: Tensor) -> Tensor:
    """The definition, out of place."""
    bit = torch.arange(32, dtype=torch.int32, device=bitmask_BW.device)
    is_allowed = (bitmask_BW.unsqueeze(-1) >> bit & 1).flatten(1)[:, : logits_BV.shape[1]]
    return logits_BV.masked_fill(is_allowed == 0, -torch.inf)


@torch.no_grad()
def apply_token_bitmask_(
    logits_BV: Tensor, bitmask_BW: Tensor, *, backend: Backend = "auto"
) -> None:
    """In place. `bitmask` int32 [B, ceil(V / 32)], 1 = allowed."""
    expected = (logits_BV.shape[0], -(-logits_BV.shape[1] // 32))
    if bitmask_BW.shape != expected or bitmask_BW.dtype != torch.int32:
        raise ValueError(
            f"bitmask: {bitmask_BW.dtype} {tuple(bitmask_BW.shape)} must be int32 {expected}, one "
            "bit a token of logits"
        )
    on_triton = use_triton(backend, logits_BV)
    check_tensors(logits_BV, "logits", on_triton, bitmask=bitmask_BW)
    if on_triton:
        from kernels.triton import sampling as triton_ops  # here: not every machine has Triton

        _check_rows(logits_BV)
        triton_ops.apply_token_bitmask(logits_BV, bitmask_BW)
        return
    if logits_BV.device.type != "cpu":
        logits_BV.copy_(apply_token_bitmask_ref(logits_BV, bitmask_BW))
        return
    words = (~bitmask_BW).contiguous().numpy()
    is_banned = np.unpackbits(
        words.view(np.uint8), axis=1, count=logits_BV.shape[1], bitorder="little"
    )
    logits_BV.masked_fill_(torch.from_numpy(is_banned.view(np.bool_)), -torch.inf)


def check_per_row(logits_BV: Tensor, **values: Tensor | None) -> None:
    """Every value is [B]: one number for each row of logits."""
    for name, value in values.items():
        if value is not None and value.shape != logits_BV.shape[:1]:
            raise ValueError(
                f"{name}: shape {tuple(value.shape)} must be one number for each of the "
                f"{logits_BV.shape[0]} rows of logits"
            )


def _check_rows(logits_BV: Tensor) -> None:
    if logits_BV.stride(1) != 1:
        raise ValueError(f"logits: strides {logits_BV.stride()} must end in 1 to be changed")
