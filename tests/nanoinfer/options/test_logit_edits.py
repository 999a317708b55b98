"""Penalties, bias, masks, n, prompt and top log-probs: by hand, and against the trainer's bits."""

import math
import random

import numpy as np
import pytest
import torch
from test_sampler import batch, chi_square
from tiny_text import VOCAB, make_model, make_text_engine, make_tokenizer

from kernels import linear_logprob
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.model.transformer import Transformer
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.options.full_sampling import sample, top_logps
from nanoinfer.options.logit_edits import EditPlan, LogitEdits
from nanoinfer.params import SamplingParams

PROMPT = [(5 * i) % 250 for i in range(40)]


def edited(ids: list[int], num_prompt: int, z: list[float], **options: object) -> list[float]:
    rows = torch.tensor([z])
    edits = LogitEdits(ids, num_prompt, SamplingParams(**options), None)  # type: ignore[arg-type]
    EditPlan.of([edits], len(z)).apply_(rows)
    return rows[0].tolist()


def edited_token_by_token(
    ids: list[int], num_prompt: int, z_V: torch.Tensor, params: SamplingParams
) -> torch.Tensor:
    """What the penalties' papers and the OpenAI API say, one token after the other, in fp32."""
    found = z_V.clone()
    options = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    repetition, frequency, presence = torch.tensor(options)
    for token in set(ids):
        z, count = found[token], torch.tensor(float(ids[num_prompt:].count(token)))
        z = z / repetition if z > 0 else z * repetition
        found[token] = z - (frequency * count + presence) if count else z
    for token, bias in params.logit_bias.items():
        found[token] += torch.tensor(bias)
    if params.allowed_token_ids is not None:
        banned = set(range(len(z_V))) - set(params.allowed_token_ids)
        found[list(banned)] = -math.inf
    return found


@pytest.mark.parametrize("seed", range(8))
def test_rows_edited_together_have_the_bits_of_each_alone(seed: int) -> None:
    """Random wishes beside each other, against fp32 arithmetic on single tokens."""
    draw, vocab = random.Random(seed), 203
    asked, edits = [], []
    for _ in range(6):
        ids = [draw.randrange(draw.choice([12, vocab])) for _ in range(draw.randint(1, 60))]
        options: dict = {}
        if draw.random() < 0.5:
            options["repetition_penalty"] = draw.uniform(0.2, 3)
        if draw.random() < 0.5:
            options["presence_penalty"] = draw.uniform(-2, 2)
        if draw.random() < 0.5:
            options["frequency_penalty"] = draw.uniform(-2, 2)
        if draw.random() < 0.5:
            options["logit_bias"] = {draw.randrange(vocab): draw.uniform(-9, 9) for _ in range(9)}
        if draw.random() < 0.3:
            options["allowed_token_ids"] = tuple(draw.randrange(vocab) for _ in range(50))
        asked.append((ids, draw.randint(1, len(ids)), SamplingParams(**options)))
        edits.append(LogitEdits(*asked[-1], None))
    z = torch.randn(6, vocab, generator=torch.Generator().manual_seed(seed)) * 5
    together = z.clone()
    EditPlan.of(edits, vocab).apply_(together)
    for row, (ids, num_prompt, params) in enumerate(asked):
        assert torch.equal(together[row], edited_token_by_token(ids, num_prompt, z[row], params))


def test_penalties_by_hand() -> None:
    z = [2.0, -2.0, 1.0, 0.5]
    # Repetition counts prompt and completion, once each: Keskar et al. 2019.
    assert edited([0, 1, 1], 2, z, repetition_penalty=2.0) == [1.0, -4.0, 1.0, 0.5]
    # Presence and frequency count the completion alone.
    assert edited([0, 1, 1, 2], 1, z, presence_penalty=0.5) == [2.0, -2.5, 0.5, 0.5]
    assert edited([0, 1, 1, 2], 1, z, frequency_penalty=0.5) == [2.0, -3.0, 0.5, 0.5]
    assert edited([3], 1, z, presence_penalty=1.0, frequency_penalty=1.0) == z
    assert edited([3], 1, z, logit_bias={1: 4.0, 3: -1.0}) == [2.0, 2.0, 1.0, -0.5]
    inf = math.inf
    assert edited([3], 1, z, allowed_token_ids=(2, 0, 2)) == [2.0, -inf, 1.0, -inf]
    both = edited([0], 1, z, repetition_penalty=2.0, logit_bias={0: 3.0}, allowed_token_ids=(0,))
    assert both == [4.0, -inf, -inf, -inf]


def test_penalties_equal_transformers() -> None:
    from transformers import RepetitionPenaltyLogitsProcessor

    z = torch.randn(1, 50, generator=torch.Generator().manual_seed(1))
    ids = [3, 7, 7, 40, 3]
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([ids]), z.clone())
    assert edited(ids, 2, z[0].tolist(), repetition_penalty=1.3) == expected[0].tolist()


def test_min_p_keeps_tokens_by_their_share_of_the_likeliest() -> None:
    p = torch.tensor([0.5, 0.26, 0.2, 0.04], dtype=torch.float64)
    rows = p.log().float().expand(20000, -1).contiguous()
    tokens, logps, own = sample(rows, batch(20000, min_p=0.5))
    kept = torch.tensor([0.5, 0.26, 0.0, 0.0], dtype=torch.float64) / 0.76
    assert chi_square(tokens, kept) < 4
    torch.testing.assert_close(own.double(), kept.log()[tokens], rtol=0, atol=1e-6)
    torch.testing.assert_close(logps.double(), p.log()[tokens], rtol=0, atol=1e-6)
    # of the tempered distribution: at temperature 0.5 the shares are squared
    tokens, _, _ = sample(rows[:5000], batch(5000, temperature=0.5, min_p=0.5))
    assert set(tokens.tolist()) == {0}


def test_edited_rows_follow_the_edited_distribution_and_leave_the_others_alone() -> None:
    z = torch.randn(1, 40, generator=torch.Generator().manual_seed(2)) * 2
    rows = z.expand(20000, -1).contiguous()
    params = SamplingParams(logit_bias={3: 2.0, 9: -5.0}, allowed_token_ids=tuple(range(12)))
    edits = LogitEdits([1], 1, params, None)
    plain = sample(rows, batch(20000))
    mixed = sample(rows, batch(20000, edits={i: edits for i in range(0, 20000, 2)}))
    w = z[0].double().clone()
    w[3] += 2
    w[9] -= 5
    w[12:] = -math.inf
    p = torch.softmax(w, -1)
    assert chi_square(mixed.tokens[::2], p) < 2
    torch.testing.assert_close(
        mixed.sampled_logps[::2].double(), p.log()[mixed.tokens[::2]], rtol=0, atol=1e-5
    )
    raw = torch.log_softmax(z[0].double(), -1)[mixed.tokens]
    torch.testing.assert_close(mixed.logps.double(), raw, rtol=0, atol=1e-5)
    for column, expected in zip(mixed, plain, strict=True):
        assert torch.equal(column[1::2], expected[1::2])


def test_sampled_logps_of_every_kind_of_row() -> None:
    z = torch.randn(6, 30, generator=torch.Generator().manual_seed(3))
    greedy = sample(z, batch(6, temperature=0.0))
    assert greedy.sampled_logps.tolist() == [0.0] * 6
    plain = sample(z, batch(6, temperature=0.7))
    assert torch.equal(plain.sampled_logps, plain.logps)
    cut = sample(z, batch(6, top_k=1))
    assert cut.sampled_logps.tolist() == [0.0] * 6 and (cut.logps < 0).all()


def test_top_logps_are_the_largest_of_the_tempered_distribution() -> None:
    z = torch.randn(3, 60, generator=torch.Generator().manual_seed(4))
    asked = batch(3, temperature=0.5, num_top={0: 4, 2: 100})
    found = top_logps(z, asked)
    assert sorted(found) == [0, 2] and len(found[2]) == 60
    expected = torch.log_softmax(z[0].double() / 0.5, -1).topk(4)
    assert [t for t, _ in found[0]] == expected.indices.tolist()
    np.testing.assert_allclose([v for _, v in found[0]], expected.values, atol=1e-6)


def test_the_reported_top_holds_the_sampled_tokens_own_logp() -> None:
    engine = make_text_engine()
    params = SamplingParams(max_tokens=20, top_logps=VOCAB, seed=3, ignore_eos=True)
    output = engine.generate([PROMPT], params)[0]
    assert len(output.top_logps) == 20
    for token, logp, top in zip(output.ids, output.logps, output.top_logps, strict=True):
        assert dict(top)[token] == logp
        assert sum(math.exp(value) for _, value in top) == pytest.approx(1.0, abs=1e-5)


def trainer_logps(model: Transformer, ids: list[int], temperature: float) -> list[float]:
    """Of every token after the first, by the training forward pass."""
    hidden = model(
        torch.tensor(ids), packed_positions([len(ids)]), PackedContext.from_lengths([len(ids)])
    )
    logp = linear_logprob(
        hidden[:-1],
        model.lm_head_weight,
        torch.tensor(ids[1:]),
        temperature=temperature,
        packed=model.lm_head_packed,
    )
    assert isinstance(logp, torch.Tensor) and logp.requires_grad
    return logp.tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=("fp32", "bf16"))
@pytest.mark.parametrize("budget", [8, 64])
def test_prompt_and_edited_logps_equal_the_trainers_bit_for_bit(
    dtype: torch.dtype, budget: int
) -> None:
    model = make_model(dtype=dtype)
    sizes = InferConfig(num_blocks=24, max_batch_tokens=budget, max_num_seqs=6)
    engine = LLMEngine(model, sizes, tokenizer=make_tokenizer())
    engine.generate([PROMPT], SamplingParams(max_tokens=2))  # its prompt is now in the cache
    options: list[dict] = [
        {"prompt_logps": True},
        {"prompt_logps": True, "temperature": 0.6},
        {"repetition_penalty": 1.5, "prompt_logps": True},
        {"presence_penalty": 0.7, "frequency_penalty": 0.2, "temperature": 0.8},
        {"logit_bias": {7: 3.0}, "min_p": 0.02},
        {"allowed_token_ids": tuple(range(40, 90)), "top_p": 0.8},
    ]
    each = [
        SamplingParams(max_tokens=40, seed=i, ignore_eos=True, **o) for i, o in enumerate(options)
    ]
    for params, output in zip(each, engine.generate([PROMPT] * 6, each), strict=True):
        expected = trainer_logps(model, PROMPT + output.ids, params.temperature)
        scored = expected[: len(PROMPT) - 1] if params.prompt_logps else []
        assert output.prompt_logps == scored
        assert output.logps == expected[len(PROMPT) - 1 :]
        if params.prompt_logps:
            assert output.num_cached_tokens == 0
    assert engine.metrics()["num_preemptions"] > 0


def test_edits_do_not_depend_on_company_or_preemption() -> None:
    options: list[dict] = [
        {"repetition_penalty": 1.5},
        {"presence_penalty": 1.0, "temperature": 0.0},
        {"frequency_penalty": 0.5, "top_k": 20},
        {"logit_bias": {1: 5.0}, "min_p": 0.1},
        {"allowed_token_ids": (1, 2, 3), "top_logps": 2},
        {},
    ]
    each = [
        SamplingParams(max_tokens=30, seed=i, ignore_eos=True, **o) for i, o in enumerate(options)
    ]
    alone = [make_text_engine(prefix_caching=False).generate([PROMPT], p)[0] for p in each]
    tight = make_text_engine(num_blocks=12, max_batch_tokens=16, max_num_seqs=6)
    together = tight.generate([PROMPT] * 6, each)
    assert tight.metrics()["num_preemptions"] > 0
    for a, b in zip(together, alone, strict=True):
        assert (a.ids, a.logps, a.sampled_logps, a.top_logps) == (
            b.ids,
            b.logps,
            b.sampled_logps,
            b.top_logps,
        )
    assert set(together[4].ids) <= {1, 2, 3}
    assert len(set(together[1].ids)) > 15  # greedy, but what was said is penalised


def test_n_completions_are_reproducible_different_and_share_the_prompt() -> None:
    params = SamplingParams(max_tokens=12, n=4, seed=5, ignore_eos=True)
    engine = make_text_engine()
    outputs = engine.generate([PROMPT, PROMPT[:7]], params)
    assert len(outputs) == 8
    assert len({tuple(o.ids) for o in outputs[:4]}) == 4
    assert engine.metrics()["computed_tokens"] == (40 + 3) + (7 + 3) + 8 * 11
    again = make_text_engine().generate([PROMPT[:7]], params)
    assert [o.ids for o in again] == [o.ids for o in outputs[4:]]
    one = SamplingParams(max_tokens=12, seed=5, ignore_eos=True)
    assert make_text_engine().generate([PROMPT], one)[0].ids == outputs[0].ids


def test_a_weight_update_scores_an_unfinished_prompt_again() -> None:
    engine = make_text_engine(max_batch_tokens=16)
    handle = engine.add(PROMPT, SamplingParams(max_tokens=2, prompt_logps=True, ignore_eos=True))
    engine.step()
    seq = engine.peek(handle)
    assert seq is not None and len(seq.prompt_logps) == 16
    engine.update_weights(iter(new_weights()), 1)
    while not (finished := engine.step()):
        pass
    expected = trainer_logps(make_model(seed=9), PROMPT, 1.0)
    assert finished[0][1].prompt_logps == expected


def new_weights() -> list[tuple[str, torch.Tensor]]:
    from nanoengine.formats.hf import export_state

    return list(export_state(make_model(seed=9)))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min_p": 1.5}, r"min_p=1\.5"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty=0\.0"),
        ({"presence_penalty": math.nan}, "presence_penalty=nan"),
        ({"logit_bias": {3: math.inf}}, r"logit_bias\[3\]=inf"),
        ({"allowed_token_ids": ()}, "allows nothing"),
        ({"n": 0}, "n=0"),
        ({"stop": "text"}, "stop='text'"),
        ({"stop": ("",)}, "none of them empty"),
        ({"top_logps": -1}, "top_logps=-1"),
        ({"logit_bias": {VOCAB: 1.0}}, "logit_bias: token 300"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids: token -1"),
        ({"stop_token_ids": (999,)}, "stop_token_ids: token 999"),
    ],
)
def test_impossible_edits_are_refused(options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_text_engine().add([1], SamplingParams(**options))


def test_texts_need_a_tokenizer() -> None:
    engine = LLMEngine(make_model(), InferConfig(num_blocks=8))
    for params in (SamplingParams(stop=("x",)), SamplingParams(detokenize=True)):
        with pytest.raises(ValueError, match="give the engine a tokenizer"):
            engine.add([1], params)
