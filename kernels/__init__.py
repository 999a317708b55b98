"""The operations both engines are made of: Triton on a GPU; C++, or PyTorch, on a CPU.

`import kernels` and call what `__all__` lists. An op is a file here with its definition in plain
PyTorch (`*_ref`), its checks and its choice of back end; the back ends are `triton/` (the same file
names; imported when first used, so a CPU program never pays for it), `cpp/`, and PyTorch beside the
op. `backend="auto" | "torch" | "cpp" | "triton"`: see `backend.py`.

* rows of activations: `rms_norm`, `rope`, `qk_norm_rope`, `swiglu`, `geglu`, `linear`,
  `gather_rows`;
* attention: `attention` (training: packed sequences and trees), `paged_attention`, `kv_cache`;
* the head: `linear_logprob`, `linear_topk` (no tokens x vocabulary tensor), `sampling`;
* the update: `gae`, `adamw`;
* mixture of experts: `moe_routing`, `grouped_gemm`, `moe`;
* lower precision and stricter order: `fp8`, `int8`, `batch_invariant`.

On a CPU a result depends on its own row or sequence only, never on what else is in the batch, on
padding or on the number of threads: that is what makes rollout and trainer log-probs equal bit for
bit. `linear.py` and `cpp/` say how.
"""

from kernels.adamw import fused_adamw_, make_tensor_table
from kernels.attention import flash_attn_varlen, make_varlen_plan, tree_attention
from kernels.batch_invariant import log_softmax_batch_invariant
from kernels.fp8 import dequantize_fp8, fp8_linear, quantize_fp8
from kernels.gae import gae
from kernels.gather_rows import add_rows_, gather_rows, make_row_gather
from kernels.geglu import geglu
from kernels.grouped_gemm import grouped_gemm
from kernels.int8 import Int8Weight, int8_linear, pack_int8
from kernels.kv_cache import make_kv_cache, reshape_and_cache
from kernels.linear import linear, pack_weight
from kernels.linear_logprob import linear_logprob, linear_topk, logits_logprob
from kernels.moe import fused_moe
from kernels.moe_routing import moe_align, topk_softmax
from kernels.paged_attention import make_paged_plan, paged_attention, paged_attention_decode
from kernels.qk_norm_rope import qk_norm_rope
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import apply_rope
from kernels.sampling import SampleOutput, apply_penalties_, apply_token_bitmask_, sample
from kernels.swiglu import swiglu

__all__ = [
    "Int8Weight",
    "SampleOutput",
    "add_rms_norm",
    "add_rows_",
    "apply_penalties_",
    "apply_rope",
    "apply_token_bitmask_",
    "dequantize_fp8",
    "flash_attn_varlen",
    "fp8_linear",
    "fused_adamw_",
    "fused_moe",
    "gae",
    "gather_rows",
    "geglu",
    "grouped_gemm",
    "int8_linear",
    "linear",
    "linear_logprob",
    "linear_topk",
    "log_softmax_batch_invariant",
    "logits_logprob",
    "make_kv_cache",
    "make_paged_plan",
    "make_row_gather",
    "make_tensor_table",
    "make_varlen_plan",
    "moe_align",
    "pack_int8",
    "pack_weight",
    "paged_attention",
    "paged_attention_decode",
    "qk_norm_rope",
    "quantize_fp8",
    "reshape_and_cache",
    "rms_norm",
    "sample",
    "swiglu",
    "topk_softmax",
    "tree_attention",
]
