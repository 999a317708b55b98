"""An engine that is split over ranks says of pictures what one process says."""

from __future__ import annotations

from pathlib import Path

import pytest
import split_picture_cases as cases
import torch
from pool import WorkerPool

from nanoengine.formats.hf import load_model, save_model
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights four times as large as fresh ones, so that what it says depends on what it sees."""
    folder = build_tiny_vision_model(tmp_path_factory.mktemp("split") / "model")
    model = load_model(folder)
    with torch.no_grad():
        for one in model.parameters():
            if one.dim() > 1:
                one.mul_(4.0)
    save_model(model, folder, folder)
    return folder


def test_two_ranks_see_what_one_sees(pool: WorkerPool, folder: Path) -> None:
    expected = cases.outputs(folder)
    assert len({output.logps[0] for output in expected}) == len(expected), "it looks"
    for sequence_parallel in (False, True):
        by_rank = pool.run(2, cases.on_rank, folder, sequence_parallel)
        for outputs in by_rank:
            for mine, true in zip(outputs, expected, strict=True):
                assert mine.ids == true.ids
                assert mine.logps == pytest.approx(true.logps, rel=1e-4, abs=1e-4)
        assert [one.logps for one in by_rank[0]] == [one.logps for one in by_rank[1]]
