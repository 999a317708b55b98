"""Triton's gae and fused_adamw_, interpreted, against fp64."""

import pytest
import torch
from guard import assert_as_close, guarded, poisoned_memory

from kernels import fused_adamw_, gae, make_tensor_table
from kernels.returns.gae import gae_ref
from kernels.torch.adamw import adamw_ref

DTYPES = [torch.float32, torch.bfloat16]


def bounds(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_mask", [False, True])
def test_gae(dtype, has_mask):
    torch.manual_seed(0)
    lengths = [1300, 0, 1, 9]
    rewards, values = (guarded(torch.randn(sum(lengths)).to(dtype)) for _ in range(2))
    mask = torch.rand(sum(lengths)) < 0.6 if has_mask else None
    if mask is not None:
        mask[100:1200] = False  # tool output: the block in the middle has no action token
    cu = bounds(lengths)
    with poisoned_memory():
        ours = gae(rewards, values, cu, 0.99, 0.95, mask_T=mask, backend="triton")

    def definition(kind):
        return gae_ref(rewards.to(kind), values.to(kind), cu, 0.99, 0.95, mask)

    assert_as_close(ours, definition(dtype), definition(torch.float64))


def tensors(shapes, dtype):
    return [guarded(torch.randn(shape).to(dtype)) for shape in shapes]


@pytest.mark.parametrize("dtype", DTYPES)
def test_adamw_follows_the_definition_for_three_steps(dtype):
    torch.manual_seed(0)
    shapes = [(130, 127), (3, 5), (1,), (0, 4)]
    options = {"lr": 0.02, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
    master = tensors(shapes, torch.float32)
    params = [guarded(x.to(dtype)) for x in master]
    exact = [(x.double(), torch.zeros_like(x).double(), torch.zeros_like(x).double())
             for x in master]  # fmt: skip
    plain = [(x.clone(), torch.zeros_like(x), torch.zeros_like(x)) for x in master]
    moments = [[guarded(torch.zeros(s)) for s in shapes] for _ in range(2)]
    grads = tensors(shapes, dtype)
    plan = make_tensor_table(params, grads, *moments, master)
    for step in (1, 2, 3):
        for g in grads:
            g.copy_(torch.randn(g.shape))
        scale = torch.tensor(0.07)
        fused_adamw_(
            params, grads, *moments, master, step=step, grad_scale=scale, plan=plan,
            backend="triton", **options,
        )  # fmt: skip
        for i, g in enumerate(grads):
            exact[i] = adamw_ref(exact[i][0], g, *exact[i][1:], step=step,
                                 grad_scale=float(scale), **options)  # fmt: skip
            plain[i] = adamw_ref(plain[i][0], g, *plain[i][1:], step=step,
                                 grad_scale=float(scale), **options)  # fmt: skip
    for ours, p, e in zip((master, *moments), zip(*plain, strict=True), zip(*exact, strict=True),
                          strict=True):  # fmt: skip
        assert_as_close(*([torch.cat([x.flatten() for x in xs])] for xs in (ours, p, e)))
    for i, param in enumerate(params):
        assert torch.equal(param, master[i].to(dtype))


@pytest.mark.parametrize("offset", [0, 1])
def test_adamw_without_masters_updates_the_parameters_wherever_they_start(offset):
    """At an offset of one element no address is a multiple of 16 bytes."""
    torch.manual_seed(0)
    ours, theirs = [torch.randn(1001)[offset:]], [torch.nn.Parameter(torch.empty(1001 - offset))]
    theirs[0].data.copy_(ours[0])
    reference = torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1)
    moments = [[torch.zeros(1001)[offset:]] for _ in range(2)]
    for step in (1, 2):
        theirs[0].grad = torch.randn(1001)[offset:]
        reference.step()
        fused_adamw_(
            ours, [theirs[0].grad], *moments, None, lr=0.01, betas=(0.9, 0.999), eps=1e-8,
            weight_decay=0.1, step=step, backend="triton",
        )  # fmt: skip
    torch.testing.assert_close(ours[0], theirs[0].data, rtol=1e-6, atol=1e-7)
