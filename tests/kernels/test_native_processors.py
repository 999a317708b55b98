"""The C++ kernels on processors other than this one: compiled for each, and run, natively or in an
emulator (`native_driver.cpp`: near fp64's results, a row's bits a function of the row alone).

AVX-512 is compiled only where the processor lacks it, since QEMU does not emulate it; its sixteen
lanes run as pairs of eight. `scripts/install_test_tools.sh` installs what the tests of ARM need.
"""

import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from kernels.cpp import build as cpp_build

DRIVER = Path(__file__).with_name("native_driver.cpp")
INCLUDES = ("-I", str(cpp_build.SOURCES), "-Wall", "-Wno-psabi")
LOOPS = """
#include "attention_gradient.h"
#include "linear.h"
template void multiply_panel<TILE_ROWS, PANEL_VECS, PANEL_LINES>(
    T*, int64_t, int64_t, const Input<T>*, int64_t, const float*, int64_t, const float*, const T*,
    const char*);
template void multiply_panel<TILE_ROWS, PANEL_VECS, 1>(
    T*, int64_t, int64_t, const Input<T>*, int64_t, const int8_t*, int64_t, const float*, const T*,
    const char*);
template void multiply_keys<SCORE_ROWS, 2, false>(
    float*, int64_t, const float*, int64_t, int64_t, const float* const*, const float* const*,
    float, T);
template void multiply_keys<FEW_ROWS, 4, true>(
    float*, int64_t, const float*, int64_t, int64_t, const CachedKey<T>* const*,
    const CachedKey<T>* const*, float, T);
template void multiply_value_words<VALUE_ROWS, VALUE_VECS>(
    float*, int64_t, const float*, int64_t, const float*, int64_t, int64_t, T);
template void multiply_words<MOST_ROWS, MOST_VECS>(
    float* const*, bool, float, const float*, int64_t, int64_t, const float*, int64_t, int64_t, T);
"""


@dataclass(frozen=True)
class Processor:
    flags: tuple[str, ...]
    lanes: int
    compiler: str = "g++"
    runner: tuple[str, ...] = ()
    needs: str = ""  # a flag of /proc/cpuinfo


PROCESSORS = {
    "x86-64": Processor(("-march=x86-64",), 4),
    "sixteen-lanes": Processor(
        ("-march=haswell", "-DVECTOR_LANES=16", "-DVECTOR_REGISTERS=32", "-O1"), 16, needs="avx2"
    ),
    "four-lanes-fused": Processor(("-march=haswell", "-DVECTOR_LANES=4", "-O1"), 4, needs="avx2"),
    "aarch64": Processor(("-static",), 4, "aarch64-linux-gnu-g++", ("qemu-aarch64",)),
}


def skip_unless_runnable(processor: Processor) -> None:
    if platform.machine() != "x86_64":
        pytest.skip("these are made from the flags of an x86-64 compiler")
    for tool in (processor.compiler, *processor.runner):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed: bash scripts/install_test_tools.sh")
    if processor.needs and processor.needs not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"the processor has no {processor.needs}")


def compile_with(flags: tuple[str, ...], *arguments: str, compiler: str = "g++") -> None:
    subprocess.run([compiler, *cpp_build.OPTIONS, *flags, *INCLUDES, *arguments], check=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory):
    """What the driver prints on a processor."""
    folder = tmp_path_factory.mktemp("drivers")
    printed: dict[str, str] = {}

    def run_once(name: str) -> str:
        processor = PROCESSORS[name]
        skip_unless_runnable(processor)
        if name not in printed:
            program = str(folder / name)
            flags = (*processor.flags, "-pthread")
            compile_with(flags, str(DRIVER), "-o", program, compiler=processor.compiler)
            done = subprocess.run(
                [*processor.runner, program], capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stdout + done.stderr
            printed[name] = done.stdout
        return printed[name]

    return run_once


@pytest.mark.rare
@pytest.mark.parametrize("name", PROCESSORS)
def test_rows_are_fp64s_and_have_the_same_bits_in_any_batch_on(name, run):
    assert run(name).startswith(f"lanes {PROCESSORS[name].lanes}, ")


@pytest.mark.rare
def test_arm_has_the_bits_of_four_fused_lanes_here(run):
    assert run("aarch64") == run("four-lanes-fused")


@pytest.mark.parametrize("dtype", ["float", "bf16"])
@pytest.mark.parametrize(
    "march, register", [("haswell", "ymm"), ("skylake-avx512", "zmm"), ("cooperlake", "zmm")]
)
def test_the_sums_of_a_tile_stay_in_registers(march, register, dtype, tmp_path):
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("needs g++ for x86-64")
    source, assembly = tmp_path / "loops.cpp", tmp_path / "loops.s"
    source.write_text(re.sub(r"\bT\b", dtype, LOOPS))
    compile_with((f"-march={march}", "-S"), str(source), "-o", str(assembly))
    loops = hot_loops(assembly.read_text())
    assert len(loops) == 6
    for loop in loops:
        assert f"%{register}" in loop
        stored = re.findall(rf"vmov\w+\s+%{register}\d+, .*\(%r[sb]p\)", loop)
        assert not stored, stored


def hot_loops(assembly: str) -> list[str]:
    """Of each function, the loop with the most multiplications."""
    found = []
    for body in re.findall(r"^_Z\w*multiply_\w+:\n(.*?)\.cfi_endproc", assembly, re.S | re.M):
        loops = [
            m[0] for m in re.finditer(r"^(\.L\d+):\n(?:(?!^\1:).)*?\tj\w+\t\1$", body, re.S | re.M)
        ]
        found.append(max(loops, key=lambda loop: len(re.findall("vfmadd|vdpbf16", loop))))
    return found
