"""Triton's layer_norm and gelu, and attention in which all see all, interpreted, against fp64."""

import pytest
import torch
from guard import assert_as_good_as_plain_torch, outputs_and_gradients

from kernels import flash_attn_varlen
from kernels.torch.attention import flash_attn_varlen_ref
from kernels.vision.gelu import gelu, gelu_ref
from kernels.vision.layer_norm import layer_norm, layer_norm_ref

DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (1, 33), (700, 40), (2, 3, 64), (3, 4608), (5, 9000)])
def test_layer_norm(dtype, shape):
    torch.manual_seed(0)
    assert_as_good_as_plain_torch(
        lambda x, w, b: layer_norm(x, w, b, 1e-6, backend="triton"),
        lambda x, w, b: layer_norm_ref(x, w, b, 1e-6),
        [torch.randn(shape) + 2, torch.randn(shape[-1]), torch.randn(shape[-1])],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(3, 1500), (2, 3, 34), (1, 40), (0, 24)])
def test_gelu(dtype, approximate, shape):
    torch.manual_seed(0)
    assert_as_good_as_plain_torch(
        lambda x: gelu(x, approximate, backend="triton"),
        lambda x: gelu_ref(x, approximate),
        [torch.randn(shape) * 3],
        dtype,
    )


def test_no_rows_give_a_zero_weight_gradient():
    x, w = torch.empty(0, 24), torch.ones(24)
    out = outputs_and_gradients(lambda *xs: layer_norm(*xs, backend="triton"), [x, w, w])
    assert torch.equal(out[2], 0 * w) and torch.equal(out[3], 0 * w)


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_whole_pictures(dtype):
    """Heads of 72, as in the towers of Qwen3-VL."""
    torch.manual_seed(0)
    bounds, scale = [0, 4, 72, 100], 72**-0.5
    assert_as_good_as_plain_torch(
        lambda q, k, v: flash_attn_varlen(
            q, k, v, bounds, bounds, 68, 68, causal=False, backend="triton"
        ),
        lambda q, k, v: flash_attn_varlen_ref(q, k, v, bounds, bounds, scale, causal=False)[0],
        [torch.randn(100, 2, 72) for _ in "qkv"],
        dtype,
    )
