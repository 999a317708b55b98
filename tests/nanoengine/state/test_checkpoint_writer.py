"""Checkpoints of several writers: any slice comes back, and kill -9 never leaves a broken one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from checkpoint_formats import write_format_1
from safetensors.torch import load_file
from torch import Tensor
from waiting import wait_until

from nanoengine.state import checkpoint_writer
from nanoengine.state.checkpoint import latest_checkpoint, open_checkpoint
from nanoengine.state.checkpoint_writer import CheckpointWriter
from nanoengine.state.slices import Box, Held, Piece, make_piece
from nanoengine.state.tensor_file import CheckpointError, write_tensors

ROOT = Path(__file__).resolve().parents[3]


def hands(step: int) -> tuple[Tensor, list[Held]]:
    """A matrix in three parts, whose rows 3 and 4 two ranks hold, and a scalar."""
    whole = torch.arange(40.0).view(8, 5) + 1000 * step
    scalar = torch.tensor(float(step), dtype=torch.float64)
    boxes = [[Box((0, 0), (5, 5))], [Box((3, 0), (5, 2)), Box((5, 2), (3, 3))]]
    found: list[Held] = []
    for rank in range(2):
        held: Held = [
            (Piece("w", (8, 5), box), box.of(whole, Box((0, 0), (8, 5))).clone())
            for box in boxes[rank]
        ]
        found.append(held + ([(make_piece("s", scalar), scalar)] if rank == 1 else []))
    return whole, found


def writers(root: Path, **options: float) -> list[CheckpointWriter]:
    return [CheckpointWriter(root, rank=rank, world=2, **options) for rank in range(2)]  # type: ignore[arg-type]


def save_all(each: list[CheckpointWriter], step: int, held: list[Held]) -> None:
    for rank, writer in enumerate(each):
        writer.save(step, held[rank], {"step": step}, {"rank": rank}, in_background=True)


def test_any_box_comes_back_from_parts_and_from_a_file_of_the_first_format(tmp_path: Path) -> None:
    whole, held = hands(3)
    each = writers(tmp_path / "parts")
    save_all(each, 3, held)
    assert each[0].wait() == tmp_path / "parts" / "step_00000003"
    each[1].wait()
    write_format_1(tmp_path / "one", 3, {"w": whole, "s": held[1][-1][1]}, {"step": 3})
    for root in (tmp_path / "parts", tmp_path / "one"):
        checkpoint = open_checkpoint(root)
        assert checkpoint.meta == {"step": 3} and sorted(checkpoint.names()) == ["s", "w"]
        assert checkpoint.shape("w") == (8, 5) and checkpoint.dtype("s") == torch.float64
        assert torch.equal(checkpoint.read("w"), whole)
        assert float(checkpoint.read("s")) == 3.0
        for r in range(8):
            for c in range(5):
                box = Box((r, c), (8 - r, 5 - c))
                out = torch.zeros(box.shape)
                checkpoint.read_box("w", box, out)
                assert torch.equal(out, whole[r:, c:])
    assert [r["rank"] for r in open_checkpoint(tmp_path / "parts").ranks] == [0, 1]
    part = load_file(tmp_path / "parts" / "step_00000003" / "rank_00000.safetensors")
    assert torch.equal(part["w@0,0"], whole[:5])  # plain safetensors, whose names say which box


def test_a_background_save_keeps_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    whole, held = hands(1)
    each = writers(tmp_path)
    each[0].save(1, held[0], {}, in_background=True)  # waits for the other's part
    for _, tensor in held[0]:
        tensor.zero_()
    each[1].save(1, held[1], {}, in_background=True)
    for writer in each:
        writer.wait()
    assert torch.equal(open_checkpoint(tmp_path).read("w"), whole)


def test_a_rank_that_never_writes_is_named_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    each = writers(tmp_path)
    save_all(each, 1, hands(1)[1])
    for writer in each:
        writer.wait()
    alone, _ = writers(tmp_path, timeout_s=0.3)
    alone.save(2, hands(2)[1][0], {}, in_background=True)
    with pytest.raises(CheckpointError, match="rank 1 wrote nothing for 0 s"):
        alone.wait()
    assert open_checkpoint(tmp_path).meta == {"step": 1}
    for rank, writer in enumerate(writers(tmp_path)):  # a new run clears the leftovers
        writer.save(3, hands(3)[1][rank], {"step": 3}, in_background=True)
    wait_until(lambda: open_checkpoint(tmp_path).meta["step"] == 3)
    assert {path.name for path in tmp_path.iterdir()} == {
        "latest",
        "step_00000001",
        "step_00000003",
    }


def test_a_damaged_part_is_found_by_whoever_verifies_it(tmp_path: Path) -> None:
    each = writers(tmp_path)
    save_all(each, 1, hands(1)[1])
    folder = each[0].wait()
    each[1].wait()
    assert folder is not None
    path = folder / "rank_00001.safetensors"
    body = bytearray(path.read_bytes())
    body[-3] ^= 1
    path.write_bytes(body)
    open_checkpoint(tmp_path, share=(0, 2))
    for share in ((1, 2), (0, 1)):
        with pytest.raises(CheckpointError, match=r"rank_00001.*checksum does not match"):
            open_checkpoint(tmp_path, share=share)


KILL_TWENTY = """
import os, random, signal, sys, time, torch
from nanoengine.state.checkpoint import open_checkpoint
from nanoengine.state.checkpoint_writer import CheckpointWriter
from nanoengine.state.slices import Box, Piece
torch.set_num_threads(1)

def save_forever(root, step, out):
    each = [CheckpointWriter(root, rank=rank, world=2) for rank in range(2)]
    while True:
        for rank, writer in enumerate(each):
            half = torch.full((150_000,), float(step))
            piece = Piece("w", (300_000,), Box((150_000 * rank,), (150_000,)))
            writer.save(step, [(piece, half)], {"step": step}, in_background=True)
        for writer in each:
            writer.wait()
        os.write(out, f"{step} ".encode())
        step += 1

def check(root, told, out):
    checkpoint = open_checkpoint(root)
    last = checkpoint.meta["step"]
    assert last >= told, (last, told)
    assert torch.equal(checkpoint.read("w"), torch.full((300_000,), float(last)))
    print("whole", last, flush=True)
    os.write(out, str(last).encode())

moments, last = random.Random(3), 0
for _ in range(20):
    reader, out = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        save_forever(sys.argv[1], last + 1, out)
    os.close(out)
    first = os.read(reader, 100)
    time.sleep(moments.uniform(0, 0.06))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    told = first
    while more := os.read(reader, 1000):
        told += more
    os.close(reader)
    reader, out = os.pipe()
    checker = os.fork()  # this process keeps clear of torch's threads: it forks again
    if checker == 0:
        check(sys.argv[1], int(told.split()[-1]), out)
        os._exit(0)
    os.close(out)
    last = int(os.read(reader, 100))
    os.close(reader)
    os.waitpid(checker, 0)
"""


def test_kill_9_at_twenty_random_moments_leaves_a_loadable_checkpoint(tmp_path: Path) -> None:
    """The threads of both writers live in a process that is killed while it saves over and over;
    after each kill the checkpoint that it last announced, or a later one, must be whole."""
    done = subprocess.run(
        [sys.executable, "-c", KILL_TWENTY, str(tmp_path)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.count("whole") == 20, done.stderr


def test_a_rank_that_cannot_write_tells_the_others_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(path: Path, tensors: dict[str, Tensor]) -> dict[str, int]:
        if path.name == "rank_00001.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device")
        return write_tensors(path, tensors)

    monkeypatch.setattr(checkpoint_writer, "write_tensors", write)
    each = writers(tmp_path, timeout_s=100.0)
    start = time.monotonic()
    save_all(each, 1, hands(1)[1])
    with pytest.raises(CheckpointError, match="was given up: another rank could not write"):
        each[0].wait()
    with pytest.raises(CheckpointError, match="No space left"):
        each[1].wait()
    assert time.monotonic() - start < 50
    assert latest_checkpoint(tmp_path) is None
