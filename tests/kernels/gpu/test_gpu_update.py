"""policy_loss, gae, fused_adamw_ and multi_tensor_l2norm on a GPU, at batch sizes of training."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "interpreter"))
from guard import assert_as_close

from kernels import fused_adamw_, gae, make_tensor_table, multi_tensor_l2norm, policy_loss

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def lengths_and_bounds(num_sequences=300):
    torch.manual_seed(0)
    lengths = torch.randint(0, 3000, (num_sequences,))
    lengths[:2] = torch.tensor([0, 1])
    cu = torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32, device="cuda")
    return int(lengths.sum()), cu


@pytest.mark.parametrize("variant", ["grpo", "gspo", "cispo"])
def test_policy_loss_is_that_of_pytorch_in_fp64_and_the_same_bits_twice(variant):
    num_tokens, cu = lengths_and_bounds()
    old = -3 * torch.rand(num_tokens, device="cuda")
    near = [old + 0.4 * torch.randn(num_tokens, device="cuda") for _ in range(3)]
    advantage = torch.randn(num_tokens, device="cuda")
    mask = torch.rand(num_tokens, device="cuda") < 0.7

    def run(kind, backend):
        logp = near[0].to(kind).requires_grad_()
        loss, stats = policy_loss(
            logp, old.to(kind), advantage.to(kind), mask, ref_logprobs=near[1].to(kind),
            rollout_logprobs=near[2].to(kind), cu_seqlens=cu, kl_coef=0.1, kl_kind="k3",
            variant=variant, backend=backend,
        )  # fmt: skip
        (grad,) = torch.autograd.grad(loss, logp)
        return loss.detach(), grad, torch.stack(list(stats.values()))

    ours, again = run(torch.float32, "triton"), run(torch.float32, "triton")
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    plain, exact = run(torch.float32, "torch"), run(torch.float64, "torch")
    assert_as_close(ours[1:2], plain[1:2], exact[1:2])
    torch.testing.assert_close(ours[0].double(), exact[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours[2], exact[2], rtol=1e-5, atol=1e-6)


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_l2norm(dtype):
    torch.manual_seed(0)
    given = [torch.randn(s, device="cuda").to(dtype) for s in ((4099, 4096), (7,), (0,), (1, 1))]
    norm = multi_tensor_l2norm(given, backend="triton")
    exact = sum(float(x.double().square().sum()) for x in given) ** 0.5
    assert float(norm) == pytest.approx(exact, rel=1e-6)
    assert torch.equal(norm, multi_tensor_l2norm(given, backend="triton"))
