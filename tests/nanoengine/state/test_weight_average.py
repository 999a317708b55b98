"""The average of the weights over time: its numbers, whom it speaks for, and its checkpoints."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from test_engine_state import draw_samples, make_engine

from nanoengine.engine import NonFiniteLoss
from nanoengine.packing import MicroBatch, Sample
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoengine.state.whole_engine import Engine

DTYPES = ("fp32", "bf16")
RATE = 0.25


def seeded(seed: int = 0) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def masters(engine: Engine) -> dict[str, torch.Tensor]:
    return {entry.slot.name: values.clone() for entry, values in engine.optimizer.entries("master")}


def average(engine: Engine) -> dict[str, torch.Tensor]:
    return {
        piece.name.removeprefix("average."): values.flatten().clone()
        for piece, values in engine.average.pieces()
    }


def step(engine: Engine, samples: list[Sample]) -> None:
    engine.train_step(samples, sft_loss, num_loss_tokens)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_average_is_numpys_after_every_step(dtype: str) -> None:
    seeded()
    engine = make_engine(dtype)
    engine.keep_average(RATE)
    expected = {name: values.double().numpy() for name, values in masters(engine).items()}
    for _ in range(4):
        step(engine, draw_samples())
        for name, values in masters(engine).items():
            expected[name] = (1 - RATE) * expected[name] + RATE * values.double().numpy()
        for name, values in average(engine).items():
            np.testing.assert_allclose(values.double(), expected[name], rtol=0, atol=1e-6)
    far = max(
        float((masters(engine)[name] - value).abs().max())
        for name, value in average(engine).items()
    )
    assert far > 1e-3, "it is not the weights themselves"


def test_the_average_follows_two_hundred_random_weights() -> None:
    rng = np.random.default_rng(0)
    engine = make_engine("fp32")
    engine.keep_average(0.05)
    expected = {name: values.double().numpy() for name, values in masters(engine).items()}
    for _ in range(200):
        for entry, values in engine.optimizer.entries("master"):
            drawn = rng.normal(size=values.shape).astype(np.float32)
            values.copy_(torch.from_numpy(drawn))
            name = entry.slot.name
            expected[name] = 0.95 * expected[name] + 0.05 * drawn.astype(np.float64)
        engine.average.follow()
    for name, values in average(engine).items():
        np.testing.assert_allclose(values.double(), expected[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_it_speaks_for_a_model_of_its_weights_and_nothing_changes(dtype: str) -> None:
    seeded()
    plain, engine = make_engine(dtype), make_engine(dtype)
    engine.keep_average(RATE)
    for _ in range(2):
        samples = draw_samples()
        step(plain, samples)
        step(engine, samples)
        told = engine.average_logprobs(samples)
        top = engine.average_top(samples, 3)
        assert all(torch.equal(masters(plain)[n], values) for n, values in masters(engine).items())
    for name, values in plain.export_state():
        assert torch.equal(values, dict(engine.export_state())[name]), name
    # Somebody whose weights are the average.
    other = make_engine(dtype, seed=1)
    mean = average(engine)
    for entry, values in other.optimizer.entries("master"):
        values.copy_(mean[entry.slot.name])
    other.optimizer.write_back()
    other._refresh()
    for ours, theirs in zip(told, other.forward_logprobs(samples), strict=True):
        assert torch.equal(ours, theirs)
    for found, wanted in zip(top, other.forward_top(samples, 3), strict=True):
        assert torch.equal(found.ids, wanted.ids) and torch.equal(found.logps, wanted.logps)
    assert not torch.equal(told[0], engine.forward_logprobs(samples)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_resumed_average_is_the_same_bits(dtype: str, tmp_path: Path) -> None:
    seeded()
    engine = make_engine(dtype)
    engine.keep_average(RATE)
    step(engine, draw_samples())
    engine.save(tmp_path, {})
    batches = [draw_samples(), draw_samples()]
    for samples in batches:
        step(engine, samples)

    again = make_engine(dtype, seed=3)
    again.keep_average(RATE)
    again.load(tmp_path)
    for samples in batches:
        step(again, samples)
    assert all(torch.equal(average(engine)[n], values) for n, values in average(again).items())
    for ours, theirs in zip(
        engine.average_logprobs(batches[0]), again.average_logprobs(batches[0]), strict=True
    ):
        assert torch.equal(ours, theirs)


def test_an_engine_without_an_average_leaves_a_stored_one_alone(tmp_path: Path) -> None:
    seeded()
    engine = make_engine("fp32")
    engine.keep_average(RATE)
    step(engine, draw_samples())
    engine.save(tmp_path, {"place": 7})
    other = make_engine("fp32", seed=3)
    assert other.load(tmp_path) == {"place": 7}
    assert all(torch.equal(masters(engine)[n], values) for n, values in masters(other).items())


def test_of_a_checkpoint_without_one_the_average_begins_anew(tmp_path: Path) -> None:
    seeded()
    engine = make_engine("fp32")
    step(engine, draw_samples())
    engine.save(tmp_path, {})
    other = make_engine("fp32", seed=3)
    other.keep_average(RATE)
    other.load(tmp_path)
    assert all(torch.equal(masters(engine)[n], values) for n, values in average(other).items())


def test_a_step_that_is_refused_moves_no_average() -> None:
    seeded()
    engine = make_engine("fp32")
    engine.keep_average(RATE)
    step(engine, draw_samples())
    before = average(engine)

    def damaged(logp_T: torch.Tensor, entropy_T: object, micro: MicroBatch):  # type: ignore[no-untyped-def]
        return logp_T.sum() * float("nan"), {}

    with pytest.raises(NonFiniteLoss):
        engine.train_step(draw_samples(), damaged, num_loss_tokens)
    assert all(torch.equal(before[n], values) for n, values in average(engine).items())


def test_keeping_it_twice_goes_on_at_the_new_rate() -> None:
    seeded()
    engine = make_engine("fp32")
    engine.keep_average(RATE)
    step(engine, draw_samples())
    kept = average(engine)
    engine.keep_average(1.0)
    assert all(torch.equal(kept[n], values) for n, values in average(engine).items())
    step(engine, draw_samples())
    found = masters(engine)
    for name, values in average(engine).items():
        torch.testing.assert_close(values, found[name], rtol=0, atol=1e-7)
