"""What two runs have in common, bit for bit: weights, rollouts and metrics."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from forked_runs import rows
from safetensors.torch import load_file

from nanorl.observability.store import RolloutStore

ROLLOUT = (
    *("rollout_id", "task_id", "group_id", "step", "version", "status", "reward", "content_hash"),
    *("tokens", "loss_mask", "logps", "versions"),
)
OF_ENTRY = 8
"""So many of them are columns; the others are in the rollout."""


def weights(run: Path) -> dict[str, torch.Tensor]:
    return {
        name: tensor
        for file in sorted((run / "model-trained").glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def rollouts(run: Path) -> dict[str, tuple[Any, ...]]:
    """Every stored rollout by its id, without what was measured (its times)."""
    with RolloutStore(run / "rollouts.sqlite") as store:
        pairs = zip(store.entries(), store.query(), strict=True)
        return {
            entry.rollout_id: (
                *(getattr(entry, name) for name in ROLLOUT[:OF_ENTRY]),
                *(getattr(rollout, name) for name in ROLLOUT[OF_ENTRY:]),
            )
            for entry, rollout in pairs
        }


def metrics(run: Path) -> list[dict[str, Any]]:
    """The rows without times and idle shares, without how many replicas there were, and without how
    many rollouts played at a time and what the cache forgot meanwhile, which is a matter of time.
    """
    return [
        {
            name: value
            for name, value in row.items()
            if not name.endswith(("_s", "num_replicas", "playing_max", "cache_lost"))
            and not name.startswith("idle_")
        }
        for row in rows(run)
    ]


def differences(run: Path, other: Path) -> list[str]:
    """What is not equal bit for bit; [] of equal runs."""
    found = []
    mine, its = weights(run), weights(other)
    if not mine or mine.keys() != its.keys():
        found.append(f"names of weights: {sorted(mine.keys() ^ its.keys())}, of {len(mine)}")
    found += [
        f"weight {name}" for name in mine.keys() & its.keys() if not _same(mine[name], its[name])
    ]
    played, its_played = rollouts(run), rollouts(other)
    if not played or played.keys() != its_played.keys():
        found.append(f"ids of rollouts: {sorted(played.keys() ^ its_played.keys())}")
    found += [
        f"rollout {name}: {column}"
        for name in played.keys() & its_played.keys()
        for column, one, two in zip(ROLLOUT, played[name], its_played[name], strict=True)
        if one != two
    ]
    for one, two in zip(metrics(run), metrics(other), strict=True):
        found += [
            f"metric {name} of step {one['step']}: {one.get(name)} and {two.get(name)}"
            for name in one | two
            if one.get(name) != two.get(name)
        ]
    return found


def _same(mine: torch.Tensor, its: torch.Tensor) -> bool:
    return mine.dtype == its.dtype and mine.shape == its.shape and bool((mine == its).all())
