"""How far two policies are apart at a token, that token and all others being the events."""

from __future__ import annotations

import torch
from torch import Tensor

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
