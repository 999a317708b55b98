"""policy_loss, gae, fused_adamw_ and multi_tensor_l2norm."""

from collections.abc import Iterator
from functools import partial

import torch
from gate_case import GateCase

from kernels import fused_adamw_, gae, multi_tensor_l2norm, policy_loss

TOKENS = 65536


def tokens() -> torch.Tensor:
    return torch.empty(TOKENS)


def bounds() -> torch.Tensor:
    return torch.empty(257, dtype=torch.int32)


def loss(variant: str, kl_kind: str | None) -> None:
    """With a `kl_kind` every optional input."""
    is_full = kl_kind is not None
    extra = {"cu_seqlens": bounds()} if variant == "gspo" else {}
    if is_full:
        extra |= {"weights": tokens(), "ref_logprobs": tokens(), "rollout_logprobs": tokens()}
    logp = torch.empty(TOKENS, requires_grad=True)
    mask = torch.empty(TOKENS, dtype=torch.bool)
    kl = {"kl_coef": 0.01, "kl_kind": kl_kind} if is_full else {}
    total, _ = policy_loss(
        logp, tokens(), tokens(), mask, variant=variant, backend="triton", **extra, **kl
    )
    total.backward()


def advantages(has_mask: bool) -> None:
    mask = torch.empty(TOKENS, dtype=torch.bool) if has_mask else None
    gae(tokens(), tokens(), bounds(), 1.0, 0.95, mask_T=mask, backend="triton")


def adamw(has_master: bool) -> None:
    shapes = [(4096, 4096), (4096,)]
    wide = [[torch.empty(s) for s in shapes] for _ in range(3)]
    params = [torch.empty(s, dtype=torch.bfloat16) for s in shapes] if has_master else wide[2]
    grads = [torch.empty(s, dtype=torch.bfloat16) for s in shapes] if has_master else wide[0]
    fused_adamw_(
        params, grads, wide[0], wide[1], wide[2] if has_master else None, lr=1e-6,
        betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3, grad_scale=torch.empty(()),
        backend="triton",
    )  # fmt: skip


def norm(dtype: torch.dtype) -> None:
    multi_tensor_l2norm([torch.empty(4096, 4096, dtype=dtype)], backend="triton")


def cases() -> Iterator[GateCase]:
    # a sequence starts anywhere, so its kernel's loads are not aligned
    few = {"finish_policy_loss_kernel": (), "sequence_log_ratio_kernel": ()}
    for variant in ("grpo", "gspo", "cispo"):
        for kl_kind in (None, "k2", "k3"):
            name = f"policy_loss-{variant}{f'-full-{kl_kind}' if kl_kind else ''}"
            call = partial(loss, variant, kl_kind)
            yield GateCase(name, call, ("ld128",), need_of=few)
    for has_mask in (False, True):
        yield GateCase(f"gae{'-mask' if has_mask else ''}", lambda m=has_mask: advantages(m))
    yield GateCase("fused_adamw-bf16", lambda: adamw(True), ("ld128",))
    yield GateCase("fused_adamw-fp32", lambda: adamw(False), ("ld128",))
    for dtype in (torch.bfloat16, torch.float32):
        yield GateCase(
            f"l2norm-{str(dtype)[6:]}", lambda d=dtype: norm(d), ("ld128",),
            need_of={"finish_norm_kernel": ()},
        )  # fmt: skip
