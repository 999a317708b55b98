"""The training engine: log-probs of samples, one optimizer step, save and resume.

One step, read top to bottom in `train_step`: pack the samples into micro-batches, for each run the
model, take the log-probs of the counted tokens, ask the caller's loss for a *sum*, divide it by one
weight of the whole batch and go backward; then clip, update, and refresh the prepacked weights.
Because every loss is a sum over tokens divided by the same number, the gradient does not depend
on how the batch was cut into micro-batches.

The engine owns the masters and moments (`optim.py`); the model it was given stays the caller's and
always holds the current weights, so an inference engine in the same process can share it.

Over a mesh of processes every rank calls the same methods, with the samples of its own place on
the data axes (tp, cp and pp neighbours pass the same ones; a rank may have none). Losses and
gradients are sums over all ranks divided by one weight summed over all ranks, so they do not
depend on how the batch was dealt out either.

Left out: losses, which belong to the algorithm.
Next: scoring.py (a micro-batch's log-probs), optim.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, Protocol, overload, runtime_checkable

import torch
from torch import Tensor

from kernels.host_memory import release_memory
from nanoengine.config import EngineConfig
from nanoengine.dtypes import DTYPES
from nanoengine.formats import hf
from nanoengine.model.attention import supports_shared_prefix
from nanoengine.model.transformer import Transformer
from nanoengine.optim import AdamW, Kind
from nanoengine.packing import (
    MicroBatch,
    Sample,
    TopTokens,
    add_sums,
    collect_all,
    idle_micro_batch,
    read_sums,
)
from nanoengine.parallel.expert_parallel import ExpertParallel
from nanoengine.parallel.layout import DATA_AXES, WORLD, Layout
from nanoengine.parallel.mesh import Mesh
from nanoengine.parallel.parameter_record import record_of
from nanoengine.parallel.tensor_parallel import TensorParallel, gather_slice
from nanoengine.scoring import Foresight, Scorer, collect_top
from nanoengine.state.checkpoint import (
    Checkpoint,
    get_rng_state,
    open_checkpoint,
    rng_pieces,
    set_rng_state,
)
from nanoengine.state.checkpoint_writer import CheckpointWriter
from nanoengine.state.fingerprint import fingerprints
from nanoengine.state.slices import Held, Piece, cut_parameter
from nanoengine.tensor_file import CheckpointError, dtype_name

LossFn = Callable[[Tensor, Tensor | None, MicroBatch], tuple[Tensor, Mapping[str, Tensor | float]]]
"""(logp_T, entropy_T or None, micro-batch) -> (sum over tokens, {name: sum of a statistic}).

Entries whose loss_mask_T is 0 hold logp 0 and entropy 0."""


@runtime_checkable
class ForeseeingLoss(Protocol):
    """A `LossFn` that can tell the log-probs it will meet, or ones at which its gradient is the
    same: a step then needs one product of the head less. A wrong guess changes nothing else."""

    def __call__(
        self, logp_T: Tensor, entropy_T: Tensor | None, micro: MicroBatch
    ) -> tuple[Tensor, Mapping[str, Tensor | float]]: ...

    def foreseen_logp(self, micro: MicroBatch) -> Tensor | None:
        """logp_T, or None where it cannot tell."""
        ...


WeightFn = Callable[[Sequence[Sample]], float]

_CUBLAS_CHOICE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")
"""NVIDIA's two (cuBLAS documentation, "Results reproducibility"); the first is the faster one."""


class NonFiniteLoss(RuntimeError):  # noqa: N818 (the name of the event, as StopIteration)
    """A loss or gradient was NaN or infinite; weights and moments are as before the step."""


def require_deterministic_cublas() -> None:
    """Make cuBLAS add in the same order every time. It reads this choice once, when CUDA starts,
    so whoever trains with `deterministic` calls this before anything touches a GPU; raises
    ValueError where it is too late or another choice was made."""
    chosen, best = os.environ.get(_CUBLAS_CHOICE), _DETERMINISTIC_CUBLAS[0]
    if chosen is None and not torch.cuda.is_initialized():
        os.environ[_CUBLAS_CHOICE] = chosen = best
    if chosen not in _DETERMINISTIC_CUBLAS:
        state = "not set, and CUDA has started" if chosen is None else f"{chosen!r}"
        raise ValueError(
            f"deterministic=True: {_CUBLAS_CHOICE} is {state}; it must be "
            f"{' or '.join(_DETERMINISTIC_CUBLAS)} before the program first uses a GPU: run it as "
            f"{_CUBLAS_CHOICE}={best} COMMAND"
        )


class Engine:
    """Trains `model`, which it converts to `config.dtype` in place. `version` counts updates."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        mesh: Mesh | None = None,
        *,
        stages: Sequence[Transformer] = (),
    ) -> None:
        """Without a mesh, or with one of a single rank, this process trains alone. `stages` are
        for `PipelineEngine`: all parts that this rank holds, `model` among them."""
        if config.share_prefix and not supports_shared_prefix(model.device):
            raise ValueError(f"share_prefix=True: not available on {model.device}; set it to False")
        self._check_model(model)
        if config.deterministic and model.device.type == "cuda":
            require_deterministic_cublas()
        mesh = Mesh(Layout()) if mesh is None else mesh
        _check_mesh(model, config, mesh, is_pipeline=bool(stages))
        self.model = model
        self.models = list(stages) if stages else [model]
        for part in self.models:
            part.batch_invariant = part.batch_invariant or config.deterministic
        self._saver: CheckpointWriter | None = None
        self.config = config
        self.mesh = mesh
        self.version = 0
        self.last_logps: list[Tensor] = []  # of the last train_step, before its update
        self.last_entropies: list[Tensor] = []  # likewise; empty where it was not asked for them
        dtype = DTYPES[config.dtype]
        self.optimizer = self._make_optimizer(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        for part in self.models:
            for buffer in part.buffers():  # rope tables: as wide as the masters
                buffer.data = buffer.to(wide)
            if config.lm_head_fp32 and dtype == torch.bfloat16:
                part.head_dtype = torch.float32
        self._scorer = Scorer(
            model,
            mesh,
            micro_batch_tokens=config.micro_batch_tokens,
            share_prefix=config.share_prefix,
            activation_checkpointing=config.activation_checkpointing,
            activation_mb=config.activation_mb,
        )
        self._refresh()

    def _check_model(self, model: Transformer) -> None:
        """`ValueError` for a model that cannot be trained."""
        if model.quantization is not None:
            raise ValueError(
                "model: its matrices are quantised, and those have no gradient; give the trainer a "
                "model of its own, or train an adapter over int8 (LoraEngine)"
            )

    def _make_optimizer(self, dtype: torch.dtype) -> AdamW:
        """The optimizer of all that is trained; it converts the models to `dtype`."""
        return AdamW(
            self.models,
            self.config,
            self.mesh,
            zero=self.config.zero,
            dtype=dtype,
            bucket_bytes=self.config.bucket_bytes,
        )

    def restart(self, config: EngineConfig) -> None:
        """Another phase of training on the same weights: its own schedule, version 0, no momentum
        (see `AdamW.restart`)."""
        if config.dtype != self.config.dtype:
            raise ValueError(
                f"dtype={config.dtype!r}: this engine computes in {self.config.dtype}, and a phase "
                "keeps the dtype; make another engine"
            )
        if config.zero != self.config.zero:
            raise ValueError(
                f"zero={config.zero}: the state of this engine is cut for zero={self.config.zero}, "
                "and a phase keeps it; make another engine"
            )
        self.config = config
        self.version = 0
        self.optimizer.restart(config)

    # -- log-probs ---------------------------------------------------------------------------

    @overload
    def forward_logprobs(
        self,
        samples: Sequence[Sample],
        *,
        temperature: float = 1.0,
        entropy: Literal[False] = False,
        only_masked: bool = False,
    ) -> list[Tensor]: ...

    @overload
    def forward_logprobs(
        self,
        samples: Sequence[Sample],
        *,
        temperature: float = 1.0,
        entropy: Literal[True],
        only_masked: bool = False,
    ) -> tuple[list[Tensor], list[Tensor]]: ...

    @torch.no_grad()
    def forward_logprobs(
        self,
        samples: Sequence[Sample],
        *,
        temperature: float = 1.0,
        entropy: bool = False,
        only_masked: bool = False,
    ) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
        """For each sample its logps (and entropies), one for each token: entry t is of tokens[t]
        given the tokens before it, entry 0 is 0. `only_masked` leaves 0 where loss_mask is 0.
        """
        logps, entropies = self._score(samples, temperature, entropy, only_masked)
        return (logps, entropies) if entropy else logps

    def _score(
        self, samples: Sequence[Sample], temperature: float, entropy: bool, only_masked: bool
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Log-probs and, if asked for, entropies of each sample's tokens."""
        micros = self._passes(samples)
        with self._kernels():
            scored = [
                self._scorer.logprobs(micro, temperature, entropy=entropy, only_masked=only_masked)
                for micro in micros
            ]
        self.optimizer.release()
        logps = collect_all(samples, micros, [one.logp_T for one in scored])
        if not entropy:
            return logps, []
        entropies = [one.entropy_T for one in scored if one.entropy_T is not None]
        return logps, collect_all(samples, micros, entropies)

    @torch.no_grad()
    def forward_top(
        self, samples: Sequence[Sample], k: int, *, temperature: float = 1.0
    ) -> list[TopTokens]:
        """For each sample the k likeliest tokens, likeliest first, in place of each token whose
        loss mask is not 0, and their log-probs."""
        micros = self._passes(samples)
        with self._kernels():
            found = [self._scorer.top(micro, k, temperature) for micro in micros]
        self.optimizer.release()
        return collect_top(samples, micros, found)

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        if not samples and self.mesh.size(DATA_AXES) > 1:
            return []
        return self._scorer.micro_batches(samples)

    def _passes(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches, and as many without any sample as it takes for all ranks to meet in
        the same collectives."""
        micros = self._micro_batches(samples)
        if self.optimizer.needs_equal_passes:
            num_passes = self.mesh.max_int(DATA_AXES, len(micros))
            micros += [idle_micro_batch(self.model.device)] * (num_passes - len(micros))
        return micros

    # -- one optimizer step ------------------------------------------------------------------

    def train_step(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight_fn: WeightFn | None = None,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> dict[str, float]:
        """Update the weights once. Returns loss, grad_norm (before clipping), lr, and the sums of
        the loss function's statistics under their own names.

        The loss is the sum over all micro-batches of all ranks, divided by `weight_fn(samples)`
        summed over all ranks (1 without one); the statistics are sums over all ranks too.
        Raises NonFiniteLoss, with weights and moments untouched.
        """
        weight = 1.0 if weight_fn is None else float(weight_fn(samples))
        if weight_fn is not None and self.mesh.size(DATA_AXES) > 1:
            weight = self.mesh.sum_float(DATA_AXES, weight)[0]
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"weight_fn gave {weight}: must be positive; a batch without any counted token "
                "cannot be trained on, drop it"
            )
        self.optimizer.zero_grad()
        with self._packed_lent():
            loss, stats = self.forward_backward(
                samples, loss_fn, weight, temperature=temperature, entropy=entropy
            )
            if not math.isfinite(loss):
                raise NonFiniteLoss(self._explain(f"the loss is {loss}"))
            return {"loss": loss, **self.update(), **stats}

    @contextmanager
    def _packed_lent(self) -> Iterator[None]:
        """Inside, until the update, activations have the memory of the prepacked copies."""
        for part in self.models:
            part.lend_packed()
        try:
            yield
        except BaseException:
            for part in self.models:
                part.restore_packed()
            raise

    def forward_backward(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight: float = 1.0,
        *,
        temperature: float = 1.0,
        entropy: bool = False,
    ) -> tuple[float, dict[str, float]]:
        """The first half of a step: add the gradient of the loss over `weight`, the same on all
        ranks, to what `optimizer.zero_grad` left. Returns the loss and the sums of statistics, over
        all ranks."""
        loss, stats = self._accumulate_gradients(samples, loss_fn, weight, temperature, entropy)
        if self.mesh.size(DATA_AXES) > 1:
            loss, stats = self._sum_over_ranks(loss, stats)
        return loss, stats

    def update(self) -> dict[str, float]:
        """The second half of a step: clip, update, bring every copy of the weights up to date.
        Returns grad_norm (before clipping) and lr. Raises NonFiniteLoss as `train_step` does."""
        grad_norm = self.optimizer.grad_norm()
        if not math.isfinite(grad_norm):
            raise NonFiniteLoss(self._explain(f"the gradient norm is {grad_norm}"))
        lr = self.optimizer.lr()
        self.optimizer.step(grad_norm)
        self._refresh()
        self.version += 1
        return {"grad_norm": grad_norm, "lr": lr}

    def _accumulate_gradients(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight: float,
        temperature: float,
        entropy: bool,
    ) -> tuple[float, dict[str, float]]:
        losses: list[Tensor] = []
        logps: list[Tensor] = []
        entropies: list[Tensor] = []
        sums_of: list[Mapping[str, Tensor | float]] = []
        micros = self._passes(samples)
        with self._kernels():
            for i, micro in enumerate(micros):
                self.optimizer.start_pass(is_last=i == len(micros) - 1)
                scored = self._scorer.logprobs(
                    micro,
                    temperature,
                    entropy=entropy,
                    only_masked=True,
                    foresight=None if entropy else _foresight(loss_fn, micro, weight),
                )
                logp_T, entropy_T, _ = scored
                if not micro.index:
                    (logp_T.sum() * 0).backward()
                    self.optimizer.end_pass()
                    continue
                loss_sum, sums = loss_fn(logp_T, entropy_T, scored.told(micro))
                loss = loss_sum / weight
                losses.append(loss.detach())
                if self.optimizer.needs_equal_passes and not loss.requires_grad:
                    loss = loss + logp_T.sum() * 0
                if loss.requires_grad:
                    loss.backward()
                self.optimizer.end_pass()
                logps.append(logp_T.detach())
                if entropy_T is not None:
                    entropies.append(entropy_T.detach())
                sums_of.append(sums)
                del scored, logp_T, entropy_T, loss_sum, loss  # and what the backward pass kept
        self.optimizer.finish_gradients()
        trained = [micro for micro in micros if micro.index]
        self.last_logps = collect_all(samples, trained, logps)
        self.last_entropies = collect_all(samples, trained, entropies) if entropies else []
        return read_sums(losses, sums_of)

    def _sum_over_ranks(
        self, loss: float, stats: dict[str, float]
    ) -> tuple[float, dict[str, float]]:
        """Added in the order of the ranks, so all get the same bits."""
        total, sums = 0.0, dict[str, float]()
        for part_loss, part_stats in self.mesh.gather_json(DATA_AXES, [loss, stats]):
            total += part_loss
            add_sums(sums, part_stats)
        return total, sums

    def _explain(self, what: str) -> str:
        return (
            f"update {self.version}: {what}; weights and moments are untouched. Lower lr="
            f"{self.config.lr}, look at the rewards and advantages of this batch, or resume from "
            "an earlier checkpoint"
        )

    def _refresh(self) -> None:
        """Bring every copy of the weights up to date with the parameters."""
        for part in self.models:
            if self.optimizer.zero == 3:
                part.forget_packed()
            else:
                part.repack()

    @contextmanager
    def _kernels(self) -> Iterator[None]:
        if not (self.config.deterministic and self.model.device.type == "cuda"):
            yield
            return
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)

    # -- weights, memory, disk ---------------------------------------------------------------

    def export_state(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Each Hugging Face tensor once; views where `dtype` is the model's own. Split tensors
        are put together, on every rank: all must run through the iterator."""
        comes_and_goes = self.optimizer.zero == 3
        with self.optimizer.gathered():
            slices = hf.hf_slices(self.model)
            for name, view in hf.export_state(self.model, dtype):
                if self.model.experts is not None and hf.is_expert(name):
                    yield from hf.gather_expert(name, view, self.model.experts)
                    continue
                if name in slices:
                    view = gather_slice(self.mesh, view, slices[name])
                yield name, view.clone() if comes_and_goes else view

    def fingerprints(self) -> dict[str, str]:
        """Of each tensor that `export_state` gives, by name: equal weights have equal ones."""
        return fingerprints(self.export_state())

    def load_weights(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights (strictly, by Hugging Face name); the moments stay. Every rank takes
        its part of the whole tensors."""
        with self.optimizer.gathered():
            hf.load_state(self.model, state)
            self.optimizer.read_weights()
        self._refresh()

    def offload(self, folder: Path | str | None = None) -> None:
        """Park the optimizer's memory until `reload`: from a GPU in host memory, from a CPU in a
        temporary file (in `folder`; the system's place without one). The weights stay usable."""
        self.optimizer.offload(folder)

    def reload(self) -> None:
        self.optimizer.reload()

    def save(
        self,
        path: Path | str,
        cursor: Mapping[str, Any] | None = None,
        *,
        in_background: bool = False,
    ) -> Path | None:
        """Write a checkpoint under `path` (see checkpoint.py) and return its folder.

        `cursor` is the caller's own JSON, such as where the data stands; `load` gives it back.
        All ranks of a mesh call it, each writes its part. `in_background` returns None once the
        state is copied; `wait_saved`, or the next save, waits for the rest.
        """
        release_memory()  # masters of bf16 weights are made for it, and may find no gap that fits
        rng_tensors, rng_values = get_rng_state(self.model.device)
        meta = {
            "version": self.version,
            "step_count": self.optimizer.step_count,
            "dtype": self.config.dtype,
            "rng": rng_values,
            "cursor": dict(cursor or {}),
        }
        if self._saver is None or self._saver.root != Path(path):
            self.wait_saved()
            mesh = self.mesh if self.mesh.size() > 1 else None
            self._saver = CheckpointWriter(path, mesh, keep=self.config.keep_checkpoints)
        held = [*optimizer_pieces(self.optimizer), *rng_pieces(self.mesh.rank(), rng_tensors)]
        rank_meta = {"rng": rng_values}
        self._saver.save(self.version, held, meta, rank_meta, in_background=in_background)
        return None if in_background else self._saver.wait()

    def wait_saved(self) -> Path | None:
        """Wait until the last background save is complete; raises its CheckpointError."""
        return None if self._saver is None else self._saver.wait()

    def load(self, path: Path | str) -> dict[str, Any]:
        """Take over a checkpoint of any layout, or the latest under a root; what follows is
        bit-equal to a run that was never interrupted (of another layout: equal but for the order
        of sums). Returns the cursor. On CheckpointError nothing has changed, on any rank."""
        self.wait_saved()
        checkpoint = _open_together(Path(path), self.mesh)
        _check(checkpoint, [piece for piece, _ in _pieces(self.optimizer)], self.mesh)
        for piece, tensor in _pieces(self.optimizer):
            checkpoint.read_box(piece.name, piece.box, tensor)
        meta = checkpoint.meta
        self.optimizer.step_count = meta["step_count"]
        self.optimizer.phase_start = meta["step_count"] - meta["version"]
        self.optimizer.write_back()
        self.version = meta["version"]
        self._restore_random_states(checkpoint)
        self._refresh()
        cursor: dict[str, Any] = meta["cursor"]
        return cursor

    def _restore_random_states(self, checkpoint: Checkpoint) -> None:
        """They belong to ranks: of as many ranks as wrote each gets its own back, else all get
        rank 0's."""
        rank, values = 0, checkpoint.meta["rng"]
        if len(checkpoint.ranks) == self.mesh.size():
            rank = self.mesh.rank()
            values = checkpoint.ranks[rank]["rng"]
        prefix = "rng." if rank == 0 else f"rng.{rank}."
        names = [n.replace(prefix, "rng.", 1) for n in checkpoint.names() if n.startswith(prefix)]
        set_rng_state(
            self.model.device,
            names,
            lambda name: checkpoint.read(name.replace("rng.", prefix, 1)),
            values,
        )


def _foresight(loss_fn: LossFn, micro: MicroBatch, weight: float) -> Foresight | None:
    if not (micro.index and isinstance(loss_fn, ForeseeingLoss)):
        return None
    logp_T = loss_fn.foreseen_logp(micro)
    if logp_T is None:
        return None
    return Foresight(logp_T, lambda logp_T: loss_fn(logp_T, None, micro)[0] / weight)


def _check_mesh(model: Transformer, config: EngineConfig, mesh: Mesh, *, is_pipeline: bool) -> None:
    if mesh.size("pp") > 1 and not is_pipeline:
        raise ValueError(f"{mesh.layout}: pp > 1 needs a PipelineEngine")
    if mesh.size("ep") > 1 and (
        not isinstance(model.experts, ExpertParallel) or model.experts.mesh is not mesh
    ):
        raise ValueError(
            f"the model's experts are not split over this mesh (ep={mesh.size('ep')}): build it "
            "with Transformer(config, experts=ExpertParallel.of(mesh, config))"
        )
    if mesh.size("cp") > 1 and config.share_prefix:
        raise ValueError("share_prefix=True: not available with cp > 1; set it to False")
    if mesh.size("tp") == 1 and model.split.size == 1:
        return
    if not isinstance(model.split, TensorParallel) or model.split.mesh is not mesh:
        raise ValueError(
            f"the model is not split over this mesh (tp={mesh.size('tp')}): build it with "
            "Transformer(config, split=TensorParallel.of(mesh, config))"
        )


def optimizer_pieces(optimizer: AdamW) -> Held:
    """Masters and moments that this rank owns, by the names of the whole model's parameters
    (`master.layers.0.qkv.weight`)."""
    return list(_pieces(optimizer))


def _pieces(optimizer: AdamW) -> Iterator[tuple[Piece, Tensor]]:
    """The same one by one; writing to a tensor before the next is taken restores it."""
    kinds: tuple[Kind, ...] = ("master", "exp_avg", "exp_avg_sq")
    for kind in kinds:
        for entry, values in optimizer.entries(kind):
            parameter = entry.slot.param
            name = f"{kind}.{entry.slot.name}"
            yield from cut_parameter(
                name, parameter.shape, record_of(parameter).slice, values, entry.lo
            )


def _open_together(path: Path, mesh: Mesh) -> Checkpoint:
    """Each rank verifies a share of the files; what one finds damaged, all refuse."""
    problem, checkpoint = "", None
    try:
        checkpoint = open_checkpoint(path, (mesh.rank(), mesh.size()))
    except CheckpointError as error:
        problem = str(error)
    _refuse_together(problem, mesh)
    assert checkpoint is not None, "no problem, so there is a checkpoint"
    return checkpoint


def _check(checkpoint: Checkpoint, wanted: list[Piece], mesh: Mesh) -> None:
    """The ranks together want exactly what is stored, in the shapes and dtypes stored."""
    mine = {piece.name: [list(piece.whole), piece.dtype] for piece in wanted}
    everyone: dict[str, Any] = {}
    for names in mesh.gather_json(WORLD, mine):
        everyone |= names
    stored = {
        name: [list(checkpoint.shape(name)), dtype_name(checkpoint.dtype(name))]
        for name in checkpoint.names()
        if not name.startswith("rng.")
    }
    problems = [f"{name} is missing" for name in everyone if name not in stored]
    problems += [f"{name} is unknown" for name in stored if name not in everyone]
    problems += [
        f"{name} is {stored[name][1]} {tuple(stored[name][0])}, must be {dtype} {tuple(shape)}"
        for name, (shape, dtype) in everyone.items()
        if name in stored and stored[name] != [shape, dtype]
    ]
    if problems:
        raise CheckpointError(
            f"checkpoint {checkpoint.folder} is of another model ({'; '.join(problems[:3])}). "
            "Resume with the model and dtype it was written with"
        )


def _refuse_together(problem: str, mesh: Mesh) -> None:
    problems = [text for text in mesh.gather_json(WORLD, problem) if text]
    if problems:
        raise CheckpointError(problems[0])
