"""The ops of a vision tower on a GPU: the interpreter's bar at model sizes, the same bits twice."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "interpreter"))
from guard import check

from kernels import flash_attn_varlen
from kernels.torch.attention import flash_attn_varlen_ref
from kernels.vision.gelu import gelu, gelu_ref
from kernels.vision.layer_norm import layer_norm, layer_norm_ref

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DTYPES = [torch.float32, torch.bfloat16]


def normal(*shape):
    return torch.randn(shape, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8192, 1024), (4099, 1152), (2048, 4608), (300, 12800)])
def test_layer_norm(dtype, shape):
    torch.manual_seed(0)
    check(
        lambda x, w, b: layer_norm(x, w, b, backend="triton"),
        lambda x, w, b: layer_norm_ref(x, w, b, 1e-6),
        [normal(*shape) + 2, normal(shape[-1]), normal(shape[-1])],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu(dtype, approximate):
    torch.manual_seed(0)
    check(
        lambda x: gelu(x, approximate, backend="triton"),
        lambda x: gelu_ref(x, approximate),
        [normal(4099, 4304) * 3],
        dtype,
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 72])
def test_attention_over_whole_pictures(dtype, head_dim):
    torch.manual_seed(0)
    sizes = torch.tensor([0, 4, 1024, 300, 36]).cumsum(0)
    cu, bounds = sizes.to("cuda", torch.int32), sizes.tolist()
    check(
        lambda q, k, v: flash_attn_varlen(q, k, v, cu, cu, 1024, 1024, causal=False),
        lambda q, k, v: flash_attn_varlen_ref(
            q, k, v, bounds, bounds, head_dim**-0.5, causal=False
        )[0],
        [normal(bounds[-1], 4, head_dim) for _ in "qkv"],
        dtype,
    )
