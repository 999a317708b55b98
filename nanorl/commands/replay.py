"""`nanorl replay RUN`: plays stored rollouts again: equal to the last bit, or where not, and why.

    nanorl replay runs/tiny-seed0                       # 200 rollouts of the whole run
    nanorl replay runs/tiny-seed0 s5-g242-m1            # this one
    nanorl replay runs/tiny-seed0 --from-step 5         # all of step 5
    nanorl replay runs/tiny-seed0 --phase after
    nanorl replay runs/eval-tiny-seed0                  # what nanorl eval played

Exit status: 0 all are equal, 1 some differ, 2 something was wrong. docs/replay.md says what it
takes and what it can name.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

PhaseName = Literal["any", "untrained", "before", "rl", "after", "no_tool", "blind", "first_hidden"]
SOME_DIFFER = 1


@dataclass(frozen=True, kw_only=True)
class ReplayOptions:
    """The options of `nanorl replay`."""

    run: tyro.conf.Positional[Path]
    """The folder of a run, or of a nanorl eval."""
    rollout_ids: tyro.conf.Positional[tuple[str, ...]] = ()
    """Only these; without any, those that the options choose."""
    phase: PhaseName = "any"
    """Of RL, or of one of the evaluations."""
    from_step: int | None = None
    """All of RL from this step on, to --to-step; without that, of this step alone."""
    to_step: int | None = None
    """The last of these steps."""
    num: int = 200
    """Without ids and steps: so many at most, spread evenly; 0: all."""
    stored_tasks: bool = False
    """Play the tasks as the run stored them, not as its source has them today."""
    as_json: bool = False
    """Print the result as JSON."""

    def __post_init__(self) -> None:
        if self.num < 0:
            raise ValueError(f"--num {self.num}: must be 0 (all) or more")
        if self.to_step is not None and (self.from_step or 0) > self.to_step:
            raise ValueError(
                f"--to-step {self.to_step}: must not be before --from-step {self.from_step}"
            )

    @property
    def steps(self) -> tuple[int, int] | None:
        """The first and the last; None: whatever step."""
        if self.from_step is None and self.to_step is None:
            return None
        first = self.from_step or 0
        return first, first if self.to_step is None else self.to_step


def replay(options: Annotated[ReplayOptions, tyro.conf.arg(name="")]) -> int:
    """Play stored rollouts of a run again and compare them with what was stored."""
    from nanorl.inspection.replay.past_run import choose, open_past  # here: they import torch
    from nanorl.inspection.replay.replay import replay as play

    with open_past(options.run) as past:
        chosen = choose(
            past, options.rollout_ids, phase=options.phase, steps=options.steps, num=options.num
        )
        print(f"playing {len(chosen)} rollouts again", file=sys.stderr)
        result = play(past, chosen, stored_tasks=options.stored_tasks)
    print(json.dumps(result.to_json(), indent=2) if options.as_json else result.text())
    return 0 if result.is_equal else SOME_DIFFER
