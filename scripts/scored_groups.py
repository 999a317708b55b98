"""The rollouts of a GRPO step that is timed, from what an engine said.

`make_groups`, for bench_rl.py and for vision_work.py, which has pictures in its prompts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import workload


def make_groups(
    prompts: Sequence[list[int]], outputs: Sequence[Any], images: Sequence[Sequence[Any]] = ()
) -> list[list[Any]]:
    """The rollouts of each prompt, scored as the peer scores them; with `images` each prompt has
    those spans."""
    from nanorl.types import Rollout  # here: who asks bench_rl.py for help loads no engine

    size = len(outputs) // len(prompts)
    return [
        [
            Rollout(
                task_id=str(g),
                group_id=str(g),
                rollout_id=f"{g}-{m}",
                tokens=prompt + out.ids,
                loss_mask=[0] * len(prompt) + [1] * len(out.ids),
                logps=[0.0] * len(prompt) + out.logps,
                versions=[-1] * len(prompt) + out.versions,
                images=list(images[g]) if images else [],
                reward=workload.reward(out.ids),
            )
            for m, out in enumerate(outputs[g * size : (g + 1) * size])
        ]
        for g, prompt in enumerate(prompts)
    ]
