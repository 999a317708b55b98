"""AdamW over flat buffers with fp32 masters, clipping by the global norm, learning-rate schedules.

Parameters lie end to end in one buffer (flat.py), masters beside two moments and one gradient of
the same size. Gradients collect in `param.main_grad` (fp32; fp64 for fp64 models): kernels that
know it add there directly, everything else goes through a hook that adds autograd's gradient and
drops it.

    m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
    w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Left out: amsgrad, parameter groups beyond "decayed or not"; what several processes share of this
(parallel/sharded_adamw.py); what lies between steps (state/kept_adamw.py).
AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv 1711.05101.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kernels.adamw import fused_adamw_
from kernels.memory import release_memory
from nanoengine.config import AdamWConfig
from nanoengine.flat import Bucket, BucketState, collect_grad, trainable

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
)
"""PyTorch's types by the names that options have for them."""

NORM_ROW = 4096  # elements summed in one piece: the result is the same for every thread count

_TABLE = "kernels:make_tensor_table"


class Flats(NamedTuple):
    """Buffers that an update reads and writes in step: 1-d tensors of one size."""

    master: Tensor
    grad: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    remainder: Tensor | None  # of masters that are bf16 weights

    def cut(self, begin: int, end: int | None = None) -> Flats:
        """The same elements of each."""
        part = slice(begin, end)
        master, grad, exp_avg, exp_avg_sq, rest = self
        rest = rest if rest is None else rest[part]
        return Flats(master[part], grad[part], exp_avg[part], exp_avg_sq[part], rest)


def lr_at(config: AdamWConfig, step: int) -> float:
    """Learning rate of update `step` (the first is 0): linear warm-up, then the schedule.

    The warm-up reaches `lr` at step warmup_steps - 1; cosine and linear reach `min_lr_ratio * lr`
    at step `total_steps` and stay there.
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.schedule == "constant":
        return config.lr
    done = (step - config.warmup_steps) / (config.total_steps - config.warmup_steps)
    done = min(done, 1.0)
    left = 1 - done if config.schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * left)


class FlatAdamW:
    """Owns masters, moments and gradients of the trainable parameters of `models`; tied ones come
    once. Weight decay applies to matrices, not to norms and biases.

    `dtype` is what the parameters are converted to (by default they keep theirs); the masters start
    from the values before. It has one bucket; a subclass may cut it into several, and own parts.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        config: AdamWConfig,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.step_count = 0
        self.phase_start = 0  # the step count at which the schedule began
        first = next(p for model in models for p in model.parameters())
        dtype = first.dtype if dtype is None else dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.states = self._make_states(models, dtype, wide)
        self.buckets = [state.bucket for state in self.states]
        release_memory()  # of the parameters as they were: before the moments, or it comes on top
        shares = [bucket.share for bucket in self.buckets]
        flat = partial(torch.zeros, sum(shares), dtype=wide, device=first.device)
        self.exp_avg, self.exp_avg_sq = flat(), flat()
        moments = self.exp_avg.split(shares), self.exp_avg_sq.split(shares)
        for state, mean, square in zip(self.states, *moments, strict=True):
            state.exp_avg, state.exp_avg_sq = mean, square
        self._decayed = [_flats(state).cut(0, state.bucket.num_decayed) for state in self.states]
        self._spared = [_flats(state).cut(state.bucket.num_decayed) for state in self.states]
        self._plans: list[Any] = []  # of a GPU's kernel: at the first step, and after `reload`
        self._parked: Any = None  # the buffers while they are elsewhere
        self._watch_gradients(models)

    def _make_states(
        self, models: Sequence[nn.Module], dtype: torch.dtype, wide: torch.dtype
    ) -> list[BucketState]:
        named = [(name, parameter) for _, name, parameter in trainable(models)]
        return [BucketState(Bucket(named, wide), dtype)]

    def _watch_gradients(self, models: Sequence[nn.Module]) -> None:
        for bucket in self.buckets:
            for slot in bucket.slots:
                slot.param.register_post_accumulate_grad_hook(collect_grad)

    # -- one step ----------------------------------------------------------------------------

    def zero_grad(self) -> None:
        self._require_loaded()
        for bucket in self.buckets:
            bucket.zero_grad()

    def grad_norm(self) -> float:
        """The L2 norm of the whole model's gradient, accumulated in fp64; NaN or inf if any entry
        is."""
        total = self._sum_of_squares()
        return math.sqrt(total) if math.isfinite(total) else total

    def _sum_of_squares(self) -> float:
        return math.fsum(sum_of_squares(bucket.grad) for bucket in self.buckets)

    def lr(self) -> float:
        """The learning rate of the next update."""
        return lr_at(self.config, self.step_count - self.phase_start)

    def step(self, grad_norm: float) -> None:
        """Clip to `max_grad_norm` given the norm just measured, update masters and moments, and
        bring the weights up to date. The gradient stays as it is."""
        lr = self.lr()
        self.step_count += 1  # the first is 1: the moments' bias is corrected by beta to its power
        scale = clip_factor(self.config, grad_norm)
        halves = (self._decayed, self._spared)
        if not self._plans:
            self._plans = [table_of(parts) for parts in halves]
        decays = (self.config.weight_decay, 0.0)
        for parts, decay, plan in zip(halves, decays, self._plans, strict=True):
            update(parts, self.config, self.step_count, lr, decay, scale, plan)
        self.write_back()

    def write_back(self) -> None:
        """Round the masters into the weights."""
        for state in self.states:
            state.round()

    def _require_loaded(self) -> None:
        if self._parked is not None:
            raise ValueError("the optimizer is offloaded: call reload() first")


def _flats(state: BucketState) -> Flats:
    grad = state.bucket.grad_shard
    return Flats(state.master, grad, state.exp_avg, state.exp_avg_sq, state.remainder)


def clip_factor(config: AdamWConfig, grad_norm: float) -> float:
    """Return what scales the gradient to `max_grad_norm` where the norm exceeds it, as torch's
    clip_grad_norm_ does; else 1."""
    if 0 < config.max_grad_norm < grad_norm:
        return config.max_grad_norm / (grad_norm + 1e-6)
    return 1.0


def update(
    parts: list[Flats],
    config: AdamWConfig,
    step: int,
    lr: float,
    weight_decay: float,
    grad_scale: float = 1.0,
    plan: Any = None,
) -> None:
    """One AdamW update, in place, of flat buffers and with their gradients times `grad_scale`.
    `plan` is `table_of(parts)`, for parts that come again at every step."""
    parts = [part for part in parts if part.master.numel()]
    if not parts:
        return
    rests = [part.remainder for part in parts if part.remainder is not None]
    # On a CPU one pass, elementwise over whole cache lines: the result does not depend on the
    # number of threads.
    fused_adamw_(
        *_columns(parts),
        None,
        remainders=rests or None,
        lr=lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=weight_decay,
        step=step,
        grad_scale=grad_scale,
        plan=plan,
    )


def table_of(parts: list[Flats]) -> Any:
    """Return the table of `parts` that a GPU's kernel reads; None on a CPU, and without parts."""
    parts = [part for part in parts if part.master.numel()]
    if not parts or parts[0].master.device.type == "cpu":
        return None
    masters, *others = _columns(parts)
    return resolve_name(_TABLE)(masters, *others, masters)


def _columns(parts: list[Flats]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """The masters, gradients, first and second moments of all parts."""
    masters, grads, exp_avgs, exp_avg_sqs, _ = zip(*parts, strict=True)
    return list(masters), list(grads), list(exp_avgs), list(exp_avg_sqs)


def sum_of_squares(flat: Tensor) -> float:
    """Rows of a fixed length in the buffer's dtype, then fp64: independent of the thread count."""
    num_rows = flat.numel() // NORM_ROW
    body, tail = flat[: num_rows * NORM_ROW], flat[num_rows * NORM_ROW :]
    rows = torch.linalg.vector_norm(body.view(num_rows, NORM_ROW), dim=1)
    parts = [*rows.split(NORM_ROW), tail]
    sums = torch.stack([part.double().square().sum() for part in parts])
    return math.fsum(sums.tolist())  # the one point where the host waits for a GPU's gradients
