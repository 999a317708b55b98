"""The losses on pairs of answers: which one is better, by a margin of two numbers.

With the margin m of the chosen answer over the rejected one, and a share ε of pairs that are taken
to be the wrong way round, both minimise the negative log-likelihood of Bradley and Terry's model:

    L = −(1 − ε)·log σ(m) − ε·log σ(−m)

    DpoLoss      m = β·[(log π_θ(y_w|x) − log π_ref(y_w|x)) − (log π_θ(y_l|x) − log π_ref(y_l|x))]
    ScoreLoss    m = r_θ(x, y_w) − r_θ(x, y_l)

DPO: Rafailov et al., arXiv 2305.18290, eq. 7; ε: conservative DPO (Mitchell), which is
`label_smoothing` in TRL. Reward model: Ouyang et al., arXiv 2203.02155, eq. 1, for two answers.

The samples of a batch are pairs, chosen and rejected, and a micro-batch holds both of a pair, for
they are a group of one tree (packing.py). So the sum over pairs, and with it the gradient, does not
depend on how a batch was cut. Left out: TRL's `center_rewards_coefficient`, which keeps scores near
0, margins that the file gives, IPO and the other losses of TRL's `loss_type`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from nanoengine.packing import MicroBatch, Sample

REFERENCE = "reference"
"""The field in which a sample has log π_ref(y|x), at its last token; 0 at the others."""


class PairLoss(ABC):
    """The sum over the pairs of a micro-batch. Statistics are sums over pairs, too."""

    def __init__(self, label_smoothing: float = 0.0) -> None:
        self.label_smoothing = label_smoothing

    def __call__(
        self, logp_T: Tensor, entropy_T: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        rewards_P2 = self.rewards(logp_T, micro)
        margin_P = rewards_P2[:, 0] - rewards_P2[:, 1]
        chosen, rejected = rewards_P2.detach().sum(0)
        return pair_loss(margin_P, self.label_smoothing).sum(), {
            "num_pairs": float(len(margin_P)),
            "accuracy": (margin_P.detach() > 0).sum(),
            "margin": margin_P.detach().sum(),
            "chosen_reward": chosen,
            "rejected_reward": rejected,
        }

    @abstractmethod
    def rewards(self, logp_T: Tensor, micro: MicroBatch) -> Tensor:
        """[P, 2] fp64: what each pair's chosen and rejected answer is worth."""


class DpoLoss(PairLoss):
    """DPO. A sample has the log-prob of the reference in its field `REFERENCE`."""

    def __init__(self, beta: float, label_smoothing: float = 0.0) -> None:
        super().__init__(label_smoothing)
        self.beta = beta

    def rewards(self, logp_T: Tensor, micro: MicroBatch) -> Tensor:
        """β·log(π_θ/π_ref) of each answer."""
        own_P2 = sums_of_pairs(logp_T, micro)
        return self.beta * (own_P2 - sums_of_pairs(micro.fields_T[REFERENCE], micro))


class ScoreLoss(PairLoss):
    """A reward model's, of scores in the place of log-probs (heads/sequence_classifier.py)."""

    def rewards(self, logp_T: Tensor, micro: MicroBatch) -> Tensor:
        """The score of each answer."""
        return sums_of_pairs(logp_T, micro)


def pair_loss(margin_P: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """[P] the loss of each pair, in nats."""
    right_P, wrong_P = logsigmoid(margin_P), logsigmoid(-margin_P)
    return -(1 - label_smoothing) * right_P - label_smoothing * wrong_P


def sums_of_pairs(values_T: Tensor, micro: MicroBatch) -> Tensor:
    """[P, 2] fp64, the sum of each sample's values, which are 0 where nothing counts: two log-probs
    of hundreds of nats each differ by little."""
    sums = dict[int, Tensor]()
    for i, values in micro.split(values_T):
        sums[i] = values.double().sum()
    order = sorted(sums)
    is_paired = all(a % 2 == 0 and a + 1 in sums for a in order[::2]) and len(order) % 2 == 0
    assert is_paired, f"samples {order}: a pair was cut over micro-batches"
    return torch.stack([sums[i] for i in order]).view(-1, 2)


def num_pairs(samples: Sequence[Sample]) -> float:
    """The denominator of a mean over the pairs of the whole batch."""
    return len(samples) / 2
