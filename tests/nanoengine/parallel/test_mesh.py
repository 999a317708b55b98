"""The grid, its collectives, what they count, and the worker pool itself."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mesh_cases
import pytest
import torch
from pool import RankFailed, WorkerPool

from nanoengine.parallel.layout import AXES, Layout
from nanoengine.parallel.mesh import Mesh, wire_bytes


def test_ranks_count_through_the_axes_with_tp_fastest() -> None:
    layout = Layout(pp=2, dp=2, tp=3)
    assert layout.world == 12
    assert layout.coordinates(7) == {"pp": 1, "dp": 0, "ep": 0, "cp": 0, "tp": 1}
    everywhere = [tuple(layout.coordinates(rank).values()) for rank in range(12)]
    in_order = [[place[axis] for axis in AXES] for place in map(layout.coordinates, range(12))]
    assert in_order == sorted(in_order) and len(set(everywhere)) == 12
    assert layout.members(7, "tp") == [6, 7, 8]
    assert layout.members(7, "dp") == [7, 10]
    assert layout.members(7, ("tp", "pp")) == [0, 1, 2, 6, 7, 8]
    assert str(layout) == "pp2·dp2·tp3" and str(Layout()) == "single"


def test_a_single_process_needs_no_store_and_its_collectives_do_nothing() -> None:
    mesh = Mesh(Layout())
    x = torch.arange(3.0)
    out = torch.zeros(3)
    mesh.all_reduce("tp", x)
    mesh.all_gather(AXES, out, x)
    assert torch.equal(out, torch.arange(3.0)) and not mesh.traffic
    with pytest.raises(ValueError, match="one rank"):
        mesh.group("dp")


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Layout(tp=0), "tp=0"),
        (lambda: Mesh(Layout(dp=2), 2), "rank=2"),
        (lambda: Mesh(Layout(dp=2), 0), "store=None"),
        (lambda: Mesh(Layout()).size("px"), "axis 'px'"),
    ],
)
def test_impossible_meshes_are_refused(build: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build()  # type: ignore[operator]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
def test_every_collective_gives_the_value_worked_by_hand(
    pool: WorkerPool, dtype: torch.dtype
) -> None:
    results = pool.run(4, mesh_cases.every_collective, dtype)
    for rank, found in enumerate(results):
        dp, tp = divmod(rank, 2)
        assert found["place"] == (dp, tp, rank)
        base = [20 * dp + 10 * r for r in (0, 1)]  # the tens of the two tp neighbours
        assert found["sum"] == [2 * i + sum(base) for i in range(4)]
        assert found["max"] == [30 + i for i in range(4)]
        assert found["gathered"] == [10 * tp + i for i in range(4)] + [
            20 + 10 * tp + i for i in range(4)
        ]
        assert found["part"] == [2 * i + sum(base) for i in (2 * tp, 2 * tp + 1)]
        assert found["root"] == [20 + 10 * tp + i for i in range(4)]
        assert found["neighbour"] == [20 * dp + 10 * (1 - tp) + i for i in range(4)]
        assert found["swapped"] == [base[r] + 2 * tp + i for r in (0, 1) for i in (0, 1)]
        assert found["json"][dp]["rank"] == rank and found["json"][1]["text"] == "ü" * (2 + tp)
        size = 4 * torch.empty(0, dtype=dtype).element_size()
        assert found["traffic"] == {
            ("all_reduce", "tp"): (1, size),
            ("all_reduce", "dp-tp"): (1, size),
            ("all_gather", "dp"): (1, 2 * size),
            ("reduce_scatter", "tp"): (1, size),
            ("broadcast", "dp"): (1, size),
            ("send", "tp"): (1, size),
            ("recv", "tp"): (1, size),
            ("all_to_all", "tp"): (1, size),
        }


def test_a_ring_sends_each_byte_of_an_all_reduce_nearly_twice() -> None:
    assert wire_bytes("all_reduce", 1000, 4) == 1500
    assert wire_bytes("all_gather", 1000, 4) == wire_bytes("reduce_scatter", 1000, 4) == 750
    assert wire_bytes("send", 1000, 2) == 1000


def test_bf16_is_reduced_in_fp32(pool: WorkerPool) -> None:
    results = pool.run(4, mesh_cases.bf16_sums)
    expected = torch.stack([mine for mine, _, _ in results]).double().sum(0).bfloat16().float()
    for _, total, narrow in results:
        assert torch.equal(total, expected)  # rounded once
        assert (narrow != expected).float().mean() > 0.05  # rounded at every hop


def test_several_meshes_live_in_one_process_without_a_default_group(pool: WorkerPool) -> None:
    assert pool.run(2, mesh_cases.two_meshes) == [[12.0], [12.0]]


def test_a_failing_rank_fails_the_call_and_the_pool_recovers(pool: WorkerPool) -> None:
    with pytest.raises(RankFailed, match="planted"):
        pool.run(2, mesh_cases.one_rank_raises)
    with pytest.raises(RankFailed, match="longer"):
        pool.run(1, mesh_cases.sleeps, timeout_s=0.3)
    assert pool.run(2, mesh_cases.two_meshes) == [[12.0], [12.0]]


PROGRAM = """
import torch
from nanoengine.parallel.layout import Layout
from nanoengine.parallel.mesh import Mesh
mesh = Mesh.from_torchrun(Layout(dp=2))
x = torch.tensor([mesh.rank() + 1.0])
mesh.all_reduce("dp", x)
print(f"sum {x.item()}")
mesh.close()
"""


@pytest.mark.slow
def test_torchrun_starts_a_mesh(tmp_path: Path) -> None:
    root = Path(__file__).resolve().parents[3]
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    arguments = ["--standalone", "--nproc-per-node", "2", str(program)]
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *arguments],
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.count("sum 3.0") == 2


def test_a_mesh_without_torchrun_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="start this with torchrun"):
        Mesh.from_torchrun(Layout(dp=2))
    place = {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match="torchrun started 3 processes"):
        Mesh.from_torchrun(Layout(dp=2))
