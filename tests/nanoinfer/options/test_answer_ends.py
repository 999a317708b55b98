"""Where an answer may end (`min_tokens`), and what its text keeps of its end and of control tokens.

The engine's own arithmetic is checked by hand: before `min_tokens` a token is drawn from the same
logits with the stop tokens at minus infinity, and its log-prob is that of the model's own
distribution, as everywhere.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_text import VOCAB, make_text_engine, make_tokenizer

from nanoinfer.options.logit_edits import LogitEdits
from nanoinfer.options.text import TextStream
from nanoinfer.params import Grammar, SamplingParams

TOKENIZER = make_tokenizer()
(EOS,) = TOKENIZER.eos_ids
PROMPT = TOKENIZER.encode_chat([{"role": "user", "content": "hello"}], add_generation_prompt=True)
BIAS = {EOS: 30.0}  # so that an answer ends at once where it may


def generate(**fields: Any) -> Any:
    return make_text_engine().generate([PROMPT], SamplingParams(detokenize=True, **fields))[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("least", [0, 1, 5])
def test_an_answer_does_not_end_before_its_least_length(temperature: float, least: int) -> None:
    output = generate(
        max_tokens=20, min_tokens=least, logit_bias=BIAS, temperature=temperature, seed=3
    )
    assert len(output.ids) == least + 1 and output.ids[-1] == EOS
    assert EOS not in output.ids[:-1] and output.finish_reason == "stop"


def test_tokens_before_it_are_drawn_from_the_rest_and_scored_by_the_model() -> None:
    output = generate(max_tokens=4, min_tokens=4, temperature=1.0, seed=11, stop_token_ids=(5, 6))
    for place, (token, logp, sampled) in enumerate(
        zip(output.ids, output.logps, output.sampled_logps, strict=True)
    ):
        z = next_logps(PROMPT + output.ids[:place])
        assert logp == pytest.approx(z.log_softmax(-1)[token].item(), abs=1e-4)
        z[[EOS, 5, 6]] = -torch.inf
        assert sampled == pytest.approx(z.log_softmax(-1)[token].item(), abs=1e-4)
        assert token not in (EOS, 5, 6)


def next_logps(ids: list[int]) -> torch.Tensor:
    """Of every token that may follow, from a request without a least length."""
    params = SamplingParams(max_tokens=1, temperature=0, top_logps=VOCAB)
    (output,) = make_text_engine().generate([ids], params)
    z = torch.full((VOCAB,), -torch.inf)
    for token, logp in output.top_logps[0]:
        z[token] = logp
    return z


def test_a_request_beside_one_with_a_least_length_keeps_its_tokens() -> None:
    free = SamplingParams(max_tokens=12, seed=1, ignore_eos=True)
    bound = SamplingParams(max_tokens=12, min_tokens=6, seed=1, logit_bias=BIAS)
    alone = [make_text_engine().generate([PROMPT], params)[0].ids for params in (free, bound)]
    beside = make_text_engine().generate([PROMPT, PROMPT], [free, bound])
    assert [output.ids for output in beside] == alone


def test_stop_texts_count_only_behind_the_least_length() -> None:
    stream = TextStream(TOKENIZER, ("a",), min_tokens=2)
    assert [stream.push(token) for token in TOKENIZER.encode("aab")] == [None, None, None]
    assert stream.text == "aab"
    assert stream.push(TOKENIZER.encode("a")[0]) == "a" and stream.text == "aab"


@settings(max_examples=60, deadline=None)
@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=3), st.integers(0, 5))
def test_the_stop_found_is_the_first_that_begins_behind_it(
    said: str, stop: str, least: int
) -> None:
    """One token a letter, so places in the text are places of tokens."""
    for keeps in (False, True):
        stream = TextStream(TOKENIZER, (stop,), min_tokens=least, keeps_stop=keeps)
        found = None
        for token in TOKENIZER.encode(said):
            found = found or stream.push(token)
            if found:
                break
        at = said.find(stop, least)
        assert (found is not None) == (at >= 0)
        end = len(said) if at < 0 else at + len(stop) * keeps
        assert stream.text == said[:end]


def test_control_tokens_and_ends_are_shown_where_asked_for() -> None:
    start = TOKENIZER.token_to_id("<|user|>")
    hello = TOKENIZER.encode("hello")
    script = [*hello, start, *TOKENIZER.encode(" x"), EOS]
    shown = {}
    for skip in (True, False):
        for include in (True, False):
            engine = make_text_engine()
            params = SamplingParams(
                max_tokens=len(script), detokenize=True, skip_special=skip, include_stop=include
            )
            handle = engine.add(PROMPT, params)
            seq = engine.peek(handle)
            assert seq is not None
            for token in script:
                seq.append(token, 0.0, 0)
            output = engine.abort(handle)
            shown[skip, include] = seq.text.text if output is None else output.text
    assert shown == {
        (True, True): "hello x",
        (True, False): "hello x",
        (False, True): "hello<|user|> x<|end|>",
        (False, False): "hello<|user|> x",
    }


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"min_tokens": -1}, "min_tokens=-1: must be from 0 "),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens=9: must be from 0 .* to max_tokens=8"),
        ({"min_tokens": 1, "grammar": Grammar("regex", "a")}, "min_tokens=1: a grammar says"),
        ({"min_tokens": 1, "allowed_token_ids": (EOS,)}, "allowed_token_ids has no token that"),
        ({"min_tokens": 1, "allowed_token_ids": (7,), "stop_token_ids": (7,)}, "has no token that"),
    ],
)
def test_what_could_never_end_or_go_on_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        generate(**fields)


def test_the_mask_is_gone_when_the_answer_may_end() -> None:
    ids = list(PROMPT)
    params = SamplingParams(min_tokens=2, max_tokens=9)
    edits = LogitEdits(ids, len(PROMPT), params, None, [EOS, VOCAB + 5])
    for _ in range(2):
        mask = edits.allowed(VOCAB)
        assert mask is not None and (~mask).nonzero().flatten().tolist() == [EOS]
        ids.append(1)
    assert edits.allowed(VOCAB) is None
