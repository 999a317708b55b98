"""What a rollout may not hold: rewards, metrics and log-probs that are no finite numbers.

One NaN spoils the advantages of a whole group, and often of a batch; masks and clips downstream
would drop it in silence. So numbers of an environment, a reward, an agent or a server are looked at
where a rollout ends (`unusable`; it FAILED then, and is played again), and once more, with those of
models, where a batch is made (`check_rollout`, `check_logps`).
Left out: rewards as they are returned, which a message can name better (envs/rewards/base.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from nanorl.types import Rollout

PART = "reward/"
"""What begins the name of a part of the reward among the metrics of a rollout."""

MOST = 1e30
"""The largest reward, either way. Advantages are fp32, whose largest number is 3e38, and rewards of
turns are added."""


def unusable(rollout: Rollout) -> str:
    """Name the first of a rollout's rewards and metrics that cannot be trained on; empty where all
    can."""
    # The first one is enough, and a good rollout is the usual case: nothing is collected.
    return next(_faults(rollout), "")


def _faults(rollout: Rollout) -> Iterator[str]:
    rule = "a reward function must return a finite number"
    if not math.isfinite(rollout.reward):
        yield f"its reward is {rollout.reward}; {rule}"
    earned = [(turn, x) for one in rollout.sequences for turn, x in enumerate(one.turn_rewards, 1)]
    for turn, reward in earned:
        if not math.isfinite(reward):
            yield f"its reward is {reward} in turn {turn}; {rule}"
    for name, value in rollout.metrics.items():
        if not math.isfinite(value):
            yield f"its metric {name!r} is {value}; what is counted must be a finite number"
    parts = [value for name, value in rollout.metrics.items() if name.startswith(PART)]
    for value in (rollout.reward, *(reward for _, reward in earned), *parts):
        if abs(value) > MOST:
            yield f"its reward is {value:g}; one must be from -{MOST:g} to {MOST:g}: scale it"


def check_rollout(rollout: Rollout) -> None:
    """`ValueError` names a rollout whose rewards, metrics or log-probs cannot be trained on."""
    # A second look: rollouts also come from servers and from stores of other runs.
    if fault := unusable(rollout):
        raise ValueError(f"rollout {rollout.rollout_id}: {fault}")
    check_logps(rollout, [sequence.logps for sequence in rollout.sequences], "the rollout policy")


def check_logps(rollout: Rollout, logps: Sequence[Sequence[float]], who: str) -> None:
    """`ValueError` names the first sampled token to which `who` gives no finite value. `logps` are
    those of all its sequences."""
    for branch, (sequence, values) in enumerate(zip(rollout.sequences, logps, strict=True), -1):
        where = "" if branch < 0 else f" of branch {branch}"
        for place, (value, is_action) in enumerate(zip(values, sequence.loss_mask, strict=True)):
            if is_action and not math.isfinite(value):
                raise ValueError(
                    f"rollout {rollout.rollout_id}: {who} gives its token {place}{where} the value "
                    f"{value}; the weights of that model are damaged: resume from an earlier "
                    "checkpoint"
                )
