"""Requests that report what they kept: the tokens, their log-probs, how often each is drawn."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from test_sampler import batch, chi_square
from tiny_text import make_model, make_text_engine, make_tokenizer

from nanoengine.config import EngineConfig
from nanoengine.packing import Sample
from nanoengine.state.whole_engine import Engine
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.options.full_sampling import sample
from nanoinfer.options.kept_sampling import MAX_KEPT, check_device, keep_rows
from nanoinfer.params import Grammar, Output, SamplingParams

PROMPT = [(5 * i) % 250 for i in range(20)]
CUTS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"min_p": 0.05},
    {"top_k": 7},
    {"top_k": 40, "top_p": 0.8, "min_p": 0.02},
]
KEPT: dict[str, Any] = {"logps_mode": "kept", "ignore_eos": True, "max_tokens": 12}


def kept64(z: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> set[int]:
    """One token after the other, likeliest first, in float64, as the definition says."""
    p = np.exp((z - z.max()) / temperature)
    p /= p.sum()
    found, mass = set(), 0.0
    for token in np.argsort(-p, kind="stable"):
        if (top_k and len(found) >= top_k) or mass >= top_p or p[token] < min_p * p.max():
            break
        found.add(int(token))
        mass += p[token]
    return found


def test_by_hand_of_three_tokens() -> None:
    """p = 0.5, 0.3, 0.2: top-p 0.7 keeps the first two, q = 5/8 and 3/8."""
    z = torch.tensor([[0.5, 0.3, 0.2]]).log().repeat(4000, 1)
    logits, plain, kept = keep_rows(z, batch(4000, top_p=0.7, kept_rows=range(4000)))
    drawn = sample(logits, plain)
    assert all({token for token, _ in row} == {0, 1} for row in kept.values())
    assert dict(kept[0]) == pytest.approx({0: np.log(5 / 8), 1: np.log(3 / 8)}, abs=1e-6)
    assert set(drawn.tokens.tolist()) == {0, 1}
    right = torch.tensor([5 / 8, 3 / 8]).log()[drawn.tokens]
    torch.testing.assert_close(drawn.logps, right, rtol=0, atol=1e-6)
    assert torch.equal(drawn.logps, drawn.sampled_logps)
    assert abs((drawn.tokens == 0).double().mean().item() - 5 / 8) < 4 * np.sqrt(15 / 64 / 4000)


@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_what_is_kept_is_what_float64_keeps_and_log_q_is_over_it(cut: dict[str, Any]) -> None:
    torch.manual_seed(0)
    z = torch.randn(200, 301) * 2
    logits, plain, kept = keep_rows(z, batch(200, 0.7, **cut, kept_rows=range(200)))
    drawn = sample(logits, plain)
    full = {"top_k": 0, "top_p": 1.0, "min_p": 0.0} | cut
    for row, z_V in enumerate(z.double().numpy()):
        expected = kept64(z_V, 0.7, **full)
        assert {token for token, _ in kept[row]} == expected
        columns = np.array(sorted(expected))
        lse = np.log(np.exp(z_V[columns] / 0.7).sum())
        assert [logp for _, logp in kept[row]] == sorted((p for _, p in kept[row]), reverse=True)
        for token, logp in kept[row]:
            assert logp == pytest.approx(z_V[token] / 0.7 - lse, abs=1e-5)
        own = int(drawn.tokens[row])
        assert own in expected
        assert float(drawn.logps[row]) == pytest.approx(z_V[own] / 0.7 - lse, abs=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cut", CUTS, ids=str)
def test_the_tokens_are_those_of_the_same_request_that_reports_nothing(
    dtype: torch.dtype, cut: dict[str, Any]
) -> None:
    torch.manual_seed(1)
    z = (torch.randn(300, 700) * 3).to(dtype)
    before = z.clone()
    plain = sample(z, batch(300, 0.8, **cut))
    logits, asked, _ = keep_rows(z, batch(300, 0.8, **cut, kept_rows=range(0, 300, 3)))
    mixed = sample(logits, asked)
    assert torch.equal(z, before)
    assert torch.equal(mixed.tokens, plain.tokens)
    torch.testing.assert_close(mixed.sampled_logps, plain.sampled_logps, rtol=0, atol=2e-6)
    others = [row for row in range(300) if row % 3]
    assert torch.equal(mixed.logps[others], plain.logps[others])


def test_every_kept_token_is_drawn_as_often_as_its_probability() -> None:
    torch.manual_seed(2)
    z = torch.randn(1, 60).repeat(20_000, 1)
    logits, plain, kept = keep_rows(z, batch(20_000, 0.9, top_p=0.8, kept_rows=range(20_000)))
    p = torch.zeros(60, dtype=torch.float64)
    for token, logp in kept[0]:
        p[token] = np.exp(logp)
    assert 5 < len(kept[0]) < 60 and p.sum().item() == pytest.approx(1)
    assert 0.5 < chi_square(sample(logits, plain).tokens, p) < 1.7


def test_no_more_is_kept_than_the_bound_however_flat_the_distribution() -> None:
    z = torch.linspace(0, 0.1, 3 * MAX_KEPT).unsqueeze(0)
    _, _, kept = keep_rows(z, batch(1, top_p=0.99, kept_rows=[0]))
    assert {token for token, _ in kept[0]} == set(range(2 * MAX_KEPT, 3 * MAX_KEPT))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_trainer_that_is_told_what_was_kept_finds_the_same_bits(dtype: torch.dtype) -> None:
    model = make_model(dtype=dtype)
    engine = LLMEngine(model, InferConfig(num_blocks=128, max_batch_tokens=64))
    asked = [
        SamplingParams(temperature=t, seed=seed, **cut, **KEPT)
        for seed, (t, cut) in enumerate([(t, cut) for t in (0.6, 1.0, 1.7) for cut in CUTS])
    ]
    outputs = engine.generate([PROMPT] * len(asked), asked)
    for params, output in zip(asked, outputs, strict=True):
        assert output.logps == output.sampled_logps
        prompt: list[list[int]] = [[] for _ in PROMPT]
        kept = [sorted(token for token, _ in row) for row in output.top_logps]
        assert all(token in row for token, row in zip(output.ids, kept, strict=True))
        assert any(len(row) > 1 for row in kept)
        sample_of = Sample(
            tokens=PROMPT + output.ids,
            loss_mask=[0] * len(PROMPT) + [1] * len(output.ids),
            kept=prompt + kept,
        )
        trainer = Engine(make_model(dtype=dtype), EngineConfig(dtype=_NAMES[dtype]))
        (logps,) = trainer.forward_logprobs([sample_of], temperature=params.temperature)
        assert logps[len(PROMPT) :].tolist() == output.logps
        (ignoring,) = trainer.forward_logprobs(
            [replace(sample_of, kept=None)], temperature=params.temperature
        )
        assert ignoring[len(PROMPT) :].tolist() != output.logps


_NAMES: dict[torch.dtype, Any] = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def test_what_a_grammar_rules_out_is_not_kept() -> None:
    engine = make_text_engine()
    grammar = Grammar("choice", choices=("yes", "no", "maybe"))
    params = SamplingParams(
        logps_mode="kept", top_p=0.95, temperature=2.0, grammar=grammar, max_tokens=8, seed=1
    )
    (output,) = engine.generate([PROMPT], [params])
    tokenizer = make_tokenizer()
    first = {tokenizer.decode([token])[0] for token, _ in output.top_logps[0]}
    assert first <= {"y", "n", "m"}
    assert np.exp([logp for _, logp in output.top_logps[0]]).sum() == pytest.approx(1)
    ended = [token for token in output.ids if token not in tokenizer.eos_ids]
    assert tokenizer.decode(ended) in grammar.choices


def test_an_answer_that_was_cut_short_goes_on_with_what_it_had_kept() -> None:
    params = SamplingParams(top_p=0.8, seed=3, **KEPT)
    (whole,) = make_text_engine().generate([PROMPT], [params])
    names = ("ids", "logps", "versions", "cache_versions", "sampled_logps", "top_logps")
    begun = Output(**{name: getattr(whole, name)[:5] for name in names})
    engine = make_text_engine()
    handle = engine.add(PROMPT, params, sampled=begun)
    found: dict[int, Output] = {}
    while handle not in found:
        found |= dict(engine.step())
    assert found[handle].top_logps == whole.top_logps
    assert found[handle].logps == whole.logps
    assert len(whole.top_logps) == len(whole.ids)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"temperature": 0.0}, "a greedy token is certain"),
        ({"prompt_logps": True}, "nobody drew the prompt"),
        ({"logit_bias": {3: 1.0}}, "logit_bias"),
        ({"repetition_penalty": 1.1}, "repetition_penalty"),
        ({"presence_penalty": 0.1}, "presence_penalty"),
        ({"frequency_penalty": 0.1}, "frequency_penalty"),
    ],
)
def test_what_a_trainer_could_not_score_again_is_refused(
    options: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        SamplingParams(logps_mode="kept", top_p=0.9, **options)


def test_a_gpu_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"logps_mode='kept' on cuda:0"):
        check_device(torch.device("cuda:0"))
