"""Checks whether the policy learns from its rewards, by what changed between the first steps and
the last, on training tasks and on held-out ones.

A check is a function from `RunRecord` to a `Finding`, or None where all is well. Nothing is said of
changes before LEAST_STEPS. Left out: rewards that cannot teach (reward_faults.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, stdev
from typing import Any

from nanorl.observability.alarms.alarms import (
    FEW_GROUPS,
    GOOD_SUCCESS,
    low_entropy,
    mean_surprise,
)
from nanorl.observability.alarms.finding import Finding, Severity
from nanorl.observability.diagnosis.run_record import (
    CLEAR,
    LEAST_STEPS,
    Change,
    RunRecord,
    Window,
)
from nanorl.observability.report.comparison import PairedComparison
from nanorl.observability.report.statistics import Z95, share_of_tasks

LONG = 30
"""Steps after which most runs that learn have shown it: those that have not are warned of."""
GAP = 0.2
"""So far apart is success of seen and of unseen tasks, which are of one difficulty, luck aside."""
MANY_TIMES = 4.0
"""So often was a task seen: once is news, four times is a list that one learns by heart."""
SAME, LEAST_COMPARED = 0.9, 10
"""So many greedy answers are the same before and after, of so many at least."""
STILL = 0.01
"""Nats a token by which the log-probs of those differ: bf16 alone gives some thousandths
(docs/log.md), and a run that learns moves them by tenths."""
EXPLODED = 10.0
"""Times the gradient norm of the first steps."""
MANY_CLIPPED = 0.3
"""So many tokens, as a share, are at the clip: usual are some hundredths."""
HALVED = 0.5
LEAST_BEST = 0.1
"""A best success below it cannot collapse: half of it is noise (monitor/alerts.py)."""
FINE_ENOUGH = 0.05
"""A standard error with which a change of a tenth would have been seen: with a larger one there is
nothing to say of a policy that stands."""


def memorised(record: RunRecord) -> Finding | None:
    """Seen tasks are solved and unseen ones are not, before RL has begun: the warm start was learnt
    by heart."""
    warm = record.config.warm_start
    if not warm.steps:
        return None
    gap = _first_gap(record)
    if gap is None or not _is_wide(gap) or _ends_well(record):
        return None
    return Finding(
        name="memorised_warm_start",
        severity=Severity.WARNING,
        seen=f"as RL begins, {gap.late:.0%} of seen tasks are solved and {gap.early:.0%} of unseen "
        "ones",
        why="the warm start was learnt by heart; what RL then improves is known already, and "
        "unseen tasks gain nothing",
        remedy=f"warm up for less than --warm-start.steps {warm.steps}"
        + (f" and --warm-start.epochs {warm.epochs}" if warm.epochs > 1 else "")
        + ", on more different tasks; a few steps that show the form are enough",
    )


def too_few_tasks(record: RunRecord) -> Finding | None:
    """Training tasks are solved more and more, held-out ones are not."""
    if record.times_seen < MANY_TIMES or record.num_steps < LEAST_STEPS or _ends_well(record):
        return None
    train, heldout = _rises(record)
    if train is None or heldout is None or not train.rose or heldout.rose:
        return None
    error = math.hypot(train.error, heldout.error)
    behind = (train.late - train.early) - (heldout.late - heldout.early)
    if behind < max(GAP, CLEAR * error):
        return None
    return Finding(
        name="too_few_tasks",
        severity=Severity.WARNING,
        seen=f"each task was played in {record.times_seen:.0f} groups; success of training tasks "
        f"{train.text()}, of held-out ones {heldout.text()}",
        why="so few tasks are learnt by heart",
        remedy="give more different tasks (a generator, `tasks(self, rng)`, never ends), or stop "
        "at the best checkpoint (--evaluation.every, RUN:best)",
    )


def gone_entropy(record: RunRecord) -> Finding | None:
    """The policy has become sure of itself without being right."""
    if not record.late.rollouts:
        return None
    first = _entropy(record.early)
    known = first if math.isfinite(first) else None  # the first rollouts may have expired
    return low_entropy(_entropy(record.late), known, record.success.late)


def small_rate(record: RunRecord) -> Finding | None:
    """There is a signal, and nothing moves."""
    if not _could_learn(record) or _moves(record):
        return None
    move = record.greedy
    if move is None or move.num < LEAST_COMPARED or move.num_same < SAME * move.num:
        return None
    if move.nats >= STILL:
        return None
    lr = record.config.rl.lr
    return Finding(
        name="small_rate",
        severity=Severity.WARNING,
        seen=f"{move.num_same} of {move.num} greedy answers are the same before and after "
        f"{record.num_steps} steps, which had a signal, and their log-probs moved by "
        f"{move.nats:.1g} nats a token; success {record.success.text()}",
        why="the updates are too small to change what is said",
        remedy=f"raise --rl.lr {lr:g} to {10 * lr:.2g}, and again until something moves",
    )


def collapsed(record: RunRecord) -> Finding | None:
    """Success was there and is gone, while the reward is not higher."""
    best = _best_stretch(record)
    late = record.success.late
    if best is None or late >= GOOD_SUCCESS or record.reward.rose:
        return None
    is_halved = best[0] >= LEAST_BEST and late < HALVED * best[0]
    if not is_halved and not record.success.fell:
        return None
    lr = record.config.rl.lr
    return Finding(
        name="collapsed",
        severity=Severity.WARNING,
        seen=f"success was {best[0]:.0%} in steps {best[1]} to {best[2]} and is {late:.0%} in "
        f"{record.late.steps}; the reward {record.reward.text('.2g')}",
        why="steps that are too large, or a reward that prefers something else, spoil what was "
        "learnt",
        remedy=f"lower --rl.lr {lr:g} to {lr / 3:.2g} or {lr / 10:.2g}, and go on from before it "
        "(--fork RUN@step or RUN:best); if another finding names the reward, mend that first",
    )


def against_success(record: RunRecord) -> Finding | None:
    """The reward rises while success falls."""
    if record.num_steps < LEAST_STEPS or not (record.reward.rose and record.success.fell):
        return None
    return Finding(
        name="against_success",
        severity=Severity.WARNING,
        seen=f"the reward rises, {record.reward.text('.2g')}, and success falls, "
        f"{record.success.text()}",
        why="the reward pays for something else than solving the task, and that is what is learnt",
        remedy="read the best-paid rollouts (nanorl view RUN), and pay most for what is solved",
    )


def wild_steps(record: RunRecord) -> Finding | None:
    """Gradients that explode, or a clip that holds back much of every step."""
    first, last = (window.numbers("grad_norm") for window in (record.early, record.late))
    clipped = record.late.numbers("clip_fraction")
    lr = record.config.rl.lr
    seen = ""
    if first and last and median(last) > EXPLODED * median(first) > 0.0:
        seen = f"the gradient norm is {median(last):.2g}, where it was {median(first):.2g}"
    elif clipped and fmean(clipped) >= MANY_CLIPPED:
        seen = f"{fmean(clipped):.0%} of the tokens are at the clip"
    if not seen or record.num_steps < LEAST_STEPS or record.success.late >= GOOD_SUCCESS:
        return None
    return Finding(
        name="wild_steps",
        severity=Severity.WARNING,
        seen=f"{seen}, with {record.success.late:.0%} success",
        why="each step goes further than the rollouts that it was made of can vouch for",
        remedy=f"lower --rl.lr {lr:g} to {lr / 3:.2g}, --rl.epochs or --rl.minibatches",
    )


def stands(record: RunRecord) -> Finding | None:
    """There is a signal, the policy moves, and neither success nor reward does."""
    if not _could_learn(record) or _moves(record):
        return None
    if max(record.success.error, record.reward.error) > FINE_ENOUGH:
        return None
    rl, is_long = record.config.rl, record.num_steps >= LONG
    return Finding(
        name="stands",
        severity=Severity.WARNING if is_long else Severity.NOTE,
        seen=f"after {record.num_steps} steps the reward is {record.reward.late:.2g}, as it was "
        f"({record.reward.early:.2g}, give or take {CLEAR * record.reward.error:.2g}); success "
        f"{record.success.text()}",
        why="what single batches say is lost in their noise, or there were too few",
        remedy=f"take more steps than {record.num_steps}, more rollouts a step "
        f"(--rl.tasks-per-step {2 * rl.tasks_per_step}), or a higher --rl.lr than {rl.lr:g}",
    )


def sharpened(record: RunRecord) -> Finding | None:
    """Sampled success rises and greedy success stands."""
    if record.num_steps < LEAST_STEPS or record.before is None or record.after is None:
        return None
    sampled = _curve_rise(record, "heldout") or record.success
    greedy = PairedComparison.of(record.before, record.after)
    after = greedy.success(1).value
    if not sampled.rose or greedy.difference.low > 0.0 or after >= GOOD_SUCCESS:
        return None
    stands = greedy.difference.value < (sampled.late - sampled.early) / 2
    if not stands or sampled.late > after:  # then the samples are more than a best guess
        return None
    return Finding(
        name="sharpened",
        severity=Severity.NOTE,
        seen=f"sampled success rises, {sampled.text('.1%')}, and greedy success stands, "
        f"{greedy.success(0).value:.1%} -> {after:.1%}{_pass_at_k(record.curve)}",
        why="RL makes samples as good as the best guess first; more than that must be found among "
        "them",
        remedy="look at pass@k (--evaluation.every 4 --evaluation.k 8): where it is above pass@1 "
        "there is more to win, by more steps, a larger --rl.group-size or a higher "
        "--rl.temperature",
    )


# -- figures of the checks -------------------------------------------------------------------------


def _could_learn(record: RunRecord) -> bool:
    """There were steps enough, with a signal, and something is left to learn."""
    return (
        record.num_steps >= LEAST_STEPS
        and min(one.trained_share for one in (record.early, record.late)) >= FEW_GROUPS
        and record.success.late < GOOD_SUCCESS
    )


def _moves(record: RunRecord) -> bool:
    return any(one.rose or one.fell for one in (record.success, record.reward))


def _entropy(window: Window) -> float:
    measured = window.numbers("entropy")
    return fmean(measured) if measured else mean_surprise(window.rollouts)


def _best_stretch(record: RunRecord) -> tuple[float, int, int] | None:
    """Find the highest mean success of as many steps as a window has, before the late one, and
    where it was."""
    size = len(record.late.rows)
    rows = [row for row in record.rows if row.get("success") is not None]
    stretches = [rows[end - size : end] for end in range(size, len(rows) - size + 1)]
    if record.num_steps < LEAST_STEPS or not stretches:
        return None
    best = max(stretches, key=lambda some: fmean(row["success"] for row in some))
    return fmean(row["success"] for row in best), best[0]["step"], best[-1]["step"]


def _ends_well(record: RunRecord) -> bool:
    """Held-out tasks are solved at the end, whatever it was like before."""
    if record.after is not None:
        return record.after.success.value >= GOOD_SUCCESS
    return bool(record.curve) and record.curve[-1]["heldout"]["success"] >= GOOD_SUCCESS


def _first_gap(record: RunRecord) -> Change | None:
    """Compare success of unseen tasks and of seen ones as RL begins. Where nothing was sampled of
    unseen ones, greedy success is held against the share of groups whose rollouts were all right:
    of a policy that has seen neither, that is the lower one."""
    if record.curve:
        row = record.curve[0]
        return _between(row["heldout"], row["train"])
    if record.before is None or not record.early.groups:
        return None
    unseen, groups = record.before.success, record.early.groups
    seen = share_of_tasks([float(all(one.is_success for one in group)) for group in groups])
    errors = [(each.high - each.low) / 2 / Z95 for each in (unseen, seen)]
    return Change(unseen.value, seen.value, math.hypot(*errors))


def _is_wide(gap: Change) -> bool:
    return gap.late - gap.early > max(GAP, CLEAR * gap.error)


def _between(one: Mapping[str, float], other: Mapping[str, float]) -> Change:
    """Compare the success of two splits' figures."""
    errors = [(each["success_high"] - each["success_low"]) / 2 / Z95 for each in (one, other)]
    return Change(one["success"], other["success"], math.hypot(*errors))


def _curve_rise(record: RunRecord, split: str) -> Change | None:
    """Compare sampled success of a split before RL and after it: of the tasks that the first
    evaluation and the last one have in common, task by task, which is surer than two means are."""
    if len(record.curve) < 2:
        return None
    first, last = (row["shares"][split] for row in (record.curve[0], record.curve[-1]))
    both = sorted(first.keys() & last.keys())
    if len(both) < 2:
        return None
    error = stdev(last[task] - first[task] for task in both) / math.sqrt(len(both))
    early, late = (fmean(some[task] for task in both) for some in (first, last))
    return Change(early, late, error)


def _rises(record: RunRecord) -> tuple[Change | None, Change | None]:
    """Compare success before and after on training tasks, and on held-out ones."""
    if len(record.curve) > 1:
        return _curve_rise(record, "train"), _curve_rise(record, "heldout")
    if record.before is None or record.after is None:
        return record.success, None
    one, other = (each.success for each in (record.before, record.after))
    error = math.hypot(*((each.high - each.low) / 2 / Z95 for each in (one, other)))
    return record.success, Change(one.value, other.value, error)


def _pass_at_k(curve: Sequence[Mapping[str, Any]]) -> str:
    ks = {row["k"] for row in (*curve[:1], *curve[-1:])}
    if len(curve) < 2 or len(ks) > 1 or ks == {1}:
        return ""
    first, last = (row["heldout"]["pass_at_k"] for row in (curve[0], curve[-1]))
    return f"; pass@{curve[0]['k']} {first:.1%} -> {last:.1%}"
