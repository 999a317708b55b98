"""Runs the model over one step's batch and returns the logits of the rows that sample."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from nanoengine.model.transformer import Transformer
from nanoinfer.attention_backends import KVCache, PagedContext
from nanoinfer.batch import StepBatch


class ModelRunner:
    """Owns the KV cache tensors beside a model."""

    def __init__(self, model: Transformer, *, num_blocks: int, block_size: int) -> None:
        config = model.config
        self.model = model
        self.cache = KVCache(
            config.num_layers,
            num_blocks,
            block_size,
            config.num_kv_heads,
            config.head_dim,
            dtype=model.dtype,
            device=model.device,
        )

    @torch.inference_mode()
    def run(self, batch: StepBatch) -> Tensor | None:
        """Logits [rows, V] in the model's dtype; None if no sequence samples in this step."""
        device = self.model.device
        if device.type != "cpu":
            batch = replace(
                batch,
                ids_T=batch.ids_T.to(device),
                positions_T=batch.positions_T.to(device),
                slots_T=batch.slots_T.to(device),
            )
        context = PagedContext(self.cache, batch)
        hidden_TE = self.model(batch.ids_T, batch.positions_T, context)
        rows = batch.sampling_rows
        if rows is None:
            return self.model.logits(hidden_TE)
        if rows.numel() == 0:
            return None
        return self.model.logits(hidden_TE.index_select(0, rows.to(device)))
