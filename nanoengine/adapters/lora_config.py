"""`LoraConfig`: the shape of an adapter, as options. lora.py says what an adapter is."""

from __future__ import annotations

import math
from dataclasses import dataclass

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """The shape of an adapter: `LoraConfig(rank=16, targets=("q_proj", "v_proj"))`."""

    rank: int = 0
    """Rank of the LoRA adapter that is trained in place of the weights; 0 trains all weights. An
    adapter takes about ten times the learning rate."""
    alpha: float = 32.0
    """The adapter's product is scaled by alpha / rank (rslora: by the root of the rank)."""
    targets: tuple[str, ...] = (ALL_LINEAR,)
    """Which matrices are adapted: ends of their Hugging Face names (q_proj, mlp.down_proj), regular
    expressions of whole names, or all-linear: every linear layer but the output head."""
    rslora: bool = False
    """Divide alpha by the root of the rank, so that high ranks learn as fast as low ones."""

    def __post_init__(self) -> None:
        if self.rank < 0:
            raise ValueError(f"rank={self.rank}: must be positive, or 0 for no adapter")
        if not (math.isfinite(self.alpha) and self.alpha > 0):
            raise ValueError(f"alpha={self.alpha}: must be positive")
        if isinstance(self.targets, str) or not self.targets or not all(self.targets):
            raise ValueError(
                f"targets={self.targets!r}: must be a tuple of names; give {ALL_LINEAR!r} for all"
            )

    @property
    def scale(self) -> float:
        """The factor of B·A. `ValueError` without a rank."""
        if self.rank < 1:
            raise ValueError("rank=0: there is no adapter; give a rank")
        return scale_of(self.alpha, self.rank, rslora=self.rslora)


def scale_of(alpha: float, rank: int, *, rslora: bool) -> float:
    """The factor of B·A, as in `peft`."""
    return float(alpha / (math.sqrt(rank) if rslora else rank))
