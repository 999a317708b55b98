"""From logits to tokens and log-probs, all rows of a step at once.

A token depends on its row of logits, its request's seed and its position, on nothing else: the
randomness is one number u in [0, 1) hashed from (seed, position), and the token is the first whose
cumulative probability exceeds u (inverse CDF). Cumulative sums run in two levels, over runs of 256
tokens and inside the run that u falls into.

The log-prob is that of the tempered distribution over the whole vocabulary by the trainer's own
arithmetic (`kernels.logits_logprob`): what the trainer recomputes. Requests that draw from a part
of the vocabulary, or from edited logits, bring options/full_sampling.py.

Left out: beam search; GPUs, whose sampler is gpu/device_sampler.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.backend import use_native
from kernels.cpp import ops as cpp_ops

_RUN = 256  # tokens a run of the two-level cumulative sum
_CHUNK_ELEMENTS = 1 << 20  # logits handled at a time: 4 MB of fp32 stay in the processor's cache
_BELOW_ONE = 1.0 - 2.0**-40
_U64 = np.uint64


@dataclass(frozen=True)
class SamplingBatch:
    """One entry a row. Temperature 0 is greedy; `positions` is the index the token will have."""

    temperatures: np.ndarray  # float64
    seeds: np.ndarray  # uint64
    positions: np.ndarray  # int64


class Samples(NamedTuple):
    """One entry a row: ids int64, log-probs fp32."""

    tokens: Tensor
    logps: Tensor  # of the tempered distribution, greedy rows of temperature 1
    sampled_logps: Tensor  # of the one the token was drawn from; a greedy token is certain: 0


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A float64 in [0, 1) for each (seed, position), by the finaliser of SplitMix64 (Steele, Lea
    and Flood 2014) applied to the seed and again to its sum with the position's own hash."""
    with np.errstate(over="ignore"):
        mixed = _mix(_mix(seeds.astype(_U64)) ^ _mix(positions.astype(_U64) + _U64(1 << 63)))
    return (mixed >> _U64(11)).astype(np.float64) * 2.0**-53


def _mix(x: np.ndarray) -> np.ndarray:
    x = x + _U64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> _U64(30))) * _U64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> _U64(27))) * _U64(0x94D049BB133111EB)
    return x ^ (x >> _U64(31))


def sample(logits_BV: Tensor, batch: SamplingBatch) -> Samples:
    """Draw one token a row. The logits are not changed."""
    tokens = torch.empty(logits_BV.shape[0], dtype=torch.int64)
    logps = torch.empty(logits_BV.shape[0], dtype=torch.float32)
    u = torch.from_numpy(uniforms(batch.seeds, batch.positions))
    # The trainer divides by one number that it knows to fp64, not by a column of fp32: rows of one
    # temperature go together, or a log-prob would differ from the trainer's in its last bit.
    for temperature in sorted(set(batch.temperatures.tolist())):
        rows = np.flatnonzero(batch.temperatures == temperature)
        for index, z_RV in chunks(logits_BV, rows):
            if temperature == 0:
                tokens[index], logps[index] = pick(z_RV, 1.0, None)
            else:
                tokens[index], logps[index] = pick(z_RV, temperature, u[index])
    is_greedy = torch.from_numpy(batch.temperatures == 0)
    return Samples(tokens, logps, logps.masked_fill(is_greedy, 0.0))


def chunks(logits_BV: Tensor, rows: np.ndarray) -> Iterator[tuple[Tensor, Tensor]]:
    """Some of the rows at a time: their places and their logits, not copied where they lie one
    after the other."""
    step = max(2, _CHUNK_ELEMENTS // logits_BV.shape[1])
    for lo in range(0, len(rows), step):
        chunk = rows[lo : lo + step]
        index = torch.from_numpy(chunk)
        is_run = int(chunk[-1]) - int(chunk[0]) + 1 == len(chunk)
        yield index, logits_BV[chunk[0] : chunk[-1] + 1] if is_run else logits_BV[index]


def pick(logits_RV: Tensor, temperature: float, u_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Inverse CDF over the whole vocabulary; without u the likeliest token, of equals the first.
    Also its log-prob, `logits_logprob`'s bits."""
    if use_native("auto", logits_RV):
        return cpp_ops.pick(logits_RV, temperature, u_R)
    if u_R is None:
        likeliest = logits_RV.float().argmax(-1)
        return likeliest, kernels.logits_logprob(logits_RV, likeliest, temperature)
    # In two levels: over a whole vocabulary a cumulative sum is one long chain of additions; this
    # is a chain over runs of tokens, and one inside the run that u falls into.
    parts = kernels.softmax_parts(logits_RV, temperature)
    num_rows, vocab = logits_RV.shape
    weights = parts.weights if vocab % _RUN == 0 else F.pad(parts.weights, (0, -vocab % _RUN))
    p_RNK = weights.view(num_rows, -1, _RUN)
    ends = p_RNK.sum(-1).to(torch.float64).cumsum(-1)
    run, u = invert(ends, u_R)
    inside = p_RNK[torch.arange(num_rows), run].to(torch.float64).cumsum(-1)
    picked = run * _RUN + invert(inside, u)[0]
    return picked, parts.z.gather(1, picked.unsqueeze(1)).squeeze(1) - parts.lse


def invert(cdf_RN: Tensor, u_R: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose (unnormalised) cumulative weight exceeds u · total, and how far into
    its weight u falls, in [0, 1). Never an index of weight 0."""
    target = (u_R * cdf_RN[:, -1]).unsqueeze(1)
    index = (cdf_RN <= target).sum(-1, keepdim=True)
    end = cdf_RN.gather(1, index)
    start = torch.where(index > 0, cdf_RN.gather(1, (index - 1).clamp_(min=0)), 0.0)
    within = ((target - start) / (end - start)).clamp_(0.0, _BELOW_ONE)
    return index.squeeze(1), within.squeeze(1)
