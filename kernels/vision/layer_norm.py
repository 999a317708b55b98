"""Layer norm with a bias: y = (x − m) · r · weight + bias over the last dimension, m the mean.

With r = 1 / sqrt(mean((x − m)²) + eps), n = (x − m)·r and g = dy·weight:

    dx = r · (g − mean(g) − n · mean(g·n)),   dweight = Σ dy·n,   dbias = Σ dy   over the rows

Computed in fp32 (fp64 for fp64) and rounded once, at the end. The variance is that of centred
values: E[x²] − m² loses its digits where the mean is large. The backward pass keeps x and two
numbers a row.

On a CPU each is a pass of C++ (`cpp/vision_rows.h`), on a GPU of Triton (`triton/vision_rows.py`),
elsewhere PyTorch's ops, here.
"""

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_floating,
    check_tensors,
    chosen,
    compute_dtype,
    resolve,
    use_native,
    use_triton,
)

# (y, mean, 1 / deviation of each row [..., 1]) of (x, weight, bias, eps)
_FORWARD = {
    "cpp": "kernels.cpp.vision_ops:layer_norm",
    "triton": "kernels.triton.vision_rows:layer_norm",
    "torch": "kernels.vision.layer_norm:norm_rows",
}
# (dx, dweight, dbias) of (dy, x, weight, mean, 1 / deviation)
_BACKWARD = {
    "cpp": "kernels.cpp.vision_ops:layer_norm_gradient",
    "triton": "kernels.triton.vision_rows:layer_norm_gradient",
    "torch": "kernels.vision.layer_norm:differentiate_rows",
}


class _LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, eps, path):
        y, mean, rstd = resolve(_FORWARD[path])(x, weight, bias, eps)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.path = path
        return y

    @staticmethod
    def backward(ctx, dy):
        return *resolve(_BACKWARD[ctx.path])(dy, *ctx.saved_tensors), None, None


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-6, *, backend: Backend = "auto"
) -> Tensor:
    """Layer norm over the last dimension; any leading shape; output in x's dtype.

    `weight` and `bias` have the size of that dimension and share a dtype. `ValueError` for other
    shapes, an `eps` that is not positive, and where a named back end cannot take them. Source: Ba,
    Kiros and Hinton 2016, arXiv 1607.06450."""
    for name, one in (("weight", weight), ("bias", bias)):
        if one.shape != x.shape[-1:]:
            raise ValueError(
                f"{name}: shape {tuple(one.shape)} must be x's last dimension {tuple(x.shape[-1:])}"
            )
    check_floating(weight=weight, bias=bias)
    if not eps > 0:
        raise ValueError(f"eps={eps}: must be positive")
    on_triton = use_triton(backend, x, has_cpp=True)
    check_tensors(x, "x", on_triton, weight=weight, bias=bias)
    path = chosen(on_triton, use_native(backend, x, weight, bias))
    if not torch.is_grad_enabled():
        return resolve(_FORWARD[path])(x, weight, bias, eps)[0]
    return _LayerNorm.apply(x, weight, bias, eps, path)


def layer_norm_ref(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The definition, differentiable by autograd alone."""
    x32 = x.to(compute_dtype(x.dtype))
    centred = x32 - x32.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * rstd * weight.to(x32.dtype) + bias.to(x32.dtype)).to(x.dtype)


def norm_rows(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The forward pass where no kernel runs."""
    x32 = x.to(compute_dtype(x.dtype))
    mean = x32.mean(-1, keepdim=True)
    centred = x32 - mean
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = centred.mul_(rstd).mul_(weight.to(x32.dtype)).add_(bias.to(x32.dtype))
    return y.to(x.dtype), mean, rstd


def differentiate_rows(
    dy: Tensor, x: Tensor, weight: Tensor, mean: Tensor, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The backward pass where no kernel runs."""
    normed = (x.to(rstd.dtype) - mean).mul_(rstd)
    dy32 = dy.to(rstd.dtype)
    dweight = (dy32 * normed).flatten(0, -2).sum(0).to(weight.dtype)
    dbias = dy32.flatten(0, -2).sum(0).to(weight.dtype)
    g = dy32 * weight.to(rstd.dtype)
    g_mean, gn_mean = g.mean(-1, keepdim=True), (g * normed).mean(-1, keepdim=True)
    dx = g.sub_(g_mean).sub_(normed.mul_(gn_mean)).mul_(rstd)
    return dx.to(x.dtype), dweight, dbias
