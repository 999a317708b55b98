"""A run that failed before it had anything to lose: its folder is free for the corrected command.

That is a run without a finished step of RL, nor a warm start that a checkpoint holds: going on with
it would begin at the beginning, too. Nothing is lost all the same: what stood under the names of a
run's own files is moved aside, into `failed-start-1` and so on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from nanoengine.state.checkpoint import latest_checkpoint
from nanoengine.state.run_folder import CONFIG
from nanorl.observability.report.metrics import read_metrics
from nanorl.observability.store import RolloutStore
from nanorl.options.run_kind import PICTURES
from nanorl.options.store_address import TRAINING_FILE
from nanorl.run.cursor import BEST, START

_KEPT = ("model-trained", "summary.json")
_BEGUN = (
    *(CONFIG, "history.jsonl", "metrics.jsonl", "eval-*.json", "monitor.json"),
    *(f"{name}.sqlite*" for name in ("rollouts", "evaluations", "evaluations-rl", "journal")),
    *("model", "tensorboard", "checkpoints", START, BEST, "critic", "critic-start", "reference"),
)
WRITTEN = (*_BEGUN, *_KEPT, "report.html")
"""What a run writes into its folder, as patterns."""


def take_away_failed_start(folder: Path) -> bool:
    """Move aside what a run left that failed at its start. False, and nothing is touched, where
    the folder holds anything else."""
    if not _is_failed_start(folder):
        return False
    aside = next(one for one in map(folder.joinpath, _names()) if not one.exists())
    aside.mkdir()
    for pattern in (*_BEGUN, PICTURES):  # those overwrite nothing, so WRITTEN has them not
        for found in folder.glob(pattern):
            found.rename(aside / found.name)
    return True


def _names() -> Iterator[str]:
    return (f"failed-start-{number}" for number in count(1))


def _is_failed_start(folder: Path) -> bool:
    options = _options(folder / CONFIG)
    if options is None or any((folder / name).exists() for name in _KEPT):
        return False
    # Without a warm start a checkpoint at this place holds the model as it came.
    is_trained = options.get("warm_start", {}).get("steps") and not options.get("fork")
    if is_trained and latest_checkpoint(folder / "checkpoints"):
        return False
    return not (read_metrics(folder / "metrics.jsonl") or _num_rollouts(folder / TRAINING_FILE))


def _options(file: Path) -> dict[str, Any] | None:
    """The options of a run; None of any other file, a model's config.json among them."""
    try:
        options = json.loads(file.read_text("utf-8"))
    except ValueError:
        return None
    return options if isinstance(options, dict) and "preset" in options else None


def _num_rollouts(file: Path) -> int:
    if not file.is_file():
        return 0
    with RolloutStore(file) as store:
        return store.count()
