"""Sees answers that are all alike: one text is said whatever the task, and is paid for it.

A reward of one's own that looks at the answer alone (is it long? does it name two things?) is often
satisfied by one sentence. RL finds it within a few steps: success is 100 %, and nothing was learnt.
Left out: texts that differ in a word; tasks that all have the same right answer, where it is no
gap.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean

from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.observability.alarms.finding import Finding, Severity, quoted
from nanorl.task import Task
from nanorl.types import Branch, Rollout

ALIKE = 0.8
"""So many rollouts, as a share, have one text: the rest is what a temperature changes."""
LEAST_TASKS = 8
"""Different tasks, of which one answer cannot be right by accident."""
PAID, MOSTLY = 0.5, 0.5
"""So much is paid for it, most of the times that it is said: an answer that is wrong nearly
everywhere is no gap, but a policy that has not begun."""


def answers_alike(
    rollouts: Sequence[Rollout], tasks: Mapping[str, Task], tokenizer: ChatTokenizer
) -> Finding | None:
    """Name the one text that answers nearly all of these tasks, and earns something. `tasks` are by
    task_id."""
    same = _commonest(rollouts)
    paid = [one for one in same if one.total_reward >= PAID]
    asked = {one.task_id for one in paid}
    if len(asked) < LEAST_TASKS or len(same) < ALIKE * len(rollouts):
        return None
    # An own reward has no answers to compare with, or one for each task.
    wanted = {tasks[name].answer_text for name in asked if name in tasks}
    if len(paid) < MOSTLY * len(same) or (len(wanted) == 1 and wanted != {""}):
        return None
    said = quoted(tokenizer.decode(action_ids(same[0].sequences), skip_special=True))
    num_tasks, mean = len({one.task_id for one in same}), fmean(one.total_reward for one in same)
    return Finding(
        name="answers_alike",
        severity=Severity.WARNING,
        seen=f"{len(same)} of {len(rollouts)} rollouts say the same to {num_tasks} different "
        f"tasks, and earn {mean:.2g}: {said}",
        why="what is paid whatever was asked is a gap in the reward, and nothing else is learnt",
        remedy="have the reward look at the task, try it on that text with several tasks, and "
        "train anew; if one answer is right for all tasks, all is well",
    )


def _commonest(rollouts: Sequence[Rollout]) -> list[Rollout]:
    """Find the rollouts of the text that was said most often; none of those that said nothing."""
    found: dict[tuple[int, ...], list[Rollout]] = {}
    for one in rollouts:
        if said := tuple(action_ids(one.sequences)):
            found.setdefault(said, []).append(one)
    return max(found.values(), key=len, default=[])


def action_ids(sequences: Iterable[Branch]) -> list[int]:
    """Return the tokens that the policy sampled, in their order."""
    return [
        token
        for sequence in sequences
        for token, is_action in zip(sequence.tokens, sequence.loss_mask, strict=True)
        if is_action
    ]
