"""Mean cross-entropy of labels under softmax(hidden · weightᵀ): supervised training's loss.

    L = −1/n Σ_{label ≠ ignore_index} log p(label)        n = number of labels that count

The same chunks as `linear_logprob`, whose gradient it takes, so no tokens x vocabulary tensor.
Ignored rows are left out of the matmul on a CPU; on a GPU, where counting them would stop it, they
are computed and weigh nothing. No label that counts gives 0, not PyTorch's NaN: a micro-batch
without targets must not end a run.

Left out: computing the gradient in the forward pass already (Liger does; it saves the second
logits matmul, a quarter of the work, but fixes the loss's scale before it is known), label
smoothing, class weights.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kernels._check import check_integers, check_tensors
from kernels._dispatch import Backend, use_triton
from kernels.linear_logprob import linear_logprob


def linear_cross_entropy_ref(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, ignore_index: int = -100
) -> Tensor:
    """PyTorch's, with the whole T x V tensor."""
    logits = hidden_TD @ weight_VD.t()
    wide = torch.promote_types(logits.dtype, torch.float32)
    return torch.nn.functional.cross_entropy(logits.to(wide), labels_T, ignore_index=ignore_index)


def linear_cross_entropy(
    hidden_TD: Tensor,
    weight_VD: Tensor,
    labels_T: Tensor,
    *,
    ignore_index: int = -100,
    chunk_size: int | None = None,
    packed: Tensor | None = None,
    logits_dtype: torch.dtype | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The mean in nats, a scalar in fp32. The other arguments are `linear_logprob`'s."""
    if hidden_TD.dim() != 2 or labels_T.shape != hidden_TD.shape[:1]:
        raise ValueError(
            f"labels: shape {tuple(labels_T.shape)} must be one for each row of hidden "
            f"{tuple(hidden_TD.shape)}, [tokens, width]"
        )
    check_tensors(hidden_TD, "hidden", False, labels=labels_T)
    check_integers(labels=labels_T)
    counts_T = labels_T != ignore_index
    num_labels = counts_T.sum().clamp_min(1)
    if not use_triton(backend, hidden_TD) and not bool(counts_T.all()):
        chosen = counts_T.nonzero().squeeze(1)
        hidden_TD, labels_T = hidden_TD.index_select(0, chosen), labels_T[chosen]
        counts_T = counts_T[chosen]
    logp_T = linear_logprob(
        hidden_TD,
        weight_VD,
        torch.where(counts_T, labels_T, 0),
        chunk_size=chunk_size,
        packed=packed,
        logits_dtype=logits_dtype,
        backend=backend,
    )
    assert isinstance(logp_T, Tensor), "no entropy was asked for"
    return -torch.where(counts_T, logp_T, 0.0).sum() / num_labels
