"""Logits to tokens: vectorised over the batch, and blind to it.

A token depends on its own row of logits, the request's seed and the position alone. The uniform
number comes from a counter-based hash (SplitMix64: Steele, Lea & Flood, OOPSLA 2014) of
(seed, position), the token from inverting the cumulative distribution, in two levels so that
only one chunk of the vocabulary is summed token by token.
Log-probs are of the tempered distribution over the whole vocabulary, before top-k and top-p: what
the trainer recomputes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kernels import logits_logprob
from nanoinfer.sampling import SamplingParams

_CHUNK = 256


def sample(
    logits_BV: Tensor, params: Sequence[SamplingParams], positions: Sequence[int]
) -> tuple[list[int], list[float]]:
    """One token and its log-prob a row. `positions[i]` is the index the token will have."""
    tokens_B = torch.argmax(logits_BV, dim=-1)
    rows = [i for i, p in enumerate(params) if p.temperature > 0]
    if rows:
        index = torch.tensor(rows, device=logits_BV.device)
        chosen = [params[i] for i in rows]
        weights = _weights(logits_BV if len(rows) == len(params) else logits_BV[index], chosen)
        u = uniform([p.seed for p in chosen], [positions[i] for i in rows])
        tokens_B[index] = invert_cdf(weights, torch.from_numpy(u).to(logits_BV.device))
    return tokens_B.tolist(), _logps(logits_BV, tokens_B, params).tolist()


def uniform(seeds: Sequence[int], positions: Sequence[int]) -> np.ndarray:
    """fp64 numbers in [0, 1), each a function of its own seed and position."""
    with np.errstate(over="ignore"):
        seed = _mix(np.array([s & 0xFFFFFFFFFFFFFFFF for s in seeds], dtype=np.uint64))
        counter = np.array(positions, dtype=np.uint64) + np.uint64(1)
        bits = _mix(seed + counter * np.uint64(0x9E3779B97F4A7C15))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def invert_cdf(weights_BV: Tensor, u_B: Tensor) -> Tensor:
    """The token at which each row's running sum of (unnormalised) weights passes u of its total."""
    num_rows, vocab = weights_BV.shape
    padding = -vocab % _CHUNK
    if padding:
        weights_BV = torch.nn.functional.pad(weights_BV, (0, padding))
    chunks_BCK = weights_BV.view(num_rows, -1, _CHUNK)
    sums_BC = chunks_BCK.sum(-1).double().cumsum(-1)
    target_B1 = (u_B * sums_BC[:, -1]).unsqueeze(1)
    chunk_B1 = _first_above(sums_BC, target_B1)
    before_B1 = torch.where(chunk_B1 > 0, sums_BC.gather(1, (chunk_B1 - 1).clamp(min=0)), 0.0)
    inside_BK = chunks_BCK[torch.arange(num_rows), chunk_B1.squeeze(1)].double()
    token_B1 = _first_above(inside_BK.cumsum(-1), target_B1 - before_B1)
    # Rounding can leave the target just past the chunk's sum: then its last likely token.
    last_B1 = (_CHUNK - 1) - (inside_BK > 0).flip(1).int().argmax(1, keepdim=True)
    token_B1 = torch.minimum(token_B1, last_B1)
    return (chunk_B1 * _CHUNK + token_B1).squeeze(1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    found = torch.searchsorted(cumulative, target, right=True)
    return found.clamp(max=cumulative.shape[1] - 1)


def _weights(logits_RV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Unnormalised probabilities, with 0 where top-k or top-p cut a token off."""
    temperature = torch.tensor([p.temperature for p in params], device=logits_RV.device)
    z_RV = logits_RV.float() / temperature.unsqueeze(1)
    weights_RV = (z_RV - z_RV.amax(-1, keepdim=True)).exp_()
    for row, p in enumerate(params):
        if p.top_k or p.top_p < 1:
            weights_RV[row] = _truncate(weights_RV[row], p)
    return weights_RV


def _truncate(weights_V: Tensor, params: SamplingParams) -> Tensor:
    """Keep the top_k likeliest, of them the fewest that hold top_p; at least one token stays."""
    ordered, index = weights_V.sort(descending=True, stable=True)
    keep = torch.ones_like(ordered, dtype=torch.bool)
    if params.top_k:
        keep[params.top_k :] = False
    kept = ordered * keep
    before = kept.cumsum(0) - kept
    keep &= before < params.top_p * kept.sum()
    return torch.zeros_like(weights_V).index_put((index[keep],), ordered[keep])


def _logps(logits_BV: Tensor, tokens_B: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    temperatures = {p.temperature for p in params}
    if len(temperatures) == 1:
        return logits_logprob(logits_BV, tokens_B, temperatures.pop())
    logps_B = torch.empty(len(params), dtype=torch.float32, device=logits_BV.device)
    for temperature in temperatures:
        rows = torch.tensor([i for i, p in enumerate(params) if p.temperature == temperature])
        rows = rows.to(logits_BV.device)
        logps_B[rows] = logits_logprob(logits_BV[rows], tokens_B[rows], temperature)
    return logps_B
