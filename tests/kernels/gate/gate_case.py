"""What a case module of the compile gate yields (`scripts/kernel_gate.py`).

A module `case_<op>.py` in this folder has `def cases() -> Iterator[GateCase]`. `call` runs the
public wrapper, forward and backward, with `backend="triton"` on tensors made inside it, which are
meta tensors there: every launch is compiled with the specialisation a GPU launch would get.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

ATTENTION_SHAPES = {
    "half-64": (9, 3, 64),
    "half-128": (32, 8, 128),
    "half-256": (8, 4, 256),
    "fp32-64": (9, 3, 64),
    "fp32-128": (16, 8, 128),
    "fp32-256": (8, 4, 256),
    "half-128-padded": (14, 2, 80),
    "half-128-mqa": (7, 1, 128),
}
"""(query heads, key heads, head_dim) of every tile class of `triton/tiles.py` (Llama-3-8B, SmolLM2
and others), and of shapes that share a class."""


@dataclass(frozen=True)
class GateCase:
    """`need`: what every launched kernel must contain, of "wgmma" (asynchronous matmul) and
    "ld128" (16-byte loads). `need_of` replaces it for kernels by name, e.g. for the small second
    pass of an op. `allow_spill`: bytes of register spill to accept, normally none. `alike`: in all
    cases of this name a kernel sums its rows in one layout, so what it gives for a row is the same
    to the bit."""

    name: str
    call: Callable[[], object]
    need: tuple[str, ...] = ()
    allow_spill: int = 0
    need_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    alike: str = ""
