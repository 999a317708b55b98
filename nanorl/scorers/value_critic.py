"""The critic: the values that PPO's advantages read, and its own regression to the returns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import fsum, isfinite, nan
from typing import Protocol

from torch import Tensor

from nanoengine.config import EngineConfig
from nanoengine.heads.value_engine import ValueEngine, value_model
from nanoengine.model.transformer import Transformer
from nanoengine.packing import MicroBatch, Sample
from nanorl.algorithms.losses import value_loss
from nanorl.grpo import Field


class ValueEstimator(Protocol):
    """A `Critic`, or what stands for one in another process."""

    def values(self, samples: Sequence[Sample]) -> list[Tensor]: ...

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]: ...


class Critic:
    """Owns the value engine. The samples that it learns from carry `Field.VALUE` (before the
    update), `Field.RETURN` and `Field.WEIGHT`.

    It starts as a copy of the policy at the beginning of RL with a value head of zeros, so the
    first advantages are plain discounted rewards. Schulman et al., "Proximal Policy Optimization
    Algorithms", arXiv 1707.06347 (clipped value loss as in its reference implementation).
    """

    def __init__(self, policy: Transformer, config: EngineConfig, *, value_clip: float) -> None:
        self.engine = ValueEngine(value_model(policy), config)
        self.value_clip = value_clip

    def values(self, samples: Sequence[Sample]) -> list[Tensor]:
        """fp32, one for each token of each sample; 0 where the loss mask is 0."""
        return self.engine.forward_values(samples)

    def train_step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """One optimizer step towards the returns; its metrics."""
        result = self.engine.train_step(samples, self._loss)
        return {"value_loss": result["loss"], "value_grad_norm": result["grad_norm"]}

    def _loss(
        self, value_T: Tensor, _: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, dict[str, Tensor | float]]:
        fields = micro.fields_T
        loss_T = value_loss(
            value_T, fields[Field.VALUE], fields[Field.RETURN], clip=self.value_clip
        )
        return (fields[Field.WEIGHT] * loss_T).sum(), {}


def explained_variance(samples: Sequence[Sample]) -> float:
    """1 − Var(return − value) / Var(return) over action tokens, before the update; 0 where the
    returns do not vary."""
    pairs = [
        (float(target), float(value))
        for sample in samples
        for target, value, is_action in zip(
            sample.fields[Field.RETURN], sample.fields[Field.VALUE], sample.loss_mask, strict=True
        )
        if is_action
    ]
    if not all(map(isfinite, chain.from_iterable(pairs))):
        return nan  # `fsum` would raise before the critic's step, which says what is wrong
    returns = [target for target, _ in pairs]
    if not pairs or min(returns) == max(returns):
        return 0.0
    return 1 - _variance([target - value for target, value in pairs]) / _variance(returns)


def _variance(values: Sequence[float]) -> float:
    """With exact sums: the same bits in any order, on any number of threads."""
    mean = fsum(values) / len(values)
    return fsum((value - mean) ** 2 for value in values) / len(values)
