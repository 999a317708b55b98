"""From logits to tokens and log-probs, all rows of a step at once.

A token depends on its row of logits, its request's seed and its position, on nothing else: the
randomness is one number u in [0, 1) hashed from (seed, position), and the token is the first whose
cumulative probability exceeds u (inverse CDF). Cumulative sums run in two levels, over runs of 256
tokens and inside the run that u falls into, so a vocabulary is read once and never sorted unless a
request truncates (top-k, top-p).

The log-prob is that of the tempered distribution over the whole vocabulary, before top-k and
top-p, by the trainer's own arithmetic (`kernels.logits_logprob`): what the trainer recomputes. A
truncated or edited request is sampled from another distribution; `sampled_logps` are that one's.
Training wants neither truncation nor edits: then the two are the same.

On a GPU `kernels.sample` does all of it in one launch, unless a row has edits: then the logits come
to the CPU. Its randomness is a hash of (seed, position) too, but another one, so the two devices
draw different tokens; it keeps every token that ties with the last one of a truncation; and its
log-prob is the trainer's up to the rounding of a sum.

Left out: beam search.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels import logits_logprob
from kernels._dispatch import use_native
from kernels._native_ops import pick as native_pick
from kernels.linear_logprob import softmax_parts
from nanoinfer.logit_edits import LogitEdits

_RUN = 256  # tokens a run of the two-level cumulative sum
_CHUNK_ELEMENTS = 1 << 20  # logits handled at a time: 4 MB of fp32 stay in the processor's cache
_BELOW_ONE = 1.0 - 2.0**-40
_U64 = np.uint64
_GREEDY, _WHOLE, _TRUNCATED = range(3)  # how a row is sampled


@dataclass(frozen=True)
class SamplingBatch:
    """One entry a row. Temperature 0 is greedy; `positions` is the index the token will have.
    `edits` and `num_top` name only the rows that have any."""

    temperatures: np.ndarray  # float64
    top_ks: np.ndarray  # int64, 0 is off
    top_ps: np.ndarray  # float64, 1 is off
    seeds: np.ndarray  # uint64
    positions: np.ndarray  # int64
    min_ps: np.ndarray  # float64, 0 is off
    edits: Mapping[int, LogitEdits] = field(default_factory=dict)
    num_top: Mapping[int, int] = field(default_factory=dict)  # likeliest tokens to report


class Samples(NamedTuple):
    """One entry a row: ids int64, log-probs fp32."""

    tokens: Tensor
    logps: Tensor  # of the tempered distribution
    sampled_logps: Tensor  # of the one the token was drawn from


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
    if logits_BV.is_cuda and not batch.edits:
        return _sample_in_one_launch(logits_BV, batch)
    logits_BV = logits_BV.cpu()
    tokens = torch.empty(logits_BV.shape[0], dtype=torch.int64)
    logps = torch.empty(logits_BV.shape[0], dtype=torch.float32)
    sampled_logps = torch.empty(logits_BV.shape[0], dtype=torch.float32)
    u = uniforms(batch.seeds, batch.positions)
    step = max(2, _CHUNK_ELEMENTS // logits_BV.shape[1])
    for (temperature, kind, is_edited), rows in _alike(batch):
        for lo in range(0, len(rows), step):
            chunk = rows[lo : lo + step]
            index = torch.from_numpy(chunk)
            is_run = int(chunk[-1]) - int(chunk[0]) + 1 == len(chunk)
            z_RV = logits_BV[chunk[0] : chunk[-1] + 1] if is_run else logits_BV[index]
            w_RV = (
                _edited(z_RV, [batch.edits[row] for row in chunk.tolist()]) if is_edited else z_RV
            )
            if kind == _GREEDY:
                picked, own = _pick(w_RV, 1.0, None)
            elif kind == _WHOLE:
                picked, own = _pick(w_RV, temperature, torch.from_numpy(u[chunk]))
            else:
                picked, own = _sample_truncated(
                    w_RV,
                    temperature,
                    torch.from_numpy(u[chunk]),
                    torch.from_numpy(batch.top_ks[chunk]),
                    torch.from_numpy(batch.top_ps[chunk]),
                    torch.from_numpy(batch.min_ps[chunk]),
                )
            is_own = kind != _TRUNCATED and not is_edited
            logp = own if is_own else logits_logprob(z_RV, picked, temperature)
            own = torch.zeros(len(chunk)) if kind == _GREEDY else own
            tokens[index], logps[index], sampled_logps[index] = picked, logp, own
    return Samples(tokens, logps, sampled_logps)


def _alike(batch: SamplingBatch) -> list[tuple[tuple[float, int, bool], np.ndarray]]:
    """Rows that can be sampled by the same calls, each set under (temperature, kind, is_edited)."""
    kinds = np.where(batch.temperatures == 0, _GREEDY, _WHOLE)
    is_cut = (batch.top_ks > 0) | (batch.top_ps < 1) | (batch.min_ps > 0)
    kinds[(kinds == _WHOLE) & is_cut] = _TRUNCATED
    is_edited = np.zeros(len(kinds), dtype=bool)
    is_edited[list(batch.edits)] = True
    keys = zip(batch.temperatures.tolist(), kinds.tolist(), is_edited.tolist(), strict=True)
    return [
        (
            key,
            np.flatnonzero(
                (batch.temperatures == key[0]) & (kinds == key[1]) & (is_edited == key[2])
            ),
        )
        for key in sorted(set(keys))
    ]


def _edited(logits_RV: Tensor, edits: list[LogitEdits]) -> Tensor:
    z_RV = logits_RV.to(torch.float32, copy=True)
    for z_V, edit in zip(z_RV, edits, strict=True):
        edit.apply(z_V)
    return z_RV


def top_logps(logits_BV: Tensor, batch: SamplingBatch) -> dict[int, list[tuple[int, float]]]:
    """The likeliest tokens of the rows that asked, and their log-probs as `logits_logprob`'s."""
    found = {}
    for row, k in batch.num_top.items():
        z_V = logits_BV[row].float()
        ids = z_V.sort(stable=True, descending=True).indices[:k]
        logps = logits_logprob(
            logits_BV[row].expand(len(ids), -1), ids, float(batch.temperatures[row])
        )
        found[row] = list(zip(ids.tolist(), logps.tolist(), strict=True))
    return found


def _sample_in_one_launch(logits_BV: Tensor, batch: SamplingBatch) -> Samples:
    def column(values: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(values.astype(dtype)).to(logits_BV.device, non_blocking=True)

    drawn = kernels.sample(
        logits_BV,
        column(batch.temperatures, np.float32),
        column(batch.top_ks, np.int32) if (batch.top_ks > 0).any() else None,
        column(batch.top_ps, np.float32) if (batch.top_ps < 1).any() else None,
        column(batch.min_ps, np.float32) if (batch.min_ps > 0).any() else None,
        column(batch.seeds.view(np.int64), np.int64),
        column(batch.positions, np.int64),
    )
    return Samples(drawn.tokens, drawn.raw_logprobs, drawn.logprobs)


def _pick(logits_RV: Tensor, temperature: float, u_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Inverse CDF over the whole vocabulary; without u the likeliest token, of equals the first.
    Also its log-prob, `logits_logprob`'s bits."""
    if use_native("auto", logits_RV):
        return native_pick(logits_RV, temperature, u_R)
    if u_R is None:
        likeliest = logits_RV.float().argmax(-1)
        return likeliest, logits_logprob(logits_RV, likeliest, temperature)
    parts = softmax_parts(logits_RV, temperature)
    num_rows, vocab = logits_RV.shape
    weights = parts.weights if vocab % _RUN == 0 else F.pad(parts.weights, (0, -vocab % _RUN))
    p_RNK = weights.view(num_rows, -1, _RUN)
    ends = p_RNK.sum(-1).to(torch.float64).cumsum(-1)
    run, u = _invert(ends, u_R)
    inside = p_RNK[torch.arange(num_rows), run].to(torch.float64).cumsum(-1)
    picked = run * _RUN + _invert(inside, u)[0]
    return picked, parts.z.gather(1, picked.unsqueeze(1)).squeeze(1) - parts.lse


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
    logits_RV: Tensor,
    temperature: float,
    u_R: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
) -> tuple[Tensor, Tensor]:
    """Inverse CDF over the most likely tokens: at most top_k, the fewest that reach top_p of the
    whole tempered distribution, and those at least min_p times as likely as the first. Ties go to
    the smaller token id. Also the log-prob among the kept."""
    z, ids = logits_RV.float().sort(stable=True, dim=-1, descending=True)
    weights = ((z - z[:, :1]) / temperature).to(torch.float64).exp_()
    cdf = weights.cumsum(-1)
    rank = torch.arange(z.shape[1])
    limit = torch.where(top_ks > 0, top_ks, z.shape[1]).unsqueeze(1)
    is_kept = (rank < limit) & (cdf - weights < top_ps.unsqueeze(1) * cdf[:, -1:])
    is_kept &= weights >= min_ps.unsqueeze(1)
    is_kept[:, 0] = True
    kept = weights.masked_fill_(~is_kept, 0.0)
    cdf = kept.cumsum(-1)
    index, _ = _invert(cdf, u_R)
    picked = index.unsqueeze(1)
    logp = (kept.gather(1, picked) / cdf[:, -1:]).log()
    return ids.gather(1, picked).squeeze(1), logp.squeeze(1).float()
