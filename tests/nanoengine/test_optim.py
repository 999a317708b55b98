"""AdamW against torch.optim.AdamW, clipping against torch, schedules against hand numbers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from nanoengine.config import AdamWConfig
from nanoengine.optim import lr_at
from nanoengine.state.kept_adamw import AdamW

SHAPES = {"embed": (37, 16), "norm": (16,), "up": (33, 16), "up_bias": (33,)}


def make_parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype))
        for name, shape in SHAPES.items()
    }


def make_optimizer(parameters: dict[str, nn.Parameter], config: AdamWConfig | None = None) -> AdamW:
    return AdamW([nn.ParameterDict(parameters)], config or AdamWConfig())


def loss_of(parameters: dict[str, nn.Parameter], step: int) -> torch.Tensor:
    return sum(
        ((p - 0.1 * step).pow(3).sum() / (i + 1) for i, p in enumerate(parameters.values())),
        start=torch.zeros(()),
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_follows_torch_adamw_and_clipping_step_by_step(
    dtype: torch.dtype, tolerance: float
) -> None:
    ours, theirs = make_parameters(dtype), make_parameters(dtype)
    config = AdamWConfig(lr=0.03, betas=(0.9, 0.97), eps=1e-6, weight_decay=0.2, max_grad_norm=5.0)
    optimizer = make_optimizer(ours, config)
    decayed = [p for p in theirs.values() if p.ndim > 1]
    spared = [p for p in theirs.values() if p.ndim == 1]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.2}, {"params": spared, "weight_decay": 0.0}],
        lr=0.03,
        betas=(0.9, 0.97),
        eps=1e-6,
    )
    clipped = 0
    for step in range(12):
        scale = 10.0 ** -(step % 4)  # clipped and unclipped steps
        optimizer.zero_grad()
        (loss_of(ours, step) * scale).backward()
        norm = optimizer.grad_norm()
        optimizer.step(norm)
        reference.zero_grad()
        (loss_of(theirs, step) * scale).backward()
        expected_norm = float(nn.utils.clip_grad_norm_(theirs.values(), 5.0))
        reference.step()
        clipped += expected_norm > 5.0
        assert norm == pytest.approx(expected_norm, rel=1e-6)
        for name in SHAPES:
            torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance)
    assert 0 < clipped < 12


def test_bf16_parameters_follow_fp32_masters_and_lose_no_small_update() -> None:
    parameters = {"w": nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))}
    optimizer = make_optimizer(parameters, AdamWConfig(lr=1e-4, max_grad_norm=0.0))
    for _ in range(50):  # each update is far below half a bf16 ulp of 1.0
        optimizer.zero_grad()
        parameters["w"].float().sum().backward()
        optimizer.step(optimizer.grad_norm())
    master = next(optimizer.entries("master"))[1].view(8, 8)
    torch.testing.assert_close(master, torch.full((8, 8), 1 - 50e-4), rtol=0, atol=1e-5)
    assert torch.equal(parameters["w"].detach(), master.bfloat16())
    assert parameters["w"][0, 0] < 1


def test_gradients_of_several_backwards_add_up_in_fp32() -> None:
    parameters = {"w": nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))}
    optimizer = make_optimizer(parameters)
    optimizer.zero_grad()
    for scale in (1.0, 1 / 1024):  # 1 + 1/1024 is no bf16 number
        (parameters["w"] * scale).sum().backward()
    assert torch.equal(parameters["w"].main_grad, torch.full((4, 4), 1 + 1 / 1024))
    assert parameters["w"].grad is None


def test_the_norm_sums_in_fp64() -> None:
    parameters = {"w": nn.Parameter(torch.zeros(3000, 1000))}
    optimizer = make_optimizer(parameters)
    (bucket,) = optimizer.buckets
    bucket.grad.uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    expected = math.sqrt(float(bucket.grad.double().square().sum()))
    assert optimizer.grad_norm() == pytest.approx(expected, rel=1e-7)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_one_bad_entry_makes_the_norm_non_finite(value: float) -> None:
    parameters = {"w": nn.Parameter(torch.zeros(300, 100))}
    optimizer = make_optimizer(parameters)
    optimizer.buckets[0].grad[12345] = value
    assert not math.isfinite(optimizer.grad_norm())


def test_schedules_by_hand() -> None:
    constant = AdamWConfig(lr=2.0, warmup_steps=4)
    assert [lr_at(constant, step) for step in (0, 1, 3, 4, 99)] == [0.5, 1.0, 2.0, 2.0, 2.0]
    linear = AdamWConfig(lr=2.0, schedule="linear", warmup_steps=2, total_steps=10)
    expected = [1.0, 2.0, 2.0, 1.0, 0.0, 0.0]
    assert [lr_at(linear, step) for step in (0, 1, 2, 6, 10, 50)] == expected
    cosine = AdamWConfig(lr=2.0, schedule="cosine", total_steps=8, min_lr_ratio=0.1)
    half_way = 2.0 * (0.1 + 0.9 * 0.5)
    quarter = 2.0 * (0.1 + 0.9 * (1 + math.sqrt(0.5)) / 2)
    for step, value in ((0, 2.0), (2, quarter), (4, half_way), (8, 0.2), (20, 0.2)):
        assert lr_at(cosine, step) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"lr": -1.0}, "lr=-1.0"),
        ({"betas": (0.9, 1.0)}, "betas"),
        ({"schedule": "step"}, "schedule='step'"),
        ({"schedule": "cosine", "warmup_steps": 5, "total_steps": 5}, "total_steps=5"),
    ],
)
def test_impossible_settings_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdamWConfig(**arguments)  # type: ignore[arg-type]


def test_a_new_phase_starts_without_momentum_at_the_old_scale() -> None:
    """Two weights with gradients of very different scale: after the restart the first update of
    each is (1 - b1) g / sqrt(v), worked out by hand, and not the sign of its gradient."""
    param = torch.nn.Parameter(torch.zeros(2))
    optimizer = make_optimizer({"w": param}, AdamWConfig(lr=1.0, betas=(0.5, 0.75), eps=1e-12))
    optimizer.buckets[0].grad[:2] = torch.tensor([4.0, 1.0])
    optimizer.step(0.0)  # v = (4, 0.25)
    optimizer.restart(AdamWConfig(lr=0.1, betas=(0.5, 0.75), eps=1e-12))
    before = param.detach().clone()
    optimizer.buckets[0].grad[:2] = torch.tensor([1.0, 1.0])
    optimizer.step(0.0)
    v = torch.tensor([0.75 * 4 + 0.25, 0.75 * 0.25 + 0.25]) / (1 - 0.75**2)
    m = torch.tensor([0.5, 0.5]) / (1 - 0.5**2)
    torch.testing.assert_close(before - param.detach(), 0.1 * m / v.sqrt())


def test_a_new_phase_has_its_own_rates_and_no_momentum() -> None:
    model = nn.Sequential(nn.Linear(9, 7), nn.Tanh(), nn.Linear(7, 5))
    optimizer = AdamW([model], AdamWConfig(lr=0.02, weight_decay=0.1))
    second = AdamWConfig(lr=0.03, schedule="linear", warmup_steps=3, total_steps=9)
    rates = []
    for step in range(8):
        if step == 4:
            optimizer.restart(second)
            assert not optimizer.exp_avg.any() and optimizer.exp_avg_sq.any()
        optimizer.zero_grad()
        model(torch.randn(4, 9)).square().sum().backward()
        rates.append(optimizer.lr())
        optimizer.step(optimizer.grad_norm())
    assert rates == pytest.approx([0.02] * 4 + [0.01, 0.02, 0.03, 0.03])
