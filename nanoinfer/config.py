"""`InferConfig`: everything that can be chosen about an engine, with its help under each field.

Nothing of it belongs to one request; that is `SamplingParams` (params.py). A size that is 0 is
chosen for the model's device when the engine is made: by `sized` on a CPU, gpu/sizes.py on a GPU.
Other configs hold one of these whole: the server's, and a training run's.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

CacheKind = Literal["auto", "fp8"]
"""The dtype of a KV cache: the model's own (auto), or fp8."""
InFlight = Literal["recompute", "keep", "wait"]
"""What becomes of requests in flight when new weights come."""
Quantization = Literal["none", "fp8", "int8"]
"""The format of the layers' matrices."""


@dataclass(frozen=True, kw_only=True)
class StepSizes:
    """The most that a step of the engine may hold. 0 lets the model's device decide: 512
    tokens and 64 sequences on a CPU, 8192 and 256 on a GPU."""

    max_batch_tokens: int = 0
    """Tokens of one engine step, decodes and prefill chunks together; 0: chosen for the device."""
    max_num_seqs: int = 0
    """Sequences that are decoded together; 0: chosen for the device."""


@dataclass(frozen=True, kw_only=True)
class WeightUpdates:
    """The way in which an engine takes new weights."""

    in_flight: InFlight = "recompute"
    """What becomes of requests in flight when new weights come. recompute: what they had cached is
    computed again by the new weights. keep: it stays, and their next tokens are sampled by the new
    weights after keys and values of the old. wait (AsyncEngine): the weights wait until all are
    answered, and new requests until the weights are there."""


@dataclass(frozen=True, kw_only=True)
class InferConfig(StepSizes, WeightUpdates):
    """The options of one engine."""

    num_blocks: int | None = None
    """Blocks of KV cache; None: as many as `cache_bytes` holds."""
    cache_bytes: int = 0
    """Memory of the KV cache where `num_blocks` is not given; on a CPU used only as it fills. 0,
    here and below: chosen for the model's device (gpu/sizes.py), 1 GiB on a CPU."""
    populate_cache: bool = False
    """On a CPU take the cache's memory at the start, not as it fills: no token waits for a page."""
    block_size: int = 16
    """Tokens a block."""
    prefix_caching: bool = True
    """Reuse the cache of earlier requests that started alike."""
    eos_ids: tuple[int, ...] | None = None
    """Tokens that end a completion; None: the model's own."""
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
        if self.in_flight not in get_args(InFlight):
            raise ValueError(
                f"in_flight={self.in_flight!r}: choose one of {', '.join(get_args(InFlight))}"
            )
        if self.quantization not in get_args(Quantization):
            raise ValueError(f"quantization={self.quantization!r}: must be 'none', 'fp8' or 'int8'")
        if self.quantization != "none" and self.deterministic:
            raise ValueError(
                f"quantization={self.quantization!r} with deterministic=True: the log-probs of "
                "quantised matrices are not the trainer's; leave one of them out"
            )

    def sized(
        self, num_seqs: int = 64, batch_tokens: int = 512, cache_bytes: int = 1 << 30
    ) -> InferConfig:
        """This config with these sizes where it has 0; the defaults are a CPU's."""
        most_seqs = self.max_num_seqs or min(num_seqs, self.max_batch_tokens or num_seqs)
        return replace(
            self,
            max_num_seqs=most_seqs,
            max_batch_tokens=self.max_batch_tokens or max(batch_tokens, most_seqs),
            cache_bytes=self.cache_bytes or (cache_bytes if self.num_blocks is None else 0),
        )

    @property
    def is_plain(self) -> bool:
        """True where it asks for nothing of nanoinfer/variants/."""
        return all(getattr(self, name) == getattr(InferConfig, name) for name in _VARIANTS)


_VARIANTS = (
    *("speculate", "speculate_free_rows", "lm_head_fp32", "deterministic"),
    *("quantization", "kv_cache_dtype", "kv_calibration_ids"),
)
