"""Compiles every Triton kernel a wrapper launches for an H200, on a machine without a GPU, and
reads what the compiler made of it: registers, spills, shared memory, instructions.

    with capture() as launched, torch.device("meta"):
        rms_norm(torch.empty(8, 4096), torch.empty(4096), backend="triton")
    for use in map(measure, launched): ...

Meta tensors have real shapes and strides and a data pointer of 0, so a launch is specialised
(divisibility by 16, arguments equal to 1, constants) as with freshly allocated GPU memory. ptxas
and cuobjdump ship in Triton's wheel. Works with triton 3.6 to 3.9, in a process of its own:
TRITON_INTERPRET must not be set. Left out: everything that only a run can tell.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.runtime.jit import KernelInterface

TARGET = GPUTarget("cuda", 90, 32)
SHARED_LIMIT = 232_448  # bytes a block may ask for on sm_90 (227 KiB); the compiler does not check
_SM_SHARED, _SM_REGISTERS, _SM_WARPS, _SM_BLOCKS = 233_472, 65_536, 64, 32
_DEFINITION = re.compile(r"^ *(%[\w-]+)(?::\d+)? = \"?([\w.]+)\"?(.*?)(?: loc\(.*)?$", re.MULTILINE)
_BLOCK_RESERVED = 1024  # bytes of shared memory the system keeps for each block


class _NoGpuDriver:
    """Stands in for Triton's CUDA driver: enough to specialise and compile a launch."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return TARGET

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self) -> Any:
        raise RuntimeError("the compile gate has no GPU: nothing may be autotuned on this path")


@contextmanager
def capture() -> Iterator[list[Any]]:
    """Inside, `kernel[grid](...)` compiles instead of launching; yields the compiled kernels."""
    triton.runtime.driver.set_active(_NoGpuDriver())
    launched: list[Any] = []
    original = KernelInterface.__getitem__

    def compile_instead(self: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            made = self.warmup(*args, grid=grid, **kwargs)  # an autotuner gives one a config
            launched.extend(made if isinstance(made, (list, tuple)) else [made])

        return launch

    KernelInterface.__getitem__ = compile_instead
    try:
        yield launched
    finally:
        KernelInterface.__getitem__ = original


@dataclass(frozen=True)
class KernelUse:
    """What one compiled kernel takes of a multiprocessor. Bytes, registers a thread, counts of
    instructions in the PTX."""

    kernel: str
    num_warps: int
    registers: int
    spill: int
    shared: int
    resident_blocks: int  # a multiprocessor holds this many at a time
    wgmma: int
    mma_sync: int
    cp_async: int
    ld128: int
    st128: int
    fp64: int
    narrow: str  # multiplications that can pass 2^31 in 32 bits, by name
    fused: int  # exponents of 2 that one fused multiply-add makes
    apart: int  # those that a difference makes
    sums: str  # how the operands of its reductions are laid out over threads, by shape and type


def measure(kernel: Any) -> KernelUse:
    """Reads a compiled kernel."""
    ptx: str = kernel.asm["ptx"]
    makers = exponent_makers(ptx)
    registers, spill = _assemble(ptx, kernel.asm["cubin"])
    num_warps, shared = kernel.metadata.num_warps, kernel.metadata.shared
    return KernelUse(
        kernel=kernel.metadata.name,
        num_warps=num_warps,
        registers=registers,
        spill=spill,
        shared=shared,
        resident_blocks=resident_blocks(registers, shared, num_warps),
        wgmma=ptx.count("wgmma.mma_async"),
        mma_sync=ptx.count("mma.sync"),
        cp_async=ptx.count("cp.async.cg"),
        ld128=_count_16_byte(ptx, "ld") + len(re.findall(r"cp\.async\.cg\S* .*, 0x10", ptx)),
        st128=_count_16_byte(ptx, "st"),
        fp64=len(re.findall(r"\.f64\b", ptx)),
        narrow=" ".join(narrow_products(kernel.asm["ttir"])),
        fused=makers.count("fma"),
        apart=makers.count("sub"),
        sums=" ".join(reduction_layouts(kernel.asm["ttgir"])),
    )


def resident_blocks(registers: int, shared: int, num_warps: int) -> int:
    """Blocks of a kernel that fit one multiprocessor of sm_90 at a time."""
    per_warp = -(-registers // 8) * 8 * 32
    by_registers = _SM_REGISTERS // per_warp // num_warps
    by_shared = _SM_SHARED // (shared + _BLOCK_RESERVED)
    return min(by_registers, by_shared, _SM_WARPS // num_warps, _SM_BLOCKS)


def narrow_products(ttir: str) -> list[str]:
    """Multiplications of a kernel that can pass 2^31 in 32 bits, by the names of their results: of
    two values known at run time alone. Not so a constant (a tile's size) times a value, or a
    tile's own rows times a stride: what they add to a 64-bit address stays small."""
    made = {m[1]: (m[2], m[3]) for m in re.finditer(_DEFINITION, ttir)}
    arguments = set(re.findall(r"(%[\w-]+): ", ttir.split("tt.func", 1)[1].split("\n", 1)[0]))

    def kind(name: str) -> str:
        operation, rest = made.get(name, ("", ""))
        operands = re.findall(r"%[\w-]+", rest)
        if operation in ("tt.splat", "tt.expand_dims", "tt.broadcast"):
            return kind(operands[0])
        if operation == "arith.addi" and {kind(x) for x in operands} == {"tile", "constant"}:
            return "tile"
        named = {"arith.constant": "constant", "tt.make_range": "tile"}
        return named.get(operation, "argument" if name in arguments else "value")

    found = []
    for name, (operation, rest) in made.items():
        if operation != "arith.muli" or not re.search(r"(: |x)i32\b", rest):
            continue
        kinds = {kind(x) for x in re.findall(r"%[\w-]+", rest)[:2]}
        if "constant" not in kinds and kinds != {"tile", "argument"}:
            found.append(name)
    return found


def exponent_makers(ptx: str) -> list[str]:
    """What makes the exponent of each power of 2, by the first part of the instruction's name."""
    made, found = {}, []
    for instruction, result, source in re.findall(
        r"^\s*(?:@%p\d+ )?([\w.]+)\s+(%\w+), (.*);", ptx, re.MULTILINE
    ):
        if instruction.startswith("ex2"):
            maker, of = made.get(source, ("", ""))
            while maker in ("mov", "selp") and (names := re.findall(r"%\w+", of)):
                maker, of = made.get(names[0], ("", ""))
            found.append(maker)
        made[result] = (instruction.split(".")[0], source)
    return found


def reduction_layouts(ttgir: str) -> list[str]:
    """Each different operand of a kernel's reductions: its shape and type, and the layout that says
    which thread holds which elements, and so in which order they are added."""
    layouts = dict(re.findall(r"^(#\w+) = #?(.*)$", ttgir, re.MULTILINE))
    bodies = re.findall(r'"tt\.reduce".*?\}\) : \((.*?)\) ->', ttgir, re.DOTALL)
    found = {part for body in bodies for part in re.findall(r"tensor<(\w+), (#\w+)", body)}
    return sorted(f"{shape}:{layouts[name].replace(' ', '')}" for shape, name in found)


def _count_16_byte(ptx: str, verb: str) -> int:
    """Vector instructions to global memory that move 16 bytes: 4 x 32 or 2 x 64 bits."""
    return len(re.findall(rf"{verb}\.global\S*?\.(?:v4\.[buf]32|v2\.[buf]64)", ptx))


def _assemble(ptx: str, cubin: bytes) -> tuple[int, int]:
    """Registers a thread and bytes spilled."""
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as source:
        source.write(ptx)
        source.flush()
        command = [get_ptxas(90).path, "-v", "--gpu-name=sm_90a", source.name, "-o", "/dev/null"]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    spills = re.findall(r"(\d+) bytes spill (?:stores|loads)", log)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(cubin)
        binary.flush()
        command = [knobs.nvidia.cuobjdump.path, "-res-usage", binary.name]
        use = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+)", use)
    if found is None:
        raise RuntimeError(f"cuobjdump told no register count:\n{use}")
    return int(found.group(1)), sum(map(int, spills))
