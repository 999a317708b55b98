"""`ReplayPolicy`: how many groups that had a signal are trained on again, and which are kept.

Left out: the groups themselves (replay_groups.py), which a run without replay never imports, and
the algorithms that cannot learn from them (options/replay_check.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from nanorl.bounds import COUNT, Bound, check_record

MOST_SHARE = 0.5
"""ExGRPO's (arXiv 2510.02245), the largest that is published."""


@dataclass(frozen=True, kw_only=True)
class ReplayPolicy:
    """Groups of earlier steps whose members earned unlike rewards, trained on again."""

    share: float = 0.0
    """Share of a batch's groups that are replayed ones. They come beside the --rl.tasks-per-step
    fresh ones and replace none; 0: nothing is kept."""
    capacity: int = 64
    """Groups that are kept; of too many those go first whose best reward is commonest, and of equal
    ones the oldest."""
    max_age: int = 8
    """A group whose first token is of more versions ago is not replayed any more."""
    max_uses: int = 4
    """How often a group is replayed."""

    def __post_init__(self) -> None:
        check_record(
            self,
            "rl.replay.",
            share=Bound(0, MOST_SHARE, "what the policy does now must be half of a batch or more"),
            capacity=Bound(1, 4096, "all their rollouts are held in memory"),
            max_age=Bound(1, 1024, "so old is their policy"),
            max_uses=COUNT,
        )

    def num_groups(self, num_fresh: int) -> int:
        """The number of groups that join so many fresh ones where enough are kept."""
        return int(num_fresh * self.share / (1 - self.share) + 0.5)
