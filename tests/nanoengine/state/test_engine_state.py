"""What the engine keeps: bit-equal resume, offload and reload, weights in and out."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_formats import write_format_1
from tiny_models import optimizer_state

from nanoengine.config import EngineConfig
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.packing import Sample
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoengine.state.checkpoint import get_rng_state
from nanoengine.state.tensor_file import CheckpointError
from nanoengine.state.whole_engine import Engine

ROOT = Path(__file__).resolve().parents[3]


def make_engine(dtype: str, seed: int = 0, hidden: int = 32, **options: object) -> Engine:
    config = ModelConfig(
        vocab_size=97,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        tie_word_embeddings=True,
        max_position_embeddings=128,
    )
    model = Transformer(config)
    model.init_weights(seed)
    settings = EngineConfig(
        dtype=dtype,  # type: ignore[arg-type]
        lr=1e-2,
        weight_decay=0.1,
        schedule="cosine",
        warmup_steps=2,
        total_steps=9,
        micro_batch_tokens=40,
        **options,  # type: ignore[arg-type]
    )
    return Engine(model, settings)


def draw_samples() -> list[Sample]:
    """From all three global generators, so that a generator not restored changes the weights."""
    samples = []
    for _ in range(5):
        tokens = torch.randint(0, 97, (random.randint(4, 20),)).tolist()
        tokens += np.random.randint(0, 97, 3).tolist()
        samples.append(Sample(tokens=tokens, loss_mask=[0] + [1] * (len(tokens) - 1)))
    return samples


def train(engine: Engine, steps: int) -> None:
    for _ in range(steps):
        engine.train_step(draw_samples(), sft_loss, num_loss_tokens)


def everything(engine: Engine) -> dict[str, torch.Tensor]:
    state = {name: tensor.clone() for name, tensor in optimizer_state(engine).items()}
    state |= {f"weight.{name}": tensor.clone() for name, tensor in engine.export_state()}
    state["counts"] = torch.tensor([engine.version, engine.optimizer.step_count])
    state["random"] = torch.tensor([random.random(), np.random.rand(), float(torch.rand(()))])
    state["logp"] = torch.cat(engine.forward_logprobs(draw_samples()))
    return state


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    seed_all(1)
    engine = make_engine(dtype)
    train(engine, 6)
    expected = everything(engine)

    seed_all(1)
    engine = make_engine(dtype)
    train(engine, 3)
    engine.save(tmp_path, {"epoch": 2, "order": [3, 1, 2]})
    train(engine, 1)  # work that the interruption loses
    seed_all(99)
    resumed = make_engine(dtype, seed=5)
    assert resumed.load(tmp_path) == {"epoch": 2, "order": [3, 1, 2]}
    train(resumed, 3)
    found = everything(resumed)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def test_the_second_of_a_pair_of_normal_numbers_survives_a_checkpoint(tmp_path: Path) -> None:
    """NumPy and Python draw normal numbers in pairs and keep the second for the next call."""
    seed_all(3)
    engine = make_engine("fp32")
    np.random.normal(), random.gauss(0, 1)  # the second of each pair is now waiting
    engine.save(tmp_path, {})
    expected = [float(np.random.normal()), random.gauss(0, 1)]
    seed_all(4)
    engine.load(tmp_path)
    assert [float(np.random.normal()), random.gauss(0, 1)] == expected


def test_a_second_phase_has_its_own_schedule_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    seed_all(1)
    engine = make_engine("bf16")
    train(engine, 4)
    second = replace(engine.config, lr=3e-3, warmup_steps=4, total_steps=20)
    engine.restart(second)
    assert engine.version == 0
    assert engine.optimizer.lr() == pytest.approx(3e-3 / 4)  # the warm-up begins anew
    assert not engine.optimizer.exp_avg.any() and engine.optimizer.exp_avg_sq.any()
    train(engine, 3)
    engine.save(tmp_path, {})
    resumed = make_engine("bf16", seed=5)
    resumed.restart(second)
    resumed.load(tmp_path)
    assert resumed.optimizer.lr() == engine.optimizer.lr() == pytest.approx(3e-3)
    engine.load(tmp_path)  # the random generators of the save
    train(engine, 2)
    expected = everything(engine)
    resumed.load(tmp_path)
    train(resumed, 2)
    for name, tensor in everything(resumed).items():
        assert torch.equal(tensor, expected[name]), name


def test_load_takes_one_checkpoint_or_the_latest(tmp_path: Path) -> None:
    engine = make_engine("bf16")
    first = engine.save(tmp_path, {"n": 0})
    train(engine, 2)
    engine.save(tmp_path, {"n": 2})
    assert engine.load(first) == {"n": 0} and engine.version == 0
    assert engine.load(tmp_path) == {"n": 2} and engine.version == 2


def test_a_checkpoint_of_another_model_changes_nothing(tmp_path: Path) -> None:
    make_engine("fp32", hidden=40).save(tmp_path)
    engine = make_engine("fp32")
    before = everything(engine)
    with pytest.raises(CheckpointError, match=r"of another model .*embedding"):
        engine.load(tmp_path)
    after = everything(engine)
    assert all(torch.equal(after[n], t) for n, t in before.items() if n.startswith(("m", "e", "w")))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_run_goes_on_from_a_checkpoint_of_the_first_format(tmp_path: Path, dtype: str) -> None:
    """What versions before format 2 wrote: one file of whole tensors. The bits of the run that was
    never interrupted."""
    seed_all(5)
    engine = make_engine(dtype)
    train(engine, 2)
    rng_tensors, rng = get_rng_state(engine.model.device)
    meta = {"version": 2, "step_count": 2, "dtype": dtype, "rng": rng, "cursor": {"at": 7}}
    write_format_1(tmp_path, 2, optimizer_state(engine) | rng_tensors, meta)
    train(engine, 2)
    expected = everything(engine)
    seed_all(99)
    resumed = make_engine(dtype, seed=1)
    assert resumed.load(tmp_path) == {"at": 7}
    train(resumed, 2)
    found = everything(resumed)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_a_damaged_checkpoint_changes_nothing_and_the_previous_one_loads(tmp_path: Path) -> None:
    engine = make_engine("fp32")
    train(engine, 1)
    good = engine.save(tmp_path, {"n": 1})
    train(engine, 1)
    bad = engine.save(tmp_path, {"n": 2}) / "rank_00000.safetensors"
    body = bytearray(bad.read_bytes())
    body[len(body) // 3] ^= 4
    bad.write_bytes(body)
    before = {name: tensor.clone() for name, tensor in optimizer_state(engine).items()}
    with pytest.raises(CheckpointError, match=rf"checksum.*Resume from {good}"):
        engine.load(tmp_path)
    assert all(torch.equal(before[n], t) for n, t in optimizer_state(engine).items())
    assert engine.load(good) == {"n": 1}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offload_frees_the_memory_and_reload_gives_the_same_bits(
    tmp_path: Path, dtype: str
) -> None:
    runs = []
    for parks in (False, True):
        seed_all(3)
        engine = make_engine(dtype)
        for _ in range(3):
            train(engine, 1)
            if parks:
                optimizer = engine.optimizer
                halves = [s.remainder for s in optimizer.states if s.remainder is not None]
                engine.offload(tmp_path)
                parked = [optimizer.exp_avg, optimizer.exp_avg_sq, optimizer.buckets[0].grad]
                parked += halves
                assert len(halves) == (dtype == "bf16")
                assert all(buffer.untyped_storage().nbytes() == 0 for buffer in parked)
                engine.forward_logprobs([Sample(tokens=[1, 2], loss_mask=[0, 1])])  # still works
                with pytest.raises(ValueError, match="reload"):
                    engine.train_step([Sample(tokens=[1, 2], loss_mask=[0, 1])], sft_loss)
                with pytest.raises(ValueError, match="reload"):
                    engine.save(tmp_path / "checkpoints")
                engine.offload(tmp_path)  # a second time is no harm
                engine.reload()
        runs.append(everything(engine))
    assert all(torch.equal(runs[0][name], runs[1][name]) for name in runs[0])
    assert not any(path.is_file() for path in tmp_path.iterdir())


RSS = """
import torch
from torch import nn
from nanoengine.config import AdamWConfig
from nanoengine.state.kept_adamw import AdamW
def rss(): return int(open("/proc/self/statm").read().split()[1]) * 4096 / 1e6
weight = nn.Parameter(torch.ones(5000, 2000, dtype=torch.bfloat16))
optimizer = AdamW([nn.ParameterDict({"w": weight})], AdamWConfig())
optimizer.buckets[0].grad.fill_(1); optimizer.step(1.0)
full = rss(); optimizer.offload(); parked = rss(); optimizer.reload(); back = rss()
print(full - parked, back - parked)
"""


def test_offload_returns_the_memory_to_the_system() -> None:
    output = subprocess.run(
        [sys.executable, "-c", RSS],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    dropped, returned = map(float, output.split())
    # MB, of 3 buffers of 40; remainders of 20 the allocator may keep; the gradient returns unread
    assert dropped > 95 and returned > 70


def test_load_weights_also_replaces_the_masters() -> None:
    source, target = make_engine("fp32", seed=7), make_engine("bf16")
    target.load_weights(source.export_state())
    for name, parameter in source.model.named_parameters():
        expected = parameter.detach().bfloat16()
        assert torch.equal(optimizer_state(target)[f"master.{name}"], expected.float())
        assert torch.equal(dict(target.model.named_parameters())[name], expected)
