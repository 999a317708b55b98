"""The least time that a workload can take on the machine it runs on: the benchmarks' bounds.

A floor counts what cannot be left out: the arithmetic of every distinct token's products and of
every query-key pair that attention looks at; the weights, read once by every decoding step; the
keys and values that its queries look at, a shared prompt's once. It divides by the best rates that
this machine shows (`measure_rates`), so no schedule of ours or of a peer's can be faster:

    seconds >= max( all FLOPs / rate,
                    sum over decoding steps of max(its FLOPs / rate, its bytes / bandwidth) )

A request's tokens come one after the other, so there are at least as many decoding steps as the
longest request has tokens; prefill may fill what a step leaves of the processor, and is therefore
counted in the first term alone. Drafts make fewer steps: only the first term bounds those.

Rates are upper limits only if they are measured on a quiet machine. They are the best of many short
runs, in processes before and after the measurement, and `best_of` joins them.
Left out: caches larger than the weights, and whatever is not a product (norms, draws, Python).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# SmolLM2-135M: weights of the (tied) head and of the rest, and what attention does for a token.
HEAD, BODY = 28_311_552, 106_203_456
NUM_LAYERS, HIDDEN, KV_DIM, FFN = 30, 576, 192, 1536
PRODUCTS = ((HIDDEN, HIDDEN + 2 * KV_DIM), (HIDDEN, HIDDEN), (HIDDEN, 2 * FFN), (FFN, HIDDEN))
PAIR_FLOPS = NUM_LAYERS * 4 * HIDDEN  # of one query and one key: its score and its value, all heads
KV_ELEMENTS = NUM_LAYERS * 2 * KV_DIM  # keys and values of one token
ROWS = (8, 16, 32, 64, 256, 1024)  # of the products whose rate is measured
_RUN_S = 0.2  # for each piece of work
_MEMORY_BYTES = 1 << 29  # far more than any cache

Rates = Mapping[str, float]  # "flops" a second; "bytes" a second from and to memory


@dataclass(frozen=True)
class DecodeStep:
    """One token more of every sequence that still runs."""

    rows: int
    pairs: float  # query-key pairs
    keys: float  # distinct keys among them: these have to be read

    def flops(self) -> float:
        return 2.0 * (BODY + HEAD) * self.rows + PAIR_FLOPS * self.pairs

    def bytes(self, element: int) -> float:
        return element * (BODY + HEAD + KV_ELEMENTS * self.keys)


@dataclass(frozen=True)
class Generation:
    """A workload of generation: what is only forwarded, and the decoding steps."""

    num_sampled: int
    prefill_tokens: int
    prefill_pairs: float
    steps: Sequence[DecodeStep]

    def flops(self) -> float:
        prefill = 2.0 * BODY * self.prefill_tokens + PAIR_FLOPS * self.prefill_pairs
        return prefill + sum(step.flops() for step in self.steps)

    def seconds(self, rates: Rates, element: int, *, is_drafted: bool = False) -> float:
        """The floor, for weights and keys of `element` bytes each."""
        arithmetic = self.flops() / rates["flops"]
        if is_drafted:
            return arithmetic
        steps = sum(
            max(step.flops() / rates["flops"], step.bytes(element) / rates["bytes"])
            for step in self.steps
        )
        return max(arithmetic, steps)


def requests(prompts: Sequence[int], outputs: Sequence[int]) -> Generation:
    """Independent requests: lengths of their prompts and of what they sample.

    The first token of a request is drawn from its prompt's last row, which is counted among the
    steps, so one row fewer is prefill.
    """
    steps = []
    for t in range(max(outputs)):
        lengths = [p + t for p, n in zip(prompts, outputs, strict=True) if n > t]
        steps.append(DecodeStep(len(lengths), sum(lengths), sum(lengths)))
    prefill = [p - 1 for p in prompts]
    return Generation(sum(outputs), sum(prefill), sum(map(causal_pairs, prefill)), steps)


def group_rollouts(
    num_groups: int, members: int, prompt: int, turns: int, sampled: int, observed: int
) -> Generation:
    """Groups of rollouts that share a prompt: `turns` times `sampled` tokens, and between two turns
    an observation of `observed` tokens of each member's own. The prompt's last row gives the first
    token of every member, so the first step has a row a group."""
    rollouts = num_groups * members
    tokens, pairs = num_groups * (prompt - 1), num_groups * causal_pairs(prompt - 1)
    steps = []
    for turn in range(turns):
        start = prompt + turn * (sampled + observed)
        if turn:  # the turn's last token and the observation, whose last row is a step's
            tokens += rollouts * observed
            pairs += rollouts * (causal_pairs(start - 1) - causal_pairs(start - 1 - observed))
        for length in range(start, start + sampled):
            rows = rollouts if length > prompt else num_groups
            keys = num_groups * prompt + rollouts * (length - prompt)
            steps.append(DecodeStep(rows, rows * length, keys))
    return Generation(rollouts * turns * sampled, tokens, pairs, steps)


def causal_pairs(length: float) -> float:
    """Query-key pairs of a sequence that attends to itself."""
    return length * (length + 1) / 2


def training_flops(rows: int, trained: int, pairs: float) -> float:
    """Of forward and backward over `rows` tokens, `trained` of which go through the head. Backward
    does each product twice; nothing is computed again."""
    return 3.0 * (2.0 * BODY * rows + 2.0 * HEAD * trained + PAIR_FLOPS * pairs)


def measure_rates(dtype: str, threads: int) -> dict[str, float]:
    """The best rates that this process sees: "flops" of products, "bytes" of memory."""
    return {"flops": product_rate(dtype, threads), "bytes": memory_rate(_MEMORY_BYTES)}


def product_rate(dtype: str, threads: int) -> float:
    """FLOP/s of the fastest product of the model's shapes, ours or PyTorch's."""
    import torch

    from kernels import linear, pack_weight

    torch.set_num_threads(threads)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    flops = 0.0
    with torch.no_grad():
        for num_in, num_out in PRODUCTS:
            weight = torch.randn(num_out, num_in).to(kind)
            packed = pack_weight(weight)
            for rows in ROWS:
                x = torch.randn(rows, num_in).to(kind)
                works = [lambda x=x, w=weight, p=packed: linear(x, w, packed=p)]
                if rows == max(ROWS):
                    works.append(lambda x=x, w=weight: torch.nn.functional.linear(x, w))
                for work in works:
                    flops = max(flops, 2.0 * rows * num_in * num_out / _least_seconds(work))
    return flops


def memory_rate(size: int) -> float:
    """Bytes/s of moving `size` bytes: copying half as many (read and written bytes both counted) or
    reading them, whichever is faster."""
    import torch

    source, target = (torch.ones(size // 8) for _ in range(2))
    whole = torch.ones(size // 4)
    return size / min(
        _least_seconds(lambda: target.copy_(source)), _least_seconds(lambda: whole.sum())
    )


def _least_seconds(work: Callable[[], object]) -> float:
    """A machine that others use has quiet moments: the shortest of many runs."""
    times: list[float] = []
    while len(times) < 7 or sum(times) < _RUN_S:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def best_of(measured: Iterable[Rates]) -> dict[str, float]:
    """The largest of each rate."""
    best: dict[str, Any] = {}
    for rates in measured:
        for name, rate in rates.items():
            best[name] = max(best.get(name, 0.0), rate)
    return best
