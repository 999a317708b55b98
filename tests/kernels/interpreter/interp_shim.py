"""Makes bf16 right in Triton's CPU interpreter, for tests.

The interpreter (3.6 to 3.9) keeps bf16 as its 16 raw bits in a uint16 array: arithmetic, reductions
and `tl.dot` then act on the bits, and fp32 → bf16 truncates instead of rounding to nearest even.
Upstream: triton-lang/triton#11584. `install` routes each of those through fp32. Left out: fp8.
"""

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def widen(bits: np.ndarray) -> np.ndarray:
    """bf16 bits to fp32."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrow(values: np.ndarray) -> np.ndarray:
    """fp32 to bf16 bits, to nearest even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    nearest_even = 0x7FFF + ((bits >> 16) & 1)
    rounded = ((bits + nearest_even.astype(np.uint32)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), rounded)


def is_bf16(handle: TensorHandle) -> bool:
    return handle.dtype.scalar == tl.bfloat16


def as_fp32(handle: TensorHandle) -> TensorHandle:
    return TensorHandle(widen(handle.data), tl.float32) if is_bf16(handle) else handle


def as_bf16(values: np.ndarray) -> TensorHandle:
    return TensorHandle(narrow(values), tl.bfloat16)


def install() -> None:
    """Patches the interpreter of this process, once."""
    builder = InterpreterBuilder
    if getattr(builder, "_rounds_bf16", False):
        return
    builder._rounds_bf16 = True
    old_cast, old_convert = builder.cast_impl, builder.create_fp_to_fp
    old_dot, old_binary, old_unary = builder.create_dot, builder.binary_op, builder.unary_op
    old_reduce = interpreter.ReduceOps.apply_impl

    def cast(self, source, target):
        if source.dtype.scalar == target.scalar:
            return source
        source = as_fp32(source)
        if target.scalar == tl.bfloat16:
            return as_bf16(source.data.astype(np.float32))
        return source if target.scalar == tl.float32 else old_cast(self, source, target)

    def convert(self, source, target, rounding):
        if tl.bfloat16 in (source.dtype.scalar, target.scalar):
            return cast(self, source, target)
        return old_convert(self, source, target, rounding)

    def dot(self, a, b, c, precision, imprecise):
        return old_dot(self, as_fp32(a), as_fp32(b), c, precision, imprecise)

    def binary(self, left, right, op):
        if not (is_bf16(left) and is_bf16(right)):
            return old_binary(self, left, right, op)
        out = op(widen(left.data), widen(right.data))
        return TensorHandle(out, tl.int1) if out.dtype == np.bool_ else as_bf16(out)

    def unary(self, x, op):
        return as_bf16(op(widen(x.data))) if is_bf16(x) else old_unary(self, x, op)

    def reduce(self, args):
        if any(is_bf16(x.handle) for x in args):
            raise NotImplementedError("reduce in fp32: .to(tl.float32) after the load")
        return old_reduce(self, args)

    builder.cast_impl, builder.create_fp_to_fp = cast, convert
    builder.create_dot, builder.binary_op, builder.unary_op = dot, binary, unary
    interpreter.ReduceOps.apply_impl = reduce
