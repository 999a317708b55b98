"""Draws from a part of the vocabulary, from edited logits, and the likeliest tokens of a row.

A request that truncates (top-k, top-p, min-p) draws from the tokens above a pivot
(logits/sampling.py says which, `cpp/truncate.h` finds it): what ties with the last one kept is
kept too. The log-prob stays that of the tempered distribution over the whole vocabulary, before
top-k and top-p; a request may ask for that of temperature 1 instead (`raw_rows`). A truncated or
edited request is sampled from another distribution; `sampled_logps` are that one's. Training wants
neither truncation nor edits, where the two are the same, or what was kept (kept_sampling.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from kernels import logits_logprob
from kernels.backend import use_native
from kernels.cpp import logits_ops
from kernels.logits.sampling import kept_tokens
from nanoinfer.options.logit_edits import EditPlan, LogitEdits
from nanoinfer.sampler import Samples, SamplingBatch, chunks, invert, pick, uniforms

_GREEDY, _WHOLE, _TRUNCATED = range(3)  # how a row is sampled


@dataclass(frozen=True)
class FullSamplingBatch(SamplingBatch):
    """One entry a row. `edits`, `num_top` and `raw_rows` name only the rows that ask for it."""

    top_ks: np.ndarray  # int64, 0 is off
    top_ps: np.ndarray  # float64, 1 is off
    min_ps: np.ndarray  # float64, 0 is off
    edits: Mapping[int, LogitEdits] = field(default_factory=dict)
    num_top: Mapping[int, int] = field(default_factory=dict)  # likeliest tokens to report
    raw_rows: Sequence[int] = ()  # whose reported log-probs are of temperature 1
    kept_rows: Sequence[int] = ()  # whose reported log-probs are among the kept (kept_sampling.py)

    @classmethod
    def of(cls, batch: SamplingBatch) -> FullSamplingBatch:
        """The same; a plain one asks for nothing."""
        if isinstance(batch, FullSamplingBatch):
            return batch
        count = len(batch.seeds)
        no_ks, all_ps, no_ps = np.zeros(count, dtype=np.int64), np.ones(count), np.zeros(count)
        return cls(batch.temperatures, batch.seeds, batch.positions, no_ks, all_ps, no_ps)

    def logp_temperatures(self) -> np.ndarray:
        """One a row: of the distribution whose log-probs are reported, where greedy rows have 1."""
        found = np.where(self.temperatures == 0, 1.0, self.temperatures)
        found[list(self.raw_rows)] = 1.0
        return found


def sample(logits_BV: Tensor, batch: FullSamplingBatch) -> Samples:
    """Draw one token a row, as the row asks. The logits are not changed."""
    tokens = torch.empty(logits_BV.shape[0], dtype=torch.int64)
    logps = torch.empty(logits_BV.shape[0], dtype=torch.float32)
    sampled_logps = torch.empty(logits_BV.shape[0], dtype=torch.float32)
    u = torch.from_numpy(uniforms(batch.seeds, batch.positions))
    for (temperature, kind, is_edited), rows in _alike(batch):
        for index, z_RV in chunks(logits_BV, rows):
            chunk, w_RV = index.numpy(), z_RV
            if is_edited:
                w_RV = edited(z_RV, [batch.edits[row] for row in chunk.tolist()])
            if kind == _GREEDY:
                picked, logp = pick(w_RV, 1.0, None)
                own = torch.zeros(len(index))
            elif kind == _WHOLE:
                picked, own = pick(w_RV, temperature, u[index])
                logp = own
            else:
                picked, logp, own = _pick_kept(
                    w_RV,
                    temperature,
                    u[index],
                    torch.from_numpy(batch.top_ks[chunk]),
                    torch.from_numpy(batch.top_ps[chunk]),
                    torch.from_numpy(batch.min_ps[chunk]),
                )
            if is_edited:
                logp = logits_logprob(z_RV, picked, temperature)
            tokens[index], logps[index], sampled_logps[index] = picked, logp, own
    if batch.raw_rows:
        raw = list(batch.raw_rows)
        logps[raw] = logits_logprob(logits_BV[raw], tokens[raw])
    return Samples(tokens, logps, sampled_logps)


def _alike(batch: FullSamplingBatch) -> list[tuple[tuple[float, int, bool], np.ndarray]]:
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


def edited(logits_RV: Tensor, edits: list[LogitEdits]) -> Tensor:
    """A copy of the logits, fp32, each row changed as it asks."""
    z_RV = logits_RV.to(torch.float32, copy=True)
    EditPlan.of(edits, z_RV.shape[1]).apply_(z_RV)
    return z_RV


def top_logps(logits_BV: Tensor, batch: FullSamplingBatch) -> dict[int, list[tuple[int, float]]]:
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
    return ids, logits_logprob(rows, ids.reshape(-1), temperature).view(ids.shape)


def _first_of_row(z_V: Tensor, count: int) -> Tensor:
    some = (
        (z_V >= z_V.topk(count).values[-1]).nonzero().flatten()
    )  # with all that tie with the last
    return some[z_V[some].sort(stable=True, descending=True).indices[:count]]


def _pick_kept(
    logits_RV: Tensor,
    temperature: float,
    u_R: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Inverse CDF over the tokens that the truncation keeps (logits/sampling.py). Also the token's
    log-prob over the whole vocabulary, `logits_logprob`'s bits, and among the kept."""
    if use_native("auto", logits_RV):
        return logits_ops.pick_kept(logits_RV, temperature, u_R, top_ks, top_ps, min_ps)
    z = logits_RV.float()
    gap = (z / temperature).double()
    gap -= gap.amax(-1, keepdim=True)
    keep = kept_tokens(z, gap, top_ks, top_ps, min_ps)
    kept = gap.exp_().masked_fill_(~keep, 0.0)
    cdf = kept.cumsum(-1)
    picked, _ = invert(cdf, u_R)
    own = (kept.gather(1, picked.unsqueeze(1)) / cdf[:, -1:]).log().squeeze(1)
    return picked, logits_logprob(logits_RV, picked, temperature), own.float()
