"""GMPO: the geometric mean of a sequence's ratios in place of their arithmetic mean (2507.20673).

    s = exp(mean over the sequence of l_t),   l_t = min(log r, clip_high)  where A > 0
                                              l_t = max(log r, −clip_low)  elsewhere
    loss = −s·A

One outlying ratio moves a geometric mean little, so that the clip may be wide: e^−0.4 to e^0.4. It
is of tokens, and pessimistic as PPO's. The paper's objective is a mean over sequences, which is
aggregation seq_mean_token_mean: every token of a sequence then has its share of the one loss.
Against verl's `geo_mean`: a correction weighs by the mean of the sequence's weights, there by their
geometric mean.
"""

from __future__ import annotations

from torch import Tensor, where

from nanorl.algorithms.segments import segment_mean, segments_of
from nanorl.grpo import LossBatch
from nanorl.policy_loss import ClippedLoss


class GMPO(ClippedLoss):
    """`gmpo`: a clip of tokens, and one ratio for a whole sequence."""

    def __call__(self, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """[T] with the gradient of `logp_T`."""
        low, high = self.spec.clip
        A_T = batch.advantage_T
        return gmpo(logp_T, old_T, A_T, segments_of(batch), clip_low=low, clip_high=high)

    def is_clipped(
        self, ratio_T: Tensor, logp_T: Tensor, old_T: Tensor, batch: LossBatch
    ) -> Tensor:
        """The tokens whose log-ratio has left the bounds in the direction of their advantage."""
        low, high = self.spec.clip
        log_r_T = logp_T - old_T
        is_up_T = (log_r_T > high) & (batch.advantage_T > 0)
        return is_up_T | ((log_r_T < -low) & (batch.advantage_T < 0))


def gmpo(
    logp_T: Tensor,
    old_logp_T: Tensor,
    advantage_T: Tensor,
    segments: tuple[Tensor, Tensor, int],
    *,
    clip_low: float = 0.4,
    clip_high: float = 0.4,
) -> Tensor:
    """`−s·A`, with `s` of the sequence of each token. Sequences must be whole (`segments_of`)."""
    log_r_T = logp_T - old_logp_T
    bounded_T = where(advantage_T > 0, log_r_T.clamp(max=clip_high), log_r_T.clamp(min=-clip_low))
    mean_S = segment_mean(bounded_T, *segments)
    return -mean_S.exp()[segments[1]] * advantage_T
