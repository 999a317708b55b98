"""What a CUDA graph is to capture, run on tensors of a GPU that is not there (fake_cuda.py): it
reads nothing back. Kernels are recorded, not launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton exists on Linux only")

from fake_cuda import fake_gpu

from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoinfer.gpu.cuda_graph import StaticDecode, can_capture
from nanoinfer.kv_cache import CacheLayout
from nanoinfer.variants.fp8_cache import make_cache

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "model_type": "qwen3_moe",
}
GPT_OSS = {
    **EXPERTS,
    "moe_intermediate_size": 128,
    "model_type": "gpt_oss",
    "norm_topk_prob": True,
    "attention_bias": True,
    "attention_output_bias": True,
    "qk_norm": False,
    "tie_word_embeddings": False,
}


def make(kind: str, **options: Any) -> StaticDecode:
    shape = ModelConfig(
        **{
            "model_type": "qwen3",
            "vocab_size": 128,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "max_position_embeddings": 4096,
            "qk_norm": True,
            "tie_word_embeddings": True,
            **options,
        }
    )
    model = Transformer(shape, torch.bfloat16, "cuda:0")
    assert can_capture(model)
    layout = CacheLayout(
        num_blocks=500,
        block_size=16,
        dtype=torch.bfloat16,
        device="cuda:0",
        has_padding_block=True,
    )
    return StaticDecode(model, make_cache(shape, layout, kind), 18)


@pytest.mark.parametrize("options", [{}, EXPERTS, GPT_OSS], ids=["dense", "moe", "gpt_oss"])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_the_work_reads_nothing_back_and_its_grid_knows_no_length(
    kind: str, options: dict[str, Any]
) -> None:
    with fake_gpu() as gpu, torch.no_grad():
        decode = make(kind, **options)
        gpu.take()
        for size in decode.sizes:
            decode._work(size)()
        assert gpu.take() == []
    decodes = [grid for name, grid in gpu.grids if name == "_decode_kernel"]
    # 2 key heads; the splits that fill 2 · 132 programs, of at least 256 of 4096 keys each
    splits = {1: 16, 2: 16, 4: 16, 8: 16, 16: 9, 18: 8}
    assert decodes == [(2, splits[size], size) for size in decode.sizes for _ in range(2)]
    assert len([name for name, _ in gpu.grids if name == "_store_kernel"]) == 2 * 6


def test_a_host_that_reads_a_value_would_be_found_out() -> None:
    with fake_gpu() as gpu:
        torch.zeros(3, device="cuda:0").max().item()
    assert [copy.kind for copy in gpu.take()] == ["download"]
