"""The operations both engines are made of: one file an op. Triton on a GPU; C++, or PyTorch, on
a CPU.

Every op takes `backend="auto" | "torch" | "triton"`; "auto" looks at the device (`backend.py`).
Triton is imported only when its back end is first used, so a CPU program never pays for it.

Families, each op with a reference in plain PyTorch:
* row ops: `rms_norm`, `rope`, `qk_norm_rope`, `swiglu`, `linear_logprob`, `linear_cross_entropy`;
* attention: `flash_attention` (training, packed), `paged_attention` and `kv_cache` (inference);
* the update: `policy_loss`, `gae`, `adamw`; generation: `sampling`, `logit_edits`;
* mixture of experts: `moe_routing`, `grouped_gemm`, `moe`;
* `fp8` (quantisation and matmul) and `batch_invariant`.

On a CPU a result depends on its own row or sequence only, never on what else is in the batch, on
padding or on the number of threads: that is what makes rollout and trainer log-probs equal bit for
bit. `linear.py` and `cpp/` say how.
"""

from kernels.adamw import clip_scale, fused_adamw_, make_tensor_table, multi_tensor_l2norm
from kernels.attention import flash_attn_varlen, make_varlen_plan
from kernels.batch_invariant import log_softmax_batch_invariant
from kernels.fp8 import dequantize_fp8, fp8_linear, quantize_fp8
from kernels.gae import gae
from kernels.gather_rows import add_rows_, gather_rows, make_row_gather
from kernels.grouped_gemm import grouped_gemm
from kernels.kv_cache import make_kv_cache, reshape_and_cache
from kernels.linear import linear, pack_weight
from kernels.linear_logprob import linear_cross_entropy, linear_logprob, logits_logprob
from kernels.moe import fused_moe
from kernels.moe_routing import moe_align, topk_softmax
from kernels.paged_attention import make_paged_plan, paged_attention, paged_attention_decode
from kernels.policy_loss import policy_loss
from kernels.qk_norm_rope import qk_norm_rope
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import apply_rope
from kernels.sampling import SampleOutput, apply_penalties_, apply_token_bitmask_, sample
from kernels.swiglu import swiglu

__all__ = [
    "SampleOutput",
    "add_rms_norm",
    "add_rows_",
    "apply_penalties_",
    "apply_rope",
    "apply_token_bitmask_",
    "clip_scale",
    "dequantize_fp8",
    "flash_attn_varlen",
    "fp8_linear",
    "fused_adamw_",
    "fused_moe",
    "gae",
    "gather_rows",
    "grouped_gemm",
    "linear",
    "linear_cross_entropy",
    "linear_logprob",
    "log_softmax_batch_invariant",
    "logits_logprob",
    "make_kv_cache",
    "make_paged_plan",
    "make_row_gather",
    "make_tensor_table",
    "make_varlen_plan",
    "moe_align",
    "multi_tensor_l2norm",
    "pack_weight",
    "paged_attention",
    "paged_attention_decode",
    "policy_loss",
    "qk_norm_rope",
    "quantize_fp8",
    "reshape_and_cache",
    "rms_norm",
    "sample",
    "swiglu",
    "topk_softmax",
]
