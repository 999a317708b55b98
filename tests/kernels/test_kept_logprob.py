"""Log-probs over kept tokens: by hand, against float64, and the arithmetic of the whole row."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import linear, linear_kept_logprob, linear_logprob, logits_logprob
from kernels.logits.kept import NOTHING, KeptHead, keep_only_

BATCHES = 200


def test_by_hand_over_two_of_three_tokens() -> None:
    """Logits ln 1, ln 2, ln 5; the last is left out: 2/3 is the likelier one's."""
    logits = torch.tensor([1.0, 2.0, 5.0]).log()
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = logits.reshape(3, 1).clone().requires_grad_()
    logp, entropy = linear_kept_logprob(
        hidden, weight, torch.tensor([1]), [[0, 1]], return_entropy=True
    )
    assert logp[0].item() == pytest.approx(math.log(2 / 3), abs=1e-6)
    h = -(math.log(1 / 3) / 3 + 2 * math.log(2 / 3) / 3)
    assert entropy[0].item() == pytest.approx(h, abs=1e-6)
    logp.sum().backward()
    # d log q / dz = 1[v = 1] - q: over the whole vocabulary it would be (-1/8, 3/4, -5/8)
    assert weight.grad is not None and hidden.grad is not None
    torch.testing.assert_close(weight.grad.flatten(), torch.tensor([-1 / 3, 1 / 3, 0.0]))
    assert weight.grad[2].item() == 0.0
    expected = math.log(2.0) * (1 / 3)  # Σ_v dz_v · w_v
    assert hidden.grad.item() == pytest.approx(expected, abs=1e-6)


def test_log_q_its_entropy_and_both_gradients_are_those_of_float64() -> None:
    rng = np.random.default_rng(0)
    for batch in range(BATCHES):
        rows, width, vocab = (int(x) for x in rng.integers([1, 1, 3], [7, 9, 300]))
        h, w = rng.normal(size=(rows, width)), rng.normal(size=(vocab, width))
        ids = rng.integers(vocab, size=rows)
        kept = [_some(rng, vocab, int(token)) for token in ids]
        temperature = float(rng.choice([0.3, 0.7, 1.0, 2.0]))
        by_logp, by_entropy = rng.normal(size=rows), rng.normal(size=rows)
        expected = _reference(h, w, ids, kept, temperature, by_logp, by_entropy)
        found = _ours(h, w, ids, kept, temperature, by_logp, by_entropy, dtype=torch.float32)
        for ours, theirs in zip(found, expected, strict=True):
            scale = max(1.0, float(np.abs(theirs).max()))
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-5 * scale, err_msg=str(batch))


def _some(rng: np.random.Generator, vocab: int, token: int) -> list[int]:
    """Some of the vocabulary with the token; at times nothing, which is all of it."""
    if rng.random() < 0.1:
        return []
    others = rng.choice(vocab, size=int(rng.integers(vocab)), replace=False).tolist()
    return sorted({token, *others})


def _reference(
    h: Any, w: Any, ids: Any, kept: Any, temperature: float, by_logp: Any, by_entropy: Any
) -> list[np.ndarray]:
    """Row by row over the kept columns alone, the gradients by their formulas."""
    logps, entropies = np.zeros(len(ids)), np.zeros(len(ids))
    dh, dw = np.zeros_like(h), np.zeros_like(w)
    for row, token in enumerate(ids):
        columns = np.array(kept[row] or range(len(w)))
        z = h[row] @ w[columns].T / temperature
        log_q = z - z.max() - np.log(np.exp(z - z.max()).sum())
        q = np.exp(log_q)
        own = columns.tolist().index(token)
        logps[row], entropies[row] = log_q[own], -(q * log_q).sum()
        dz = by_logp[row] * ((np.arange(len(columns)) == own) - q)
        dz -= by_entropy[row] * q * (log_q + entropies[row])
        dh[row] = dz @ w[columns] / temperature
        dw[columns] += np.outer(dz, h[row]) / temperature
    return [logps, entropies, dh, dw]


def _ours(
    h: Any,
    w: Any,
    ids: Any,
    kept: Any,
    temperature: float,
    by_logp: Any,
    by_entropy: Any,
    dtype: Any,
) -> list[np.ndarray]:
    hidden = torch.tensor(h, dtype=dtype, requires_grad=True)
    weight = torch.tensor(w, dtype=dtype, requires_grad=True)
    logp, entropy = linear_kept_logprob(
        hidden, weight, torch.tensor(ids), kept, temperature=temperature, return_entropy=True,
        head=KeptHead(chunk_size=3),
    )  # fmt: skip
    loss = (logp * torch.tensor(by_logp)).sum() + (entropy * torch.tensor(by_entropy)).sum()
    loss.backward()
    assert hidden.grad is not None and weight.grad is not None
    return [x.detach().numpy() for x in (logp, entropy, hidden.grad, weight.grad)]


def test_gradcheck() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    ids, kept = torch.tensor([0, 5, 2, 3]), [[0, 1], [5], [], [1, 2, 3, 4]]

    def score(h: Tensor, w: Tensor) -> Any:
        return linear_kept_logprob(h, w, ids, kept, temperature=0.7, return_entropy=True)

    assert torch.autograd.gradcheck(score, (hidden, weight), check_undefined_grad=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [1e-6, 0.01, 0.7, 1.0])
def test_the_bits_are_those_of_a_sampler_over_the_same_logits(
    dtype: torch.dtype, temperature: float
) -> None:
    torch.manual_seed(1)
    hidden, weight = torch.randn(40, 16).to(dtype), torch.randn(700, 16).to(dtype)
    ids = torch.randint(700, (40,))
    kept = [sorted({int(token), *torch.randint(700, (30,)).tolist()}) for token in ids]
    logp = linear_kept_logprob(hidden, weight, ids, kept, temperature=temperature)
    keep = torch.zeros(40, 700, dtype=torch.bool)
    for row, columns in enumerate(kept):
        keep[row, columns] = True
    logits = keep_only_(linear(hidden, weight), keep)
    assert (logits[~keep] == torch.tensor(NOTHING).to(dtype)).all()
    assert isinstance(logp, Tensor) and logp.isfinite().all()
    assert torch.equal(logp, logits_logprob(logits, ids, temperature))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_row_that_keeps_everything_has_the_bits_of_the_plain_op(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    hidden, weight = torch.randn(9, 16).to(dtype), torch.randn(300, 16).to(dtype)
    ids = torch.randint(300, (9,))
    plain = linear_logprob(hidden, weight, ids, temperature=0.7, return_entropy=True)
    for kept in ([[]] * 9, [list(range(300))] * 9):
        mine = linear_kept_logprob(hidden, weight, ids, kept, temperature=0.7, return_entropy=True)
        assert all(torch.equal(a, b) for a, b in zip(mine, plain, strict=True))


def test_the_gradient_goes_into_the_buffer_of_an_optimizer() -> None:
    torch.manual_seed(3)
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    ids = torch.tensor([1, 2, 3, 4, 5])
    kept = [[int(token), 9, 30] for token in ids]
    linear_kept_logprob(hidden, weight, ids, kept).sum().backward()
    expected, weight.grad = weight.grad, None
    weight.main_grad = torch.ones(50, 4)  # type: ignore[attr-defined]
    linear_kept_logprob(hidden, weight, ids, kept).sum().backward()
    assert weight.grad is None and expected is not None
    torch.testing.assert_close(weight.main_grad - 1, expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("kept", "words"),
    [
        ([[0, 1], [2, 3]], "row 1 does not keep its own token 1"),
        ([[0]], "1 rows must be as many as the 2 tokens"),
        ([[0, 99], [1]], "99 is outside the vocabulary of 8"),
    ],
)
def test_what_cannot_have_been_drawn_is_refused(kept: list[list[int]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        linear_kept_logprob(torch.ones(2, 4), torch.ones(8, 4), torch.tensor([0, 1]), kept)


def test_several_tokens_a_row_are_refused() -> None:
    with pytest.raises(ValueError, match="one id for each row"):
        linear_kept_logprob(torch.ones(2, 4), torch.ones(8, 4), torch.ones(2, 2).long(), [[], []])
