"""`nanorl replay RUN`: plays stored rollouts again: equal to the last bit, or where not, and why.

    nanorl replay runs/tiny-seed0                       # 200 rollouts of the whole run
    nanorl replay runs/tiny-seed0 s5-g242-m1            # this one
    nanorl replay runs/tiny-seed0 --from-step 5         # all of step 5
    nanorl replay runs/tiny-seed0 --phase after
    nanorl replay runs/eval-tiny-seed0                  # what nanorl eval played

Exit status: 0 all are equal, 2 some differ, 1 something was wrong. docs/replay.md says what it
takes and what it can name.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Literal

import tyro

PhaseName = Literal["any", "untrained", "before", "rl", "after", "no_tool"]
SOME_DIFFER = 2


def replay(
    run: tyro.conf.Positional[Path],
    rollout_ids: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
    /,
    *,
    phase: PhaseName = "any",
    from_step: int | None = None,
    to_step: int | None = None,
    num: int = 200,
    stored_tasks: bool = False,
    as_json: bool = False,
) -> int:
    """Play stored rollouts of a run again and compare them with what was stored.

    Args:
        run: The folder of a run, or of a nanorl eval.
        rollout_ids: Only these; without any, those that the options choose.
        phase: Of RL, or of one of the evaluations.
        from_step: Of RL steps from this one on.
        to_step: To this step, itself included; without it, that one step alone.
        num: So many at most, spread evenly; 0: all. A choice by steps or ids is played whole.
        stored_tasks: Play the tasks as the run stored them, not as its source has them today.
        as_json: Print the result as JSON.
    """
    from nanorl.replay.past_run import choose, open_past  # here: they import torch
    from nanorl.replay.replay import replay as play

    if num < 0:
        raise ValueError(f"--num {num}: must be 0 (all) or more")
    with open_past(run) as past:
        steps = (
            None if from_step is None else (from_step, from_step if to_step is None else to_step)
        )
        chosen = choose(past, rollout_ids, phase=phase, steps=steps, num=num)
        print(f"playing {len(chosen)} rollouts again", file=sys.stderr)
        result = play(past, chosen, stored_tasks=stored_tasks)
    print(json.dumps(result.to_json(), indent=2) if as_json else result.text())
    return 0 if result.is_equal else SOME_DIFFER
