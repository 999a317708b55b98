"""AdamW over flat buffers with fp32 masters, clipping by the global norm, learning-rate schedules.

All parameters lie in flat buckets: masters beside two moments and one gradient of the same size,
so that an optimizer step is a handful of passes over memory whatever the model looks like. In fp32
and fp64 the parameter *is* its slice of the master and no copy exists. Where the model computes in
bf16, `param.data` is rounded from the master: on a GPU a working copy beside it, on a CPU one half
of the master, whose other half is a 16-bit remainder (kernels/torch/split_master.py).

Gradients collect in `param.main_grad` (fp32; fp64 for fp64 models): kernels that know it add there
directly, everything else goes through a hook that adds autograd's gradient and drops it.

One process alone has one bucket and owns all of it. Over a mesh, masters, moments, gradients and
parameters can be cut over the ranks that hold the same parameters:

    ZeRO   parameters   gradients   masters + moments     a step moves, per parameter
    0      whole        whole       whole                 all-reduce of the gradient
    1      whole        whole       1/n                   reduce-scatter it, all-gather the weights
    2      whole        1/n         1/n                   the same; the scatter for each micro-batch
    3      1/n          1/n         1/n                   and all-gather twice for each micro-batch

Left out: amsgrad, parameter groups beyond "decayed or not".
Next: parallel/data_parallel.py (buckets and their reduction), parallel/zero.py (what is in memory).
AdamW: Loshchilov and Hutter, "Decoupled weight decay regularization", arXiv 1711.05101.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from kernels import fused_adamw_
from kernels.gpu.tensor_table import TensorTable, make_tensor_table
from nanoengine.config import AdamWConfig
from nanoengine.model.device import release_memory
from nanoengine.model.linear import record_of
from nanoengine.parallel.data_parallel import Bucket, BucketState, GradientReducer, ShardEntry
from nanoengine.parallel.layout import REPLICA_AXES, WORLD, Layout
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.zero import Residency, cut_into_buckets
from nanoengine.tensor_file import read_tensor, tensor_bytes

Kind = Literal["master", "exp_avg", "exp_avg_sq", "grad"]
Flats = tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]
"""Master, gradient, first and second moment, and of masters that are bf16 weights the remainder:
1-d tensors of one size."""

NORM_ROW = 4096  # elements summed in one piece: the result is the same for every thread count


def check_zero(zero: int, layout: Layout) -> None:
    """`ValueError` for a stage that does not exist, or not over a pipeline."""
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero={zero}: must be 0, 1, 2 or 3")
    if zero == 3 and layout.pp > 1:
        raise ValueError(
            "zero=3 with pp > 1: every micro-batch in flight would gather each layer again; "
            "use zero=2, or more dp and no pp"
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


class AdamW:
    """Owns masters, moments and gradients of the trainable parameters of `models`; tied ones come
    once. Weight decay applies to matrices, not to norms and biases.

    `models` are this rank's parts of the model: one, or its pipeline stages. `dtype` is what the
    parameters are converted to (by default they keep theirs); the masters start from the values
    before. Without a mesh this process trains alone.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        config: AdamWConfig,
        mesh: Mesh | None = None,
        *,
        zero: int = 0,
        dtype: torch.dtype | None = None,
        bucket_bytes: int = 25_000_000,
    ) -> None:
        mesh = Mesh(Layout()) if mesh is None else mesh
        check_zero(zero, mesh.layout)
        self.config, self.mesh = config, mesh
        self.zero = zero if mesh.size(REPLICA_AXES) > 1 else 0  # one replica shares with nobody
        self.step_count = 0
        self.phase_start = 0  # the step count at which the schedule began
        first = next(p for model in models for p in model.parameters())
        dtype = first.dtype if dtype is None else dtype
        wide = torch.promote_types(dtype, torch.float32)
        self.has_working_copy = dtype != wide
        self.buckets = [
            Bucket(named, layers, mesh, axes, is_sharded=self.zero > 0, wide=wide)
            for layers, named, axes in cut_into_buckets(models, mesh, self.zero, bucket_bytes, wide)
        ]
        size = sum(bucket.share for bucket in self.buckets)
        flat = partial(torch.zeros, size, device=first.device)
        is_split = dtype == torch.bfloat16 and first.device.type == "cpu"
        keeps_masters = (self.has_working_copy or self.zero == 3) and not is_split
        self._own_masters = flat(dtype=wide) if keeps_masters else None
        self._remainders = flat(dtype=torch.int16) if is_split else None
        self._states = list(self._make_states(dtype))
        release_memory()  # of the parameters as they were: before the moments, or it comes on top
        self.exp_avg, self.exp_avg_sq = flat(dtype=wide), flat(dtype=wide)
        shares = [state.bucket.share for state in self._states]
        moments = self.exp_avg.split(shares), self.exp_avg_sq.split(shares)
        for state, mean, square in zip(self._states, *moments, strict=True):
            state.exp_avg, state.exp_avg_sq = mean, square
        self._decayed, self._spared = self._halves()
        self._plans: list[TensorTable | None] = []  # made at the first step, and after `reload`
        self._parked: Parked | None = None
        self.residency = Residency(mesh, self._states, models) if self.zero >= 2 else None
        self.reducer = GradientReducer(
            mesh,
            self.buckets,
            every_pass=self.zero >= 2,
            when_reduced=self.residency.after_backward if self.residency is not None else None,
        )

    def _make_states(self, dtype: torch.dtype) -> Iterator[BucketState]:
        begin = 0
        for bucket in self.buckets:
            part = slice(begin, begin + bucket.share)
            begin += bucket.share
            own, rest = (x if x is None else x[part] for x in (self._own_masters, self._remainders))
            is_resident = self.zero < 3
            yield BucketState(bucket, dtype, own, remainder=rest, is_resident=is_resident)

    def _halves(self) -> tuple[list[Flats], list[Flats]]:
        """The buffers of decayed parameters and of those that are spared."""
        decayed, spared = [], []
        for state in self._states:
            bucket = state.bucket
            a, b, c, d = state.master, bucket.grad_shard, state.exp_avg, state.exp_avg_sq
            r = state.remainder
            cut = min(max(bucket.decay_end - bucket.begin, 0), bucket.share)
            decayed.append((a[:cut], b[:cut], c[:cut], d[:cut], None if r is None else r[:cut]))
            spared.append((a[cut:], b[cut:], c[cut:], d[cut:], None if r is None else r[cut:]))
        return decayed, spared

    @property
    def needs_equal_passes(self) -> bool:
        """Say whether all data-parallel ranks must run the same number of forward passes."""
        meets_in_passes = self.zero >= 2 or self.mesh.size("ep") > 1
        return meets_in_passes and self.mesh.size(("dp", "ep")) > 1

    # -- one step ----------------------------------------------------------------------------

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
        for bucket in self.buckets:
            bucket.zero_grad()

    def start_pass(self, *, is_last: bool, is_pipeline: bool = False) -> None:
        self.reducer.start_pass(is_last=is_last, is_pipeline=is_pipeline)

    def end_pass(self) -> None:
        self.reducer.end_pass()

    def finish_gradients(self) -> None:
        self.reducer.finish()

    def grad_norm(self) -> float:
        """The L2 norm of the whole model's gradient, accumulated in fp64; NaN or inf if any entry
        is. Every element counts once, however many ranks hold it.

        One collective of all ranks, whatever a rank holds: a pipeline stage without experts meets
        those with them."""
        total = self.mesh.sum_float(WORLD, math.fsum(self._sums_of_squares()))[0]
        return math.sqrt(total) if math.isfinite(total) else total

    def _sums_of_squares(self) -> Iterator[float]:
        for bucket in self.buckets:
            if self.mesh.size() == 1:  # nobody else holds a part of it: in one go
                yield sum_of_squares(bucket.grad)
            elif bucket.num_shards > 1 or self.mesh.rank(bucket.axes) == 0:  # of copies the first
                for entry in bucket.entries():
                    if self._counts(entry.slot.param):
                        yield sum_of_squares(entry.of(bucket.grad_shard))

    def _counts(self, parameter: Tensor) -> bool:
        """Tensor-parallel ranks share small parameters, pipeline stages a tied embedding."""
        record = record_of(parameter)
        return not record.is_copy and (record.slice is not None or self.mesh.rank("tp") == 0)

    def lr(self) -> float:
        """The learning rate of the next update."""
        return lr_at(self.config, self.step_count - self.phase_start)

    def step(self, grad_norm: float) -> None:
        """Clip to `max_grad_norm` given the norm just measured, update this rank's masters and
        moments, and give all ranks the new weights. The gradient stays as it is.

            m = b1 m + (1 - b1) g        v = b2 v + (1 - b2) g^2
            w = w (1 - lr wd) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)
        """
        lr = self.lr()
        self.step_count += 1
        scale = clip_factor(self.config, grad_norm)
        halves = (self._decayed, self._spared)
        if not self._plans:
            self._plans = [table_of(parts) for parts in halves]
        decays = (self.config.weight_decay, 0.0)
        for parts, decay, plan in zip(halves, decays, self._plans, strict=True):
            update(parts, self.config, self.step_count, lr, decay, scale, plan)
        self.write_back()

    def write_back(self) -> None:
        """Round the masters into the weights and give every rank the whole ones (ZeRO-1, 2); with
        ZeRO-3 whatever is gathered is out of date and goes."""
        self.release()
        handles = []
        for state in self._states:
            state.round()
            if self.zero < 3:
                handles.append(state.gather(self.mesh))
        for handle in handles:
            handle.wait()

    @torch.no_grad()
    def read_weights(self) -> None:
        """Take the parameters as the new masters, after somebody else wrote to them. With ZeRO-3
        call it inside `gathered`."""
        self._require_loaded()
        for state in self._states:
            state.read()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """The whole parameters are here (they always are, except with ZeRO-3)."""
        if self.residency is not None:
            self.residency.fetch_all()
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        """Free the parameters of other ranks (ZeRO-3), after each forward or training step."""
        if self.residency is not None:
            self.residency.release_all()

    # -- memory and state --------------------------------------------------------------------

    def entries(self, kind: Kind) -> Iterator[tuple[ShardEntry, Tensor]]:
        """Yield what this rank owns: elements lo:hi of each (flattened, tensor-parallel part of a)
        parameter with their values, 1-d. Writing to the values before the next ones are taken
        restores them; then `write_back`."""
        self._require_loaded()
        for state in self._states:
            if kind == "master":
                yield from state.masters()
                continue
            shard = state.bucket.grad_shard if kind == "grad" else getattr(state, kind)
            for entry in state.bucket.entries():
                yield entry, entry.of(shard)

    def offload(self, folder: Path | str | None = None) -> None:
        """Free the gradients and park moments and separate masters until `reload`: from a GPU in
        host memory, from a CPU in a temporary file in `folder`. A second call does nothing."""
        if self._parked is None:
            buffers = [self.exp_avg, self.exp_avg_sq]
            if self._own_masters is not None and (self.zero < 3 or self.has_working_copy):
                buffers.append(self._own_masters)
            if self._remainders is not None:
                buffers.append(self._remainders)
            scratch = {id(t): t for b in self.buckets for t in (b.grad, b.grad_shard)}
            whole = [t for t in scratch.values() if t.untyped_storage().nbytes()]
            self._parked = Parked(buffers, whole, folder)

    def reload(self) -> None:
        if self._parked is not None:
            self._parked.restore()
            self._parked = None
        self._plans = []  # the buffers may lie elsewhere now

    def _require_loaded(self) -> None:
        if self._parked is not None:
            raise ValueError("the optimizer is offloaded: call reload() first")


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
    plan: TensorTable | None = None,
) -> None:
    """One AdamW update, in place, of flat buffers and with their gradients times `grad_scale`.
    `plan` is `table_of(parts)`, for parts that come again at every step."""
    parts = [part for part in parts if part[0].numel()]
    if not parts:
        return
    rests = [part[4] for part in parts if part[4] is not None]
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


def table_of(parts: list[Flats]) -> TensorTable | None:
    """Return the table of `parts` that a GPU's kernel reads; None on a CPU, and without parts."""
    parts = [part for part in parts if part[0].numel()]
    if not parts or parts[0][0].device.type == "cpu":
        return None
    masters, *others = _columns(parts)
    return make_tensor_table(masters, *others, masters)


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
