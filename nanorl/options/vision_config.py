"""The options of a model with a vision tower."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from nanoengine.config import VisionTrain
from nanorl.bounds import POSITIVE, check_record


@dataclass(frozen=True, kw_only=True)
class VisionOptions:
    """Says what of the tower is trained, in both phases, of the policy and of a critic."""

    train: VisionTrain = "all"
    """all of the tower, its mergers alone (merger: what makes tokens of patches), or none: a frozen
    tower looks once at each picture, and its weights are sent to replicas once."""
    lr: float | None = None
    """Learning rate of what is trained of the tower, on the schedule of each phase; None: that of
    the rest."""

    def __post_init__(self) -> None:
        if self.train not in get_args(VisionTrain):
            raise ValueError(f"--vision.train {self.train}: must be all, merger or none")
        if self.lr is None:
            return
        check_record(self, "vision.", lr=POSITIVE)
        if self.train == "none":
            raise ValueError(
                f"--vision.lr {self.lr}: nothing of the tower is trained (--vision.train none); "
                "leave one of them out"
            )
