"""Checkpoints under kill -9, flipped bits, short files and a full disk."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import pytest
import torch
from checkpoint_formats import save_checkpoint, write_format_1
from safetensors.torch import load_file

from nanoengine.state.checkpoint import (
    forget_newer,
    latest_checkpoint,
    list_checkpoints,
    open_checkpoint,
)
from nanoengine.state.tensor_file import CheckpointError

ROOT = Path(__file__).resolve().parents[3]


def some_tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "a": torch.randn(7, 5, generator=generator),
        "b": torch.randn(33, generator=generator).bfloat16(),
        "rng": torch.randint(0, 256, (100,), generator=generator, dtype=torch.uint8),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
    }


def run_child(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_tensors_and_meta_come_back_and_safetensors_reads_them(tmp_path: Path) -> None:
    tensors, meta = some_tensors(0), {"cursor": {"epoch": 1}, "big": 2**80, "x": 0.1}
    folder = save_checkpoint(tmp_path, 3, tensors, meta)
    assert folder == tmp_path / "step_00000003"
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.meta == meta
    theirs = load_file(folder / "rank_00000.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.read(name), tensor)
        assert torch.equal(theirs[name], tensor)
        assert theirs[name].dtype == tensor.dtype


def test_a_checkpoint_of_the_first_format_is_read_like_any_other(tmp_path: Path) -> None:
    tensors = some_tensors(4)
    folder = write_format_1(tmp_path, 7, tensors, {"cursor": [1, 2]})
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.folder == folder and checkpoint.meta == {"cursor": [1, 2]}
    assert checkpoint.names() == list(tensors)
    assert all(torch.equal(checkpoint.read(name), t) for name, t in tensors.items())
    later = save_checkpoint(tmp_path, 8, some_tensors(5), {}, keep=2)
    assert list_checkpoints(tmp_path) == [folder, later]


def test_a_format_of_the_future_is_refused_by_its_number(tmp_path: Path) -> None:
    folder = write_format_1(tmp_path, 1, some_tensors(0), {})
    outer = json.loads((folder / "meta.json").read_text())
    body = outer["body"].replace('"format": 1', '"format": 3')
    outer = {"crc32": zlib.crc32(body.encode()), "body": body}
    (folder / "meta.json").write_text(json.dumps(outer))
    with pytest.raises(CheckpointError, match="format 3: this version reads formats 1 and 2"):
        open_checkpoint(folder)


def test_the_newest_keep_survive_and_latest_names_the_last(tmp_path: Path) -> None:
    for step in range(5):
        save_checkpoint(tmp_path, step, some_tensors(step), {"step": step}, keep=2)
    assert [folder.name for folder in list_checkpoints(tmp_path)] == [
        "step_00000003",
        "step_00000004",
    ]
    assert open_checkpoint(tmp_path).meta == {"step": 4}
    assert sorted(path.name for path in tmp_path.iterdir())[0] == "latest"  # no temporary left


def test_a_run_that_went_back_writes_the_same_step_again(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_checkpoint(tmp_path, step, some_tensors(step), {"try": 1}, keep=3)
    folder = save_checkpoint(tmp_path, 2, some_tensors(9), {"try": 2}, keep=2)
    assert latest_checkpoint(tmp_path) == folder
    assert open_checkpoint(tmp_path).meta == {"try": 2}
    assert open_checkpoint(tmp_path / "step_00000003").meta == {"try": 1}


def save(root: Path, step: int, keep: int) -> Path:
    return save_checkpoint(root, step, some_tensors(0), {"step": step}, keep=keep)


def test_the_clock_has_no_say_in_what_is_kept(tmp_path: Path) -> None:
    future = time.time() + 3600  # the clock was set back, or the files were copied
    for step in (500, 0, 5):  # a phase begins its count anew
        for file in save(tmp_path, step, 2).iterdir():
            os.utime(file, (future, future))
    newest = save(tmp_path, 1, 2)
    assert latest_checkpoint(tmp_path) == newest
    assert open_checkpoint(tmp_path).meta == {"step": 1}
    kept = [tmp_path / "step_00000005", newest]
    assert list_checkpoints(tmp_path) == kept
    (tmp_path / "latest").unlink()
    assert latest_checkpoint(tmp_path) == newest


def test_checkpoints_of_steps_that_are_taken_again_do_not_count_as_the_newest(
    tmp_path: Path,
) -> None:
    folders = [save(tmp_path, step, 3) for step in (5, 10, 15)]
    forget_newer(folders[0])
    assert list_checkpoints(tmp_path) == [folders[0]]
    assert [folders[0], save(tmp_path, 10, 2)] == list_checkpoints(tmp_path)


@pytest.mark.parametrize("file", ["rank_00000.safetensors", "meta.json"])
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_is_named_and_the_previous_checkpoint_is_offered(
    tmp_path: Path, file: str, damage: str
) -> None:
    save_checkpoint(tmp_path, 1, some_tensors(1), {"step": 1})
    save_checkpoint(tmp_path, 2, some_tensors(2), {"step": 2})
    broken = tmp_path / "step_00000002" / file
    body = bytearray(broken.read_bytes())
    if damage == "flip":
        body[len(body) // 2] ^= 1
        broken.write_bytes(body)
    elif damage == "truncate":
        broken.write_bytes(body[:-3])
    else:
        broken.unlink()
    if (file, damage) == ("meta.json", "remove"):  # then it is no checkpoint at all
        assert open_checkpoint(tmp_path).meta == {"step": 1}
        return
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(tmp_path)
    assert "step_00000002" in str(caught.value)
    assert f"Resume from {tmp_path / 'step_00000001'}" in str(caught.value)
    assert open_checkpoint(tmp_path / "step_00000001").meta == {"step": 1}


def test_of_several_undamaged_checkpoints_the_newest_is_offered(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        folder = save_checkpoint(tmp_path, step, some_tensors(step), {}, keep=3)
    (folder / "rank_00000.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"Resume from \S*step_00000002,"):
        open_checkpoint(tmp_path)


def test_every_flipped_byte_is_found(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path, 1, some_tensors(1), {"step": 1})
    for file in ("rank_00000.safetensors", "meta.json"):
        body = (folder / file).read_bytes()
        for position in random.Random(0).sample(range(len(body)), 60):
            damaged = bytearray(body)
            damaged[position] ^= 0x10
            (folder / file).write_bytes(damaged)
            with pytest.raises(CheckpointError, match="step_00000001"):
                open_checkpoint(tmp_path)
        (folder / file).write_bytes(body)
    open_checkpoint(tmp_path)


def test_no_checkpoint_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint under"):
        open_checkpoint(tmp_path / "nowhere")


SAVE_FOREVER = """
import sys, torch
from checkpoint_formats import save_checkpoint
torch.set_num_threads(1)
for step in range(1, 10**9):
    value = torch.full((250_000,), float(step))
    save_checkpoint(sys.argv[1], step, {"w": value, "b": value[:10]}, {"step": step})
    print(step, flush=True)
"""


def test_latest_loads_after_kill_9_at_any_moment(tmp_path: Path) -> None:
    moments = random.Random(1)
    for _ in range(8):
        child = run_child(SAVE_FOREVER, str(tmp_path))
        assert child.stdout is not None
        child.stdout.readline()  # at least one checkpoint is there
        time.sleep(moments.uniform(0, 0.05))
        child.send_signal(signal.SIGKILL)
        printed = child.communicate()[0].split()
        checkpoint = open_checkpoint(tmp_path)
        step = checkpoint.meta["step"]
        assert step >= int(printed[-1]) if printed else step >= 1
        assert torch.equal(checkpoint.read("w"), torch.full((250_000,), float(step)))
    save_checkpoint(tmp_path, 0, some_tensors(0), {})
    names = {path.name for path in tmp_path.iterdir()}
    assert len(names) == 3 and "latest" in names  # killed writers left nothing behind


FULL_DISK = """
import resource, sys, torch
from checkpoint_formats import save_checkpoint
from nanoengine.state.tensor_file import CheckpointError
save_checkpoint(sys.argv[1], 1, {"w": torch.ones(1000)}, {"step": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    save_checkpoint(sys.argv[1], 2, {"w": torch.ones(250_000)}, {"step": 2})
except CheckpointError as error:
    print("ERROR", error)
"""


def test_a_full_disk_is_one_clear_error_and_the_old_checkpoint_stays(tmp_path: Path) -> None:
    output = run_child(FULL_DISK, str(tmp_path)).communicate(timeout=120)[0]
    assert "ERROR cannot save a checkpoint" in output
    assert "1.0 MB needed" in output and "Free some space" in output
    assert f"{tmp_path / 'step_00000001'} is intact" in output
    assert open_checkpoint(tmp_path).meta == {"step": 1}
    assert {path.name for path in tmp_path.iterdir()} == {"latest", "step_00000001"}


def test_an_unwritable_root_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match="Choose a writable folder"):
        save_checkpoint(tmp_path / "file", 1, some_tensors(0), {})
