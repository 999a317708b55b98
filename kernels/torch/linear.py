"""PyTorch's products, where there is no C++: oneDNN's over a weight that was laid out, and plain.

Also gradients of weights that come another way: one that exists already is added to `main_grad`
(adapters, tensor parallelism), those that pipelines left for later are computed.
`kernels/linear.py` says when.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.linear import weight_grad
from kernels.torch import onednn

_ADD_ELEMENTS = 1 << 18  # 1 MB in fp32: stays in the processor's cache


def pack(weight: Tensor, out: Tensor | None) -> Tensor | None:
    """`pack_weight` in oneDNN's layout; None where it has none."""
    if not can_pack(weight):
        return None
    fresh = onednn.pack(weight)
    is_fitting = out is not None and out.is_mkldnn and out.dtype == fresh.dtype
    return out.copy_(fresh) if out is not None and is_fitting else fresh


def can_pack(weight: Tensor) -> bool:
    """True if oneDNN has a layout for this weight."""
    is_ours = weight.device.type == "cpu" and weight.dtype in (torch.float32, torch.bfloat16)
    return is_ours and onednn.can_multiply(torch.float32)


def linear(x_TI: Tensor, weight_OI: Tensor, bias: Tensor | None, packed: Tensor | None) -> Tensor:
    """x · weightᵀ + bias, by oneDNN where it has a layout for the weight."""
    if not can_pack(weight_OI) or x_TI.dtype != weight_OI.dtype:
        return F.linear(x_TI, weight_OI, bias)
    packed = pack(weight_OI, None) if packed is None else packed
    assert packed is not None, "packable weights have a packed form"
    return onednn.linear(x_TI, packed, bias)


def matmul(a_MK: Tensor, b_KN: Tensor) -> Tensor:
    """a · b by the fastest CPU path: oneDNN in fp32 (MKL reaches half of it on some machines)."""
    if a_MK.device.type == "cpu" and a_MK.numel() and b_KN.numel() and _is_fp32_best(a_MK.dtype):
        return onednn.matmul(a_MK, b_KN)
    return a_MK @ b_KN


def _is_fp32_best(dtype: torch.dtype) -> bool:
    """True if oneDNN's fp32 product is the fastest for factors of this dtype."""
    is_slow = dtype == torch.bfloat16 and not onednn.is_bf16_fast()
    return (dtype == torch.float32 or is_slow) and onednn.can_multiply(torch.float32)


def add_product(total_OI: Tensor, dy_TO: Tensor, x_TI: Tensor) -> None:
    """total += dyᵀ · x, whose total is fp32 (fp64 for fp64)."""
    if dy_TO.is_cuda and dy_TO.dtype in (torch.bfloat16, torch.float16):
        total_OI.add_(torch.mm(dy_TO.t(), x_TI, out_dtype=torch.float32))
        return
    add_wide(total_OI, matmul(dy_TO.t(), x_TI))


def accumulate_weight_grad(weight: Tensor, dw: Tensor) -> Tensor | None:
    """Adds `dw` to `weight.main_grad` where there is one, else hands it to autograd."""
    main_grad = getattr(weight, "main_grad", None)
    if not isinstance(main_grad, Tensor):
        return dw.to(weight.dtype)
    add_wide(main_grad, dw)
    return None


def add_wide(total: Tensor, part: Tensor) -> None:
    """total += part, where part is narrower: row block by row block, because a mixed add first
    widens all of `part` to memory, which takes seven times as long as the sum itself."""
    if total.device.type != "cpu" or total.dtype == part.dtype:
        total.add_(part)
        return
    step = max(1, _ADD_ELEMENTS // total[0].numel())
    for lo in range(0, total.shape[0], step):
        total[lo : lo + step].add_(part[lo : lo + step])


@torch.no_grad()
def finish_weight_grads(late: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    """Compute the weight gradients that a backward pass left, in its order; empties the list."""
    while late:
        weight, dy_TO, x_TI = late.pop(0)
        dw = weight_grad(weight, dy_TO, x_TI)
        if dw is not None:
            weight.grad = dw if weight.grad is None else weight.grad.add_(dw)
