"""Over a whole run in one process a file is decoded once, and the tower looks at a picture once
under given weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from graded_look_back import Brief

import nanorl
from nanoengine.vision.picture_store import PictureStore
from nanoengine.vision.sight import Sight
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model
from nanorl.observability.results import PHASES
from nanorl.observability.store import RolloutStore
from nanorl.types import Rollout

OPTIONS: dict[str, Any] = {
    **{"dtype": "bf16", "threads": 1, "env_workers": 0, "agent.max_turns": 3},
    **{"agent.max_turn_tokens": 3, "agent.max_context_tokens": 128, "rl.temperature": 1.0},
    **{"warm_start.steps": 0, "rl.steps": 3, "rl.tasks_per_step": 2, "rl.group_size": 4},
    **{"rl.lr": 1e-3, "evaluation.num_tasks": 2, "evaluation.num_tasks_untrained": 0},
    **{"evaluation.num_tasks_no_tool": 0, "evaluation.num_tasks_hidden": 2},
}


class Counts:
    """What was decoded, by its hash, and looked at, by its key: with gradients and without."""

    def __init__(self) -> None:
        self.decoded: Counter[str] = Counter()
        self.trained: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()

    def run(self, model: Path, out: Path, **more: Any) -> None:
        ready, look = PictureStore._make_ready, Sight._run

        def noted_ready(store: PictureStore, sha256: str, data: bytes) -> Any:
            self.decoded[sha256] += 1
            return ready(store, sha256, data)

        def noted_look(sight: Sight, spans: Any, *rest: Any) -> Any:
            kind = self.seen if torch.is_inference_mode_enabled() else self.trained
            kind.update(span.key for span in spans)
            return look(sight, spans, *rest)

        with (
            mock.patch.object(PictureStore, "_make_ready", noted_ready),
            mock.patch.object(Sight, "_run", noted_look),
        ):
            nanorl.train(str(model), env=Brief, out=out, options={**OPTIONS, **more})


def keys_of(rollouts: Iterable[Rollout]) -> set[str]:
    """The pictures that something was said after."""
    found = set()
    for rollout in rollouts:
        said = [i for i, counts in enumerate(rollout.loss_mask) if counts]
        found |= {span.key for span in rollout.images if span.end <= said[-1]}
    return found


def by_version(run: Path) -> list[set[str]]:
    """The pictures that the rollouts and evaluations of each version of the weights have seen."""
    with RolloutStore(run / "rollouts.sqlite", is_read_only=True) as store:
        found = [keys_of(store.query(step=step)) for step in range(OPTIONS["rl.steps"])]
    with RolloutStore(run / "evaluations.sqlite", is_read_only=True) as store:
        phases = {name: keys_of(store.query(step=PHASES.index(name))) for name in PHASES}
    found[0] |= phases["before"]
    return [*found, phases["after"] | phases["blind"] | phases["first_hidden"]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision_model(tmp_path_factory.mktemp("seeing") / "model")


def test_the_tower_looks_once_at_each_picture_under_each_version(
    model: Path, tmp_path: Path
) -> None:
    counts = Counts()
    counts.run(model, tmp_path / "run")
    expected = sum((Counter(keys) for keys in by_version(tmp_path / "run")), Counter())
    assert max(expected.values()) > 1, "some are seen under several versions"
    assert counts.seen == expected
    assert set() < counts.trained.keys() <= expected.keys(), "in groups with a signal"
    files = {file.name for file in (tmp_path / "run" / "pictures").iterdir()}
    assert counts.decoded == dict.fromkeys(files, 1)


def test_a_frozen_tower_looks_once_at_each_picture_of_a_run(model: Path, tmp_path: Path) -> None:
    counts = Counts()
    counts.run(model, tmp_path / "run", **{"vision.train": "none"})
    assert counts.seen == dict.fromkeys(set().union(*by_version(tmp_path / "run")), 1)
    assert not counts.trained
