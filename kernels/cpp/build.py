"""The CPU kernels in C++ (`cpp/`): compiled on first use, kept in the user's cache.

One command of the system's compiler, some seconds once; the file's name is a hash of the sources,
the compiler, its flags and the processor, so another machine that shares the folder compiles its
own. A kept file ends in a checksum of the rest: one that was cut short or overwritten is compiled
again, since to load it could kill the process. Where the folder cannot be written, each process
compiles for itself. Where there is no compiler the ops fall back on PyTorch: slower, the same
results up to rounding, and as exact between the engines, since both then take that path.
`ops.py` calls them.

Left out: Windows.
"""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpp.ops import NATIVE_DTYPES, Kernels

CACHE = Path("~/.cache/nanorl/kernels")
SOURCES = Path(__file__).parent
_COMPILERS = ("g++", "clang++", "c++")
OPTIONS = ("-O3", "-std=c++17", "-ffp-contract=off")
_FLAGS = (*OPTIONS, "-fPIC", "-shared")
# The first that the compiler takes: clang on ARM knew -mcpu alone for long.
_VARIANTS = (("-march=native", "-pthread"), ("-mcpu=native", "-pthread"))
_SUFFIX = dict(zip(NATIVE_DTYPES, ("f32", "bf16"), strict=True))
_COMPILE_LIMIT_S = 300
_SEAL_BYTES = 32
# the kernels that return one
_COUNTS = ("panel", "int8_word", "run_keys", "run_word", "decode_scratch")


def open_kernels() -> Kernels | None:
    """The kernels, compiled where they are not kept yet; None, with a warning, where they cannot be
    compiled or loaded. `ops.library` asks once a process."""
    try:
        return _open()
    except (OSError, subprocess.SubprocessError) as error:
        warnings.warn(
            f"kernels: the C++ kernels are not available ({_reason(error)}); PyTorch's take their "
            "place, which decodes at about half the speed",
            stacklevel=4,
        )
        return None


def _open() -> Kernels:
    compiler = next((path for name in _COMPILERS if (path := shutil.which(name))), None)
    if compiler is None:
        raise FileNotFoundError("no C++ compiler found: install g++ or clang++")
    name = f"{_fingerprint(compiler)}.so"
    folder = _cache_folder()
    if folder is not None and _is_whole(folder / name):
        return _load(folder / name)
    with tempfile.TemporaryDirectory() as scratch:
        built = Path(scratch) / name
        _compile(compiler, built)
        kept = built if folder is None else _keep(built, folder)
        return _load(kept)  # a loaded file may be deleted


def _cache_folder() -> Path | None:
    try:
        return CACHE.expanduser()
    except RuntimeError:  # a user without a home
        return None


def _is_whole(path: Path) -> bool:
    try:
        data = path.read_bytes()
    except OSError:
        return False
    return data[-_SEAL_BYTES:] == hashlib.sha256(data[:-_SEAL_BYTES]).digest()


def _keep(built: Path, folder: Path) -> Path:
    """Where the file now lies: in the folder, or where it was, with a warning."""
    data = built.read_bytes()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            sealed = Path(scratch) / built.name
            sealed.write_bytes(data + hashlib.sha256(data).digest())
            sealed.replace(folder / built.name)  # in one step: processes may compile side by side
    except OSError as error:
        warnings.warn(
            f"kernels: {folder} cannot keep the C++ kernels ({error}); every process compiles them",
            stacklevel=6,
        )
        return built
    return folder / built.name


def _load(path: Path) -> Kernels:
    loaded = ctypes.CDLL(str(path))
    pointer, count, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    arguments = {
        "rms_norm": [pointer] * 4 + [count] * 4 + [number, count],
        "add_rms_norm": [pointer] * 6 + [count] * 2 + [number, count],
        "swiglu": [pointer] * 2 + [count] * 3,
        "differentiate_rms_norm": [pointer] * 7 + [count] * 5,
        "differentiate_swiglu": [pointer] * 3 + [count] * 3,
        "rope": [pointer] * 6 + [count] * 7,
        "store_kv": [pointer] * 5 + [count] * 7,
        "score": [pointer] + [count] * 3 + [number] + [pointer] * 4 + [count],
        "differentiate_scores": (
            [pointer] + [count] * 3 + [number, pointer, count] + [pointer] * 4 + [count]
        ),
        "pick": [pointer] + [count] * 3 + [number] + [pointer] * 3 + [count],
        "pick_kept": [pointer] + [count] * 3 + [number] + [pointer] * 7 + [count],
        "likeliest": [pointer] + [count] * 3 + [number, pointer, count] + [pointer] * 2 + [count],
        "panel": [],
        "linear": [pointer] * 4 + [count] * 5,
        "linear_unpacked": [pointer] * 4 + [count] * 5,
        "linear_int8": [pointer] * 5 + [count] * 5,
        "add_low_rank": [pointer] * 3 + [count] * 5,
        "int8_word": [],
        "pack_int8": [pointer] * 2 + [count] * 3,
        "unpack_int8": [pointer] * 2 + [count] * 3,
        "transpose_int8": [pointer] * 2 + [count] * 3,
        "pack": [pointer] * 2 + [count] * 3,
        "pack_columns": [pointer] * 2 + [count] * 4,
        "add_product": [pointer] * 3 + [count] * 7,
        "adamw": [pointer] * 5 + [count, pointer, count],
        "attend": [pointer] * 6 + [count] * 9 + [number, count, count, pointer, count],
        "run_keys": [],
        "run_word": [],
        "differentiate_attention": (
            [pointer] * 11 + [count] * 9 + [number, count, pointer, pointer, count]
        ),
        "decode": [pointer] * 3 + [count] + [pointer] * 4 + [number] * 3 + [count],
        "decode_scratch": [pointer],
        "layer_norm": [pointer] * 6 + [count] * 2 + [number, count],
        "differentiate_layer_norm": [pointer] * 8 + [count] * 3,
        "gelu": [pointer] * 2 + [count] * 3,
        "differentiate_gelu": [pointer] * 3 + [count] * 3,
        "attend_whole": [pointer] * 6 + [count] * 7 + [number, count],
        "differentiate_whole": [pointer] * 11 + [count] * 9 + [number, count],
    }
    kernels: Kernels = {}
    for name, types in arguments.items():
        for dtype, suffix in _SUFFIX.items():
            found = getattr(loaded, f"{name}_{suffix}")
            found.argtypes = types
            found.restype = count if name in _COUNTS else None
            kernels[name, dtype] = found
    found = loaded.for_ranges_raw  # whatever the bytes mean
    found.argtypes, found.restype = [count] + [pointer] * 6 + [count], None
    kernels["for_ranges", torch.uint8] = found
    return kernels


def _compile(compiler: str, built: Path) -> None:
    source = str(SOURCES / "kernels.cpp")
    for variant in _VARIANTS:
        command = [compiler, *_FLAGS, *variant, source, "-o", str(built)]
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_COMPILE_LIMIT_S
        )
        if done.returncode == 0:
            return
    done.check_returncode()


def _fingerprint(compiler: str) -> str:
    version = subprocess.run(
        [compiler, "--version"], capture_output=True, text=True, errors="replace",
        timeout=_COMPILE_LIMIT_S,
    )  # fmt: skip
    digest = hashlib.sha256()
    for part in (version.stdout, repr((_FLAGS, _VARIANTS)), platform.machine(), _processor()):
        digest.update(part.encode())
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:24]


def _processor() -> str:
    """The text that -march=native depends on: the instruction sets, or the processor's name."""
    if os.path.exists("/proc/cpuinfo"):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        wanted = ("flags", "Features", "model name", "cpu family", "model\t")
        return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))
    return platform.processor()


def _reason(error: Exception) -> str:
    if isinstance(error, subprocess.CalledProcessError):
        lines = (error.stderr or "").strip().splitlines() or [f"exit code {error.returncode}"]
        return f"{error.cmd[0]}: {next((line for line in lines if 'error' in line), lines[0])}"
    return str(error)


def why_not_native(tensors: Sequence[Tensor]) -> str:
    """The reason why these tensors cannot go to the C++ kernels."""
    dtypes = list(dict.fromkeys(x.dtype for x in tensors))
    if len(dtypes) > 1:
        return f"dtypes {', '.join(map(str, dtypes))} must be one"
    if dtypes[0] not in NATIVE_DTYPES:
        return f"dtype {dtypes[0]} must be float32 or bfloat16"
    elsewhere = [x.device for x in tensors if not x.is_cpu]
    if elsewhere:
        return f"a tensor is on {elsewhere[0]}, C++ runs on a CPU"
    return "the C++ kernels are not available (the first warning said why)"
