"""gae, fused_adamw_, qk_norm_rope on a CPU."""

import pytest
import torch

from kernels import apply_rope, fused_adamw_, gae, make_tensor_table, qk_norm_rope, rms_norm
from kernels.returns.gae import gae_ref
from kernels.torch.adamw import _PIECE
from kernels.torch.split_master import join_master, split_master_
from nanorl.algorithms.returns import gae as gae_of_nanorl


def test_gae_skips_observations_as_the_worked_example():
    """Two action tokens, three observations, two action tokens: 0.429, not 0.977."""
    mask = torch.tensor([1, 1, 0, 0, 0, 1, 1]).bool()
    values = torch.where(mask, 0.5, 5.0)
    rewards = torch.tensor([0.0, 0, 0, 0, 0, 0, 1])
    cu = torch.tensor([0, 7], dtype=torch.int32)
    advantages, returns = gae(rewards, values, cu, 1.0, 0.95, mask_T=mask)
    assert float(advantages[0]) == pytest.approx(0.429, abs=5e-4)
    assert float(advantages[6]) == pytest.approx(0.5)
    assert not advantages[~mask].any() and not returns[~mask].any()


@pytest.mark.parametrize("has_mask", [False, True])
def test_gae_of_many_sequences_equals_nanorl_and_the_definition(has_mask):
    torch.manual_seed(0)
    lengths = torch.tensor([5, 0, 1, 130, 64, 2])
    rewards, values = torch.randn(2, int(lengths.sum()))
    mask = torch.rand(len(values)) < 0.5 if has_mask else None
    cu = torch.tensor([0, *lengths.cumsum(0).tolist()], dtype=torch.int32)
    ours = gae(rewards, values, cu, 0.97, 0.9, mask_T=mask)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    whole = torch.ones(len(values)) if mask is None else mask
    theirs = gae_of_nanorl(rewards, values, whole, ids, gamma=0.97, lam=0.9)
    exact = gae_ref(rewards.double(), values.double(), cu, 0.97, 0.9, mask)
    for a, b, e in zip(ours, theirs, exact, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(a.double(), e, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_is_torch_adamw_on_clipped_gradients(dtype):
    torch.manual_seed(0)
    shapes = [(40, 30), (7,), (0, 3)]
    master = [torch.randn(s) for s in shapes]
    params = [x.to(dtype) for x in master]
    moments = [[torch.zeros(s) for s in shapes] for _ in range(2)]
    theirs = [torch.nn.Parameter(x.clone()) for x in master]
    options = {"lr": 0.02, "betas": (0.9, 0.97), "eps": 1e-6, "weight_decay": 0.2}
    reference = torch.optim.AdamW(theirs, **options)
    for step in (1, 2, 3):
        grads = [torch.randn(s).to(dtype) for s in shapes]
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.float().clone()
        norm = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
        reference.step()
        fused_adamw_(
            params, grads, *moments, master, step=step, grad_scale=1 / (norm + 1e-6), **options
        )
    for p, w, t in zip(params, master, theirs, strict=True):
        torch.testing.assert_close(w, t.data, rtol=1e-6, atol=1e-6)
        assert torch.equal(p, w.to(dtype))


OPTIONS = {"lr": 0.02, "betas": (0.9, 0.97), "eps": 1e-6, "weight_decay": 0.2}


def step_in_fp64(w, m, v, g, step, scale):
    """AdamW written out, its moments in place; returns the new w."""
    lr, (b1, b2) = OPTIONS["lr"], OPTIONS["betas"]
    g = g.double() * scale
    m.mul_(b1).add_((1 - b1) * g)
    v.mul_(b2).add_((1 - b2) * g * g)
    root = (v / (1 - b2**step)).sqrt() + OPTIONS["eps"]
    return w * (1 - lr * OPTIONS["weight_decay"]) - lr * (m / (1 - b1**step)) / root


def split_of(master):
    weight, remainder = master.bfloat16(), torch.empty(len(master), dtype=torch.int16)
    split_master_(weight, remainder, master)
    return weight, remainder


@pytest.mark.usefixtures("cpu_path")
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_adamw_is_fp64s_and_torchs_over_masters_of_either_kind(is_split, scale):
    torch.manual_seed(0)
    size = 3000
    start = torch.randn(size)
    theirs = torch.nn.Parameter(start.clone())
    reference = torch.optim.AdamW([theirs], **OPTIONS)
    exact, m, v = start.double(), *torch.zeros(2, size, dtype=torch.float64)
    ours, remainder = split_of(start) if is_split else (start.clone(), None)
    moments = [torch.zeros(size)], [torch.zeros(size)]
    for step in range(1, 7):
        g = torch.randn(size) * 10.0 ** (step % 3)
        exact = step_in_fp64(exact, m, v, g, step, scale)
        theirs.grad = g * scale
        reference.step()
        rests = [remainder] if is_split else None
        fused_adamw_(
            [ours], [g], *moments, None, remainders=rests, step=step, grad_scale=scale, **OPTIONS
        )
    master = join_master(ours, remainder) if is_split else ours
    torch.testing.assert_close(master.double(), exact, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(master, theirs.data, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(moments[1][0].double(), v, rtol=1e-6, atol=0)
    assert not is_split or torch.equal(ours, master.bfloat16())


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("beta1", [0.9, 0.3])
def test_adamw_in_cpp_has_pytorchs_bits_on_any_number_of_threads(is_split, beta1):
    torch.manual_seed(0)
    size, found = (1 << 17) + 64, []
    start, options = torch.randn(size), OPTIONS | {"betas": (beta1, 0.97)}
    for backend, threads in (("torch", 1), ("cpp", 1), ("cpp", 2)):
        torch.set_num_threads(threads)
        ours, remainder = split_of(start) if is_split else (start.clone(), None)
        m, v = torch.zeros(2, size)
        for step in range(1, 4):
            g = torch.randn(size, generator=torch.Generator().manual_seed(step))
            fused_adamw_(
                [ours], [g], [m], [v], None, remainders=[remainder] if is_split else None,
                step=step, grad_scale=0.3, backend=backend, **options,
            )  # fmt: skip
        found.append([ours, m, v, *([remainder] if is_split else [])])
    torch.set_num_threads(1)
    for other in found[1:]:
        assert all(map(torch.equal, found[0], other))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adamw_by_pieces_has_the_bits_of_one_call_on_widened_tensors(dtype):
    """A tensor of two pieces and an odd end, a small one, and views that start anywhere."""
    torch.manual_seed(0)
    sizes, options = (2 * _PIECE + 77, 1001), {"lr": 0.01, "eps": 1e-8, "weight_decay": 0.1}
    ours = [[torch.randn(n).abs() for n in sizes] for _ in range(3)]
    theirs = [[x.clone() for x in tensors] for tensors in ours]
    grads = [torch.randn(n + 3).to(dtype)[3:] for n in sizes]
    params = [torch.empty(n).to(dtype) for n in sizes]
    w, m, v = ours
    fused_adamw_(
        params, grads, m, v, w, step=7, betas=(0.9, 0.95), grad_scale=torch.tensor(0.3), **options
    )
    torch._fused_adamw_(
        theirs[0], [g.float() * 0.3 for g in grads], theirs[1], theirs[2], [],
        [torch.tensor(7.0)] * 2, beta1=0.9, beta2=0.95, amsgrad=False, maximize=False, **options,
    )  # fmt: skip
    for mine, reference in zip(ours, theirs, strict=True):
        assert all(map(torch.equal, mine, reference))
    assert all(torch.equal(p, x.to(dtype)) for p, x in zip(params, w, strict=True))


def test_one_adamw_step_by_hand():
    p, g, m, v = ([torch.tensor([x])] for x in (1.0, 4.0, 0.0, 0.0))
    fused_adamw_(
        p, g, m, v, None, lr=0.1, betas=(0.9, 0.99), eps=0.0, weight_decay=0.5, step=1,
        grad_scale=0.5,
    )  # fmt: skip
    assert float(p[0]) == pytest.approx(1 - 0.1 * 0.5 - 0.1)  # the first step is lr · sign(g)
    assert float(m[0]) == pytest.approx(0.2) and float(v[0]) == pytest.approx(0.04)
    assert float(g[0]) == 4.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_qk_norm_rope_is_bit_for_bit_the_norm_then_the_rotation(dtype):
    torch.manual_seed(0)
    q, k = torch.randn(7, 4, 16).to(dtype), torch.randn(7, 2, 16).to(dtype)
    qw, kw = (torch.randn(16).to(dtype) for _ in "qk")
    angle = torch.rand(9, 8) * 6
    table = angle.cos(), angle.sin(), torch.randint(0, 9, (7,))
    ours = qk_norm_rope(q, k, qw, kw, *table, 1e-5)
    expected = apply_rope(rms_norm(q, qw, 1e-5), rms_norm(k, kw, 1e-5), *table)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))


def adamw(params, master=None, **options):
    given = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "step": 1}
    moments = [[torch.zeros(p.shape) for p in params] for _ in range(2)]
    fused_adamw_(params, params, *moments, master, **(given | options))


CU = torch.tensor([0, 4], dtype=torch.int32)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda: adamw([]), "params"),
        (lambda: adamw([torch.zeros(2)], step=0), "step=0"),
        (lambda: adamw([torch.zeros(2, dtype=torch.bfloat16)]), "master"),
        (lambda: adamw([torch.zeros(2)], [torch.zeros(3)]), "elements"),
        (lambda: adamw([torch.zeros(2)], remainders=[torch.zeros(2)]), "remainders: complete"),
        (lambda: adamw([torch.zeros(2).bfloat16()], remainders=[torch.zeros(2)]), "int16"),
        (lambda: make_tensor_table([torch.zeros(4, 4).t()]), "contiguous"),
        (lambda: make_tensor_table([torch.zeros(2)], []), "lists of"),
        (lambda: gae(torch.zeros(3), torch.zeros(4), CU, 1.0, 1.0), "rewards"),
        (lambda: gae(torch.zeros(5), torch.zeros(5), CU, 1.0, 1.0), "cu_seqlens"),
        (lambda: gae(torch.zeros(4), torch.zeros(4), CU, 1.5, 1.0), "gamma=1.5"),
        (lambda: gae(*[torch.zeros(4)] * 2, CU, 1.0, 1.0, mask_T=torch.ones(3)), "mask"),
        (lambda: qk_norm_rope(*[torch.zeros(2, 1, 6)] * 2, *[torch.zeros(5)] * 2,
                              *[torch.zeros(9, 3)] * 2, torch.zeros(2).long()), "q_weight"),
    ],
)  # fmt: skip
def test_bad_input_names_the_argument(call, name):
    with pytest.raises(ValueError, match=name):
        call()
