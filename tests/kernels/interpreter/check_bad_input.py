"""Every tensor argument of every op, on both back ends: a wrong shape, dtype or device raises a
`ValueError` that names the argument, before any kernel is launched.

A row of the table has valid arguments; each of them is spoilt in turn: one more entry along a
dimension, integers for floats (floats for integers), another device. FREE lists what may be so.
"""

import re

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

import kernels
from kernels.gpu.gather_rows import make_row_gather

FP8 = torch.float8_e4m3fn


def fl(*shape):
    return torch.randn(shape)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


def paged():
    caches = {f"{n}_cache": torch.zeros(3, 16, 2, 8) for n in "kv"}
    return {**caches, "seq_lens": ints(4, 20), "block_tables": ints([0, 0], [1, 2])}


def moe():
    weights = {"w13_E2FH": fl(4, 16, 8), "w2_EHF": fl(4, 8, 8)}
    choices = {"topk_weights_NK": fl(3, 2), "topk_ids_NK": ints([0, 1], [2, 3], [1, 0])}
    return {"x_NH": fl(3, 8), **weights, **choices}


def fp8():
    return {
        "x_MK": fl(3, 128).to(FP8), "w_NK": fl(5, 128).to(FP8), "x_scale": fl(3), "w_scale": fl(5)
    }  # fmt: skip


def rope(**extra):
    tables = {"cos_PD2": fl(9, 4), "sin_PD2": fl(9, 4), "positions_T": ints(1, 2, 8)}
    return {"q_THD": fl(3, 4, 8), "k_TKD": fl(3, 2, 8), **tables, **extra}


def flash():
    q, k, v = fl(6, 4, 8), fl(6, 2, 8), fl(6, 2, 8)
    bounds = {"cu_seqlens_q": ints(0, 2, 6), "cu_seqlens_k": ints(0, 2, 6)}
    return {"q_THD": q, "k_SKD": k, "v_SKD": v, **bounds, "max_seqlen_q": 4, "max_seqlen_k": 4}


def drawing():
    rows = {n: fl(2) for n in ("temperature", "top_k", "top_p", "min_p")}
    return {"logits_BV": fl(2, 40), **rows, "seeds": ints(1, 2), "positions": ints(1, 2)}


def penalties():
    rows = {name: fl(2) for name in ("repetition", "frequency", "presence")}
    seen = torch.zeros(2, 40, dtype=torch.int32)
    return {"logits_BV": fl(2, 40), "output_counts_BV": seen, "prompt_mask_BV": seen > 0, **rows}


TABLE = {
    "rms_norm": lambda: {"x": fl(3, 8), "weight": fl(8)},
    "add_rms_norm": lambda: {"x": fl(3, 8), "residual": fl(3, 8), "weight": fl(8)},
    "swiglu": lambda: {"gate_up_T2F": fl(3, 8)},
    "apply_rope": rope,
    "qk_norm_rope": lambda: rope(q_weight_D=fl(8), k_weight_D=fl(8)),
    "flash_attn_varlen": flash,
    "tree_attention": lambda: {
        "q_THD": fl(6, 4, 8), "k_THD": fl(6, 2, 8), "v_THD": fl(6, 2, 8),
        "plan": kernels.make_varlen_plan([0, 2, 6], [-1, 0]),
    },
    "reshape_and_cache": lambda: {
        "k_TKD": fl(3, 2, 8), "v_TKD": fl(3, 2, 8), "k_cache": torch.zeros(3, 16, 2, 8),
        "v_cache": torch.zeros(3, 16, 2, 8), "slot_mapping_T": ints(5, 6, 40, dtype=torch.int64),
    },
    "paged_attention": lambda: {
        "q_THD": fl(5, 4, 8), **paged(), "query_start_loc": ints(0, 4, 5), "max_query_len": 4,
        "max_seq_len": 20, "out": fl(5, 4, 8),
    },
    "paged_attention_decode": lambda: {
        "q_BHD": fl(2, 4, 8), **paged(), "max_seq_len": 20, "out": fl(2, 4, 8)
    },
    "linear_logprob": lambda: {
        "hidden_TD": fl(3, 8), "weight_VD": fl(20, 8), "token_ids_T": ints(1, 2, 19)
    },
    "linear_topk": lambda: {"hidden_TD": fl(3, 8), "weight_VD": fl(20, 8), "k": 2},
    "gae": lambda: {
        "rewards_T": fl(5), "values_T": fl(5), "cu_seqlens": ints(0, 2, 5), "gamma": 0.9,
        "lam": 0.9, "mask_T": torch.ones(5, dtype=torch.bool),
    },
    "fused_adamw_": lambda: {
        "params": [fl(9).bfloat16()], "grads": [fl(9).bfloat16()], "exp_avgs": [fl(9)],
        "exp_avg_sqs": [fl(9).abs()], "master": [fl(9)], "grad_scale": fl(1), "lr": 0.1,
        "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1, "step": 1,
    },
    "sample": drawing,
    "apply_penalties_": penalties,
    "apply_token_bitmask_": lambda: {"logits_BV": fl(2, 40), "bitmask_BW": ints([1, 2], [3, 4])},
    "topk_softmax": lambda: {"router_logits_NE": fl(3, 8), "k": 2},
    "moe_align": lambda: {"topk_ids_NK": ints([0, 1], [2, 0]), "num_experts": 4, "block_m": 16},
    "grouped_gemm": lambda: {
        "x_MI": fl(5, 8), "w_EOI": fl(2, 6, 8), "expert_offsets": ints(0, 2, 5)
    },
    "fused_moe": moe,
    "quantize_fp8": lambda: {"x_NK": fl(3, 130)},
    "fp8_linear": fp8,
    "logits_logprob": lambda: {"logits_BV": fl(3, 20), "token_ids_B": ints(1, 2, 19)},
    "linear": lambda: {
        "x": fl(3, 8), "weight": fl(5, 8), "bias": fl(5), "batch_invariant": True
    },
    "log_softmax_batch_invariant": lambda: {"x": fl(3, 8)},
    "gather_rows": lambda: {"x": fl(3, 8), "gather": make_row_gather(ints(0, 2, 2), 3)},
    "add_rows_": lambda: {"total": fl(3, 8), "index": ints(0, 2, 2, 1), "rows": fl(4, 8)},
}  # fmt: skip

LAST_DIM = {("rms_norm", "x"), ("linear", "x"), ("flash_attn_varlen", "q_THD")}
LAST_DIM |= {("tree_attention", "q_THD")}
LAST_DIM |= {("swiglu", "gate_up_T2F"), ("linear_logprob", "weight_VD")}
LAST_DIM |= {("linear_topk", "hidden_TD"), ("linear_topk", "weight_VD")}
LAST_DIM |= {("fused_moe", "w13_E2FH")}
DEVICE_OF_X = {"cu_seqlens_q", "cu_seqlens_k", "query_start_loc", "seq_lens", "block_tables"}
FREE = {
    # any shape will do
    ("topk_softmax", "router_logits_NE", "shape"),
    ("moe_align", "topk_ids_NK", "shape"),
    ("quantize_fp8", "x_NK", "shape"),
    ("log_softmax_batch_invariant", "x", "shape"),
    ("add_rows_", "total", "shape"),
    # numbers of any kind
    *(("sample", name, "dtype") for name in ("temperature", "top_k", "top_p", "min_p")),
    *(("apply_penalties_", n, "dtype") for n in ("repetition", "frequency", "presence")),
    ("fused_adamw_", "grad_scale", "dtype"),
    ("gather_rows", "x", "dtype"),
}


def spoil(x, how, dim):
    if isinstance(x, list):
        return [spoil(x[0], how, dim)]
    if how == "shape":
        return torch.cat([x, x.narrow(dim, 0, 1)], dim)
    if how == "device":
        return x.to("meta")
    return x.to(torch.float32) if not x.dtype.is_floating_point else x.to(torch.int64)


def cases():
    for op, build in TABLE.items():
        for name, value in build().items():
            tensor = value[0] if isinstance(value, list) and value else value
            if not isinstance(tensor, torch.Tensor):
                continue
            for how in ("shape", "dtype", "device"):
                is_free = (op, name, how) in FREE or (how == "dtype" and tensor.dtype == torch.bool)
                is_moved = how == "device" and (name in DEVICE_OF_X or name == first(build()))
                if not is_free and not is_moved:
                    yield op, name, how


def first(arguments):
    """The argument whose device decides."""
    return next(iter(arguments))


@pytest.mark.parametrize("backend", ["triton", "torch"])
@pytest.mark.parametrize(("op", "name", "how"), list(cases()))
def test_a_spoilt_argument_is_named_before_any_launch(monkeypatch, backend, op, name, how):
    def launch(*args, **kwargs):
        raise AssertionError("a kernel was launched")

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    arguments = TABLE[op]()
    dim = -1 if (op, name) in LAST_DIM else 0
    arguments[name] = spoil(arguments[name], how, dim)
    shown = re.sub(r"_[A-Z0-9]+$", "", name)
    with pytest.raises(ValueError, match=rf"\b{shown}\b"):
        getattr(kernels, op)(**arguments, backend=backend)


@pytest.mark.parametrize("op", TABLE)
def test_both_back_ends_take_the_arguments_of_the_table(op):
    """Else a spoilt one might be refused for another reason."""
    ours, plain = (
        [(x.shape, x.dtype) for x in tensors(getattr(kernels, op)(**TABLE[op](), backend=backend))]
        for backend in ("triton", "torch")
    )
    assert ours == plain


def tensors(found):
    """Those of an op's result: a tensor, a tuple of what may be one, or nothing for an update."""
    found = found if isinstance(found, tuple) else (found,)
    return [x for x in found if isinstance(x, torch.Tensor)]


def test_the_table_has_every_op_with_a_back_end():
    no_triton = {"make_paged_plan"}  # C++ or PyTorch
    every = {n: getattr(kernels, n) for n in kernels.__all__ if n not in no_triton}
    assert {n for n, f in every.items() if "backend" in getattr(f, "__annotations__", {})} == {
        *TABLE
    }
