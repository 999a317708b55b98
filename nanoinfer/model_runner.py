"""One step on the device: copy blocks, run the model over the new tokens, sample.

Only the tokens that are the last of their sequence go through the output head.
Left out: CUDA graphs, several devices.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels import linear, pack_weight
from nanoengine.model.transformer import Transformer
from nanoinfer.attention_backends import KVCache, PagedContext
from nanoinfer.batch import StepInput
from nanoinfer.sampler import sample


@dataclass(frozen=True)
class StepResult:
    """One entry for each sequence whose last token was computed, in the order of the step."""

    tokens: list[int]
    logps: list[float]


class ModelRunner:
    """The model and its cache. `lm_head_fp32` computes logits in fp32 from a bf16 model, as a
    trainer with `logits_dtype=torch.float32` does."""

    def __init__(self, model: Transformer, cache: KVCache, lm_head_fp32: bool = False) -> None:
        self.model = model
        self.cache = cache
        self._wants_fp32_head = lm_head_fp32 and model.dtype != torch.float32
        self.refresh()

    def refresh(self) -> None:
        """The weights changed: renew what was derived from them."""
        self._head: Tensor | None = None
        if self._wants_fp32_head:
            self._head = self.model.lm_head_weight.detach().float()
            self._head_packed = pack_weight(self._head)

    @torch.inference_mode()
    def run(self, step: StepInput) -> StepResult:
        """Run one step; keys and values of its tokens are in the cache afterwards."""
        self.cache.copy_blocks(step.copies)
        context = PagedContext(self.cache, step)
        device = self.model.device
        hidden_TE = self.model(step.ids_T.to(device), step.positions_T.to(device), context)
        if step.sampled is not None:
            if len(step.sampled) == 0:
                return StepResult([], [])
            hidden_TE = hidden_TE.index_select(0, step.sampled.to(device))
        tokens, logps = sample(self._logits(hidden_TE), step.sampling)
        return StepResult(tokens.tolist(), logps.tolist())

    def _logits(self, hidden_SE: Tensor) -> Tensor:
        if self._head is None:
            return self.model.logits(hidden_SE)
        return linear(hidden_SE.float(), self._head, packed=self._head_packed)
