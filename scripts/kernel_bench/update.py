"""Benchmark rows of gae and fused_adamw_."""

from collections.abc import Iterator

import torch
from kernel_bench.case import BenchCase

from kernels import fused_adamw_, gae, make_tensor_table

# The matrices of one decoder layer, several times over: hidden, heads' width, ffn
LAYERS = {"qwen3-0.6b": (1024, 4096, 3072, 28), "llama-3-8b": (4096, 6144, 14336, 8)}


def cases(device: str) -> Iterator[BenchCase]:
    is_gpu = device == "cuda"
    yield from gae_cases(device, 65536 if is_gpu else 4096)
    for model in LAYERS if is_gpu else ["qwen3-0.6b"]:
        yield from adamw_cases(device, model, LAYERS[model][3] if is_gpu else 1)


def gae_cases(device: str, num_tokens: int) -> Iterator[BenchCase]:
    rewards, values = (torch.randn(num_tokens, device=device) for _ in range(2))
    cu = torch.arange(0, num_tokens + 1, 512, device=device, dtype=torch.int32)
    yield BenchCase(
        name="gae", op="gae", shape=f"({num_tokens},) in sequences of 512", dtype="float32",
        run=lambda: gae(rewards, values, cu, 1.0, 0.95),
        peers={"eager": lambda: gae(rewards, values, cu, 1.0, 0.95, backend="torch")},
        bytes=num_tokens * 20,
    )  # fmt: skip


def adamw_cases(device: str, model: str, num_layers: int) -> Iterator[BenchCase]:
    hidden, heads, ffn, _ = LAYERS[model]
    shapes = [(heads, hidden), (hidden, heads), (2 * ffn, hidden), (hidden, ffn), (hidden,)]
    shapes = shapes * num_layers
    master, exp_avg, exp_avg_sq = ([torch.zeros(s, device=device) for s in shapes] for _ in "wmv")
    params, grads = ([x.bfloat16() for x in master] for _ in "pg")
    lists = (params, grads, exp_avg, exp_avg_sq, master)
    plan = make_tensor_table(*lists)
    num_elements = sum(x.numel() for x in params)
    shape = f"{model}, {num_elements} elements in {len(shapes)} tensors"
    options = {"lr": 1e-6, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
    leaves = [torch.nn.Parameter(x) for x in master]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)
    # fp32 throughout: 28 bytes an element too, but nothing to convert
    peer = torch.optim.AdamW(leaves, fused=True, **options)

    def mixed() -> None:
        """What the op does: bf16 gradients in, fp32 masters, bf16 parameters out."""
        torch._foreach_copy_([x.grad for x in leaves], grads)
        peer.step()
        torch._foreach_copy_(params, [x.data for x in leaves])

    yield BenchCase(
        name="fused_adamw", op="fused_adamw", shape=shape, dtype="bfloat16",
        run=lambda: fused_adamw_(*lists, step=2, plan=plan, **options),
        peers={"torch-fused-fp32": peer.step, "torch-fused-and-casts": mixed},
        bytes=28 * num_elements,
    )  # fmt: skip
