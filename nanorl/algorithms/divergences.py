"""How far two policies are apart, from the log-probs of sampled tokens (schulman.me/kl-approx)."""

from __future__ import annotations

import torch
from torch import Tensor

from nanorl.policy_loss import k3

TINY = 1e-6
"""The least probability of all other tokens that is told from 0."""


def binary_tv(logp_T: Tensor, other_logp_T: Tensor) -> Tensor:
    """Total variation of (p, 1 − p) and (q, 1 − q), the token and all others: `|p − q|`."""
    return (logp_T.exp() - other_logp_T.exp()).abs()


def binary_kl(logp_T: Tensor, other_logp_T: Tensor) -> Tensor:
    """`KL((p, 1 − p)‖(q, 1 − q))` in nats, `log p` and `log q` given; 1 − p is kept from 0."""
    p_T, q_T = logp_T.exp(), other_logp_T.exp()
    rest_T = torch.log((1 - p_T).clamp(min=TINY) / (1 - q_T).clamp(min=TINY))
    return p_T * (logp_T - other_logp_T) + (1 - p_T) * rest_T


def kl(kind: str, logp_T: Tensor, ref_logp_T: Tensor, old_logp_T: Tensor | None = None) -> Tensor:
    """Estimators of KL(π_θ‖π_ref) from sampled tokens, `d = log π_θ − log π_ref`.

    As *values*: k1 = d (unbiased), k2 = d²/2, k3 = e^{−d} − 1 + d (unbiased, not negative).
    As *loss terms* their expected gradients differ: k1 gives 0, k2 the gradient of KL(π‖ref), k3
    that of KL(ref‖π), and rk3 = r·k3 (needs `old_logp_T`) again that of KL(π‖ref).
    """
    d_T = logp_T - ref_logp_T
    if kind == "k1":
        return d_T
    if kind == "k2":
        return d_T**2 / 2
    k3_T = k3(logp_T, ref_logp_T)
    if kind == "k3":
        return k3_T
    if kind == "rk3" and old_logp_T is not None:
        return (logp_T - old_logp_T).exp() * k3_T
    raise ValueError(f"kind={kind!r}: choose k1, k2, k3, or rk3 with old_logp_T")
