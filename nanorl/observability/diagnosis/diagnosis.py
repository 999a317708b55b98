"""Says why a run does not learn: all checks over what it has written, the worst finding first.

A check belongs into reward_faults.py (rewards that cannot teach) or learning_faults.py (a policy
that does not take what they teach), and into CHECKS. The checks of a batch (alarms/alarms.py) are
asked about the last steps, too: turns that are cut off and calls that nobody reads are reasons.
"""

from __future__ import annotations

from collections.abc import Callable

from nanorl.observability.alarms.alarms import (
    GOOD_SUCCESS,
    OF_ENDS,
    Evidence,
    rollout_findings,
)
from nanorl.observability.alarms.finding import Finding, Severity, in_order
from nanorl.observability.diagnosis import learning_faults, reward_faults
from nanorl.observability.diagnosis.run_record import RunRecord
from nanorl.types import Status

LEAST_STEPS = 3
"""So many steps of RL must be done: one may be bad by accident, as in the alarms of a run."""

Check = Callable[[RunRecord], Finding | None]

CHECKS: tuple[Check, ...] = (
    reward_faults.one_answer,
    reward_faults.paid_cut_offs,
    reward_faults.paid_silence,
    learning_faults.against_success,
    reward_faults.costly_steps,
    reward_faults.near_misses,
    reward_faults.never_solved,
    reward_faults.no_signal,
    reward_faults.faint_rewards,
    reward_faults.one_sided,
    learning_faults.memorised,
    learning_faults.too_few_tasks,
    learning_faults.small_rate,
    learning_faults.wild_steps,
    learning_faults.collapsed,
    learning_faults.gone_entropy,
    learning_faults.sharpened,
)
"""Causes before what follows from them: of equal severity, the first is read first."""
SAID_BETTER = (
    *("no_signal", "identical_rollouts", "never_success", "always_success", "silence_pays"),
)
"""Checks of a batch that have one of a whole run here."""


def diagnose(record: RunRecord) -> list[Finding]:
    """Return the findings, the worst first; none of a run that is well, or has hardly begun."""
    if record.num_steps < LEAST_STEPS or not record.late.rollouts:
        return []
    found = [*(check(record) for check in CHECKS), *_of_batches(record)]
    if not any(one is not None and one.severity < Severity.NOTE for one in found):
        found.append(learning_faults.stands(record))  # where nothing says why
    return in_order(found)


def nothing_found(record: RunRecord) -> str:
    """Say in words that there is no finding."""
    if record.num_steps < LEAST_STEPS:
        return f"too early to judge: it takes {LEAST_STEPS} steps"
    return "its numbers show nothing that keeps it from learning"


def _of_batches(record: RunRecord) -> list[Finding]:
    """Ask about the last rollouts by themselves, unless nearly all are right, or more than were."""
    late = record.late
    if record.success.late >= GOOD_SUCCESS or record.success.rose:
        return []
    evidence = Evidence(
        config=record.config,
        groups=late.groups,
        tokenizer=record.tokenizer,
        has_tools=any("num_executions" in one.metrics for one in late.rollouts),
    )
    # A policy that ended its turns once has not been given the wrong token: it has collapsed.
    could_end = any(one.status is Status.FINISHED for one in record.early.rollouts)
    left_out = SAID_BETTER + (OF_ENDS if could_end else ())
    return [
        one
        for one in rollout_findings(evidence)
        if one.severity < Severity.NOTE and one.name not in left_out
    ]
