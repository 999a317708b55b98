"""AdamW over flat buffers with fp32 masters, clipping by the global norm, learning-rate schedules.

All parameters live in one flat master buffer, laid out beside two moments and one gradient of the
same size, so that an optimizer step is a handful of passes over memory whatever the model looks
like. Where the model computes in bf16, `param.data` is a working copy rounded from the master;
in fp32 and fp64 the parameter *is* its slice of the master and no copy exists.

Gradients collect in `param.main_grad` (fp32; fp64 for fp64 models): kernels that know it add there
directly, everything else goes through a hook that adds autograd's gradient and drops it.

Left out: amsgrad, parameter groups beyond "decayed or not", and sharding: parallel/zero.py has the
same interface and uses the pieces of this file.
AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv 1711.05101.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from kernels import fused_adamw_
from kernels.adamw import make_tensor_table
from kernels.tensor_table import TensorTable
from nanoengine.tensor_file import read_tensor, tensor_bytes

Schedule = Literal["constant", "cosine", "linear"]

ALIGNMENT = 64  # elements; every parameter starts on a cache line in fp32 and in bf16
NORM_ROW = 4096  # elements summed in one piece: the result is the same for every thread count


@dataclass(frozen=True, kw_only=True)
class AdamWConfig:
    """Hyperparameters of the update. `weight_decay` spares norms and biases."""

    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0  # 0 never clips
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int = 0  # where the schedule ends; needed by cosine and linear
    min_lr_ratio: float = 0.0  # of lr, at the end of the schedule

    def __post_init__(self) -> None:
        if not self.lr >= 0:
            raise ValueError(f"lr={self.lr}: must be 0 or positive")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas={self.betas}: both must be in [0, 1)")
        if not self.eps > 0:
            raise ValueError(f"eps={self.eps}: must be positive")
        if not self.weight_decay >= 0:
            raise ValueError(f"weight_decay={self.weight_decay}: must be 0 (off) or positive")
        if not self.max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm}: must be 0 (off) or positive")
        if self.schedule not in ("constant", "cosine", "linear"):
            raise ValueError(f"schedule={self.schedule!r}: must be constant, cosine or linear")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps={self.warmup_steps}: must be 0 or positive")
        if self.schedule != "constant" and self.total_steps <= self.warmup_steps:
            raise ValueError(
                f"total_steps={self.total_steps}: the {self.schedule} schedule needs more than "
                f"warmup_steps={self.warmup_steps}"
            )


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


@dataclass(frozen=True)
class Slot:
    """Where a parameter lives in the flat buffers."""

    name: str
    param: nn.Parameter
    offset: int

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.param.numel()].view(self.param.shape)


def clip(grad: Tensor, config: AdamWConfig, grad_norm: float) -> None:
    """Scale to `max_grad_norm` where the norm exceeds it, as torch's clip_grad_norm_ does."""
    if 0 < config.max_grad_norm < grad_norm:
        grad.mul_(config.max_grad_norm / (grad_norm + 1e-6))


def update(
    parts: list[tuple[Tensor, Tensor, Tensor, Tensor]],
    config: AdamWConfig,
    step: int,
    lr: float,
    weight_decay: float,
    plan: TensorTable | None = None,
) -> None:
    """One AdamW update, in place, of flat (master, gradient, first moment, second moment). `plan`
    is `table_of(parts)`, for parts that come again at every step."""
    parts = [part for part in parts if part[0].numel()]
    if not parts:
        return
    masters, grads, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*parts, strict=True))
    # On a CPU PyTorch's one-pass kernel: elementwise over cache-line units, so the result does
    # not depend on the number of threads. Three times faster than tensor ops.
    fused_adamw_(
        masters,
        grads,
        exp_avgs,
        exp_avg_sqs,
        None,
        lr=lr,
        betas=config.betas,
        eps=config.eps,
        weight_decay=weight_decay,
        step=step,
        plan=plan,
    )


def table_of(parts: list[tuple[Tensor, Tensor, Tensor, Tensor]]) -> TensorTable | None:
    """What a GPU's kernel reads of `parts`, on the GPU; None on a CPU, and where there are none."""
    parts = [part for part in parts if part[0].numel()]
    if not parts or parts[0][0].device.type == "cpu":
        return None
    masters, grads, exp_avgs, exp_avg_sqs = (list(column) for column in zip(*parts, strict=True))
    return make_tensor_table(masters, grads, exp_avgs, exp_avg_sqs, masters)


class Offloadable:
    """What an optimizer does once its memory is parked; `offload` itself is the optimizer's."""

    _parked: Parked | None = None

    def reload(self) -> None:
        if self._parked is not None:
            self._parked.restore()
            self._parked = None

    def _require_loaded(self) -> None:
        if self._parked is not None:
            raise ValueError("the optimizer is offloaded: call reload() first")


class AdamW(Offloadable):
    """Owns masters, moments and gradients of `named_parameters`; tied parameters come once.

    `dtype` is what the parameters are converted to (by default they keep theirs); the masters
    start from the values before. Weight decay applies to matrices, not to norms and biases.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        config: AdamWConfig,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.config = config
        self.step_count = 0
        self.phase_start = 0  # the step count at which the schedule began
        named = [(name, param) for name, param in named_parameters if param.requires_grad]
        if not named:
            raise ValueError("no trainable parameters: every requires_grad is False")
        self._slots, self._decay_end, size = lay_out(named)
        first = named[0][1]
        dtype = dtype if dtype is not None else first.dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.master, self.exp_avg, self.exp_avg_sq, self.grad = (
            torch.zeros(size, dtype=wide, device=first.device) for _ in range(4)
        )
        self.has_working_copy = dtype != wide
        flats = (self.master, self.grad, self.exp_avg, self.exp_avg_sq)
        self._decayed, self._plain = (
            [(flats[0][cut], flats[1][cut], flats[2][cut], flats[3][cut])]
            for cut in (slice(self._decay_end), slice(self._decay_end, None))
        )
        self._plans: list[TensorTable | None] = []  # made at the first step, and after `reload`
        self._hooks = []
        for slot in self._slots:
            master = slot.view(self.master).copy_(slot.param.data)
            slot.param.data = master.to(dtype)  # the master's own memory in fp32
            slot.param.main_grad = slot.view(self.grad)  # type: ignore[attr-defined]
            self._hooks.append(slot.param.register_post_accumulate_grad_hook(collect_grad))

    def restart(self, config: AdamWConfig) -> None:
        """Another phase of training: its own schedule and no momentum, but the second moments stay.

        With fresh second moments the first updates are the sign of a noisy gradient, at the full
        rate in every weight. The scale of the phase before is a better guess, and is forgotten at
        beta2's pace.
        """
        self._require_loaded()
        self.config = config
        self.phase_start = self.step_count
        self.exp_avg.zero_()

    def zero_grad(self) -> None:
        self._require_loaded()
        self.grad.zero_()

    @property
    def needs_equal_passes(self) -> bool:
        """Of several ranks; this class serves one. So do the methods that follow."""
        return False

    def start_pass(self, *, is_last: bool) -> None: ...

    def end_pass(self) -> None: ...

    def finish_gradients(self) -> None: ...

    def release(self) -> None: ...

    def gathered(self) -> AbstractContextManager[None]:
        return nullcontext()

    def grad_norm(self) -> float:
        """Global L2 norm of the gradient, accumulated in fp64; NaN or inf if any entry is."""
        return math.sqrt(sum_of_squares(self.grad))

    def lr(self) -> float:
        """Of the next update."""
        return lr_at(self.config, self.step_count - self.phase_start)

    def step(self, grad_norm: float) -> None:
        """Clip to `max_grad_norm` given the norm just measured, update masters and moments, and
        round the working copies. The gradient buffer holds the clipped gradient afterwards.

            m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
            w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        """
        clip(self.grad, self.config, grad_norm)
        lr = self.lr()
        self.step_count += 1
        halves = (self._decayed, self._plain)
        if not self._plans:
            self._plans = [table_of(parts) for parts in halves]
        decays = (self.config.weight_decay, 0.0)
        for parts, decay, plan in zip(halves, decays, self._plans, strict=True):
            update(parts, self.config, self.step_count, lr, decay, plan)
        self.write_back()

    def reload(self) -> None:
        super().reload()
        self._plans = []  # the buffers may lie elsewhere now

    @torch.no_grad()
    def write_back(self) -> None:
        """Round the masters into the working copies (nothing to do in fp32)."""
        if self.has_working_copy:
            for slot in self._slots:
                slot.param.copy_(slot.view(self.master))

    @torch.no_grad()
    def read_weights(self) -> None:
        """Take the parameters as the new masters, after somebody else wrote to them."""
        self._require_loaded()
        if self.has_working_copy:
            for slot in self._slots:
                slot.view(self.master).copy_(slot.param)

    def state(self) -> dict[str, Tensor]:
        """Views, by name: `master.*`, `exp_avg.*`, `exp_avg_sq.*`. Writing to them restores."""
        self._require_loaded()
        buffers = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {
            f"{kind}.{slot.name}": slot.view(flat)
            for kind, flat in buffers.items()
            for slot in self._slots
        }

    def offload(self, folder: Path | str | None = None) -> None:
        """Free the gradient and park moments and separate masters until `reload`: from a GPU in
        host memory, from a CPU in a temporary file in `folder`. A second call does nothing."""
        if self._parked is None:
            buffers = [self.exp_avg, self.exp_avg_sq]
            if self.has_working_copy:
                buffers.append(self.master)
            self._parked = Parked(buffers, [self.grad], folder)


class Parked:
    """Flat buffers whose storage is empty while their bytes lie elsewhere. Views stay valid.
    `scratch` comes back without its values."""

    def __init__(
        self, buffers: list[Tensor], scratch: list[Tensor], folder: Path | str | None
    ) -> None:
        self._buffers, self._scratch = buffers, scratch
        self._host: list[Tensor] = []
        self._file = None
        if buffers[0].device.type == "cpu":
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (lives until restore)
            for buffer in buffers:
                self._file.writelines(tensor_bytes(buffer))
            self._file.seek(0)
        else:
            self._host = [buffer.cpu() for buffer in buffers]
        self._sizes = [buffer.untyped_storage().nbytes() for buffer in (*buffers, *scratch)]
        for buffer in (*buffers, *scratch):
            buffer.untyped_storage().resize_(0)

    def restore(self) -> None:
        for buffer, size in zip((*self._buffers, *self._scratch), self._sizes, strict=True):
            buffer.untyped_storage().resize_(size)
        for buffer, source in zip(self._buffers, self._host, strict=False):
            buffer.copy_(source)
        if self._file is not None:
            with self._file as file:
                for buffer in self._buffers:
                    read_tensor(file, buffer)


def lay_out(named: list[tuple[str, nn.Parameter]]) -> tuple[list[Slot], int, int]:
    """Decayed parameters first. Returns (slots, end of the decayed part, total size)."""
    slots: list[Slot] = []
    offset, decay_end = 0, 0
    for decayed in (True, False):
        for name, param in named:
            if (param.ndim >= 2) is decayed:
                slots.append(Slot(name, param, offset))
                offset += -(-param.numel() // ALIGNMENT) * ALIGNMENT
        if decayed:
            decay_end = offset
    return slots, decay_end, offset


def collect_grad(param: nn.Parameter) -> None:
    """Move autograd's gradient into `main_grad`, in the order autograd produces them."""
    if param.grad is not None:
        param.main_grad.add_(param.grad)  # type: ignore[attr-defined]
        param.grad = None


def sum_of_squares(flat: Tensor) -> float:
    """Rows of a fixed length in the buffer's dtype, then fp64: independent of the thread count."""
    num_rows = flat.numel() // NORM_ROW
    body, tail = flat[: num_rows * NORM_ROW], flat[num_rows * NORM_ROW :]
    rows = torch.linalg.vector_norm(body.view(num_rows, NORM_ROW), dim=1)
    parts = [*rows.split(NORM_ROW), tail]
    sums = torch.stack([part.double().square().sum() for part in parts])
    return math.fsum(sums.tolist())  # the one point where the host waits for a GPU's gradients
