"""What a benchmark module yields: `scripts/kernel_bench/<op>.py` has
`def cases(device: str) -> Iterator[BenchCase]`, found by `bench_kernels.py`.

Make a case's tensors just before yielding it, so that only one case lives at a time. On "cuda" use
the shapes of the models below; on "cpu" (where ops run their PyTorch path) reduced ones.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class BenchCase:
    """`run` is timed beside each of `peers`. `bytes` moved or `flops` done, whichever bounds the
    op, say how near to the machine's copy or matmul rate it comes; neither: latency is reported."""

    name: str
    op: str
    shape: str
    dtype: str
    run: Callable[[], object]
    peers: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    bytes: int | None = None
    flops: int | None = None


@dataclass(frozen=True)
class ModelShape:
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int


MODELS = {
    "qwen3-0.6b": ModelShape(1024, 3072, 16, 8, 128, 151_936),
    "qwen3-4b": ModelShape(2560, 9728, 32, 8, 128, 151_936),
    "llama3-8b": ModelShape(4096, 14_336, 32, 8, 128, 128_256),
}
