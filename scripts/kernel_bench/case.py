"""What a benchmark module yields: `scripts/kernel_bench/<op>.py` has
`def cases(device: str) -> Iterator[BenchCase]`, found by `bench_kernels.py`.

Make a case's tensors just before yielding it, so that only one case lives at a time. On "cuda" use
the shapes of the models below; on "cpu" reduced ones.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

Op = Callable[..., Tensor | tuple[Tensor, ...]]
Step = Callable[[], object]


@dataclass(frozen=True)
class BenchCase:
    """`run` is timed beside each of `peers`. `bytes` moved or `flops` done, whichever bounds the
    op, say how near to the machine's copy or matmul rate it comes; neither: latency is reported.

    `slow_peers` (torch.compile, FlexAttention) take seconds before their first result: they are
    timed in a second round, when every op has its row. No step may do work before it is called: a
    peer that this machine cannot run must cost its own row only."""

    name: str
    op: str
    shape: str
    dtype: str
    run: Step
    peers: Mapping[str, Step] = field(default_factory=dict)
    bytes: int | None = None
    flops: int | None = None
    slow_peers: Mapping[str, Step] = field(default_factory=dict)


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


def forward_of(op: Op, inputs: Sequence[Tensor]) -> Step:
    plain = [x.detach() for x in inputs]
    return lambda: op(*plain)


def backward_of(op: Op, inputs: Sequence[Tensor]) -> Step:
    """The backward pass alone; its graph is made at the first call and kept."""
    graph: list[tuple[tuple[Tensor, ...], list[Tensor]]] = []
    leaves = [x.detach().requires_grad_() for x in inputs]

    def step() -> object:
        if not graph:
            outs = op(*leaves)
            outs = outs if isinstance(outs, tuple) else (outs,)
            graph.append((outs, [torch.randn_like(out) for out in outs]))
        outs, grads = graph[0]
        return torch.autograd.grad(outs, leaves, grads, retain_graph=True)

    return step


def compiled(op: Op) -> Op:
    """torch.compile for each shape: a kernel for shapes unknown would be slower than it need be."""
    made: Op = torch.compile(op, dynamic=False)
    return made
