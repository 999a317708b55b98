"""`nanorl export RUN --to FORMAT`: the stored rollouts of a run in a format that other tools read.

    nanorl export runs/tiny-seed0 --to jsonl --min-reward 1     # chats to imitate, with tokens
    nanorl export runs/tiny-seed0 --to atif --step 12           # a JSON file each
    nanorl export runs/tiny-seed0 --to parquet --phase after    # of the evaluation after RL
    nanorl export runs/tiny-seed0 --to otel --endpoint http://localhost:4318

docs/trajectories.md has the fields of each.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Annotated

import tyro

from nanorl.inspection.export_trajectories import ExportOptions, export_rollouts


def export(options: Annotated[ExportOptions, tyro.conf.arg(name="")]) -> None:
    """Write the stored rollouts of a run as ATIF, JSONL, parquet or OpenTelemetry spans."""
    done = export_rollouts(options, say=partial(print, file=sys.stderr))
    plural = "" if done.num_rollouts == 1 else "s"
    print(f"{done.num_rollouts} rollout{plural} -> {done.place}")
