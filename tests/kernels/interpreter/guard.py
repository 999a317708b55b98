"""The bar every kernel is held to: an error against fp64 of at most twice that of plain PyTorch in
the same dtype, on inputs that lie between NaN guard bands and outputs that start as NaN.

Used here and by the GPU tests.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_FRESH = {torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default}
_FRESH |= {torch.ops.aten.new_empty.default, torch.ops.aten.empty_strided.default}


class _Poison(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func in _FRESH:
            raw = out.view(-1).view(torch.uint8) if out.numel() and out.is_contiguous() else None
            if raw is not None:
                raw.fill_(0xFF)  # NaN in every float format, -1 in integers
        return out


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """Uninitialised tensors hold NaN (-1 for integers): what a kernel forgets to write shows."""
    with _Poison():
        yield


def guarded(x: Tensor) -> Tensor:
    """The same values in the middle of a buffer of NaN."""
    num_bytes = (x.numel() + 512) * x.element_size()
    buffer = torch.full((num_bytes,), 0xFF, dtype=torch.uint8, device=x.device)
    view = buffer.view(x.dtype)[256 : 256 + x.numel()].view(x.shape)
    return view.copy_(x)


def outputs_and_gradients(op: Callable, inputs: Sequence[Tensor]) -> list[Tensor]:
    leaves = [guarded(x).requires_grad_() for x in inputs]
    with poisoned_memory():
        outs = op(*leaves)
        outs = outs if isinstance(outs, tuple) else (outs,)
        torch.manual_seed(3)
        slopes = [torch.randn(o.shape, device=o.device).bfloat16().to(o.dtype) for o in outs]
        grads = torch.autograd.grad(outs, leaves, slopes)
    return [o.detach() for o in (*outs, *grads)]


def assert_as_good_as_plain_torch(
    ours: Callable,
    plain: Callable,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    *,
    keep: Sequence[int] = (),
    times: float = 2,
    floors: Mapping[int, float] | None = None,
) -> None:
    """Outputs and gradients: error against fp64 at most twice (`times`) plain torch's in `dtype`.
    Inputs whose index is in `keep` stay in fp32. `floors`: what an analysis allows the result of
    an index (the last one's is -1) in any case, as a norm."""
    inputs = [x if i in keep else x.to(dtype) for i, x in enumerate(inputs)]
    exact = outputs_and_gradients(plain, [x.double() for x in inputs])
    naive, mine = (outputs_and_gradients(op, inputs) for op in (plain, ours))
    allowed = {i % len(exact): norm for i, norm in (floors or {}).items()}
    assert_as_close(mine, naive, exact, times, allowed)


def check(
    ours: Callable,
    plain: Callable,
    inputs: Sequence[Tensor],
    dtype: torch.dtype,
    keep: Sequence[int] = (),
    times: float = 2,
) -> None:
    """As good as plain PyTorch, and forward and backward twice are the same bits."""
    assert_as_good_as_plain_torch(ours, plain, inputs, dtype, keep=keep, times=times)
    typed = [x if i in keep else x.to(dtype) for i, x in enumerate(inputs)]
    first, second = outputs_and_gradients(ours, typed), outputs_and_gradients(ours, typed)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def assert_as_close(
    ours: Sequence[Tensor],
    plain: Sequence[Tensor],
    exact: Sequence[Tensor],
    times: float = 2,
    floors: Mapping[int, float] | None = None,
) -> None:
    """Result by result: our distance to `exact` is at most `times` that of `plain`, or `floors`."""
    for i, (a, n, e) in enumerate(zip(ours, plain, exact, strict=True)):
        assert a.dtype == n.dtype, i
        # plain torch can be exact by luck on few elements
        floor = torch.finfo(a.dtype).eps / 8 * e.double().norm().item()
        floor = max(floor, (floors or {}).get(i, 0.0))
        error, allowed = ((x.double() - e).norm().item() for x in (a, n))
        assert error <= times * allowed + floor, (i, error, allowed, floor)
