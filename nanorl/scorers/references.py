"""The policy that KL terms and distillation compare with: another model of the same vocabulary, or
the policy as RL began, which is written into the run's folder, because a resumed run must compare
with the same weights.

Several are one `Policy`: a weighted mean of teachers' log-probs, or a teacher for each kind of task
(reference_names.py says how they are named).
The mean of log-probs is not normalised again: of a sampled token nobody knows the sum over all
others, and a constant of the place moves no gradient that is summed over what the policy may say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from nanoengine.formats.hf import load_model
from nanoengine.heads.scorer import Policy, Scorer
from nanoengine.model.transformer import Transformer
from nanoengine.optim import DTYPES
from nanoengine.packing import Sample, TopTokens
from nanorl.options.reference_check import resolve_reference
from nanorl.options.reference_names import MIXED, ReferenceName, parse_references, shares_of
from nanorl.options.run_config import RunConfig


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


def reference_folders(
    config: RunConfig, own: Path, *, has_begun: bool, write_policy: Callable[[Path], None]
) -> list[Path]:
    """The Hugging Face folders of the reference, one for each entry of `rl.reference`, or `own`,
    where a run keeps the policy as RL began.

    `write_policy` writes the policy as it is now, which is that one unless RL steps were taken
    (`has_begun`). `ValueError` if the run's own is missing.
    """
    if config.rl.reference:
        return [
            resolve_reference(one.name, config) for one in parse_references(config.rl.reference)
        ]
    if not own.is_dir():
        if has_begun:
            raise ValueError(
                f"{own} is missing: it holds the policy as RL began, which this run "
                "compares with; put it back, or start another run"
            )
        write_policy(own)
    return [own]


def load_reference(
    config: RunConfig,
    folders: Sequence[Path],
    device: torch.device,
    prepare: Callable[[Transformer], None] | None = None,
) -> Policy:
    """The reference, frozen, in the run's dtype: the model of the one folder, or those of
    `rl.reference` together. `prepare` is called with each model, as to let it see."""
    scorers = [_load_scorer(config, folder, device) for folder in folders]
    if prepare is not None:
        for scorer in scorers:
            prepare(scorer.model)
    if len(scorers) == 1:
        return scorers[0]
    return References(parse_references(config.rl.reference), scorers)


def _load_scorer(config: RunConfig, folder: Path, device: torch.device) -> Scorer:
    model = load_model(folder, DTYPES[config.dtype], str(device))
    model.batch_invariant = config.deterministic  # as the policy's: a KL to its copy starts at 0
    limits = config.engine
    if limits.lm_head_fp32:
        model.head_dtype = torch.float32
        model.repack()
    return Scorer(
        model.requires_grad_(False),
        micro_batch_tokens=limits.micro_batch_tokens,
        share_prefix=limits.share_prefix,
    )
