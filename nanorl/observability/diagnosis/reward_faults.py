"""Checks whether the rewards that a run plays for can teach, by its rollouts.

A check is a function from `RunRecord` to a `Finding`, or None where all is well. What is well: a
policy that solves nearly everything, whatever its groups look like, and one whose success rises.
Left out: faults that a single batch shows (alarms/alarms.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean, pvariance

from nanorl.observability.alarms.alarms import FEW_GROUPS, GOOD_SUCCESS, MANY
from nanorl.observability.alarms.alike import action_ids, answers_alike
from nanorl.observability.alarms.finding import Finding, Severity
from nanorl.observability.alarms.silence import LEAST_OF_EACH, silence_pays
from nanorl.observability.diagnosis.run_record import LEAST_STEPS, RunRecord
from nanorl.types import Rollout, Status

SOLVED = 0.99
"""So many of the first rollouts are right: at 97 % there are tasks left, and a run finds them."""
LEAST_GROUPS = 8
"""Groups with a signal, without which nothing is said of what they look like."""
LEAST_MEMBERS = 4
"""A smaller group cannot be one-sided: of three, one is always alone."""
MOST = 0.66
"""So many groups with a signal, as a share, have one lucky rollout where a twelfth of eight, or a
sixth of four, succeed."""
FAINT = 0.05
"""Between the best and the worst of a group, where a solved task earns 1: what a reward says of
length or style, and not of the task."""
NEAR_MISS = 0.5
"""So much of what a success earns: from there on a failure that is sure pays better than trying
for a success that comes half of the time."""
LEAST_FAILURES = 16
GROWN = 0.1
"""More rollouts are cut off, of all."""
AS_MUCH = 0.95
"""So much of what finished rollouts earn: rewards that differ by less are no reason to finish."""


def no_signal(record: RunRecord) -> Finding | None:
    """Groups of equal rewards: too hard, solved already, or each task always the same way."""
    late, success = record.late, record.success
    if late.trained_share >= FEW_GROUPS or success.fell:  # what was solved once is not too hard
        return None
    seen = (
        f"{late.trained_share:.0%} of the rollouts of {late.steps} were trained on, with "
        f"{success.late:.0%} success"
    )
    alike = sum(
        len({tuple(action_ids(one.sequences)) for one in some}) == 1 for some in late.groups
    )
    if alike >= MANY * len(late.groups):
        seen += f"; in {alike} of {len(late.groups)} groups all rollouts are the same"
    why = "a group of equal rewards says nothing of what is better"
    if success.late >= GOOD_SUCCESS:
        return _solved(seen) if success.early >= SOLVED else None
    if success.late <= 1.0 - GOOD_SUCCESS:
        return Finding(
            name="too_hard",
            severity=Severity.WARNING,
            seen=seen,
            why=f"{why}, and here none or all fail: the tasks are too hard for it",
            remedy="give easier tasks or partial rewards (self.reward(...), a Score), raise "
            f"--rl.group-size {record.config.rl.group_size} or --rl.temperature, or teach more "
            "first (Env.teacher, --warm-start.steps)",
        )
    return Finding(
        name="all_or_nothing",
        severity=Severity.WARNING,
        seen=seen,
        why=f"{why}, and here a task is solved by all of its group or by none",
        remedy="raise --rl.temperature or --rl.group-size "
        f"{2 * record.config.rl.group_size}, set --rl.curriculum learnable, or give tasks between "
        "those that it can and those that it cannot",
    )


def _solved(seen: str) -> Finding:
    return Finding(
        name="solved",
        severity=Severity.NOTE,
        seen=f"{seen}, as in the first steps",
        why="what is solved before RL begins cannot be learnt by it",
        remedy="give harder tasks, or be content",
    )


def never_solved(record: RunRecord) -> Finding | None:
    """Rewards above 0 that never reach what counts as solved."""
    rollouts = record.both
    most = max((one.total_reward for one in rollouts), default=0.0)
    if most <= 0.0 or any(one.is_success for one in rollouts):
        return None
    return Finding(
        name="never_solved",
        severity=Severity.WARNING,
        seen=f"success is 0 %: the highest of {len(rollouts)} rewards is {most:g}, the mean "
        f"{record.reward.text('.2g')}",
        why="a task counts as solved when its reward, without those of single turns, is 1.0 or "
        "more",
        remedy="if that is all that a solved task can earn, scale the reward to 1.0; if not, give "
        "easier tasks, or show whole solutions first (Env.teacher, --warm-start.steps)",
    )


def one_sided(record: RunRecord) -> Finding | None:
    """Groups in which one lucky rollout stands against all others."""
    played = [*record.early.groups, *record.late.groups]
    groups = _with_signal(played)
    large = [group for group in groups if len(group) >= LEAST_MEMBERS]
    lucky = sum(_has_one_above(group) for group in large)
    is_rare = len(groups) < MANY * len(played)
    if len(large) < LEAST_GROUPS or lucky < MOST * len(large) or not is_rare:
        return None
    if _is_learning(record):
        return None
    return Finding(
        name="one_sided",
        severity=Severity.WARNING,
        seen=f"in {lucky} of {len(large)} groups with a signal one rollout alone earned more than "
        f"the others, which are all alike, and {len(played) - len(groups)} groups have none",
        why="a step follows single lucky rollouts, with what was accidental in them",
        remedy=f"raise --rl.group-size {record.config.rl.group_size} to "
        f"{4 * record.config.rl.group_size}, give easier tasks or partial rewards, or warm up "
        "longer (--warm-start.steps)",
    )


def _has_one_above(group: Sequence[Rollout]) -> bool:
    counts = Counter(_rewards(group))
    return len(counts) == 2 and counts[max(counts)] == 1


def faint_rewards(record: RunRecord) -> Finding | None:
    """Rewards that are nearly constant: what little they differ by is all that is learnt."""
    groups = _with_signal(record.late.groups)
    spreads = [max(rewards) - min(rewards) for rewards in map(_rewards, groups)]
    faint = [spread for spread in spreads if spread < FAINT]
    if len(groups) < LEAST_GROUPS or len(faint) < MANY * len(groups):
        return None
    if _is_learning(record):
        return None
    return Finding(
        name="faint_rewards",
        severity=Severity.WARNING,
        seen=f"in {len(faint)} of {len(groups)} groups with a signal the best reward is less than "
        f"{FAINT:g} above the worst, {fmean(faint):.2g} in the mean",
        why="an advantage that is divided by the group's spread makes that as loud as a success; "
        "one that is not divided hardly moves a weight",
        remedy="leave the small terms of the reward out, or give what you want at least 0.1; "
        "--rl.algorithm.advantage dr_grpo does not divide",
    )


def costly_steps(record: RunRecord) -> Finding | None:
    """The cost of turns decides more than what the rollout came to."""
    groups = _with_signal(record.late.groups)
    mean_cost = record.late.mean(_of_turns)
    by_turns = sum(pvariance(map(_of_turns, group)) for group in groups)
    by_outcome = sum(pvariance([one.reward for one in group]) for group in groups)
    if len(groups) < LEAST_GROUPS or mean_cost >= 0.0 or by_turns < by_outcome:
        return None
    if _is_learning(record):
        return None
    return Finding(
        name="costly_steps",
        severity=Severity.WARNING,
        seen=f"turns cost {-mean_cost:.2g} a rollout, and {by_turns / (by_turns + by_outcome):.0%} "
        "of what tells the rollouts of a group apart is that cost",
        why="ending soon is worth more than ending well, so it learns to end soon; success "
        f"{record.success.text()}",
        remedy="make a turn cost so little that a whole rollout costs less than 0.2, charge it "
        "only to what is solved, or leave it out",
    )


def paid_silence(record: RunRecord) -> Finding | None:
    """Rollouts that are cut off earn more than those that play; early ones, too, since afterwards
    there may be no others."""
    if record.success.late >= GOOD_SUCCESS or paid_cut_offs(record):
        return None
    return silence_pays(record.late.rollouts) or silence_pays(record.early.rollouts)


def paid_cut_offs(record: RunRecord) -> Finding | None:
    """More and more rollouts are cut off, and earn as much as those that end."""
    cut, rest = (
        [one.total_reward for one in record.both if _is_cut(one) is is_cut]
        for is_cut in (True, False)
    )
    share = record.change(_is_cut)
    is_early = record.num_steps < LEAST_STEPS
    if is_early or min(len(cut), len(rest)) < LEAST_OF_EACH or len({*cut, *rest}) == 1:
        return None
    grows = share.rose and share.late - share.early >= GROWN
    if not grows or fmean(cut) < AS_MUCH * fmean(rest) or record.success.late >= GOOD_SUCCESS:
        return None
    length = record.change(lambda one: one.num_action_tokens)
    return Finding(
        name="paid_cut_offs",
        severity=Severity.WARNING,
        seen=f"{share.text()} of the rollouts are cut off, and earn {fmean(cut):.2g} where those "
        f"that end earn {fmean(rest):.2g}; they write {length.text('.0f')} tokens",
        why="nothing is lost by never coming to an end, so it rambles",
        remedy="have `score` give less, or 0, to what was cut off (transcript.is_truncated), "
        "or raise the limit",
    )


def near_misses(record: RunRecord) -> Finding | None:
    """Failures that earn nearly as much as a success, which does not come."""
    failures = [one.total_reward for one in record.late.rollouts if not one.is_success]
    grades = [one.total_reward for one in record.both if not one.is_success]
    solved = [one.total_reward for one in record.both if one.is_success]
    best = fmean(solved) if solved else 1.0
    if len(failures) < LEAST_FAILURES or fmean(failures) < NEAR_MISS * best:
        return None
    if max(grades) - min(grades) < FAINT or _is_learning(record):
        return None
    return Finding(
        name="near_misses",
        severity=Severity.WARNING,
        seen=f"a failure earns {fmean(failures):.2g} in the mean, a success {best:.2g}; the reward "
        f"goes {record.reward.text('.2g')}, success {record.success.text()}",
        why="a near miss that is sure pays better than trying for more, so it stays with that",
        remedy="pay less for a near miss (its square or cube, or a third of it) and the most of "
        "the reward for what is exact",
    )


def one_answer(record: RunRecord) -> Finding | None:
    """One text answers all tasks."""
    return answers_alike(record.late.rollouts, record.tasks, record.tokenizer)


def _is_learning(record: RunRecord) -> bool:
    """It solves nearly everything, or more than it did: whatever its rewards are, they teach."""
    return record.success.late >= GOOD_SUCCESS or record.success.rose


def _with_signal(groups: Sequence[Sequence[Rollout]]) -> list[Sequence[Rollout]]:
    return [group for group in groups if len(set(_rewards(group))) > 1]


def _rewards(group: Sequence[Rollout]) -> list[float]:
    return [one.total_reward for one in group]


def _of_turns(rollout: Rollout) -> float:
    """Return what its turns earned beside its outcome."""
    return rollout.total_reward - rollout.reward


def _is_cut(rollout: Rollout) -> bool:
    return rollout.status in (Status.TRUNCATED_TURN, Status.TRUNCATED_CONTEXT)
