"""Benchmark rows of policy_loss, gae, fused_adamw_ and multi_tensor_l2norm."""

from collections.abc import Callable, Iterator

import torch
from kernel_bench.case import BenchCase
from torch import Tensor

from kernels import fused_adamw_, gae, make_tensor_table, multi_tensor_l2norm, policy_loss

# The matrices of one decoder layer, several times over: hidden, heads' width, ffn
LAYERS = {"qwen3-0.6b": (1024, 4096, 3072, 28), "llama-3-8b": (4096, 6144, 14336, 8)}


def cases(device: str) -> Iterator[BenchCase]:
    is_gpu = device == "cuda"
    yield from loss_cases(device, 65536 if is_gpu else 4096)
    for model in LAYERS if is_gpu else ["qwen3-0.6b"]:
        yield from adamw_cases(device, model, LAYERS[model][3] if is_gpu else 1)


def loss_cases(device: str, num_tokens: int) -> Iterator[BenchCase]:
    def normal() -> Tensor:
        return torch.randn(num_tokens, device=device)

    logp, old, advantage, ref = normal().requires_grad_(), normal(), normal(), normal()
    mask = torch.rand(num_tokens, device=device) < 0.7
    cu = torch.arange(0, num_tokens + 1, 512, device=device, dtype=torch.int32)
    bytes_moved = num_tokens * 28

    def loss(backend: str, variant: str) -> Callable[[], object]:
        return lambda: policy_loss(
            logp, old, advantage, mask, ref_logprobs=ref, cu_seqlens=cu, kl_coef=0.01,
            variant=variant, backend=backend,
        )  # fmt: skip

    for variant in ("grpo", "gspo"):
        yield BenchCase(
            name=f"policy_loss-{variant}", op="policy_loss", shape=f"({num_tokens},)",
            dtype="float32", run=loss("auto", variant), peers={"eager": loss("torch", variant)},
            bytes=bytes_moved,
        )  # fmt: skip
    yield BenchCase(
        name="gae", op="gae", shape=f"({num_tokens},) in sequences of 512", dtype="float32",
        run=lambda: gae(ref, old, cu, 1.0, 0.95),
        peers={"eager": lambda: gae(ref, old, cu, 1.0, 0.95, backend="torch")},
        bytes=num_tokens * 20,
    )  # fmt: skip


def adamw_cases(device: str, model: str, num_layers: int) -> Iterator[BenchCase]:
    hidden, heads, ffn, _ = LAYERS[model]
    shapes = [(heads, hidden), (hidden, heads), (2 * ffn, hidden), (hidden, ffn), (hidden,)]
    shapes = shapes * num_layers
    master, exp_avg, exp_avg_sq = ([torch.zeros(s, device=device) for s in shapes] for _ in "wmv")
    params, grads = ([x.bfloat16() for x in master] for _ in "pg")
    lists = (params, grads, exp_avg, exp_avg_sq, master)
    plan, norm_plan = make_tensor_table(*lists), make_tensor_table(grads)
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
    yield BenchCase(
        name="multi_tensor_l2norm", op="multi_tensor_l2norm", shape=shape, dtype="bfloat16",
        run=lambda: multi_tensor_l2norm(grads, plan=norm_plan),
        peers={
            "torch-result-in-bf16": lambda: torch.nn.utils.get_total_norm(grads),
            "torch-on-fp32": lambda: torch.nn.utils.get_total_norm([g.float() for g in grads]),
        },
        bytes=2 * num_elements,
    )  # fmt: skip
