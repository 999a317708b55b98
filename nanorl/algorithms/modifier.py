"""`Modifier`: an option that changes the way of a batch; `Modified`: GRPO with such options.

Nothing here imports torch: options are read before anything is computed.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from nanorl.grpo import (
    GRPO,
    AdvantageBatch,
    BatchScorer,
    GroupEstimator,
    LossBatch,
    OwnedSample,
    Term,
)
from nanorl.types import Rollout

if TYPE_CHECKING:
    from torch import Tensor

    from nanoengine.packing import Sample


class Modifier:
    """An option of an algorithm, at work: each method is a stage of a batch's way, and changes
    nothing unless a subclass says so."""

    def earned(self, rollout: Rollout) -> Hashable | None:
        """The earnings by which a rollout is compared with others; None: its total reward."""

    def select(self, rollouts: list[Rollout], metrics: dict[str, float]) -> list[Rollout]:
        """The rollouts that take part."""
        return rollouts

    def reward(
        self, rollouts: Sequence[Rollout], batch: AdvantageBatch, max_tokens: int
    ) -> AdvantageBatch:
        """The batch with other rewards than those of outcomes."""
        return batch

    def compare(self, estimator: GroupEstimator, batch: AdvantageBatch) -> Tensor | None:
        """[T] What the estimator says of other things than rollouts; None: of those."""

    def advantages(self, batch: AdvantageBatch, advantage_T: Tensor) -> Tensor:
        """The advantages after the estimator's."""
        return advantage_T

    def mark(
        self, samples: list[Sample], batch: AdvantageBatch, advantage_T: Tensor
    ) -> list[Sample]:
        """The samples with one more field for the loss."""
        return samples

    def finish(
        self,
        rollouts: Sequence[Rollout],
        owned: list[OwnedSample],
        scoring: BatchScorer | None,
        metrics: dict[str, float],
    ) -> list[OwnedSample]:
        """The samples that are trained on."""
        return owned

    def correct(self, weight_T: Tensor, log_w_T: Tensor, batch: LossBatch) -> Tensor:
        """The weights of tokens after the correction's."""
        return weight_T

    def token_loss(self, loss_T: Tensor, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        """The losses of action tokens with a term more."""
        return loss_T

    def term(self, logp_T: Tensor, batch: LossBatch) -> Term | None:
        """A sum that is added to the micro-batch's loss, and its statistics."""


@dataclass(frozen=True, kw_only=True)
class Modified(GRPO):
    """GRPO whose stages `modifiers` change, one after the other. The first that compares something
    else than rollouts decides what is compared."""

    @cached_property
    def modifiers(self) -> tuple[Modifier, ...]:
        """The modifiers that change a stage."""
        return ()

    def earned(self, rollout: Rollout) -> Hashable:
        found = (modifier.earned(rollout) for modifier in self.modifiers)
        return next((thing for thing in found if thing is not None), rollout.total_reward)

    def select(self, rollouts: list[Rollout], metrics: dict[str, float]) -> list[Rollout]:
        for modifier in self.modifiers:
            rollouts = modifier.select(rollouts, metrics)
        return rollouts

    def reward(
        self, rollouts: Sequence[Rollout], batch: AdvantageBatch, max_tokens: int
    ) -> AdvantageBatch:
        for modifier in self.modifiers:
            batch = modifier.reward(rollouts, batch, max_tokens)
        return batch

    def compare(self, estimator: GroupEstimator, batch: AdvantageBatch) -> Tensor | None:
        found = (modifier.compare(estimator, batch) for modifier in self.modifiers)
        return next((compared_T for compared_T in found if compared_T is not None), None)

    def advantages(self, batch: AdvantageBatch, advantage_T: Tensor) -> Tensor:
        for modifier in self.modifiers:
            advantage_T = modifier.advantages(batch, advantage_T)
        return advantage_T

    def mark(
        self, samples: list[Sample], batch: AdvantageBatch, advantage_T: Tensor
    ) -> list[Sample]:
        for modifier in self.modifiers:
            samples = modifier.mark(samples, batch, advantage_T)
        return samples

    def finish(
        self,
        rollouts: Sequence[Rollout],
        owned: list[OwnedSample],
        scoring: BatchScorer | None,
        metrics: dict[str, float],
    ) -> list[OwnedSample]:
        for modifier in self.modifiers:
            owned = modifier.finish(rollouts, owned, scoring, metrics)
        return owned

    def correct(self, weight_T: Tensor, log_w_T: Tensor, batch: LossBatch) -> Tensor:
        for modifier in self.modifiers:
            weight_T = modifier.correct(weight_T, log_w_T, batch)
        return weight_T

    def token_loss(self, loss_T: Tensor, logp_T: Tensor, old_T: Tensor, batch: LossBatch) -> Tensor:
        for modifier in self.modifiers:
            loss_T = modifier.token_loss(loss_T, logp_T, old_T, batch)
        return loss_T

    def terms(self, logp_T: Tensor, batch: LossBatch) -> list[Term]:
        found = (modifier.term(logp_T, batch) for modifier in self.modifiers)
        return [term for term in found if term is not None]
