"""Makes bf16 and fp8 right in Triton's CPU interpreter, for tests.

The interpreter (3.6 to 3.9) keeps bf16 as its 16 raw bits in a uint16 array: arithmetic, reductions
and `tl.dot` then act on the bits, and fp32 → bf16 truncates instead of rounding to nearest even.
fp32 → fp8 loses the mantissa's carry (1.96 becomes 1.0) and does not saturate. Upstream:
triton-lang/triton#11584. `install` routes each of those through fp32 and PyTorch's casts.
Left out: `tl.sort` of bf16, which stays wrong on 3.6.
"""

import dataclasses

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

FP8 = {tl.float8e4nv: (torch.float8_e4m3fn, 448.0), tl.float8e5: (torch.float8_e5m2, 57344.0)}
"""The PyTorch twin and the largest finite value, where `cvt.rn.satfinite` saturates."""


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bits to fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bits, to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32).reshape(np.shape(values))
    nearest_even = 0x7FFF + ((bits >> 16) & 1)
    rounded = ((bits + nearest_even.astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def as_fp32(handle: TensorHandle) -> TensorHandle:
    """bf16 and fp8 as fp32; anything else as it is."""
    if is_bf16(handle):
        return TensorHandle(widen(handle.data), tl.float32)
    if handle.dtype.scalar in FP8:
        bits = torch.from_numpy(np.ascontiguousarray(handle.data))
        return TensorHandle(bits.view(FP8[handle.dtype.scalar][0]).float().numpy(), tl.float32)
    return handle


def as_bf16(values: np.ndarray) -> TensorHandle:
    return TensorHandle(narrow(values), tl.bfloat16)


def as_fp8(values: np.ndarray, kind: tl.dtype) -> TensorHandle:
    twin, largest = FP8[kind]
    wide = torch.from_numpy(np.ascontiguousarray(values, np.float32))
    return TensorHandle(wide.clamp(-largest, largest).to(twin).view(torch.uint8).numpy(), kind)


def install() -> None:
    """Patches the interpreter of this process, once. `tl.device_assert` then works as well."""
    builder = InterpreterBuilder
    if getattr(builder, "_rounds_bf16", False):
        return
    builder._rounds_bf16 = True
    _patch_casts(builder)
    _patch_arithmetic(builder)
    _patch_reductions()
    builder_instance = interpreter.interpreter_builder
    builder_instance.options = dataclasses.replace(builder_instance.options, debug=True)


def _patch_casts(builder) -> None:
    old_cast, old_convert = builder.cast_impl, builder.create_fp_to_fp
    special = {tl.bfloat16, *FP8}

    def cast(self, source, target):
        kind = target.scalar
        if source.dtype.scalar == kind:
            return source
        source = as_fp32(source)
        if kind in FP8:
            return as_fp8(source.data, kind)
        if kind == tl.bfloat16:
            return as_bf16(source.data.astype(np.float32))
        return source if source.dtype.scalar == kind else old_cast(self, source, target)

    def convert(self, source, target, rounding):
        if {source.dtype.scalar, target.scalar} & special:
            return cast(self, source, target)
        return old_convert(self, source, target, rounding)

    builder.cast_impl, builder.create_fp_to_fp = cast, convert
    builder.get_bf16 = lambda self, value: as_bf16(np.array([value], np.float32))


def _patch_arithmetic(builder) -> None:
    old_dot, old_binary, old_unary = builder.create_dot, builder.binary_op, builder.unary_op

    def dot(self, a, b, c, precision, imprecise):
        return old_dot(self, as_fp32(a), as_fp32(b), c, precision, imprecise)

    def binary(self, left, right, op):
        if not (is_bf16(left) and is_bf16(right)):
            return old_binary(self, left, right, op)
        out = op(widen(left.data), widen(right.data))
        return TensorHandle(out, tl.int1) if out.dtype == np.bool_ else as_bf16(out)

    def unary(self, x, op):
        return as_bf16(op(widen(x.data))) if is_bf16(x) else old_unary(self, x, op)

    builder.create_dot, builder.binary_op, builder.unary_op = dot, binary, unary


def _patch_reductions() -> None:
    old_reduce = interpreter.ReduceOps.apply_impl

    def reduce(self, args):
        low = [is_bf16(x.handle) for x in args]
        if not any(low):
            return old_reduce(self, args)
        wide = [
            self.to_tensor(widen(x.handle.data), tl.float32) if is_low else x
            for x, is_low in zip(args, low, strict=True)
        ]
        out = old_reduce(self, tuple(wide))
        if not isinstance(out, (tuple, list)):
            return _lower(out) if low[0] else out
        return tuple(_lower(x) if is_low else x for x, is_low in zip(out, low, strict=True))

    interpreter.ReduceOps.apply_impl = reduce


def _lower(x: tl.tensor) -> tl.tensor:
    """A reduction's fp32 result back as bf16; its indices as they are."""
    if x.dtype.scalar != tl.float32:
        return x
    data = narrow(x.handle.data)
    kind = tl.block_type(tl.bfloat16, list(data.shape)) if x.type.is_block() else tl.bfloat16
    return tl.core.tensor(TensorHandle(data, tl.bfloat16), kind)
