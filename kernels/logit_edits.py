"""Two edits of logits before sampling, in place: penalties and a grammar's bitmask.

`apply_penalties_`, per token with c its count in the output so far (Hugging Face's and OpenAI's
definitions, in this order):

    seen in prompt or output:  z = z / repetition if z > 0 else z · repetition
    z = z − frequency·c − presence·[c > 0]

The counts are the caller's, one int32 a token and row, updated by one increment a step; a row whose
penalties are all neutral is not touched. `apply_token_bitmask_` writes −inf where the mask's bit is
0: bit v % 32 of word v // 32, the layout of XGrammar.
"""

import torch
from torch import Tensor

from kernels._check import check_integers, check_per_row, check_tensors
from kernels._dispatch import Backend, compute_dtype, use_triton


def apply_penalties_ref(
    logits_BV: Tensor,
    output_counts_BV: Tensor,
    prompt_mask_BV: Tensor | None,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
) -> Tensor:
    """The definition, out of place."""
    wide = compute_dtype(logits_BV.dtype)
    z, count = logits_BV.to(wide), output_counts_BV.to(wide)
    factor, frequency, presence = (
        x.to(wide).unsqueeze(1) for x in (repetition, frequency, presence)
    )
    seen = count > 0 if prompt_mask_BV is None else (count > 0) | prompt_mask_BV.bool()
    z = torch.where(seen, torch.where(z > 0, z / factor, z * factor), z)
    return (z - frequency * count - presence * (count > 0)).to(logits_BV.dtype)


@torch.no_grad()
def apply_penalties_(
    logits_BV: Tensor,
    output_counts_BV: Tensor,
    prompt_mask_BV: Tensor | None,
    *,
    repetition: Tensor,
    frequency: Tensor,
    presence: Tensor,
    backend: Backend = "auto",
) -> None:
    """In place. Counts int32 [B, V]; prompt mask bool [B, V] or None; the penalties are [B] on the
    logits' device, neutral at 1, 0 and 0."""
    for name, table in (("output_counts", output_counts_BV), ("prompt_mask", prompt_mask_BV)):
        if table is not None and table.shape != logits_BV.shape:
            raise ValueError(
                f"{name}: shape {tuple(table.shape)} must be logits' {tuple(logits_BV.shape)}"
            )
    named = {"repetition": repetition, "frequency": frequency, "presence": presence}
    check_per_row(logits_BV, **named)
    tables = {"output_counts": output_counts_BV, "prompt_mask": prompt_mask_BV}
    on_triton = use_triton(backend, logits_BV)
    check_tensors(logits_BV, "logits", on_triton, **named, **tables)
    check_integers(output_counts=output_counts_BV)
    if on_triton:
        from kernels import _logit_edits_triton

        _check_rows(logits_BV)
        _logit_edits_triton.apply_penalties(logits_BV, output_counts_BV, prompt_mask_BV, **named)
        return
    is_active = (repetition != 1) | (frequency != 0) | (presence != 0)
    active = is_active.nonzero().flatten()
    if not len(active):
        return
    rows: Tensor | slice = active if len(active) < len(is_active) else slice(None)
    mask = None if prompt_mask_BV is None else prompt_mask_BV[rows]
    logits_BV[rows] = apply_penalties_ref(
        logits_BV[rows], output_counts_BV[rows], mask, *(x[rows] for x in named.values())
    )


def apply_token_bitmask_ref(logits_BV: Tensor, bitmask_BW: Tensor) -> Tensor:
    """The definition, out of place."""
    bit = torch.arange(32, dtype=torch.int32, device=bitmask_BW.device)
    is_allowed = (bitmask_BW.unsqueeze(-1) >> bit & 1).flatten(1)[:, : logits_BV.shape[1]]
    return logits_BV.masked_fill(is_allowed == 0, -torch.inf)


@torch.no_grad()
def apply_token_bitmask_(
    logits_BV: Tensor, bitmask_BW: Tensor, *, backend: Backend = "auto"
) -> None:
    """In place. `bitmask` int32 [B, ceil(V / 32)], 1 = allowed."""
    expected = (logits_BV.shape[0], -(-logits_BV.shape[1] // 32))
    if bitmask_BW.shape != expected or bitmask_BW.dtype != torch.int32:
        raise ValueError(
            f"bitmask: {bitmask_BW.dtype} {tuple(bitmask_BW.shape)} must be int32 {expected}, one "
            "bit a token of logits"
        )
    on_triton = use_triton(backend, logits_BV)
    check_tensors(logits_BV, "logits", on_triton, bitmask=bitmask_BW)
    if on_triton:
        from kernels import _logit_edits_triton

        _check_rows(logits_BV)
        _logit_edits_triton.apply_token_bitmask(logits_BV, bitmask_BW)
        return
    logits_BV.copy_(apply_token_bitmask_ref(logits_BV, bitmask_BW))


def _check_rows(logits_BV: Tensor) -> None:
    if logits_BV.stride(1) != 1:
        raise ValueError(f"logits: strides {logits_BV.stride()} must end in 1 to be changed")
