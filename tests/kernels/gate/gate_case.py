"""What a case module of the compile gate yields (`scripts/kernel_gate.py`).

A module `case_<op>.py` in this folder has `def cases() -> Iterator[GateCase]`. `call` runs the
public wrapper, forward and backward, with `backend="triton"` on tensors made inside it, which are
meta tensors there: every launch is compiled with the specialisation a GPU launch would get.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class GateCase:
    """`need`: what every launched kernel must contain, of "wgmma" (asynchronous matmul) and
    "ld128" (16-byte loads). `need_of` replaces it for kernels by name, e.g. for the small second
    pass of an op. `allow_spill`: bytes of register spill to accept, normally none."""

    name: str
    call: Callable[[], object]
    need: tuple[str, ...] = ()
    allow_spill: int = 0
    need_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
