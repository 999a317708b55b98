"""bench_vision.py on a tiny model: what it counts, what both sides see, bounds by hand."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import bench_vision
from model_bench import PEERS

sys.path.insert(0, str(PEERS))

from smolvlm_folder import build_folder
from vision_workload import Workload


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(build_folder(tmp_path_factory.mktemp("vision") / "model", None))


def measured(work: str, folder: str, dtype: str = "bf16") -> dict[str, Any]:
    found: dict[str, Any] = bench_vision.WORKERS[work](folder, dtype, 1)
    return found


def test_transformers_sees_the_same_in_the_same_folder(folder: str) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    load = Workload.of(folder)
    pixels = load.picture(0).transpose(2, 0, 1)[None, None] / np.float32(127.5) - 1
    with torch.no_grad():
        theirs = model.model.get_image_features(torch.from_numpy(pixels)).pooler_output[0]
    ours = measured("tower", folder, "fp32")["features"]
    assert len(ours) == theirs.shape[1] > 100
    assert theirs[0].tolist() == pytest.approx(ours, abs=1e-4)


def test_rollouts_look_once_at_each_picture(folder: str) -> None:
    found = measured("rollouts", folder)
    assert found["num_looks"] == 2 * 2  # rollouts x turns
    # 8 of text, 2 marks, the picture and a mark a turn; the second prompt has the first turn in it
    # (and two texts of 8 warmed up)
    assert found["prompt_tokens"] == 2 * (12 + (12 + 4 + 12)) + 2 * 8
    assert found["tokens_per_s"] == pytest.approx(2 * 2 * 4 / found["seconds"])


def test_a_step_trains_on_what_was_sampled(folder: str) -> None:
    found = measured("step", folder)
    assert found["logp_gap_max"] == 0.0
    # after two or three steps, in each of which two prompts show a picture: once to roll out, and
    # once to train, unless all of a group have one reward
    assert 2 * 2 <= found["num_looks"] <= 3 * 4
    assert 0 < found["train_s"] < found["seconds"]


def test_the_memory_of_pictures_is_of_distinct_ones(folder: str) -> None:
    found = measured("memory", folder)
    assert found["num_pictures"] == 4 * 3
    assert found["resized_bytes"] == 4 * 3 * 64 * 64 * 3
    assert found["growth_bytes"] < 100e6


def test_the_bound_of_the_tower_counts_its_products(folder: str) -> None:
    # 4 x 4 patches of 768 numbers, two blocks of 32 with 48 between; 16 patches a token of 128
    block = 2 * 16 * (4 * 32 * 32 + 2 * 32 * 48) + 4 * 16 * 16 * 32
    ends = 2 * 16 * 768 * 32 + 2 * 16 * 32 * 128
    assert bench_vision.tower_flops(folder) == 2 * block + ends


def test_a_row_is_above_one_where_the_pictures_weigh_less_than_they_are_large(
    folder: str,
) -> None:
    runs = {"ours": [{"growth_bytes": 80, "resized_bytes": 100}]}
    rates = {"flops": 1e9, "bytes": 1e9}
    row = bench_vision.row_of("vision-memory", runs, folder, "bf16", 1, rates)
    assert (row["value"], row["peer"], row["ratio"]) == (80, "the resized pictures", 1.25)
