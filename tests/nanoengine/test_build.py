"""Engines from a folder in every layout, what is refused before any process starts, and how ranks
that nobody introduced meet."""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from pathlib import Path

import build_cases
import pytest
import torch
from pool import WorkerPool
from tiny_shapes import DENSE, MOE

from nanoengine.build import build_engine, build_value_engine, check_layout
from nanoengine.config import EngineConfig
from nanoengine.formats.hf import save_model
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.parallel.layout import Layout, SplitConfig
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.rendezvous import LOOPBACK, join_mesh, open_store
from nanoengine.sft.chats import num_loss_tokens, sft_loss

# eps: a gradient that is all rounding must not become a step of random sign
CONFIG = EngineConfig(lr=1e-2, max_grad_norm=0.0, eps=1e-4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "moe"
    model = Transformer(MOE)
    model.init_weights(seed=0, std=0.1)
    save_model(model, path)
    return path


@pytest.mark.parametrize(
    ("layout", "zero", "split"),
    [
        (Layout(dp=2), 1, SplitConfig()),
        (Layout(ep=2), 3, SplitConfig()),
        (Layout(tp=2), 0, SplitConfig(sequence_parallel=True)),
        (Layout(pp=2), 0, SplitConfig(schedule="zb_h1")),
        (Layout(cp=2), 2, SplitConfig()),
    ],
    ids=str,
)
def test_an_engine_built_from_a_folder_takes_the_step_of_one_process(
    pool: WorkerPool, folder: Path, layout: Layout, zero: int, split: SplitConfig
) -> None:
    config = replace(CONFIG, zero=zero)
    alone = build_engine(folder, config)
    expected = {name: tensor.clone() for name, tensor in alone.export_state()}
    step = alone.train_step(build_cases.SAMPLES, sft_loss, num_loss_tokens)
    for result, before, after in pool.run(2, build_cases.train, folder, layout, config, split):
        assert all(torch.equal(before[name], tensor) for name, tensor in expected.items())
        assert before.keys() == expected.keys()
        assert result["loss"] == pytest.approx(step["loss"], rel=1e-5)
        assert result["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-5)
        for name, tensor in alone.export_state():
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=1e-4)


def test_masters_hold_the_values_of_the_folder_whatever_the_model_computes_in(
    pool: WorkerPool, folder: Path
) -> None:
    """Rounded to bf16 on the way, a layout's masters would not be those of one process."""
    config = replace(CONFIG, dtype="bf16")
    expected = build_cases.masters(build_engine(folder, config))
    for found in pool.run(2, build_cases.masters_of_ranks, folder, Layout(dp=2), config):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_critic_over_data_ranks_takes_the_step_of_one_process(
    pool: WorkerPool, folder: Path
) -> None:
    alone = build_value_engine(folder, CONFIG)
    for _ in range(2):
        step = alone.train_step(build_cases.SAMPLES, sft_loss, num_loss_tokens)
    for result in pool.run(
        2, build_cases.value_step, folder, Layout(dp=2), replace(CONFIG, zero=1)
    ):
        assert result["loss"] == pytest.approx(step["loss"], rel=1e-4)
        assert result["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-4)
    with pytest.raises(ValueError, match="tp2: a critic is whole on every rank; use dp, cp and"):
        build_value_engine(folder, CONFIG, Mesh(Layout(tp=2), 0, open_store()[0]))


@pytest.mark.parametrize(
    ("axes", "shape", "options", "message"),
    [
        ({"tp": 3}, DENSE, {}, "tp=3: must divide num_heads=4; choose another layout"),
        ({"tp": 4}, DENSE, {}, "tp=4: must divide num_kv_heads=2"),
        ({"ep": 2}, DENSE, {}, "ep=2: the model has no experts to split; use dp=2"),
        ({"ep": 3}, MOE, {}, "ep=3: must divide num_experts=4"),
        ({"ep": 2, "tp": 2}, MOE, {}, "ep=2 with tp=2: experts are split over one of the two"),
        ({"pp": 3}, DENSE, {}, "pp=3 x 1 chunks: more stages than the 2 layers"),
        ({"pp": 2}, DENSE, {"chunks": 2}, "num_chunks=2: 1f1b has one chunk a rank"),
        ({"pp": 2}, DENSE, {"schedule": "zbv"}, "schedule='zbv': must be one of gpipe, 1f1b"),
        ({"pp": 2}, DENSE, {"zero": 3}, "zero=3 with pp > 1"),
        ({"cp": 2}, DENSE, {"share_prefix": True}, "share_prefix=True with cp=2"),
    ],
)
def test_impossible_layouts_are_refused_before_any_process_starts(
    axes: dict[str, int], shape: ModelConfig, options: dict[str, object], message: str
) -> None:
    engine = {name: options.pop(name) for name in ("zero", "share_prefix") if name in options}
    config = replace(CONFIG, **engine)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=message):
        check_layout(Layout(**axes), shape, config, SplitConfig(**options))  # type: ignore[arg-type]
    check_layout(Layout(), shape, config)


def test_ranks_meet_at_a_store_that_rank_0_opened(pool: WorkerPool) -> None:
    assert pool.run(2, build_cases.sums_of_ranks) == [3.0, 3.0]


def test_a_store_listens_where_it_says_and_nowhere_else() -> None:
    store, meeting = open_store()
    other, elsewhere = open_store()
    assert meeting.host == LOOPBACK and meeting.port != elsewhere.port
    tables = [Path(f"/proc/{os.getpid()}/net/{name}").read_text() for name in ("tcp", "tcp6")]
    listening = [
        line.split()[1]
        for table in tables
        for line in table.splitlines()
        if f":{meeting.port:04X} " in line and line.split()[3] == "0A"
    ]
    little_endian = int.from_bytes(socket.inet_aton(LOOPBACK), "little")
    assert listening == [f"{little_endian:08X}:{meeting.port:04X}"]
    assert join_mesh(meeting, Layout(), 0).size() == 1
    del store, other
    with pytest.raises(ValueError, match=r"host='203.0.113.7': not an IPv4 address of this mach"):
        open_store("203.0.113.7")
