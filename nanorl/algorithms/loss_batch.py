"""`LossBatch`: what a loss reads of one micro-batch."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LossBatch:
    """One micro-batch, packed. Sequences are whole; all tensors are [T] and without gradient,
    except `entropy_T` and `top_logp_TK`, which are of the policy being updated. Two sequences of
    two tokens:

        LossBatch(
            rollout_logp_T=tensor([0.0, -0.5, 0.0, -1.2]),
            advantage_T=tensor([0.0, 0.7, 0.0, -0.7]),
            mask_T=tensor([0.0, 1.0, 0.0, 1.0]),
            weight_T=tensor([0.0, 0.5, 0.0, 0.5]),
            sequence_ids_T=tensor([0, 0, 1, 1]),
            num_sequences=2,
        )
    """

    rollout_logp_T: Tensor
    advantage_T: Tensor
    mask_T: Tensor
    weight_T: Tensor
    """From `token_weights` over the whole optimizer batch; it holds the mask."""
    sequence_ids_T: Tensor
    """0 .. num_sequences−1 within this micro-batch."""
    num_sequences: int
    old_logp_T: Tensor | None = None
    """None in the first step on a batch: θ has not left o, its own log-probs are the old ones."""
    ref_logp_T: Tensor | None = None
    teacher_logp_T: Tensor | None = None
    """Of a teacher that reads more than the policy; None: the reference is the teacher."""
    top_logp_TK: Tensor | None = None
    """log π_θ of the tokens that the teacher holds likeliest, [T, K]."""
    teacher_top_logp_TK: Tensor | None = None
    """The teacher's of the same tokens."""
    observation_T: Tensor | None = None
    """The share of each observation's token in the loss of ECHO; those are outside the mask."""
    chosen_T: Tensor | None = None
    """1 for the tokens that clip_cov and kl_cov treat in their own way."""
    staleness_T: Tensor | None = None
    """Versions ago that a token was sampled."""
    entropy_T: Tensor | None = None

    @property
    def segments(self) -> tuple[Tensor, Tensor, int]:
        """The arguments that functions of whole sequences ask for."""
        return self.mask_T, self.sequence_ids_T, self.num_sequences
