"""The bar every kernel is held to: an error against fp64 of at most twice that of plain PyTorch in
the same dtype, on inputs that lie between NaN guard bands and outputs that start as NaN.

Used here and, with `device="cuda"`, by the GPU tests.
"""

from collections.abc import Callable, Sequence

import torch
from guard import poisoned_memory
from torch import Tensor

Op = Callable[..., Tensor | tuple[Tensor, ...]]
_GUARD = 256  # elements; keeps 16-byte alignment


def guarded(x: Tensor) -> Tensor:
    """The same values in the middle of a buffer of NaN."""
    buffer = torch.full((x.numel() + 2 * _GUARD,), torch.nan, device=x.device).to(x.dtype)
    view = buffer[_GUARD : _GUARD + x.numel()].view(x.shape)
    view.copy_(x)
    return view


def run(op: Op, inputs: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients of `op`, for one fixed gradient of its outputs."""
    leaves = [guarded(x.to(dtype)).requires_grad_() for x in inputs]
    with poisoned_memory():
        outs = op(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        torch.manual_seed(3)
        weights = [torch.randn(o.shape).bfloat16().to(o.device, o.dtype) for o in outs]
        return [*outs, *torch.autograd.grad(outs, leaves, weights)]


def assert_as_good_as_plain_torch(
    ours: Op, plain: Op, inputs: Sequence[Tensor], dtype: torch.dtype
) -> None:
    inputs = [x.to(dtype) for x in inputs]
    exact = run(plain, inputs, torch.float64)
    naive = run(plain, inputs, dtype)
    assert_as_close(run(ours, inputs, dtype), naive, exact)


def assert_as_close(
    ours: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]
) -> None:
    """Result by result: our distance to `exact` is at most twice that of `plain`."""
    for i, (a, n, e) in enumerate(zip(ours, plain, exact, strict=True)):
        assert a.dtype == n.dtype, i
        floor = torch.finfo(a.dtype).eps / 8  # plain torch can be exact by luck on few elements
        error, allowed = ((x.double() - e).norm().item() for x in (a, n))
        assert error <= 2 * allowed + floor * e.double().norm().item(), (i, error, allowed)
