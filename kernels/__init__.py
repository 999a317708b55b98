"""The operations both engines are made of: one file an op, PyTorch on a CPU, Triton on a GPU.

Every op takes `backend="auto" | "torch" | "triton"`; "auto" looks at the device (`_dispatch.py`).
Triton is imported only when its back end is first used, so a CPU program never pays for it.

Two families:
* row ops, each with a reference in plain PyTorch: `rms_norm`, `rope`, `qk_norm_rope`, `swiglu`,
  `linear_logprob`; `policy_loss`, `gae` and `adamw` for the update; `sampling` and `logit_edits`;
* attention: `flash_attention` (training, packed), `paged_attention` and `kv_cache` (inference).

On a CPU a result depends on its own row or sequence only, never on what else is in the batch, on
padding or on the number of threads: that is what makes rollout and trainer log-probs equal bit for
bit. `linear.py` and `flash_attention.py` say how.
"""

from kernels.adamw import clip_scale, fused_adamw_, make_tensor_table, multi_tensor_l2norm
from kernels.flash_attention import flash_attn_varlen, make_varlen_plan
from kernels.gae import gae
from kernels.gather_rows import gather_rows, make_row_gather
from kernels.kv_cache import reshape_and_cache
from kernels.linear import linear, pack_weight
from kernels.linear_logprob import linear_logprob, logits_logprob
from kernels.logit_edits import apply_penalties_, apply_token_bitmask_
from kernels.paged_attention import make_paged_plan, paged_attention, paged_attention_decode
from kernels.policy_loss import policy_loss
from kernels.qk_norm_rope import qk_norm_rope
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import apply_rope
from kernels.sampling import SampleOutput, sample
from kernels.swiglu import swiglu

__all__ = [
    "SampleOutput",
    "add_rms_norm",
    "apply_penalties_",
    "apply_rope",
    "apply_token_bitmask_",
    "clip_scale",
    "flash_attn_varlen",
    "fused_adamw_",
    "gae",
    "gather_rows",
    "linear",
    "linear_logprob",
    "logits_logprob",
    "make_paged_plan",
    "make_row_gather",
    "make_tensor_table",
    "make_varlen_plan",
    "multi_tensor_l2norm",
    "pack_weight",
    "paged_attention",
    "paged_attention_decode",
    "policy_loss",
    "qk_norm_rope",
    "reshape_and_cache",
    "rms_norm",
    "sample",
    "swiglu",
]
