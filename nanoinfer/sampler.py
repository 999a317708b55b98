"""From logits to tokens and log-probs, all rows of a step at once.

A token depends on its row of logits, its request's seed and its position, on nothing else: the
randomness is one number u in [0, 1) hashed from (seed, position), and the token is the first whose
cumulative probability exceeds u (inverse CDF). Cumulative sums run in two levels, over runs of 256
tokens and inside the run that u falls into, so a vocabulary is read once and never sorted unless a
request truncates (top-k, top-p).

The log-prob is that of the tempered distribution over the whole vocabulary, before top-k and
top-p, by the trainer's own arithmetic (`kernels.logits_logprob`): what the trainer recomputes. A
truncated request is therefore sampled from a distribution whose log-probs are not reported;
training wants top_k=0, top_p=1.

On a GPU `kernels.sample` does all of it in one launch. Its randomness is a hash of (seed, position)
too, but another one, so the two devices draw different tokens; it keeps every token that ties with
the last one of a truncation; and its log-prob is the trainer's up to the rounding of a sum.

Left out: penalties, grammar masks, top-k log-probs.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import kernels
from kernels import logits_logprob

_RUN = 256  # tokens a run of the two-level cumulative sum
_CHUNK_ELEMENTS = 1 << 20  # logits handled at a time: 4 MB of fp32 stay in the processor's cache
_BELOW_ONE = 1.0 - 2.0**-40
_U64 = np.uint64


@dataclass(frozen=True)
class SamplingBatch:
    """One entry a row. Temperature 0 is greedy; `positions` is the index the token will have."""

    temperatures: np.ndarray  # float64
    top_ks: np.ndarray  # int64, 0 is off
    top_ps: np.ndarray  # float64, 1 is off
    seeds: np.ndarray  # uint64
    positions: np.ndarray  # int64


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


def sample(logits_BV: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    """(token ids int64 [B], logps fp32 [B]). The logits are not changed."""
    if logits_BV.is_cuda:
        return _sample_in_one_launch(logits_BV, batch)
    tokens = torch.empty(logits_BV.shape[0], dtype=torch.int64)
    logps = torch.empty(logits_BV.shape[0], dtype=torch.float32)
    u = uniforms(batch.seeds, batch.positions)
    kinds = np.where(batch.temperatures == 0, 0, 1)
    kinds[(kinds == 1) & ((batch.top_ks > 0) | (batch.top_ps < 1))] = 2
    step = max(2, _CHUNK_ELEMENTS // logits_BV.shape[1])
    for temperature, kind in sorted(set(zip(batch.temperatures.tolist(), kinds.tolist()))):  # noqa: B905
        rows = np.flatnonzero((batch.temperatures == temperature) & (kinds == kind))
        for lo in range(0, len(rows), step):
            chunk = rows[lo : lo + step]
            index = torch.from_numpy(chunk)
            is_run = int(chunk[-1]) - int(chunk[0]) + 1 == len(chunk)
            z_RV = logits_BV[chunk[0] : chunk[-1] + 1] if is_run else logits_BV[index]
            if kind == 0:
                picked = z_RV.float().argmax(-1)
            elif kind == 1:
                picked = _sample_all(z_RV, temperature, torch.from_numpy(u[chunk]))
            else:
                picked = _sample_truncated(
                    z_RV,
                    temperature,
                    torch.from_numpy(u[chunk]),
                    torch.from_numpy(batch.top_ks[chunk]),
                    torch.from_numpy(batch.top_ps[chunk]),
                )
            tokens[index] = picked
            logps[index] = logits_logprob(z_RV, picked, temperature)
    return tokens, logps


def _sample_in_one_launch(logits_BV: Tensor, batch: SamplingBatch) -> tuple[Tensor, Tensor]:
    def column(values: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(values.astype(dtype)).to(logits_BV.device, non_blocking=True)

    drawn = kernels.sample(
        logits_BV,
        column(batch.temperatures, np.float32),
        column(batch.top_ks, np.int32) if (batch.top_ks > 0).any() else None,
        column(batch.top_ps, np.float32) if (batch.top_ps < 1).any() else None,
        None,
        column(batch.seeds.view(np.int64), np.int64),
        column(batch.positions, np.int64),
    )
    return drawn.tokens, drawn.raw_logprobs


def _sample_all(logits_RV: Tensor, temperature: float, u_R: Tensor) -> Tensor:
    """Inverse CDF over the whole vocabulary."""
    num_rows, vocab = logits_RV.shape
    num_runs = -(-vocab // _RUN)
    p = torch.zeros(num_rows, num_runs * _RUN)
    z = p[:, :vocab]
    z.copy_(logits_RV)
    z.sub_(z.amax(-1, keepdim=True))
    if temperature != 1.0:
        z.div_(temperature)
    z.exp_()
    p_RNK = p.view(num_rows, num_runs, _RUN)
    ends = p_RNK.sum(-1).to(torch.float64).cumsum(-1)
    run, u = _invert(ends, u_R)
    inside = p_RNK[torch.arange(num_rows), run].to(torch.float64).cumsum(-1)
    return run * _RUN + _invert(inside, u)[0]


def _invert(cdf_RN: Tensor, u_R: Tensor) -> tuple[Tensor, Tensor]:
    """The first index whose (unnormalised) cumulative weight exceeds u · total, and how far into
    its weight u falls, in [0, 1). Never an index of weight 0."""
    target = (u_R * cdf_RN[:, -1]).unsqueeze(1)
    index = (cdf_RN <= target).sum(-1, keepdim=True)
    end = cdf_RN.gather(1, index)
    start = torch.where(index > 0, cdf_RN.gather(1, (index - 1).clamp_(min=0)), 0.0)
    within = ((target - start) / (end - start)).clamp_(0.0, _BELOW_ONE)
    return index.squeeze(1), within.squeeze(1)


def _sample_truncated(
    logits_RV: Tensor, temperature: float, u_R: Tensor, top_ks: Tensor, top_ps: Tensor
) -> Tensor:
    """Inverse CDF over the most likely tokens: at most top_k, and the fewest that reach top_p of
    the whole tempered distribution. Ties go to the smaller token id."""
    z, ids = logits_RV.float().sort(stable=True, dim=-1, descending=True)
    weights = ((z - z[:, :1]) / temperature).to(torch.float64).exp_()
    cdf = weights.cumsum(-1)
    rank = torch.arange(z.shape[1])
    limit = torch.where(top_ks > 0, top_ks, z.shape[1]).unsqueeze(1)
    is_kept = (rank < limit) & (cdf - weights < top_ps.unsqueeze(1) * cdf[:, -1:])
    is_kept[:, 0] = True
    index, _ = _invert(weights.masked_fill_(~is_kept, 0.0).cumsum(-1), u_R)
    return ids.gather(1, index.unsqueeze(1)).squeeze(1)
