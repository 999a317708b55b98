"""The training engine: log-probs of samples, one optimizer step, save and resume.

One step, read top to bottom in `train_step`: pack the samples into micro-batches, for each run the
model, take the log-probs of the counted tokens, ask the caller's loss for a *sum*, divide it by one
weight of the whole batch and go backward; then clip, update, and refresh the prepacked weights.
Because every loss is a sum over tokens divided by the same number, the gradient does not depend
on how the batch was cut into micro-batches.

The engine owns the masters and moments (`optim.py`); the model it was given stays the caller's and
always holds the current weights, so an inference engine in the same process can share it.

Left out: more than one device (`parallel/` wraps this), and losses, which belong to the algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import Tensor

from kernels import linear_logprob, pack_weight
from nanoengine.checkpoint import CheckpointError, open_checkpoint, save_checkpoint
from nanoengine.model import hf
from nanoengine.model.attention import AttentionContext, PackedContext
from nanoengine.model.shared_prefix import SharedPrefixContext, supports_shared_prefix
from nanoengine.model.transformer import Transformer
from nanoengine.optim import AdamW, AdamWConfig
from nanoengine.packing import MicroBatch, Sample, make_micro_batches
from nanoengine.rng import get_rng_state, set_rng_state

LossFn = Callable[[Tensor, Tensor | None, MicroBatch], tuple[Tensor, Mapping[str, Tensor | float]]]
"""(logp_T, entropy_T or None, micro-batch) -> (sum over tokens, {name: sum of a statistic}).

Entries whose loss_mask_T is 0 hold logp 0 and entropy 0."""

WeightFn = Callable[[Sequence[Sample]], float]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}


class NonFiniteLoss(RuntimeError):  # noqa: N818 (the name of the event, as StopIteration)
    """A loss or gradient was NaN or infinite; weights and moments are as before the step."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig(AdamWConfig):
    """How the engine computes; what it inherits says how it updates."""

    dtype: Literal["fp32", "bf16", "fp64"] = "fp32"  # parameters and matmuls; masters stay fp32
    micro_batch_tokens: int = 2048  # rows of the model in one forward and backward pass
    share_prefix: bool = False  # read the common leading tokens of a group once
    activation_checkpointing: bool = False  # less memory, a third more work, the same bits
    lm_head_fp32: bool = False  # output head in fp32 over a bf16 model
    deterministic: bool = False  # GPU: only run-to-run deterministic kernels. A CPU always is
    keep_checkpoints: int = 2

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype!r}: must be one of {', '.join(DTYPES)}")
        if self.micro_batch_tokens < 1:
            raise ValueError(f"micro_batch_tokens={self.micro_batch_tokens}: must be at least 1")
        if self.keep_checkpoints < 1:
            raise ValueError(f"keep_checkpoints={self.keep_checkpoints}: must be at least 1")


class Engine:
    """Trains `model`, which it converts to `config.dtype` in place. `version` counts updates."""

    def __init__(self, model: Transformer, config: EngineConfig) -> None:
        if config.share_prefix and not supports_shared_prefix(model.device):
            raise ValueError(f"share_prefix=True: not available on {model.device}; set it to False")
        self.model = model
        self.config = config
        self.version = 0
        self.last_logps: list[Tensor] = []  # of the last train_step, before its update
        self.optimizer = AdamW(model.named_parameters(), config, dtype=DTYPES[config.dtype])
        for buffer in model.buffers():  # rope tables: as wide as the masters
            buffer.data = buffer.to(self.optimizer.master.dtype)
        self._head_packed: Tensor | None = None
        self._refresh()

    def restart(self, config: EngineConfig) -> None:
        """Another phase of training on the same weights: its own schedule, version 0, no momentum
        (see `AdamW.restart`)."""
        if config.dtype != self.config.dtype:
            raise ValueError(
                f"dtype={config.dtype!r}: this engine computes in {self.config.dtype}, and a phase "
                "keeps the dtype; make another engine"
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
        logps = _empty_like_tokens(samples)
        entropies = _empty_like_tokens(samples)
        with self._kernels():
            for micro in self._micro_batches(samples):
                logp_T, entropy_T = self._logprobs(micro, temperature, entropy, only_masked)
                _collect(logps, micro, logp_T)
                if entropy_T is not None:
                    _collect(entropies, micro, entropy_T)
        return (logps, entropies) if entropy else logps

    def _logprobs(
        self, micro: MicroBatch, temperature: float, entropy: bool, only_masked: bool
    ) -> tuple[Tensor, Tensor | None]:
        """logp_T and entropy_T; only the rows that predict something reach the output head."""
        hidden_ND = self.model(
            micro.ids_N,
            micro.positions_N,
            self._context(micro),
            activation_checkpointing=self.config.activation_checkpointing,
        )
        rows, targets, picked = micro.rows_T, micro.target_ids_T, None
        if only_masked:
            picked = micro.loss_mask_T.nonzero().squeeze(1)
            rows = picked if rows is None else rows[picked]
            targets = targets[picked]
        hidden_PD = hidden_ND if rows is None else hidden_ND.index_select(0, rows)
        is_wide = self._head_packed is not None
        scored = linear_logprob(
            hidden_PD,
            self.model.lm_head_weight,
            targets,
            temperature=temperature,
            return_entropy=entropy,
            packed=self._head_packed if is_wide else self.model.lm_head_packed,
            logits_dtype=torch.float32 if is_wide else None,
        )
        logp_T, entropy_T = scored if isinstance(scored, tuple) else (scored, None)
        if picked is not None:
            zeros_T = torch.zeros(len(micro.target_ids_T), dtype=logp_T.dtype, device=logp_T.device)
            logp_T = zeros_T.index_copy(0, picked, logp_T)
            if entropy_T is not None:
                entropy_T = zeros_T.index_copy(0, picked, entropy_T)
        return logp_T, entropy_T

    def _context(self, micro: MicroBatch) -> AttentionContext:
        if micro.prefix_of_S is None:
            return PackedContext(micro.cu_seqlens, micro.max_seqlen)
        return SharedPrefixContext(micro.cu_seqlens, micro.prefix_of_S, self.model.dtype)

    def _micro_batches(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        return make_micro_batches(
            samples,
            self.config.micro_batch_tokens,
            share_prefix=self.config.share_prefix,
            device=self.model.device,
        )

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

        The loss is the sum over all micro-batches divided by `weight_fn(samples)` (1 without one).
        Raises NonFiniteLoss, with weights and moments untouched.
        """
        weight = 1.0 if weight_fn is None else float(weight_fn(samples))
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"weight_fn gave {weight}: must be positive; a batch without any counted token "
                "cannot be trained on, drop it"
            )
        loss, stats = self._accumulate_gradients(samples, loss_fn, weight, temperature, entropy)
        grad_norm = self.optimizer.grad_norm()
        if not math.isfinite(grad_norm):
            raise NonFiniteLoss(self._explain(f"the gradient norm is {grad_norm}"))
        lr = self.optimizer.lr()
        self.optimizer.step(grad_norm)
        self._refresh()
        self.version += 1
        return {"loss": loss, "grad_norm": grad_norm, "lr": lr, **stats}

    def _accumulate_gradients(
        self,
        samples: Sequence[Sample],
        loss_fn: LossFn,
        weight: float,
        temperature: float,
        entropy: bool,
    ) -> tuple[float, dict[str, float]]:
        self.optimizer.zero_grad()
        total = 0.0
        stats: dict[str, float] = {}
        logps = _empty_like_tokens(samples)
        with self._kernels():
            for micro in self._micro_batches(samples):
                logp_T, entropy_T = self._logprobs(micro, temperature, entropy, only_masked=True)
                loss_sum, sums = loss_fn(logp_T, entropy_T, micro)
                loss = loss_sum / weight
                total += float(loss.detach())
                if not math.isfinite(total):
                    raise NonFiniteLoss(self._explain(f"the loss is {float(loss.detach())}"))
                if loss.requires_grad:
                    loss.backward()
                _collect(logps, micro, logp_T.detach())
                for name, value in sums.items():
                    value = value.detach() if isinstance(value, Tensor) else value
                    stats[name] = stats.get(name, 0.0) + float(value)
        self.last_logps = logps
        return total, stats

    def _explain(self, what: str) -> str:
        return (
            f"update {self.version}: {what}; weights and moments are untouched. Lower lr="
            f"{self.config.lr}, look at the rewards and advantages of this batch, or resume from "
            "an earlier checkpoint"
        )

    def _refresh(self) -> None:
        """Bring every copy of the weights up to date with the parameters."""
        self.model.repack()
        if self.config.lm_head_fp32 and self.model.dtype == torch.bfloat16:
            self._head_packed = pack_weight(self.model.lm_head_weight.detach().float())

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
        """Each Hugging Face tensor once; views where `dtype` is the model's own."""
        return hf.export_state(self.model, dtype)

    def load_weights(self, state: Iterable[tuple[str, Tensor]]) -> None:
        """Replace the weights (strictly, by Hugging Face name); the moments stay."""
        hf.load_state(self.model, state)
        self.optimizer.read_weights()
        self._refresh()

    def offload(self, folder: Path | str | None = None) -> None:
        """Park the optimizer's memory until `reload`: from a GPU in host memory, from a CPU in a
        temporary file (in `folder`; the system's place without one). The weights stay usable."""
        self.optimizer.offload(folder)

    def reload(self) -> None:
        self.optimizer.reload()

    def save(self, path: Path | str, cursor: Mapping[str, Any] | None = None) -> Path:
        """Write a checkpoint under `path` (see checkpoint.py) and return its folder.

        `cursor` is the caller's own JSON, such as where the data stands; `load` gives it back.
        """
        rng_tensors, rng_values = get_rng_state(self.model.device)
        meta = {
            "version": self.version,
            "step_count": self.optimizer.step_count,
            "dtype": self.config.dtype,
            "rng": rng_values,
            "cursor": dict(cursor or {}),
        }
        tensors = {**self.optimizer.state(), **rng_tensors}
        return save_checkpoint(path, self.version, tensors, meta, keep=self.config.keep_checkpoints)

    def load(self, path: Path | str) -> dict[str, Any]:
        """Take over a checkpoint, or the latest under a root; what follows is bit-equal to a run
        that was never interrupted. Returns the cursor. On CheckpointError nothing has changed."""
        checkpoint = open_checkpoint(path)
        state = self.optimizer.state()
        stored = {name for name in checkpoint.names() if not name.startswith("rng.")}
        problems = [f"{name} is missing" for name in state if name not in stored]
        problems += [f"{name} is unknown" for name in sorted(stored) if name not in state]
        problems += [
            f"{name} is {checkpoint.dtype(name)} {checkpoint.shape(name)}, must be "
            f"{tensor.dtype} {tuple(tensor.shape)}"
            for name, tensor in state.items()
            if name in stored
            and (checkpoint.shape(name), checkpoint.dtype(name)) != (tensor.shape, tensor.dtype)
        ]
        if problems:
            raise CheckpointError(
                f"checkpoint {checkpoint.folder} is of another model ({'; '.join(problems[:3])}). "
                "Resume with the model and dtype it was written with"
            )
        for name, tensor in state.items():
            checkpoint.read_into(name, tensor)
        meta = checkpoint.meta
        self.optimizer.step_count = meta["step_count"]
        self.optimizer.phase_start = meta["step_count"] - meta["version"]
        self.optimizer.write_back()
        self._refresh()
        self.version = meta["version"]
        set_rng_state(self.model.device, checkpoint.names(), checkpoint.read, meta["rng"])
        cursor: dict[str, Any] = meta["cursor"]
        return cursor


def _empty_like_tokens(samples: Sequence[Sample]) -> list[Tensor]:
    return [torch.zeros(len(sample.tokens)) for sample in samples]


def _collect(per_sample: list[Tensor], micro: MicroBatch, values_T: Tensor) -> None:
    for index, values in micro.split(values_T.cpu()):
        per_sample[index] = torch.cat([values.new_zeros(1), values])
