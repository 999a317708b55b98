"""gae and fused_adamw_ on a GPU, at batch sizes of training."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "interpreter"))

from kernels import fused_adamw_, gae, make_tensor_table

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def lengths_and_bounds(num_sequences=300):
    torch.manual_seed(0)
    lengths = torch.randint(0, 3000, (num_sequences,))
    lengths[:2] = torch.tensor([0, 1])
    cu = torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    return int(lengths.sum()), cu


@pytest.mark.parametrize("has_mask", [False, True])
def test_gae(has_mask):
    num_tokens, cu = lengths_and_bounds()
    rewards, values = torch.randn(2, num_tokens, device="cuda")
    mask = torch.rand(num_tokens, device="cuda") < 0.6 if has_mask else None
    ours = gae(rewards, values, cu, 0.99, 0.95, mask_T=mask, backend="triton")
    again = gae(rewards, values, cu, 0.99, 0.95, mask_T=mask, backend="triton")
    exact = gae(rewards, values, cu, 0.99, 0.95, mask_T=mask, backend="torch")  # in fp64
    for a, b, e in zip(ours, again, exact, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_follows_torch_for_five_steps(dtype):
    torch.manual_seed(0)
    shapes = [(4099, 1024), (1024,), (151936, 64), (1,), (3, 5), (0, 8)]
    master = [torch.randn(s, device="cuda") for s in shapes]
    params = [x.to(dtype) for x in master]
    moments = [[torch.zeros(s, device="cuda") for s in shapes] for _ in range(2)]
    theirs = [torch.nn.Parameter(x.clone()) for x in master]
    options = {"lr": 0.01, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    reference = torch.optim.AdamW(theirs, fused=True, **options)
    grads = [torch.empty(s, device="cuda", dtype=dtype) for s in shapes]
    plan = make_tensor_table(params, grads, *moments, master)
    for step in range(1, 6):
        for g, t in zip(grads, theirs, strict=True):
            g.normal_()
            t.grad = g.float() * 0.25
        reference.step()
        fused_adamw_(
            params, grads, *moments, master, step=step, plan=plan, backend="triton",
            grad_scale=torch.tensor(0.25, device="cuda"), **options,
        )  # fmt: skip
    for p, w, t in zip(params, master, theirs, strict=True):
        torch.testing.assert_close(w, t.data, rtol=1e-5, atol=1e-6)
        assert torch.equal(p, w.to(dtype))
