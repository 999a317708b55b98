"""One held-out task of a run, as the model played it before RL and after, for the README's picture.

`shown_pair(run)` chooses by a rule and not by eye: of the tasks that were wrong before and right
after, with a program that ran, the one whose two rollouts are shortest to read.
"""

from __future__ import annotations

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import nanorl
from nanorl.run.saved_models import read_run

Played = dict[str, Any]
"""A rollout as `nanorl export --to jsonl` writes it."""


def shown_pair(run: Path) -> list[dict[str, Any]]:
    """The rows that benchmarks/ keeps: the task's rollout before RL, and after it."""
    before, after = (_played(run, phase) for phase in ("before", "after"))
    learned = [
        (before[task], rollout)
        for task, rollout in after.items()
        if _is_right(rollout) and task in before and not _is_right(before[task])
    ]
    pairs = [pair for pair in learned if all(_can_be_shown(one) for one in pair)]
    if not pairs:
        raise ValueError(f"{run} has no task that RL taught it and that a picture can show")
    seed = read_run(run).seed
    chosen = min(pairs, key=lambda pair: (sum(map(_size, pair)), pair[0]["task_id"]))
    return [_row(name, one, seed) for name, one in zip(("before", "after"), chosen, strict=True)]


def _played(run: Path, phase: str) -> dict[str, Played]:
    """The rollouts of an evaluation by their tasks."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "played.jsonl"
        nanorl.export(run, "jsonl", phase=phase, out=file)
        rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    return {row["task_id"]: row for row in rows}


def _is_right(rollout: Played) -> bool:
    return rollout["reward"] >= 1


def _can_be_shown(rollout: Played) -> bool:
    """It ran a program and answered, in as many lines as the picture has."""
    said = turns(rollout)
    return 3 <= len(said) <= 5 and all(len(text.splitlines()) <= 3 for _, text in said)


def turns(rollout: Played) -> list[tuple[str, str]]:
    """Who said which text after the question, without what marks code as such."""
    messages = rollout["messages"]
    first = next(i for i, one in enumerate(messages) if one["role"] == "assistant")
    return [(one["role"], _plain(str(one["content"]))) for one in messages[first:]]


def _plain(text: str) -> str:
    return re.sub(r"```\w*\n?", "", text).strip()


def _size(rollout: Played) -> int:
    return sum(len(text) for _, text in turns(rollout))


def _row(name: str, rollout: Played, seed: int) -> dict[str, Any]:
    asked = [one["content"] for one in rollout["messages"] if one["role"] == "user"]
    return {
        "name": name,
        "value": rollout["reward"],
        "unit": "reward",
        "seed": seed,
        "task_id": rollout["task_id"],
        "asked": str(asked[0]).strip(),
        "turns": turns(rollout),
    }
