"""The options of both engines, and of the adapter that they train."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, get_args

from nanoengine.adapters.lora_config import LoraConfig
from nanoengine.config import ComputeConfig
from nanoinfer.config import Quantization, StepSizes, WeightUpdates
from nanorl.bounds import NATURAL, POSITIVE, Bound, check_record, require


@dataclass(frozen=True, kw_only=True)
class EngineLimits(ComputeConfig, StepSizes, WeightUpdates):
    """Sizes of the two engines; 0: chosen for the device (run_sizes.py)."""

    micro_batch_tokens: int = 0
    """Tokens of one training micro-batch, rows of the model in a forward and a backward pass."""
    quantization: Quantization = "none"
    """fp8, or int8 on a CPU: rollouts multiply in 8 bits, training does not. Needs an off-policy
    correction; for an int8 base of an adapter, which needs none, see --lora.base-dtype."""
    activation_mb: int = 160
    share_prefix: bool = True
    cache_mb: int = 0
    """Memory of the paged KV cache."""

    def __post_init__(self) -> None:
        most = Bound(0, 1 << 20, "a step's activations grow with it")
        check_record(
            self,
            "engine.",
            micro_batch_tokens=most,
            max_num_seqs=Bound(0, 1 << 16, "each has a place in every step"),
            max_batch_tokens=most,
            cache_mb=NATURAL,
            activation_mb=NATURAL,
        )
        require(
            self.max_batch_tokens >= self.max_num_seqs or self.max_batch_tokens == 0,
            "engine.max-batch-tokens",
            self.max_batch_tokens,
            f"at least engine.max-num-seqs={self.max_num_seqs}: a step gives each one a token",
        )


BaseDtype = Literal["auto", "int8"]


@dataclass(frozen=True, kw_only=True)
class LoraOptions(LoraConfig):
    """The adapter that the run trains, warm start and RL, in place of the model's weights."""

    base_dtype: BaseDtype = "auto"
    """The dtype of the frozen matrices below the adapter. auto: the run's own, and rollouts read a
    merged copy. int8, on a CPU: a byte a weight and no copy; both engines add the adapter to the
    same products, so log-probs stay equal bit for bit."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_record(
            self, "lora.", rank=Bound(0, 1 << 16, "a full matrix has no more"), alpha=POSITIVE
        )
        if self.base_dtype not in get_args(BaseDtype):
            raise ValueError(f"--lora.base-dtype {self.base_dtype}: must be auto or int8")
        unread = [one.name for one in dataclasses.fields(self) if self._differs(one)]
        if self.rank == 0 and unread:
            raise ValueError(
                f"--lora.{unread[0].replace('_', '-')} {getattr(self, unread[0])}: there is no "
                "adapter; set --lora.rank too"
            )

    @property
    def is_int8(self) -> bool:
        return self.base_dtype == "int8"

    def _differs(self, one: dataclasses.Field[Any]) -> bool:
        return bool(getattr(self, one.name) != one.default)
