"""The training engine: log-probs of samples, and one optimizer step.

One step, read top to bottom in `train_step`: pack the samples into micro-batches, for each run the
model, take the log-probs of the counted tokens, ask the caller's loss for a *sum*, divide it by one
weight of the whole batch and go backward; then clip, update, and refresh the prepacked weights.
Because every loss is a sum over tokens divided by the same number, the gradient does not depend
on how the batch was cut into micro-batches, nor on how it was dealt out to processes.

The engine owns the masters and moments (`optim.py`); the model it was given stays the caller's and
always holds the current weights, so an inference engine in the same process can share it.

Left out: losses, which belong to the algorithm; several processes (alone.py, parallel/ranks.py);
checkpoints and exports (state/engine_state.py).
Next: scoring.py (a micro-batch's log-probs), optim.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pkgutil import resolve_name
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from nanoengine.alone import Alone
from nanoengine.config import EngineConfig
from nanoengine.model.transformer import Transformer
from nanoengine.optim import DTYPES, FlatAdamW
from nanoengine.packing import MicroBatch, Sample, collect_all, read_sums
from nanoengine.scoring import Foresight

LossFn = Callable[[Tensor, Tensor | None, MicroBatch], tuple[Tensor, Mapping[str, Tensor | float]]]
"""(logp_T, entropy_T or None, micro-batch) -> (sum over tokens, {name: sum of a statistic}).

Entries whose loss_mask_T is 0 hold logp 0 and entropy 0."""

_RANKS = "nanoengine.parallel.ranks:Ranks"
_STATE = "nanoengine.state.engine_state:EngineState"
_DETERMINISTIC = "nanoengine.determinism:deterministic_kernels"
_REQUIRE_DETERMINISTIC = "nanoengine.determinism:require_deterministic_cublas"


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


class NonFiniteLoss(RuntimeError):  # noqa: N818 (the name of the event, as StopIteration)
    """A loss or gradient was NaN or infinite; weights and moments are as before the step."""


class StepEngine(ABC):
    """Trains `model`, which it converts to `config.dtype` in place. `version` counts updates."""

    def __init__(
        self,
        model: Transformer,
        config: EngineConfig,
        mesh: Any = None,
        *,
        stages: Sequence[Transformer] = (),
    ) -> None:
        """Without a mesh (`parallel.mesh.Mesh`), or with one of a single rank, this process trains
        alone. `stages` are for `PipelineEngine`: all parts that this rank holds, `model` among
        them."""
        if config.share_prefix and model.device.type not in ("cpu", "cuda"):
            raise ValueError(f"share_prefix=True: not available on {model.device}; set it to False")
        self._check_model(model)
        if config.deterministic and model.device.type == "cuda":
            resolve_name(_REQUIRE_DETERMINISTIC)()
        is_alone = mesh is None or mesh.size() == 1
        self.ranks: Alone = Alone(mesh) if is_alone else resolve_name(_RANKS)(mesh)
        self.ranks.check(model, config, is_pipeline=bool(stages))
        self.model = model
        self.models = list(stages) if stages else [model]
        for part in self.models:  # one, but for the stages of a pipeline
            part.batch_invariant = part.batch_invariant or config.deterministic
        self.config = config
        self.version = 0
        self.last_logps: list[Tensor] = []  # of the last train_step, before its update
        self.last_entropies: list[Tensor] = []  # likewise; empty where it was not asked for them
        dtype = DTYPES[config.dtype]
        # The masters start from the weights as they were given, before they are rounded to `dtype`.
        self.optimizer = self._make_optimizer(dtype)
        wide = torch.promote_types(dtype, torch.float32)
        for part in self.models:
            for buffer in part.buffers():  # rope tables: as wide as the masters
                buffer.data = buffer.to(wide)
            if config.lm_head_fp32 and dtype == torch.bfloat16:
                part.head_dtype = torch.float32
        self._scorer = self.ranks.scorer(model, config)
        self._refresh()

    def _check_model(self, model: Transformer) -> None:
        """`ValueError` for a model that cannot be trained."""
        if model.quantization is not None:
            raise ValueError(
                "model: its matrices are quantised, and those have no gradient; give the trainer a "
                "model of its own, or train an adapter over int8 (LoraEngine)"
            )

    def _make_optimizer(self, dtype: torch.dtype) -> FlatAdamW:
        """The optimizer of all that is trained; it converts the models to `dtype`."""
        return self.ranks.optimizer(self.models, self.config, dtype)

    @property
    def mesh(self) -> Any:
        """The `parallel.mesh.Mesh` of its processes; alone, one of a single rank."""
        return self.ranks.mesh

    # -- log-probs ---------------------------------------------------------------------------

    @abstractmethod
    def forward_logprobs(
        self, samples: Sequence[Sample], *, temperature: float = 1.0
    ) -> list[Tensor]:
        """For each sample a log-prob of each token: entry t is of tokens[t] given the tokens before
        it, entry 0 is 0. No part of a step: `Engine` (state/whole_engine.py) has it."""

    def _passes(self, samples: Sequence[Sample]) -> list[MicroBatch]:
        """The micro-batches, in the order in which they are run."""
        return self.ranks.micro_batches(self._scorer, samples)

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
        weight = 1.0 if weight_fn is None else self.ranks.total(float(weight_fn(samples)))
        if not (math.isfinite(weight) and weight > 0):
            raise ValueError(
                f"weight_fn gave {weight}: must be positive; a batch without any counted token "
                "cannot be trained on, drop it"
            )
        self.optimizer.zero_grad()
        # With so many rows a product lays its weight out for itself in no more time, and the update
        # makes the prepacked copies stale anyway: their memory is worth more.
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
        except BaseException:  # a loss function may raise anything; the copies come back
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
        return self.ranks.summed(loss, stats)

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
        loss_fn = self.ranks.joined(loss_fn)
        with self._kernels():
            for micro in self.ranks.passes(micros):
                scored = self._scorer.logprobs(
                    micro,
                    temperature,
                    entropy=entropy,
                    only_masked=True,
                    # What is foreseen is the gradient by log-probs; an entropy's would be missing.
                    foresight=None if entropy else _foresight(loss_fn, micro, weight),
                )
                loss_sum, sums = loss_fn(scored.logp_T, scored.entropy_T, scored.told(micro))
                # Dividing by one weight of the batch, never by that of the micro-batch, is what
                # makes gradients add up to the same whatever the cut.
                loss = loss_sum / weight
                if loss.requires_grad:  # not where no token of the micro-batch counts
                    loss.backward()
                losses.append(loss.detach())
                logps.append(scored.logp_T.detach())
                if scored.entropy_T is not None:
                    entropies.append(scored.entropy_T.detach())
                sums_of.append(sums)
                del scored, loss_sum, loss  # and what the backward pass kept
        # Nothing was read from a GPU until here: the host ran ahead of it, pass by pass.
        self.last_logps = collect_all(samples, micros, logps)
        self.last_entropies = collect_all(samples, micros, entropies) if entropies else []
        return read_sums(losses, sums_of)

    def _explain(self, what: str) -> str:
        return (
            f"update {self.version}: {what}; weights and moments are untouched. Lower lr="
            f"{self.config.lr}, look at the rewards and advantages of this batch, or resume from "
            "an earlier checkpoint"
        )

    def _refresh(self) -> None:
        """Bring every copy of the weights up to date with the parameters."""
        self.ranks.refresh(self.models)

    def _kernels(self) -> AbstractContextManager[None]:
        """Inside, a GPU computes the same bits every time, where that was asked for."""
        if not (self.config.deterministic and self.model.device.type == "cuda"):
            return nullcontext()
        chosen: AbstractContextManager[None] = resolve_name(_DETERMINISTIC)()
        return chosen


def _foresight(loss_fn: LossFn, micro: MicroBatch, weight: float) -> Foresight | None:
    if not isinstance(loss_fn, ForeseeingLoss):
        return None
    logp_T = loss_fn.foreseen_logp(micro)
    if logp_T is None:
        return None
    return Foresight(logp_T, lambda logp_T: loss_fn(logp_T, None, micro)[0] / weight)
