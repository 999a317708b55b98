"""The operations both engines are made of: Triton on a GPU; C++, or PyTorch, on a CPU.

`import kernels` and call what `__all__` lists. The files of this folder are what a dense model
runs through on a CPU: an op is one file, with its formula, its checks and a table of its other
paths by name. `backend="auto" | "torch" | "cpp" | "triton"`: see `backend.py`.

* rows of activations: `rms_norm`, `rope` (and `qk_norm_rope`), `swiglu`, `linear`;
* attention: `attention` (training: trees and packed sequences), `kv_cache` (inference);
* the head: `linear_logprob` (no tokens x vocabulary tensor);
* the update: `adamw`; memory and its ways: `memory`.

Everything else is in a folder, imported when it is first asked for:

* paths: `cpp/` (the C++ and its calls; `ops.py` and `decoder.py` belong to the above), `triton/`
  (a GPU's kernels) and `gpu/` (what their host prepares), `torch/` (definitions, and the way
  without a kernel);
* ops of a layer that the dense model's own way does without: `paged/` (attention over the cache,
  writing to it), `varlen/` (bounds of keys, lse, other masks), `vision/` (a vision tower's);
* other ops: `moe/` (mixture of experts), `quantized/` (fp8 and int8 weights), `logits/` (their
  log-probs, sampling on a GPU, the likeliest tokens), `returns/` (advantages of PPO), `transport/`
  (checksums of weights that move).

On a CPU a result depends on its own row or sequence only, never on what else is in the batch, on
padding or on the number of threads: that is what makes rollout and trainer log-probs equal bit for
bit. `linear.py` and `cpp/` say how.
"""

from typing import Any

from kernels.adamw import fused_adamw_
from kernels.attention import make_varlen_plan, tree_attention
from kernels.backend import resolve
from kernels.kv_cache import make_kv_cache, make_paged_plan
from kernels.linear import add_rows_, linear, pack_weight
from kernels.linear_logprob import linear_logprob
from kernels.rms_norm import add_rms_norm, rms_norm
from kernels.rope import apply_rope, qk_norm_rope
from kernels.swiglu import swiglu

_ELSEWHERE = {
    "Int8Weight": "kernels.quantized.int8:Int8Weight",
    "SampleOutput": "kernels.logits.sampling:SampleOutput",
    "apply_penalties_": "kernels.logits.sampling:apply_penalties_",
    "apply_token_bitmask_": "kernels.logits.sampling:apply_token_bitmask_",
    "dequantize_fp8": "kernels.quantized.fp8:dequantize_fp8",
    "flash_attn_varlen": "kernels.varlen.flash_attention:flash_attn_varlen",
    "fp8_linear": "kernels.quantized.fp8:fp8_linear",
    "fused_moe": "kernels.moe.fused_moe:fused_moe",
    "gae": "kernels.returns.gae:gae",
    "gather_rows": "kernels.gpu.gather_rows:gather_rows",
    "geglu": "kernels.torch.geglu:geglu",
    "grouped_gemm": "kernels.moe.grouped_gemm:grouped_gemm",
    "int8_linear": "kernels.quantized.int8:int8_linear",
    "linear_kept_logprob": "kernels.logits.kept:linear_kept_logprob",
    "linear_topk": "kernels.logits.topk:linear_topk",
    "log_softmax_batch_invariant": "kernels.logits.batch_invariant:log_softmax_batch_invariant",
    "logits_logprob": "kernels.logits.logprob:logits_logprob",
    "make_row_gather": "kernels.gpu.gather_rows:make_row_gather",
    "make_tensor_table": "kernels.gpu.tensor_table:make_tensor_table",
    "moe_align": "kernels.moe.moe_routing:moe_align",
    "pack_int8": "kernels.quantized.int8:pack_int8",
    "paged_attention": "kernels.paged.paged_attention:paged_attention",
    "paged_attention_decode": "kernels.gpu.paged_attention:paged_attention_decode",
    "quantize_fp8": "kernels.quantized.fp8:quantize_fp8",
    "reshape_and_cache": "kernels.paged.reshape_and_cache:reshape_and_cache",
    "sample": "kernels.logits.sampling:sample",
    "softmax_parts": "kernels.logits.logprob:softmax_parts",
    "topk_softmax": "kernels.moe.moe_routing:topk_softmax",
}

__all__ = [
    "Int8Weight", "SampleOutput", "add_rms_norm", "add_rows_", "apply_penalties_", "apply_rope",
    "apply_token_bitmask_", "dequantize_fp8", "flash_attn_varlen", "fp8_linear", "fused_adamw_",
    "fused_moe", "gae", "gather_rows", "geglu", "grouped_gemm", "int8_linear", "linear",
    "linear_kept_logprob", "linear_logprob", "linear_topk", "log_softmax_batch_invariant",
    "logits_logprob",
    "make_kv_cache", "make_paged_plan", "make_row_gather", "make_tensor_table",
    "make_varlen_plan", "moe_align", "pack_int8", "pack_weight", "paged_attention",
    "paged_attention_decode", "qk_norm_rope", "quantize_fp8", "reshape_and_cache", "rms_norm",
    "sample", "swiglu", "topk_softmax", "tree_attention",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """An op of another folder, imported when it is first asked for."""
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return resolve(_ELSEWHERE[name])
