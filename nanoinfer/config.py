"""`InferConfig`: everything that can be chosen about an engine, with its help under each field.

Nothing of it belongs to one request; that is `SamplingParams` (params.py). A size that is 0 is
chosen for the model's device when the engine is made: by `sized` on a CPU, gpu/sizes.py on a GPU.
Other configs hold one of these whole: the server's, and a training run's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from nanoinfer.engine_options import EngineOptions

CacheKind = Literal["auto", "fp8"]
"""The dtype of a KV cache: the model's own (auto), or fp8."""
Quantization = Literal["none", "fp8", "int8"]
"""The format of the layers' matrices."""


@dataclass(frozen=True, kw_only=True)
class InferConfig(EngineOptions):
    """The options of one engine."""

    speculate: int = 0
    """Most tokens of a sequence that are guessed and tried in a step; 0: none. Outputs do not
    depend on it (variants/speculative.py)."""
    speculate_siblings: bool = True
    """Guess also from what running requests sampled whose prompts start alike."""
    speculate_free_rows: int = 16
    """How many more tokens would double the time of a decoding step: the fewer, the surer a guess
    has to be (variants/speculative.py)."""
    lm_head_fp32: bool = False
    """Compute logits in fp32 from a bf16 model; a second copy of the output head."""
    deterministic: bool = False
    """On a GPU: kernels whose rows do not depend on the batch, so that log-probs equal those of a
    deterministic trainer bit for bit. Slower; a CPU always is."""
    quantization: Quantization = "none"
    """fp8 (e4m3) multiplies by the layers' matrices in blocks of 128 x 128, which are quantised
    again at every weight update. For GPUs from Ada or Hopper on; right but slow on a CPU, which
    widens them for every product. int8, on a CPU alone, has a scale for each output, and quantises
    the output head too: about a third of bf16's memory, since matrices have no other copy, and up
    to 1.7 times as fast for few requests. Either way log-probs no longer equal the trainer's, so a
    rollout to train on needs an off-policy correction."""
    kv_cache_dtype: CacheKind = "auto"
    """fp8 (e4m3) holds 2 (bf16) or 4 (fp32) times the tokens, but log-probs no longer equal the
    trainer's: for serving, not for rollouts to train on. nanorl never sets it."""
    kv_calibration_ids: tuple[int, ...] = ()
    """Token ids of a text that chooses the scales of an fp8 cache; none: scales of 1."""
    cuda_graphs: bool = True
    """Replay decode steps as CUDA graphs; ignored on a CPU."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.quantization not in get_args(Quantization):
            raise ValueError(f"quantization={self.quantization!r}: must be 'none', 'fp8' or 'int8'")
        if self.quantization != "none" and self.deterministic:
            raise ValueError(
                f"quantization={self.quantization!r} with deterministic=True: the log-probs of "
                "quantised matrices are not the trainer's; leave one of them out"
            )

    @property
    def is_plain(self) -> bool:
        """True where it asks for nothing of nanoinfer/variants/."""
        return all(getattr(self, name) == getattr(InferConfig, name) for name in _VARIANTS)


_VARIANTS = (
    *("speculate", "speculate_free_rows", "lm_head_fp32", "deterministic"),
    *("quantization", "kv_cache_dtype", "kv_calibration_ids"),
)
