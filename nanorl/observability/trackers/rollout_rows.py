"""`RolloutRow`: a rollout as a row of a table, as experiment trackers show them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from nanorl.observability.report.trace import Decode
from nanorl.observability.report.transcript import transcript, verdict
from nanorl.task import Task
from nanorl.types import Rollout


@dataclass(frozen=True, kw_only=True)
class RolloutRow:
    """The parts of a rollout that a reader wants to see side by side."""

    rollout_id: str
    task_id: str
    kind: str
    question: str
    answer: str
    """What the policy said last."""
    expected: str
    reward: float
    status: str
    verdict: str
    num_turns: int
    num_tokens: int
    turns: str
    """The whole conversation, as the log has it."""


def rollout_rows(
    played: Iterable[tuple[Task, Rollout]], decode: Decode, *, most: int
) -> list[RolloutRow]:
    """Rows of at most `most` rollouts; of more, so many that lie at equal distances. `decode`
    should leave special tokens out."""
    every = list(played)
    chosen = [every[place * len(every) // most] for place in range(most)]
    return [_row(*pair, decode) for pair in (every if len(every) <= most else chosen)]


def _row(task: Task, rollout: Rollout, decode: Decode) -> RolloutRow:
    spans = rollout.turn_spans[-1:]
    said = [decode(rollout.tokens[span.action_start : span.action_end]) for span in spans]
    return RolloutRow(
        rollout_id=rollout.rollout_id,
        task_id=task.task_id,
        kind=task.kind,
        question=task.prompt_text,
        answer=said[0] if said else "",
        expected=task.answer_text,
        reward=rollout.total_reward,
        status=rollout.status.value,
        verdict=verdict(rollout),
        num_turns=rollout.num_turns,
        num_tokens=rollout.num_tokens,
        turns=transcript(task, rollout, decode, title=rollout.rollout_id),
    )


def as_columns(rows: Sequence[RolloutRow]) -> dict[str, list[object]]:
    """The rows of a table as its columns, by their names."""
    names = RolloutRow.__dataclass_fields__
    return {name: [getattr(row, name) for row in rows] for name in names}
