"""The table of the rollout store: its columns, and a rollout as one row of it.

Left out: queries and transactions (nanorl.data.store).
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from nanorl.data.encoding import content_hash, pack_floats, pack_ints, unpack
from nanorl.types import Rollout, Status, TurnSpan

SCHEMA_VERSION = 1

SCHEMA = """
CREATE TABLE IF NOT EXISTS rollouts (
    rollout_id TEXT PRIMARY KEY,
    task_id TEXT NOT NULL,
    group_id TEXT NOT NULL,
    step INTEGER NOT NULL,
    version INTEGER NOT NULL,
    status TEXT NOT NULL,
    reward REAL,
    num_tokens INTEGER NOT NULL,
    num_turns INTEGER NOT NULL,
    content_hash TEXT NOT NULL,
    extra TEXT NOT NULL,
    tokens BLOB NOT NULL,
    loss_mask BLOB NOT NULL,
    logps BLOB NOT NULL,
    versions BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_step ON rollouts (step, group_id);
CREATE INDEX IF NOT EXISTS by_task ON rollouts (task_id, step);
CREATE INDEX IF NOT EXISTS by_group ON rollouts (group_id);
CREATE INDEX IF NOT EXISTS by_version ON rollouts (version);
CREATE INDEX IF NOT EXISTS by_hash ON rollouts (content_hash);
CREATE INDEX IF NOT EXISTS by_status ON rollouts (status);
"""

ENTRY_COLUMNS = (
    *("rollout_id", "task_id", "group_id", "step", "version", "status", "reward"),
    *("num_tokens", "num_turns", "content_hash"),
)
COLUMNS = (*ENTRY_COLUMNS, "extra", "tokens", "loss_mask", "logps", "versions")


@dataclass(frozen=True, kw_only=True)
class Entry:
    """The index columns of one stored rollout."""

    rollout_id: str
    task_id: str
    group_id: str
    step: int
    version: int
    status: Status
    reward: float
    num_tokens: int
    num_turns: int
    content_hash: str


def to_entry(row: tuple[Any, ...]) -> Entry:
    """From a row of ENTRY_COLUMNS."""
    fields = dict(zip(ENTRY_COLUMNS, row, strict=True))
    fields["status"] = Status(fields["status"])
    fields["reward"] = _reward(fields["reward"])
    return Entry(**fields)


def to_row(rollout: Rollout, step: int, version: int) -> tuple[Any, ...]:
    """In the order of COLUMNS."""
    extra = {
        "turn_spans": [list(asdict(span).values()) for span in rollout.turn_spans],
        "turn_rewards": rollout.turn_rewards,
        "metrics": rollout.metrics,
    }
    return (
        rollout.rollout_id,
        rollout.task_id,
        rollout.group_id,
        step,
        version,
        rollout.status.value,
        rollout.reward,  # NaN becomes NULL in SQLite
        len(rollout.tokens),
        len(rollout.turn_spans),
        content_hash(rollout),
        json.dumps(extra),
        pack_ints(rollout.tokens),
        pack_ints(rollout.loss_mask),
        pack_floats(rollout.logps),
        pack_ints(rollout.versions),
    )


def from_row(row: tuple[Any, ...]) -> Rollout:
    """The inverse of `to_row`; ValueError if the row is damaged."""
    fields = dict(zip(COLUMNS, row, strict=True))
    extra = json.loads(fields["extra"])
    per_token = {
        name: unpack(fields[name]) for name in ("tokens", "loss_mask", "logps", "versions")
    }
    lengths = {len(values) for values in per_token.values()}
    if lengths != {fields["num_tokens"]}:
        raise ValueError(f"per-token lists of lengths {sorted(lengths)}")
    return Rollout(
        task_id=fields["task_id"],
        group_id=fields["group_id"],
        rollout_id=fields["rollout_id"],
        turn_spans=[
            TurnSpan(action_start=start, action_end=end, observation_end=observation_end)
            for start, end, observation_end in extra["turn_spans"]
        ],
        reward=_reward(fields["reward"]),
        turn_rewards=extra["turn_rewards"],
        status=Status(fields["status"]),
        metrics=extra["metrics"],
        **per_token,  # type: ignore[arg-type]
    )


def _reward(value: float | None) -> float:
    return float("nan") if value is None else value
