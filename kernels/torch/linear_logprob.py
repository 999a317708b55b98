"""Log-probabilities in PyTorch: the definition, and linear_logprob.py's passes over a chunk of
logits where no kernel runs. Both go by runs of rows that stay in the processor's cache.
"""

import torch
from torch import Tensor

from kernels.logits.logprob import softmax_parts

_TILE_ELEMENTS = 8 * 49152


def linear_logprob_ref(
    hidden_TD: Tensor, weight_VD: Tensor, token_ids_T: Tensor, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """logp and entropy with the whole T x V tensor, by autograd alone."""
    logits = hidden_TD @ weight_VD.t()
    z = logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature
    logp_TV = torch.log_softmax(z, -1)
    entropy = -(logp_TV.exp() * logp_TV).sum(-1)
    return logp_TV.gather(1, token_ids_T.unsqueeze(1)).squeeze(1), entropy


def stats(
    logits: Tensor, token_ids: Tensor, temperature: float, wants_entropy: bool
) -> tuple[Tensor, ...]:
    """(log-prob of each row's id, log-sum-exp, entropy or nothing) of logits / temperature."""
    parts = []
    for tile in _row_tiles(logits):
        z, _, lse = softmax_parts(logits[tile], temperature)
        logp = z.gather(1, token_ids[tile].unsqueeze(1)).squeeze(1) - lse
        parts.append((logp, lse, _entropy(z, lse) if wants_entropy else lse[:0]))
    return tuple(torch.cat(column) for column in zip(*parts, strict=True))


def gradient(logits, token_ids, temperature, lse, entropy, dlogp, dentropy) -> Tensor:
    """The gradient by the logits, in their memory; see `linear_logprob.py`."""
    for tile in _row_tiles(logits):
        z = logits[tile].to(lse.dtype)
        if temperature != 1.0:
            z.div_(temperature)
        parts = [None if x is None else x[tile] for x in (dlogp, dentropy, entropy)]
        dz = _dlogits(z, lse[tile], token_ids[tile], *parts)
        if temperature != 1.0:
            dz.div_(temperature)
        logits[tile] = dz
    return logits


def _row_tiles(logits: Tensor) -> list[slice]:
    """Runs of rows whose fp32 intermediates stay in the processor's cache."""
    num_rows, step = logits.shape[0], logits.shape[0]
    if logits.device.type == "cpu":
        step = max(1, _TILE_ELEMENTS // logits.shape[1])
    return [slice(lo, lo + step) for lo in range(0, num_rows, step)]


def _entropy(z: Tensor, lse: Tensor) -> Tensor:
    logp = z - lse.unsqueeze(1)
    return -(logp.exp().mul_(logp)).sum(-1)


def _dlogits(z, lse, token_ids, dlogp, dentropy, entropy) -> Tensor:
    """Gradient by the tempered logits: Σ dlogp · (onehot − p) − dentropy · p · (logp + entropy)."""
    logp = z.sub_(lse.unsqueeze(1))
    if dentropy is None:
        scale = -dlogp.sum(1, keepdim=True)
        dz = logp.exp_().mul_(scale)
    else:
        scale = -dentropy.unsqueeze(1)
        slope = (logp + entropy.unsqueeze(1)).mul_(scale)
        if dlogp is not None:
            slope.sub_(dlogp.sum(1, keepdim=True))
        dz = logp.exp_().mul_(slope)
    if dlogp is not None:
        dz.scatter_add_(1, token_ids, dlogp.to(dz.dtype))
    return dz
