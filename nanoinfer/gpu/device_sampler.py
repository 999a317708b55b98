"""Sampling where the logits are: on a GPU, in one launch, edits included.

The host decides what each row asks for and writes it down as tensors (`DeviceSampling`), which go
up with the rest of the step. The GPU edits the logits of the rows that want it, samples all rows at
once, and keeps the log-probs of the untouched logits, which are the trainer's (or of temperature 1,
where asked for), beside those of what was sampled from.

Its randomness is a hash of (seed, position) as the CPU's is, but another one (`kernels.sample`), so
the two devices draw different tokens; it keeps every token that ties with the last one of a
truncation; and its log-prob is the trainer's up to the rounding of a sum, or to the bit where the
engine is deterministic.

Legend: B rows of logits, R of them edited, N of them scored apart from sampling, K of them report
their likeliest tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

import kernels
from nanoinfer.options.full_sampling import FullSamplingBatch
from nanoinfer.options.logit_edits import EditPlan
from nanoinfer.sampler import Samples


@dataclass(frozen=True)
class RescoredRows:
    """Rows whose log-probs are taken from the untouched logits by the trainer's function, rows of
    one temperature at a time: the trainer divides by a number that it knows to fp64."""

    rows: Tensor  # int64, in B, like temperatures together
    spans: tuple[tuple[float, int, int], ...]  # temperature, never 0, and its rows [lo, hi)

    @classmethod
    def of(cls, rows: Sequence[int], batch: FullSamplingBatch) -> RescoredRows | None:
        if not rows:
            return None
        order = np.array(rows)
        temperatures = batch.logp_temperatures()[order]
        by_temperature = temperatures.argsort(kind="stable")
        values, counts = np.unique(temperatures, return_counts=True)
        ends = counts.cumsum()
        spans = zip(values.tolist(), (ends - counts).tolist(), ends.tolist(), strict=True)
        return cls(torch.from_numpy(order[by_temperature]), tuple(spans))

    def logps(self, logits_BV: Tensor, tokens_B: Tensor) -> Tensor:
        """One a row, in the order of `rows`."""
        found = []
        for temperature, lo, hi in self.spans:
            rows = self.rows[lo:hi]
            z, tokens = logits_BV.index_select(0, rows), tokens_B.index_select(0, rows)
            found.append(kernels.logits_logprob(z, tokens, temperature))
        return torch.cat(found)


@dataclass(frozen=True)
class RankedRows:
    """Rows that report their likeliest tokens, at temperatures of their own."""

    rows: Tensor  # int64, in B
    temperatures: Tensor  # fp32, never 0

    @classmethod
    def of(cls, rows: Sequence[int], batch: FullSamplingBatch) -> RankedRows | None:
        if not rows:
            return None
        temperatures = batch.logp_temperatures()[list(rows)].astype(np.float32)
        return cls(torch.tensor(rows), torch.from_numpy(temperatures))

    def tempered(self, logits_BV: Tensor) -> Tensor:
        """Their logits, fp32."""
        return logits_BV.index_select(0, self.rows).float() / self.temperatures.unsqueeze(1)


@dataclass(frozen=True)
class DeviceSampling:
    """The sampling parameters of a step's rows, as `kernels.sample` takes it; None is off for all
    rows."""

    temperatures: Tensor  # fp32 [B]
    top_ks: Tensor | None  # int32 [B]
    top_ps: Tensor | None  # fp32 [B]
    min_ps: Tensor | None  # fp32 [B]
    seeds: Tensor  # int64 [B]
    positions: Tensor  # int64 [B]
    edited_rows: Tensor | None  # int64 [R], in B
    edits: EditPlan | None  # of those rows
    rescored: RescoredRows | None  # [N]: drawn from other logits or at another temperature
    top: RankedRows | None  # [K]
    num_top: int  # the most that one of them wants


def device_sampling(
    batch: FullSamplingBatch, vocab: int, *, rescores_all: bool = False
) -> DeviceSampling:
    """On the host, from what the requests say. The log-prob that comes with a draw is the trainer's
    up to the rounding of a sum; `rescores_all` gives every row the trainer's bits, for one more
    pass over the logits."""
    rescored = batch.edits.keys() | set(batch.raw_rows)

    def column(values: np.ndarray, dtype: type) -> Tensor:
        return torch.from_numpy(values.astype(dtype))

    return DeviceSampling(
        temperatures=column(batch.temperatures, np.float32),
        top_ks=column(batch.top_ks.clip(max=vocab), np.int32) if (batch.top_ks > 0).any() else None,
        top_ps=column(batch.top_ps, np.float32) if (batch.top_ps < 1).any() else None,
        min_ps=column(batch.min_ps, np.float32) if (batch.min_ps > 0).any() else None,
        seeds=column(batch.seeds.view(np.int64), np.int64),
        positions=column(batch.positions, np.int64),
        edited_rows=torch.tensor(list(batch.edits)) if batch.edits else None,
        edits=EditPlan.of(list(batch.edits.values()), vocab) if batch.edits else None,
        rescored=RescoredRows.of(
            range(len(batch.temperatures)) if rescores_all else sorted(rescored), batch
        ),
        top=RankedRows.of(list(batch.num_top), batch),
        num_top=min(max(batch.num_top.values(), default=0), vocab),
    )


def sample_on_device(logits_BV: Tensor, asked: DeviceSampling) -> Samples:
    """Draw one token a row. The logits are not changed, and nothing is read by the host."""
    drawn = kernels.sample(
        _edited(logits_BV, asked),
        asked.temperatures,
        asked.top_ks,
        asked.top_ps,
        asked.min_ps,
        asked.seeds,
        asked.positions,
    )
    logps = drawn.raw_logprobs
    if asked.rescored is not None:
        again = asked.rescored.logps(logits_BV, drawn.tokens)
        logps = logps.index_copy(0, asked.rescored.rows, again)
    return Samples(drawn.tokens, logps, drawn.logprobs)


def _edited(logits_BV: Tensor, asked: DeviceSampling) -> Tensor:
    """A copy in fp32 where any row is edited."""
    if asked.edits is None:
        return logits_BV
    assert asked.edited_rows is not None, "made with the edits"
    z_RV = logits_BV.index_select(0, asked.edited_rows).float()
    asked.edits.apply_(z_RV)
    return logits_BV.float().index_copy(0, asked.edited_rows, z_RV)


def top_on_device(logits_BV: Tensor, asked: DeviceSampling) -> tuple[Tensor, Tensor] | None:
    """Ids and log-probs [K, num_top] of the likeliest tokens, of equals the first, in the rows that
    asked; None where none did."""
    if asked.top is None:
        return None
    z_KV = logits_BV.index_select(0, asked.top.rows)
    return _likeliest(z_KV, asked.top.tempered(logits_BV), asked.num_top)


def likeliest_on_device(logits_RV: Tensor, temperature: float, count: int) -> tuple[Tensor, Tensor]:
    """`sampler.likeliest` of rows of one temperature, [R, count] each, on their device."""
    return _likeliest(logits_RV, logits_RV.float() / (temperature or 1.0), count)


def _likeliest(logits_RV: Tensor, tempered_RV: Tensor, count: int) -> tuple[Tensor, Tensor]:
    ids = logits_RV.float().sort(stable=True, descending=True).indices[:, :count]
    return ids, kernels.log_softmax_batch_invariant(tempered_RV).gather(1, ids)
