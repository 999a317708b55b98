"""A model that a client trains, one request at a time, on the thread of whoever calls.

The computing is an `Engine`'s: packed micro-batches, log-probs of every target, gradients that
collect until the client asks for a step. An `optim_step` brings its own learning rate and betas.

Left out: weight decay of norms and biases, which the engine spares.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch

from nanoengine.engine import Engine, NonFiniteLoss
from nanorl.serving.training_service.checkpoints import Record
from nanorl.serving.training_service.service_losses import find_loss, make_samples
from nanorl.serving.training_service.service_messages import ForwardBackward, write_forward_backward
from nanorl.serving.training_service.service_requests import AdamParams

_STATE = "state"


class TrainedModel:
    """Weights, moments and gradients of one model id. `export` writes a folder that a sampler
    reads."""

    def __init__(self, engine: Engine, record: Record, export: Callable[[Path], None]) -> None:
        self.engine, self.record, self.export = engine, record, export
        engine.optimizer.zero_grad()

    def forward_backward(self, request: ForwardBackward) -> bytes:
        """Add the gradient of the loss, a sum, to what has collected; the answer, encoded.
        `NonFiniteLoss` drops what has collected as well, for it holds NaNs now."""
        shape = self.engine.model.config
        loss = find_loss(request.loss_fn, request.loss_fn_config)
        samples = make_samples(request.data, loss, shape.vocab_size, shape.max_position_embeddings)
        with torch.set_grad_enabled(not request.forward_only):
            value, _ = self.engine.forward_backward(samples, loss.engine_loss())
        if not math.isfinite(value):
            if not request.forward_only:
                self.engine.optimizer.zero_grad()
            raise NonFiniteLoss(
                f"loss_fn={request.loss_fn!r}: the loss is {value}; the gradients since the last "
                "optim_step are dropped, the weights are as before. Look at logprobs and advantages"
            )
        logps = [logp_T[1:].tolist() for logp_T in self.engine.last_logps]
        return write_forward_backward(logps, {"loss:sum": value})

    def optim_step(self, params: AdamParams) -> dict[str, float]:
        """One AdamW update with these settings; the gradients are forgotten."""
        config = params.engine_config(self.engine.config)
        self.engine.config = self.engine.optimizer.config = config
        try:
            return self.engine.update()
        finally:
            self.engine.optimizer.zero_grad()

    def save_state(self, folder: Path) -> None:
        """Weights and moments; gradients that have collected are not part of it."""
        self.engine.save(folder / _STATE)

    def load_state(self, folder: Path, *, with_optimizer: bool) -> None:
        """Take over what `save_state` wrote; without the moments the optimizer begins anew.
        Gradients that had collected are forgotten. On `CheckpointError` nothing has changed."""
        self.engine.load(folder / _STATE)
        self.engine.optimizer.zero_grad()
        if not with_optimizer:
            optimizer = self.engine.optimizer
            optimizer.exp_avg.zero_()
            optimizer.exp_avg_sq.zero_()
            optimizer.step_count = optimizer.phase_start = self.engine.version = 0
