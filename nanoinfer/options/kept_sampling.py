"""Draws whose log-prob a trainer can take again: `SamplingParams(logps_mode="kept")`.

Such a request draws from the tokens that top-k, top-p and min-p leave, reports its log-probs among
them, and says which they were (`Output.top_logps`). Logits of all other tokens are overwritten as
the trainer does (`kernels.logits.kept`), so that the draw from the whole row, and its log-prob, are
the same code and the same bits at both ends.

What it has to report is bounded: no more than the MAX_KEPT likeliest tokens are kept, with those
that tie with the last of them. Tokens that a grammar or `min_tokens` rules out are not kept.
Left out: GPUs (`check_device`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kernels.logits.kept import keep_only_
from kernels.logits.sampling import kept_tokens
from nanoinfer.options.full_sampling import FullSamplingBatch, edited
from nanoinfer.params import SamplingParams

MAX_KEPT = 1024
"""The most tokens that are kept, ties aside. Past it a distribution of p = 0.95 has tokens of less
than 0.001 each on average."""

TopTokens = dict[int, list[tuple[int, float]]]


def check_kept(params: SamplingParams) -> None:
    """`ValueError` for what cannot be scored again over what was kept."""
    if params.temperature == 0:
        raise ValueError(
            "logps_mode='kept' with temperature=0: a greedy token is certain; set a temperature, "
            "or logps_mode='tempered'"
        )
    if params.prompt_logps:
        raise ValueError(
            "logps_mode='kept' with prompt_logps=True: nobody drew the prompt; leave it out, or "
            "set logps_mode='tempered'"
        )
    changed = {
        "repetition_penalty": params.repetition_penalty != 1,
        "presence_penalty": params.presence_penalty != 0,
        "frequency_penalty": params.frequency_penalty != 0,
        "logit_bias": bool(params.logit_bias),
    }
    for name, is_set in changed.items():
        if is_set:
            raise ValueError(
                f"logps_mode='kept' with {name}={getattr(params, name)}: a trainer does not know "
                "the changed logits; leave it out, or set logps_mode='tempered'"
            )


def check_device(device: torch.device) -> None:
    """`ValueError` where the device's own sampler would not do it."""
    if device.type != "cpu":
        raise ValueError(
            f"logps_mode='kept' on {device}: what was kept is reported on a CPU alone so far; set "
            "logps_mode='tempered'"
        )


def keep_rows(
    logits_BV: Tensor, batch: FullSamplingBatch
) -> tuple[Tensor, FullSamplingBatch, TopTokens]:
    """The logits with NOTHING where a row of `batch.kept_rows` leaves a token out, the batch in
    which these rows ask for no more than a plain draw, and what they kept, likeliest first, with
    log-probs. The logits given are not changed."""
    rows = np.array(batch.kept_rows)
    z_RV = logits_BV[torch.from_numpy(rows)]
    keep_RV = _kept(z_RV, rows, batch)
    z_RV = keep_only_(z_RV, keep_RV)
    logits_BV = logits_BV.index_copy(0, torch.from_numpy(rows), z_RV)
    top_ks, top_ps, min_ps = batch.top_ks.copy(), batch.top_ps.copy(), batch.min_ps.copy()
    top_ks[rows], top_ps[rows], min_ps[rows] = 0, 1.0, 0.0
    edits = {row: one for row, one in batch.edits.items() if row not in batch.kept_rows}
    plain = replace(batch, top_ks=top_ks, top_ps=top_ps, min_ps=min_ps, edits=edits, kept_rows=())
    temperatures = torch.from_numpy(batch.temperatures[rows]).unsqueeze(1)
    logp_RV = torch.log_softmax(z_RV.double() / temperatures, -1)
    found: TopTokens = {}
    for row, keep_V, logp_V in zip(batch.kept_rows, keep_RV, logp_RV, strict=True):
        ids = keep_V.nonzero().squeeze(1)
        logps, order = logp_V[ids].sort(descending=True, stable=True)
        found[row] = list(zip(ids[order].tolist(), logps.tolist(), strict=True))
    return logits_BV, plain, found


def _kept(logits_RV: Tensor, rows: np.ndarray, batch: FullSamplingBatch) -> Tensor:
    """Which tokens each of the rows keeps, bool [R, V], by `sample`'s definition."""
    z_RV = logits_RV.float()
    for place, row in enumerate(rows.tolist()):
        if row in batch.edits:
            z_RV[place] = edited(logits_RV[place : place + 1], [batch.edits[row]])[0]
    gap_RV = (z_RV / torch.from_numpy(batch.temperatures[rows]).unsqueeze(1).float()).double()
    gap_RV -= gap_RV.amax(-1, keepdim=True)
    top_ks = batch.top_ks[rows]
    top_ks = np.where(top_ks > 0, np.minimum(top_ks, MAX_KEPT), MAX_KEPT)
    ps = (torch.from_numpy(one[rows]) for one in (batch.top_ps, batch.min_ps))
    return kept_tokens(z_RV, gap_RV, torch.from_numpy(top_ks), *ps)
