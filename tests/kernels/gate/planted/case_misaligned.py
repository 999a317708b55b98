"""Must be rejected: rows of 4095 bf16 start at odd addresses, so 16-byte loads are impossible."""

from collections.abc import Iterator

import torch
from gate_case import GateCase

from kernels import rms_norm


def normalise(width: int) -> None:
    x = torch.empty(64, width, dtype=torch.bfloat16)
    rms_norm(x, torch.empty(width, dtype=torch.bfloat16), backend="triton")


def cases() -> Iterator[GateCase]:
    yield GateCase("planted-aligned", lambda: normalise(4096), need=("ld128",))
    yield GateCase("planted-misaligned", lambda: normalise(4095), need=("ld128",))
