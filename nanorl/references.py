"""Several references as one: a weighted mean of teachers' log-probs, or a teacher for each kind of
task.

    --rl.reference math:ORG/A,code:ORG/B     each kind of task its own teacher (MOPD)
    --rl.reference ORG/A=3,ORG/B             Σ w·log π with weights ¾ and ¼: a geometric mean
    --rl.reference code:ORG/B,ORG/A          A for all kinds but code

Multi-teacher on-policy distillation by kind: MiMo-V2-Flash, arXiv 2601.02780. The mean of log-probs
is not normalised again: of a sampled token nobody knows the sum over all others, and a constant of
the place moves no gradient that is summed over what the policy may say.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.packing import Sample, TopTokens
from nanoengine.scoring import Policy


@dataclass(frozen=True)
class ReferenceName:
    """One entry of `rl.reference`: `[KIND:]NAME[=WEIGHT]`."""

    name: str
    kind: str = ""
    """The kind of tasks that it is asked about; empty: all that no other entry names."""
    weight: float = 1.0


def parse_references(text: str) -> list[ReferenceName]:
    """The entries of `rl.reference`; none of an empty text, and a single one of a text that is a
    folder or has none of the marks. ValueError for an entry that is none."""
    if not text:
        return []
    if Path(text).expanduser().is_dir():
        return [ReferenceName(text)]
    return [_parse(entry.strip(), text) for entry in text.split(",")]


def _parse(entry: str, text: str) -> ReferenceName:
    kind, has_kind, rest = entry.rpartition(":")
    name, has_weight, number = rest.partition("=")
    try:
        weight = float(number) if has_weight else 1.0
    except ValueError:
        weight = math.nan
    if not name or (has_kind and not kind) or not (math.isfinite(weight) and weight > 0):
        raise ValueError(
            f"--rl.reference {text}: {entry!r} is no reference; write NAME, NAME=WEIGHT with a "
            "weight above 0, or KIND:NAME, with commas between"
        )
    return ReferenceName(name, kind, weight)


def shares_of(kind: str, names: Sequence[ReferenceName]) -> list[float]:
    """How much of the reference's word on a task of this kind is each one's; they add up to 1.
    ValueError where nobody is asked about it."""
    own = [one.weight if one.kind and one.kind == kind else 0.0 for one in names]
    if not any(own):
        own = [0.0 if one.kind else one.weight for one in names]
    if not any(own):
        raise ValueError(
            f"--rl.reference: no teacher is named for tasks of kind {kind!r} (there are: "
            f"{', '.join(sorted({one.kind for one in names}))}); add {kind}:NAME, or a NAME alone "
            "for all other kinds"
        )
    return [weight / sum(own) for weight in own]


class References:
    """A `Policy` of several: each sample is scored by those that are asked about its kind."""

    def __init__(self, names: Sequence[ReferenceName], policies: Sequence[Policy]) -> None:
        self._names, self._policies = names, policies

    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """The weighted mean of their log-probs of each token."""
        shares = [shares_of(sample.kind, self._names) for sample in samples]
        found = [torch.zeros(len(sample.tokens)) for sample in samples]
        for i, policy in enumerate(self._policies):
            asked = [place for place, share in enumerate(shares) if share[i] > 0]
            if asked:
                given = [samples[place] for place in asked]
                scored = policy.forward_logprobs(given, temperature=temperature)
                for place, values in zip(asked, scored, strict=True):
                    found[place] = found[place] + shares[place][i] * values.cpu()
        return found

    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        """The likeliest tokens of the one teacher of each sample. ValueError where several are
        mixed: their likeliest tokens are not the same ones."""
        shares = [shares_of(sample.kind, self._names) for sample in samples]
        found: dict[int, TopTokens] = {}
        for i, policy in enumerate(self._policies):
            asked = [place for place, share in enumerate(shares) if share[i] > 0]
            if any(shares[place][i] < 1 for place in asked):
                raise ValueError(MIXED)
            if asked:
                tops = policy.forward_top(
                    [samples[place] for place in asked], k, temperature=temperature
                )
                found |= zip(asked, tops, strict=True)
        return [found[place] for place in range(len(samples))]


MIXED = (
    "--rl.reference: loss opd_topk compares with the likeliest tokens of one teacher, and several "
    "are mixed here; name one for each kind of task (KIND:NAME), or choose --rl.algorithm.loss opd"
)


def check_mixture(names: Sequence[ReferenceName], *, is_topk: bool) -> None:
    """ValueError for a mixture of teachers where only one can be asked."""
    if is_topk and len({one.kind for one in names}) < len(names):
        raise ValueError(MIXED)
