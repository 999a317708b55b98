"""The rotation in PyTorch: the definitions of rope.py, and its pass where no kernel runs."""

import torch
from torch import Tensor

from kernels.torch.rms_norm import rms_norm_ref


def apply_rope_ref(
    q_THD: Tensor, k_TKD: Tensor, cos_PD2: Tensor, sin_PD2: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """The definition, differentiable by autograd alone."""
    cos = torch.cat([cos_PD2[positions_T]] * 2, -1).unsqueeze(1)
    sin = torch.cat([sin_PD2[positions_T]] * 2, -1).unsqueeze(1)

    def rotate(x: Tensor) -> Tensor:
        x1, x2 = x.to(cos.dtype).chunk(2, -1)
        return (torch.cat([x1, x2], -1) * cos + torch.cat([-x2, x1], -1) * sin).to(x.dtype)

    return rotate(q_THD), rotate(k_TKD)


def qk_norm_rope_ref(
    q_THD: Tensor,
    k_TKD: Tensor,
    q_weight_D: Tensor,
    k_weight_D: Tensor,
    cos_PD2: Tensor,
    sin_PD2: Tensor,
    positions_T: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """The definition, differentiable by autograd alone."""
    q, k = rms_norm_ref(q_THD, q_weight_D, eps), rms_norm_ref(k_TKD, k_weight_D, eps)
    return apply_rope_ref(q, k, cos_PD2, sin_PD2, positions_T)


def rotate(q: Tensor, k: Tensor, cos_TD2: Tensor, sin_TD2: Tensor) -> tuple[Tensor, Tensor]:
    """Rotated queries and keys; the tables have a row a token."""
    cos, sin = cos_TD2.unsqueeze(1), sin_TD2.unsqueeze(1)
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, -1)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    y1, y2 = y.chunk(2, -1)
    if x.dtype == cos.dtype:
        torch.mul(x1, cos, out=y1).addcmul_(x2, sin, value=-1)
        torch.mul(x2, cos, out=y2).addcmul_(x1, sin)
        return y
    x1, x2 = x1.to(cos.dtype), x2.to(cos.dtype)
    y1.copy_((x1 * cos).addcmul_(x2, sin, value=-1))
    y2.copy_((x2 * cos).addcmul_(x1, sin))
    return y
