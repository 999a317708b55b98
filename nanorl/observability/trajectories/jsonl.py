"""JSONL: a rollout a line, UTF-8. The fields are explained in docs/trajectories.md.

`messages` and `tools` are a chat as TRL and axolotl read them, beside the very tokens that the
policy read and sampled, with their mask, log-probs and policy versions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from nanorl.observability.trajectories.base import Trajectory, TrajectorySequence, number
from nanorl.observability.trajectories.files import whole_file
from nanorl.observability.trajectories.frames import Json


def write_jsonl(trajectories: Iterable[Trajectory], path: Path, *, force: bool) -> None:
    """Write the file, a row in memory at a time."""
    with whole_file(path, force=force) as file:
        for trajectory in trajectories:
            row = to_row(trajectory)
            text = json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
            file.write(text.encode() + b"\n")


def to_row(trajectory: Trajectory) -> Json:
    """The JSON of a rollout: its own sequence, and its branches as lists of the same fields."""
    rollout = trajectory.rollout
    names = {
        "rollout_id": rollout.rollout_id,
        "group_id": rollout.group_id,
        "task_id": rollout.task_id,
    }
    branches = [
        {"name": one.name, "caller": list(one.caller or ()), **_sequence_row(one)}
        for one in trajectory.sequences[1:]
    ]
    return {
        **names,
        **trajectory.outcome(),
        **_sequence_row(trajectory.main),
        "branches": branches,
    }


def _sequence_row(sequence: TrajectorySequence) -> Json:
    branch = sequence.branch
    turns = [
        {
            "action_start": turn.span.action_start,
            "action_end": turn.span.action_end,
            "observation_end": turn.span.observation_end,
            "reward": number(turn.reward),
            "finish_reason": turn.finish_reason,
            "text": turn.text,
            "calls": [vars(call) for call in turn.calls],
        }
        for turn in sequence.turns
    ]
    return {
        "messages": sequence.messages(),
        "tools": sequence.chat.tools if sequence.chat.are_tools_listed else [],
        "tokens": branch.tokens,
        "loss_mask": branch.loss_mask,
        "logps": [number(logp) for logp in branch.logps],
        "versions": branch.versions,
        "kept": branch.kept,
        "images": [asdict(span) for span in branch.images],
        "turns": turns,
    }
