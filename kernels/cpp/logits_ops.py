"""C++ over rows of logits for requests that truncate them or ask for the likeliest tokens
(`cpp/truncate.h`, `cpp/logits.h`). The conventions are those of ops.py.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.cpp.ops import dense_last, function


def pick_kept(
    logits_RV: Tensor,
    temperature: float,
    u_R: Tensor,
    top_ks: Tensor,
    top_ps: Tensor,
    min_ps: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """`pick` among the tokens that top-k (int64, 0: off), top-p and min-p (fp64; 1, 0: off) of each
    row keep: (token, its log-prob over the whole row, its log-prob among the kept)."""
    logits = dense_last(logits_RV)
    num_rows, vocab = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64)
    logp, kept_logp = (torch.empty(num_rows, dtype=torch.float32) for _ in range(2))
    given = [x.contiguous() for x in (top_ks, top_ps, min_ps, u_R)]
    function("pick_kept", logits.dtype)(
        logits.data_ptr(), num_rows, vocab, logits.stride(0), temperature,
        *(x.data_ptr() for x in given), tokens.data_ptr(), logp.data_ptr(), kept_logp.data_ptr(),
        torch.get_num_threads(),
    )  # fmt: skip
    return tokens, logp, kept_logp


def likeliest(
    logits_RV: Tensor, temperature: float, counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The `counts[r]` likeliest tokens of row r, most likely first and of equals the smaller id,
    and their log-probs: [R, largest count], the first entries of each row."""
    logits = dense_last(logits_RV)
    num_rows, vocab = logits.shape
    counts_R = torch.tensor(counts, dtype=torch.int64).clamp_(max=vocab)
    width = int(counts_R.max())
    ids = torch.zeros(num_rows, width, dtype=torch.int64)
    logp = torch.zeros(num_rows, width, dtype=torch.float32)
    function("likeliest", logits.dtype)(
        logits.data_ptr(), num_rows, vocab, logits.stride(0), temperature, counts_R.data_ptr(),
        width, ids.data_ptr(), logp.data_ptr(), torch.get_num_threads(),
    )  # fmt: skip
    return ids, logp
