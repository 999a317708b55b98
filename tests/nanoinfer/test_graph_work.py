"""What a CUDA graph is to capture, run on tensors that claim to be on a GPU and hold no values:
reading one on the host raises. Kernels are recorded, not launched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    FakeTensor,
    FakeTensorMode,
)

from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoinfer.attention_backends import KVCache
from nanoinfer.cuda_graph import StaticDecode, can_capture

pytest.importorskip("triton", reason="Triton exists on Linux only")
EXPERTS = {
    "num_experts": 4,
    "num_experts_per_token": 2,
    "moe_intermediate_size": 64,
    "model_type": "qwen3_moe",
}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, tuple[int, ...]]]]:
    """(kernel, grid) of every launch."""
    from triton.runtime.jit import KernelInterface

    found: list[tuple[str, tuple[int, ...]]] = []

    def record(self: Any, grid: Any) -> Any:
        def launch(*args: Any, **kwargs: Any) -> None:
            tensors = [x for x in args if isinstance(x, torch.Tensor)]
            assert tensors and all(x.device.type == "cuda" for x in tensors)
            found.append((self.fn.__name__, grid(kwargs) if callable(grid) else grid))

        return launch

    monkeypatch.setattr(KernelInterface, "__getitem__", record)
    yield found


@pytest.fixture(autouse=True)
def indexing(monkeypatch: pytest.MonkeyPatch) -> None:
    """`x[...]` and `copy_` of such a tensor ask for a GPU where PyTorch was built without; the ops
    below do not, and there is nothing to copy."""

    def getitem(x: Tensor, key: Any) -> Tensor:
        dim = 0
        for part in key if isinstance(key, tuple) else (key,):
            if isinstance(part, int):
                x = x.select(dim, part)
                continue
            if isinstance(part, slice):
                x = torch.ops.aten.slice(x, dim, part.start, part.stop, part.step or 1)
            else:
                x = x.index_select(dim, part) if isinstance(part, Tensor) else x.unsqueeze(dim)
            dim += 1
        return x

    monkeypatch.setattr(FakeTensor, "__getitem__", getitem)
    monkeypatch.setattr(FakeTensor, "copy_", lambda x, source, non_blocking=False: x)


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
    cache = KVCache(
        shape, 500, 16, torch.bfloat16, "cuda:0", kind=kind, has_padding_block=True  # type: ignore[arg-type]
    )  # fmt: skip
    return StaticDecode(model, cache, 18)


@pytest.mark.parametrize("options", [{}, EXPERTS], ids=["dense", "moe"])
@pytest.mark.parametrize("kind", ["auto", "fp8"])
def test_the_work_reads_nothing_back_and_its_grid_knows_no_length(
    launches: list[tuple[str, tuple[int, ...]]], kind: str, options: dict[str, Any]
) -> None:
    with FakeTensorMode(), torch.no_grad():
        decode = make(kind, **options)
        for size in decode.sizes:
            decode._work(size)()
    decodes = [grid for name, grid in launches if name == "_decode_kernel"]
    # 2 key heads; the splits that fill 2 · 132 programs, of at least 256 of 4096 keys each
    splits = {1: 16, 2: 16, 4: 16, 8: 16, 16: 9, 18: 8}
    assert decodes == [(2, splits[size], size) for size in decode.sizes for _ in range(2)]
    assert len([name for name, _ in launches if name == "_store_kernel"]) == 2 * 6


def test_a_host_that_reads_a_value_would_be_found_out() -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.zeros(3, device="cuda:0").max().item()
