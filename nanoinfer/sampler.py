"""From logits to tokens and log-probs, all rows of a step at once.

A token depends on its row of logits, its request's seed and its position, on nothing else: the
randomness is one number u in [0, 1) hashed from (seed, position), and the token is the first whose
cumulative probability exceeds u (inverse CDF). Cumulative sums run in two levels, over runs of 256
tokens and inside the run that u falls into. A request that truncates (top-k, top-p, min-p) draws
from the tokens above a pivot (logits/sampling.py says which, `cpp/truncate.h` finds it): what
ties with the last one kept is kept too.

The log-prob is that of the tempered distribution over the whole vocabulary, before top-k and
top-p, by the trainer's own arithmetic (`kernels.logits_logprob`): what the trainer recomputes. A
request may ask for that of temperature 1 instead (`raw_rows`). A truncated or edited request is
sampled from another distribution; `sampled_logps` are that one's. Training wants neither truncation
nor edits: then the two are the same.

Left out: beam search; GPUs, whose sampler is device_sampler.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

import kernels
from kernels.backend import use_native
from kernels.cpp import logits_ops
from kernels.cpp import ops as cpp_ops
from kernels.logits.sampling import kept_tokens
from nanoinfer.logit_edits import EditPlan, LogitEdits

_RUN = 256  # tokens a run of the two-level cumulative sum
_CHUNK_ELEMENTS = 1 << 20  # logits handled at a time: 4 MB of fp32 stay in the processor's cache
_BELOW_ONE = 1.0 - 2.0**-40
_U64 = np.uint64
_GREEDY, _WHOLE, _TRUNCATED = range(3)  # how a row is sampled


@dataclass(frozen=True)
class SamplingBatch:
    """One entry a row. Temperature 0 is greedy; `positions` is the index the token will have.
    `edits`, `num_top` and `raw_rows` name only the rows that ask for it."""

    temperatures: np.ndarray  # float64
    top_ks: np.ndarray  # int64, 0 is off
    top_ps: np.ndarray  # float64, 1 is off
    seeds: np.ndarray  # uint64
    positions: np.ndarray  # int64
    min_ps: np.ndarray  # float64, 0 is off
    edits: Mapping[int, LogitEdits] = field(default_factory=dict)
    num_top: Mapping[int, int] = field(default_factory=dict)  # likeliest tokens to report
    raw_rows: Sequence[int] = ()  # whose reported log-probs are of temperature 1

    def logp_temperatures(self) -> np.ndarray:
        """One a row: of the distribution whose log-probs are reported, where greedy rows have 1."""
        found = np.where(self.temperatures == 0, 1.0, self.temperatures)
        found[list(self.raw_rows)] = 1.0
        return found


class Samples(NamedTuple):
    """One entry a row: ids int64, log-probs fp32."""

    tokens: Tensor
    logps: Tensor  # of the tempered distribution, in `raw_rows` of temperature 1
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
                picked, logp = _pick(w_RV, 1.0, None)
                own = torch.zeros(len(chunk))
            elif kind == _WHOLE:
                picked, own = _pick(w_RV, temperature, torch.from_numpy(u[chunk]))
                logp = own
            else:
                picked, logp, own = _pick_kept(
                    w_RV,
                    temperature,
                    torch.from_numpy(u[chunk]),
                    torch.from_numpy(batch.top_ks[chunk]),
                    torch.from_numpy(batch.top_ps[chunk]),
                    torch.from_numpy(batch.min_ps[chunk]),
                )
            if is_edited:
                logp = kernels.logits_logprob(z_RV, picked, temperature)
            tokens[index], logps[index], sampled_logps[index] = picked, logp, own
    if batch.raw_rows:
        raw = list(batch.raw_rows)
        logps[raw] = kernels.logits_logprob(logits_BV[raw], tokens[raw])
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
    EditPlan.of(edits, z_RV.shape[1]).apply_(z_RV)
    return z_RV


def top_logps(logits_BV: Tensor, batch: SamplingBatch) -> dict[int, list[tuple[int, float]]]:
    """The likeliest tokens of the rows that asked, of equals the smaller id first, and their
    log-probs as `logits_logprob`'s."""
    found: dict[int, list[tuple[int, float]]] = {}
    if not batch.num_top:
        return found
    temperatures = batch.logp_temperatures()
    for temperature in sorted({float(temperatures[row]) for row in batch.num_top}):
        rows = [row for row in batch.num_top if temperatures[row] == temperature]
        counts = [batch.num_top[row] for row in rows]
        ids, logps = likeliest(logits_BV[rows], temperature, max(counts))
        for row, count, *pair in zip(rows, counts, ids.tolist(), logps.tolist(), strict=True):
            found[row] = list(zip(*pair, strict=True))[:count]
    return found


def likeliest(logits_RV: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor]:
    """Ids and log-probs [R, count] of the likeliest tokens of each row, of equals the smaller id
    first; fewer where the vocabulary is smaller."""
    if use_native("auto", logits_RV):
        return logits_ops.likeliest(logits_RV, temperature or 1.0, [count] * len(logits_RV))
    ids = torch.stack([_first_of_row(z_V, min(count, len(z_V))) for z_V in logits_RV])
    rows = logits_RV.repeat_interleave(ids.shape[1], 0)
    return ids, kernels.logits_logprob(rows, ids.reshape(-1), temperature).view(ids.shape)


def _first_of_row(z_V: Tensor, count: int) -> Tensor:
    some = (
        (z_V >= z_V.topk(count).values[-1]).nonzero().flatten()
    )  # with all that tie with the last
    return some[z_V[some].sort(stable=True, descending=True).indices[:count]]


def _pick(logits_RV: Tensor, temperature: float, u_R: Tensor | None) -> tuple[Tensor, Tensor]:
    """Inverse CDF over the whole vocabulary; without u the likeliest token, of equals the first.
    Also its log-prob, `logits_logprob`'s bits."""
    if use_native("auto", logits_RV):
        return cpp_ops.pick(logits_RV, temperature, u_R)
    if u_R is None:
        likeliest = logits_RV.float().argmax(-1)
        return likeliest, kernels.logits_logprob(logits_RV, likeliest, temperature)
    parts = kernels.softmax_parts(logits_RV, temperature)
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


def _pick_kept(
    logits_RV: Tensor,
    temperature: float,
    u_R: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse CDF over the tokens that the truncation keeps (`kernels.sampling`). Also the token's
    log-prob over the whole vocabulary, `logits_logprob`'s bits, and among the kept."""
    if use_native("auto", logits_RV):
        return logits_ops.pick_kept(logits_RV, temperature, u_R, top_ks, top_ps, min_ps)
    z = logits_RV.float()
    gap = (z / temperature).double()
    gap -= gap.amax(-1, keepdim=True)
    keep = kept_tokens(z, gap, top_ks, top_ps, min_ps)
    kept = gap.exp_().masked_fill_(~keep, 0.0)
    cdf = kept.cumsum(-1)
    picked, _ = _invert(cdf, u_R)
    own = (kept.gather(1, picked.unsqueeze(1)) / cdf[:, -1:]).log().squeeze(1)
    return picked, kernels.logits_logprob(logits_RV, picked, temperature), own.float()
