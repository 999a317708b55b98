"""The machine as the system shows it: processor, memory, disk, GPUs. Nothing here needs PyTorch."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from nanorl.inspection.doctor.machine_limits import (
    cpu_limit,
    free_memory_bytes,
    memory_limit_bytes,
    total_memory_bytes,
    usable_cores,
)
from nanorl.inspection.doctor.section import Section
from nanorl.observability.alarms.finding import Finding, Severity

INSTRUCTION_SETS = (
    *("avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8"),
    *("asimd", "asimddp", "i8mm", "bf16", "sve"),
)
"""Those of the processor's flags that decide how fast it multiplies, on x86_64 and on ARM."""
LEAST_MEMORY_BYTES = 5 << 30
"""What the default run takes (4 GB), and some room."""
LEAST_DISK_BYTES = 8 << 30
"""The default model, three checkpoints of it and the trained model, roughly."""
_GPU_FIELDS = "name,memory.total,driver_version"
_GPU_LIMIT_S = 30


def processor_section(root: Path = Path("/")) -> Section:
    """The processor, its instruction sets, and the cores that this process gets."""
    info = _cpuinfo(root)
    flags = set(info.get("flags", info.get("Features", "")).split())
    usable, granted = usable_cores(), cpu_limit(root)
    facts = {
        "model": info.get("model name") or platform.processor() or "unknown",
        "architecture": platform.machine(),
        "instruction_sets": [name for name in INSTRUCTION_SETS if name in flags],
        "cores": os.cpu_count(),
        "cores_usable": usable,
        "container_limit": None if granted is None else f"{granted:g} cores",
    }
    finding = core_finding(usable, granted)
    return Section(title="processor", facts=facts, findings=(finding,) if finding else ())


def core_finding(usable: int, granted: float | None) -> Finding | None:
    """A container that gets less time than its number of cores promises."""
    if granted is None or granted >= usable:
        return None
    return Finding(
        name="throttled_cores",
        severity=Severity.WARNING,
        seen=f"the container may run on {usable} cores and gets the time of {granted:g}",
        why="a thread for each core would wait for the others most of the time",
        remedy=f"train with --threads {max(1, int(granted))}",
    )


def memory_section(root: Path = Path("/")) -> Section:
    """Memory of the machine, and what this process may take of it."""
    free = free_memory_bytes(root)
    facts = {
        "machine_bytes": total_memory_bytes(root),
        "container_limit_bytes": memory_limit_bytes(root),
        "free_bytes": free,
    }
    low = Finding(
        name="low_memory",
        severity=Severity.WARNING,
        seen=f"{free / 1e9:.1f} GB of memory are free",
        why=f"the default run takes up to {LEAST_MEMORY_BYTES / 1e9:.0f} GB",
        remedy="close other programs, raise the container's limit, or begin with --preset tiny",
    )
    return Section(
        title="memory", facts=facts, findings=(low,) if free < LEAST_MEMORY_BYTES else ()
    )


def disk_section(folders: Sequence[tuple[str, Path]]) -> Section:
    """Room in the folders that a run writes to; each has a name and a path."""
    facts: dict[str, int] = {}
    findings = []
    for name, folder in folders:
        try:
            whole = folder.expanduser()
            place = next(one for one in (whole, *whole.parents) if one.exists())
            facts[f"free_in_{name}_bytes"] = free = shutil.disk_usage(place).free
        except OSError as error:
            findings.append(_unreadable(folder, error))
            continue
        except RuntimeError:
            findings.append(_homeless(folder))
            continue
        if not os.access(place, os.W_OK):
            findings.append(_unwritable(name, folder))
        elif free < LEAST_DISK_BYTES:
            findings.append(_full(name, folder, free))
    return Section(title="disk", facts=facts, findings=tuple(findings))


def _homeless(folder: Path) -> Finding:
    return Finding(
        name="no_home",
        severity=Severity.WARNING,
        seen=f"{folder} is nowhere: this user has no home folder",
        why="models and compiled kernels are kept there; every process compiles its own",
        remedy="set HOME to a folder that you may write to",
    )


def _unreadable(folder: Path, error: OSError) -> Finding:
    return Finding(
        name="unreadable_folder",
        severity=Severity.ERROR,
        seen=f"{folder} cannot be looked at ({error.strerror})",
        why="a run keeps files there",
        remedy="change the folder's permissions, or work in another one",
    )


def _unwritable(name: str, folder: Path) -> Finding:
    flag = "--cache-dir" if name == "cache" else "--out"
    return Finding(
        name="unwritable_folder",
        severity=Severity.ERROR,
        seen=f"{folder} cannot be written",
        why="a run keeps files there",
        remedy=f"name another folder with {flag}, or change the permissions of this one",
    )


def _full(name: str, folder: Path, free: int) -> Finding:
    return Finding(
        name="low_disk",
        severity=Severity.WARNING,
        seen=f"{free / 1e9:.1f} GB are free in {folder}",
        why=f"the default run writes up to {LEAST_DISK_BYTES / 1e9:.0f} GB there, most of it "
        "checkpoints",
        remedy="make room, or name another disk with "
        + ("--cache-dir" if name == "cache" else "--out, or keep less with --keep-checkpoints 1"),
    )


def gpu_section() -> Section:
    """The NVIDIA cards that the driver reports; whether PyTorch reaches them is engines.py's."""
    return Section(title="gpu", facts={"nvidia": nvidia_cards()})


def nvidia_cards() -> list[str]:
    """A line of `nvidia-smi` for each card; none where there is no such command, or it fails."""
    command = ["nvidia-smi", f"--query-gpu={_GPU_FIELDS}", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GPU_LIMIT_S)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _cpuinfo(root: Path) -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is no such file."""
    found: dict[str, str] = {}
    try:
        lines = (root / "proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return found
    for line in lines:
        name, _, value = line.partition(":")
        found.setdefault(name.strip(), value.strip())
    return found
