"""The numbers that travel with each token of a sample, from the optimizer batch to the losses.

`Sample.fields` (nanoengine.packing) holds a list of floats by name, one for each token; the engine
packs, splits and shifts them with the tokens, and hands them to the loss as fp32 tensors. The names
that this package writes and reads are these, and no others:

    Sample(
        tokens=[5, 6, 7, 8],       # two of the prompt, two that the policy sampled
        loss_mask=[0, 0, 1, 1],
        fields={
            Field.ROLLOUT_LOGP: [0.0, 0.0, -0.5, -1.2],
            Field.STALENESS: [0.0, 0.0, 0.0, 0.0],
            Field.ADVANTAGE: [0.0, 0.0, 0.7, 0.7],
            Field.WEIGHT: [0.0, 0.0, 0.25, 0.25],
        },
    )

All but OBSERVATION are 0 where the policy did not sample, or are not read there. Log-probs are nats
of the tempered distribution.
"""

from __future__ import annotations

from enum import StrEnum


class Field(StrEnum):
    """A name in `Sample.fields`. Under each: what it is, who writes it, who reads it."""

    ROLLOUT_LOGP = "rollout_logp"
    """log μ. Written from the rollout; read by the corrections, the losses and `logp_gap`."""
    STALENESS = "staleness"
    """Versions ago that the token was sampled. Written from the rollout; read by `logp_gap`."""
    OLD_LOGP = "old_logp"
    """log π_o. Written by `Scoring.old`, or by the learner after the first step on a batch; read by
    the advantages and the losses."""
    SHARP_LOGP = "sharp_logp"
    """log π_o at half the temperature, of which and of log π_o follows Σπ². Written by
    `Scoring.sharp`; read by the advantage otb."""
    REF_LOGP = "ref_logp"
    """log π_ref. Written by `Scoring.reference`; read by the advantages and the losses."""
    TEACHER_LOGP = "teacher_logp"
    """log π_T of a teacher that reads hindsight beside the prompt. Written by `Scoring.teacher`;
    read by the loss opd in place of REF_LOGP."""
    VALUE = "value"
    """V, before the update. Written by the critic; read by the advantages and the critic's loss."""
    ADVANTAGE = "advantage"
    """A. Written by `build_batch`; read by the losses."""
    RETURN = "return"
    """The critic's target. Written by `build_batch`; read by the critic's loss."""
    CHOSEN = "chosen"
    """1 for the tokens chosen by their covariance. Written by `ChosenTokens`; read by the
    losses clip_cov and kl_cov."""
    OBSERVATION = "observation"
    """The share of an observation's token in the loss of ECHO, where the loss mask is 1 for it
    too; 0 for all others. Written by `ObservationLoss`; read by `PolicyLoss` and `logp_gap`."""
    WEIGHT = "weight"
    """The share of the token in the loss. Written by `build_batch`; read by all losses."""


ALWAYS = frozenset({Field.ROLLOUT_LOGP, Field.STALENESS, Field.ADVANTAGE, Field.WEIGHT})
"""Every sample of a finished batch has these; the others depend on the algorithm."""
