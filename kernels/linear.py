"""y = x · weightᵀ + bias, row-invariant and fast on a CPU.

The two engines must give one token the same bits whatever batch it sits in. On a CPU both read a
weight that is laid out once for it (`pack_weight`), in one of two ways:

* C++ (`cpp/linear.h`), wherever there is a compiler. A result is summed over the inputs in order,
  for any number of rows. It is as fast as oneDNN for many rows and up to 1.8 times as fast for the
  few of a decoding step. In a processor's matrix unit (AMX) oneDNN multiplies many rows of bf16
  faster, but gives a row other bits for another number of rows, so it is not used there either.
* oneDNN's inner product where there is none. It is row-invariant from two rows on without a matrix
  unit, so one row is doubled; about twice as fast as `F.linear` in fp32.

A weight may carry `main_grad`, an fp32 buffer of its shape: the backward pass then adds to that
and autograd sees no gradient, which saves one weight-sized tensor a layer and keeps the sum over
micro-batches in fp32.

It may also carry `late_grads`, a list: the backward pass then computes the input's gradient alone
and leaves (weight, dy, x) there for `finish_weight_grads`. Pipelines fill their bubbles with that.

Or `take_grad`, a callable, which is then given (dy, x) in place of the weight's gradient: that of a
low-rank change of the weight takes much less than the gradient itself (adapters, nanoengine).

A product keeps its input for the gradient of the weight, unless it is given an `InputRecipe`: the
backward pass then makes the input again, from tensors that others keep anyway.

On a GPU the product is cuBLAS's, which chooses its algorithm by the number of rows. Where the two
engines have to agree to the bit there too, `batch_invariant=True` asks for a Triton kernel instead
(`triton/batch_invariant.py`): one tile and one order of the sum for every number of rows, for the
output and for the input's gradient.

Left out: quantised weights (`quantized/`); what PyTorch does instead of C++ (`torch/linear.py`).
"""

import os
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from kernels.backend import (
    Backend,
    check_floating,
    check_integers,
    check_tensors,
    check_triton_dtype,
    resolve,
    use_triton,
)
from kernels.cpp import ops as cpp_ops
from kernels.cpp.ops import has_native

_WORTH_PACKING = 32
"""Rows from which on a product is worth laying its other factor out for it."""

_SCRATCH_BYTES = 1 << 25
"""Largest weight that is laid out in memory which the C++ keeps for the next one."""

BATCH_INVARIANT = "kernels.triton.batch_invariant:matmul"
"""a · b by a kernel whose row m depends on row m of `a` and on `b` alone."""

_LINEAR = "kernels.torch.linear:linear"
_MATMUL = "kernels.torch.linear:matmul"
_ADD_PRODUCT = "kernels.torch.linear:add_product"
_PACK = "kernels.torch.linear:pack"
_CAN_PACK = "kernels.torch.linear:can_pack"
_ADD_ROWS = "kernels.gpu.gather_rows:add_rows"

# oneDNN reads this once, before its first product, and PyTorch may ask for one that is not ours.
# What a user has set stays. `torch/onednn.py` says why its matrix unit is left alone.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


class InputRecipe(NamedTuple):
    """Says how the input of a product is made again for its backward pass: `make(*sources)`, which
    gives the same bits every time and takes much less than the product. Worth it where somebody
    else keeps the sources."""

    make: Callable[..., Tensor]
    sources: tuple[Tensor, ...]


def is_packable(weight: Tensor) -> bool:
    """True if there is a packed layout for this weight."""
    return is_native(weight) or resolve(_CAN_PACK)(weight)


def is_native(weight: Tensor) -> bool:
    """True if the packed layout of this weight is the C++ kernels'."""
    return has_native(weight)


def pack_weight(weight: Tensor, out: Tensor | None = None) -> Tensor | None:
    """A copy of `weight` in the layout of the processor's fastest product, for `packed=`; None
    where there is none. It is written into `out`, an earlier copy, where that fits."""
    if is_native(weight):
        return cpp_ops.pack(weight.detach(), None if out is None or out.is_mkldnn else out)
    return resolve(_PACK)(weight, out)


def linear_rows(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias: Tensor | None,
    packed: Tensor | None,
    on_triton: bool = False,
) -> Tensor:
    """The forward pass, without autograd, on rows; `on_triton` by the batch-invariant kernel."""
    if on_triton:
        y_TO: Tensor = resolve(BATCH_INVARIANT)(x_TI, weight_OI.t())
        return y_TO if bias is None else y_TO.add_(bias)
    if not has_native(weight_OI, x_TI) or (packed is not None and packed.is_mkldnn):
        return resolve(_LINEAR)(x_TI, weight_OI, bias, packed)
    if packed is None and _fits_scratch(weight_OI):
        return cpp_ops.linear_unpacked(x_TI, weight_OI, bias)
    packed = cpp_ops.pack(weight_OI.detach()) if packed is None else packed
    return cpp_ops.linear(x_TI, packed, bias, weight_OI.shape[0])


def _fits_scratch(weight_OI: Tensor) -> bool:
    """True for a weight that C++ lays out as it is, in memory that it keeps: one of whole words."""
    has_words = weight_OI.shape[1] * weight_OI.itemsize % 4 == 0
    return is_native(weight_OI) and has_words and weight_OI.nbytes <= _SCRATCH_BYTES


def pack_columns(weight_OI: Tensor) -> Tensor | None:
    """A copy of `weight` for `matmul_rows(…, packed=)`, where several products read it; None where
    there is no such layout."""
    return cpp_ops.pack_columns(weight_OI.detach()) if is_native(weight_OI) else None


def matmul_rows(a_MK: Tensor, b_KN: Tensor, packed: Tensor | None = None) -> Tensor:
    """a · b, in their dtype; `packed` is `pack_columns(b)`. In C++ a row's bits depend on that row
    and on b alone."""
    if packed is None and len(a_MK) >= _WORTH_PACKING and a_MK.dtype == b_KN.dtype:
        packed = pack_columns(b_KN)
    if packed is not None:
        return cpp_ops.linear(a_MK, packed, None, b_KN.shape[1])
    return resolve(_MATMUL)(a_MK, b_KN).to(a_MK.dtype)


@torch.no_grad()
def add_weight_grad(total_OI: Tensor, dy_TO: Tensor, x_TI: Tensor) -> None:
    """total += dyᵀ · x. `total` is fp32 (fp64 for fp64): what a product's fp32 sums lose when they
    are rounded to bf16, the sum over micro-batches would never get back."""
    if total_OI.dtype == torch.float32 and total_OI.stride(1) == 1 and has_native(dy_TO, x_TI):
        cpp_ops.add_product(total_OI, dy_TO, x_TI)
    else:
        resolve(_ADD_PRODUCT)(total_OI, dy_TO, x_TI)


def weight_grad(weight: Tensor, dy_TO: Tensor, x_TI: Tensor) -> Tensor | None:
    """The gradient dyᵀ · x of `weight` for autograd; None where `weight.main_grad` took it."""
    main_grad = getattr(weight, "main_grad", None)
    if isinstance(main_grad, Tensor):
        add_weight_grad(main_grad, dy_TO, x_TI)
        return None
    wide = torch.promote_types(weight.dtype, torch.float32)
    total = torch.zeros(weight.shape, dtype=wide, device=weight.device)
    add_weight_grad(total, dy_TO, x_TI)
    return total.to(weight.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x_TI, weight, bias, packed, on_triton, recipe):
        ctx.make = None if recipe is None else recipe.make
        ctx.save_for_backward(*(recipe.sources if recipe is not None else (x_TI,)))
        ctx.weight = weight  # itself: activation checkpointing gives back copies without main_grad
        ctx.on_triton = on_triton
        return linear_rows(x_TI, weight, bias, packed, on_triton)

    @staticmethod
    def backward(ctx, dy_TO):
        sources, weight = ctx.saved_tensors, ctx.weight
        needs_x, needs_w, needs_b = ctx.needs_input_grad[:3]
        multiply = resolve(BATCH_INVARIANT) if ctx.on_triton else matmul_rows
        dx = multiply(dy_TO, weight) if needs_x else None
        late, dw, x_TI = getattr(weight, "late_grads", None), None, sources[0]
        if ctx.make is not None and needs_w:
            x_TI = ctx.make(*sources).flatten(0, -2)
        take = getattr(weight, "take_grad", None)
        if take is not None and needs_w:
            take(dy_TO, x_TI)
        elif late is not None and needs_w:
            late.append((weight, dy_TO, x_TI))
        elif needs_w:
            dw = weight_grad(weight, dy_TO, x_TI)
        db = None
        if needs_b:
            db = dy_TO.sum(0, dtype=torch.promote_types(dy_TO.dtype, torch.float32)).to(dy_TO.dtype)
        return dx, dw, db, None, None, None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    packed: Tensor | None = None,
    *,
    recipe: InputRecipe | None = None,
    batch_invariant: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """x [..., in] · weight [out, in]ᵀ + bias [out]. `packed` is `pack_weight(weight)`, kept fresh
    by the caller; without it the weight is packed on every call. With `recipe` x is not kept for
    the backward pass, but made again.

    A row's bits never depend on the other rows on a CPU; on a GPU with `batch_invariant` alone,
    where they cost time. Without it there is no Triton kernel, and `backend` says nothing.
    """
    if x.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"x: last dimension {x.shape[-1]} must be weight's {weight.shape[1]} "
            f"(weight is {tuple(weight.shape)}, [out, in])"
        )
    if x.dtype != weight.dtype:
        raise ValueError(f"x: dtype {x.dtype} must be weight's {weight.dtype}; cast one of them")
    if bias is not None and (bias.shape != weight.shape[:1] or bias.dtype != weight.dtype):
        raise ValueError(
            f"bias: {bias.dtype} {tuple(bias.shape)} must be weight's {weight.dtype} "
            f"({weight.shape[0]},)"
        )
    x_TI = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    on_triton = batch_invariant and use_triton(backend, x)
    check_tensors(x, "x", on_triton, weight=weight, bias=bias)
    if on_triton:
        check_triton_dtype("x", x.dtype)
    if torch.is_grad_enabled():
        y_TO = _Linear.apply(x_TI, weight, bias, packed, on_triton, recipe)
    else:
        y_TO = linear_rows(x_TI, weight, bias, packed, on_triton)
    return y_TO.view(*x.shape[:-1], weight.shape[0])


def add_rows_(total: Tensor, index: Tensor, rows: Tensor, *, backend: Backend = "auto") -> None:
    """total [R, ...] += the rows [G, ...] at `index` [G], in total's dtype and in order: the
    gradient of an embedding, which is a product with rows of zeros and a one."""
    on_triton = use_triton(backend, rows)
    check_tensors(total, "total", on_triton, index=index, rows=rows)
    check_floating(rows=rows)
    check_integers(index=index)
    if index.shape != rows.shape[:1] or rows.shape[1:] != total.shape[1:]:
        raise ValueError(
            f"rows: {tuple(rows.shape)} must be one row like total's {tuple(total.shape[1:])} for "
            f"each of the {len(index)} entries of index"
        )
    if on_triton:
        resolve(_ADD_ROWS)(total, index, rows)
    else:
        total.index_add_(0, index, rows.to(total.dtype))
