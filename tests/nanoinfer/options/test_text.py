"""Text while tokens arrive, stop texts across token borders, and grammars."""

import json
import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_text import make_text_engine, make_tokenizer
from tokenizers import Tokenizer, decoders, models

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.options.logit_edits import GrammarCompiler
from nanoinfer.options.text import TextStream
from nanoinfer.params import Grammar, Output, SamplingParams

TOKENIZER = make_tokenizer()
PROMPT = TOKENIZER.encode("hello, the world")


@given(st.lists(st.integers(0, 263), max_size=40))
@example([94] * 7 + [126, 94])  # broken bytes, the last of which begin a character
@example([94] * 8 + [126, 94])
@settings(max_examples=150, deadline=None)
def test_streamed_text_is_the_text_of_all_tokens(ids: list[int]) -> None:
    stream = TextStream(TOKENIZER)
    seen = ""
    for token in ids:
        assert stream.push(token) is None
        assert stream.text.startswith(seen)
        seen = stream.text
    stream.finish()
    whole = TOKENIZER.decode(ids, skip_special=True)
    if "\ufffd" not in whole:
        assert stream.text == whole
    assert stream.text.replace("\ufffd", "") == whole.replace("\ufffd", "")


def test_a_character_of_several_tokens_appears_when_it_is_complete() -> None:
    stream = TextStream(TOKENIZER)
    shown = []
    for token in TOKENIZER.encode("aé😀b"):
        stream.push(token)
        shown.append(stream.text)
    assert shown == ["a", "a", "aé", "aé", "aé", "aé", "aé😀", "aé😀b"]


@given(st.text("abc", max_size=12), st.lists(st.text("abc", min_size=1, max_size=3), max_size=3))
@settings(max_examples=150, deadline=None)
def test_a_stop_text_is_found_where_it_first_ends(text: str, stop: list[str]) -> None:
    stream = TextStream(TOKENIZER, tuple(stop))
    found = None
    for end, token in enumerate(TOKENIZER.encode(text), 1):  # one letter a token
        found = stream.push(token)
        endings = [s for s in stop if text[:end].endswith(s)]
        assert (found is not None) == bool(endings)
        if found is not None:
            assert stream.text == text[: end - max(map(len, endings))]
            return
        assert text.startswith(stream.settled())
    assert found is None and stream.text == text


def test_what_may_become_a_stop_text_is_not_settled() -> None:
    stream = TextStream(TOKENIZER, ("END", "N!"))
    settled = []
    for token in TOKENIZER.encode("aENEb"):
        assert stream.push(token) is None
        settled.append(stream.settled())
    assert settled == ["a", "a", "a", "aEN", "aENEb"]


def free_text(seed: int = 1) -> Output:
    params = SamplingParams(max_tokens=40, seed=seed, ignore_eos=True, detokenize=True)
    return make_text_engine().generate([PROMPT], params)[0]


def test_a_stop_text_across_tokens_ends_a_request() -> None:
    free = free_text()
    assert free.text == TOKENIZER.decode(free.ids, skip_special=True)
    clean = re.search(r"[^\ufffd]{3}", free.text[5:])
    assert clean is not None, "the seed gives three clean characters in a row"
    stop = clean.group()
    params = SamplingParams(max_tokens=40, seed=1, ignore_eos=True, stop=("nowhere", stop))
    output = make_text_engine().generate([PROMPT], params)[0]
    assert output.finish_reason == "stop" and output.stop_reason == stop
    assert output.text == free.text[: free.text.index(stop)]
    assert output.ids == free.ids[: len(output.ids)] and len(output.ids) < 40
    assert stop in TOKENIZER.decode(output.ids, skip_special=True)


def test_stop_reasons() -> None:
    free = free_text()
    stop = free.ids[6]
    params = SamplingParams(
        max_tokens=40, seed=1, ignore_eos=True, detokenize=True, stop_token_ids=(stop,)
    )
    output = make_text_engine().generate([PROMPT], params)[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.ids == free.ids[: free.ids.index(stop) + 1]
    assert output.text == TOKENIZER.decode(output.ids[:-1], skip_special=True)
    assert (free.finish_reason, free.stop_reason) == ("length", None)


# Grammars

SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["hel", "lo"]}, "age": {"type": "integer", "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def constrained(grammar: Grammar, seeds: int = 6, **options: object) -> list[Output]:
    pytest.importorskip("llguidance", reason="needs the extra `grammar` (llguidance)")
    engine = make_text_engine()
    outputs = engine.generate(
        [PROMPT] * seeds,
        [
            SamplingParams(max_tokens=120, seed=i, grammar=grammar, detokenize=True, **options)  # type: ignore[arg-type]
            for i in range(seeds)
        ],
    )
    engine.check()
    return outputs


def test_a_json_schema_gives_json_that_fits_it() -> None:
    outputs = constrained(Grammar("json_schema", json.dumps(SCHEMA)))
    finished = [o for o in outputs if o.finish_reason == "stop"]
    assert len(finished) >= 3  # a random model likes white space and may run out of tokens
    for output in finished:
        value = json.loads(output.text or "")
        assert value["name"] in ("hel", "lo") and 99 >= value["age"] == int(value["age"])
    assert all(own != logp for o in outputs for own, logp in zip(o.sampled_logps, o.logps))  # noqa: B905


def test_a_regex_gives_a_full_match() -> None:
    for output in constrained(Grammar("regex", r"[a-f]{3}-\d{2}(é|😀)")):
        assert re.fullmatch(r"[a-f]{3}-\d{2}(é|😀)", output.text or "")
        assert output.finish_reason == "stop"


def test_a_pattern_that_would_hold_up_every_step_is_refused_before_it_is_sampled() -> None:
    pytest.importorskip("llguidance", reason="needs the extra `grammar` (llguidance)")
    compiler = GrammarCompiler(TOKENIZER, 264)
    for bomb in ("(a{1000}){1000}", "((a{200}){200}){200}"):
        with pytest.raises(ValueError, match="grammar regex: is not valid"):
            compiler.matcher(Grammar("regex", bomb))
    assert compiler.matcher(Grammar("regex", "(a{100}){100}")).allowed().any()


def test_tokens_that_are_plain_text_walk_a_grammar() -> None:
    """A tokenizer whose decoder only joins, as the tiny preset's; every mask by brute force."""
    pytest.importorskip("llguidance", reason="needs the extra `grammar` (llguidance)")
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), (" ", "w"), ("o", " w")]
    tokens = ["<eos>", *"helowrdé ", *(a + b for a, b in merges)]
    bare = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(tokens)}, merges=merges))
    bare.decoder = decoders.Fuse()
    bare.add_special_tokens(["<eos>"])
    tokenizer = ChatTokenizer(bare, eos_ids=[0])
    choices = ("hello world", "held", "hé", "low")
    compiler = GrammarCompiler(tokenizer, len(tokens))
    for chosen in choices:
        matcher = compiler.matcher(Grammar("choice", choices=choices))
        said = ""
        for token in [*tokenizer.encode(chosen), 0]:
            allowed = {tokens[i] for i in matcher.allowed().nonzero().flatten().tolist()}
            expected = {
                one for one in tokens[1:] if any(full.startswith(said + one) for full in choices)
            }
            expected |= {"<eos>"} if said in choices else set()
            following = {full[: len(said) + 1] for full in choices if full.startswith(said)}
            # Where only one text can follow, the library takes its first token alone.
            assert allowed == expected if len(following) > 1 else allowed <= expected
            assert tokens[token] in allowed
            matcher.accept(token)
            said += tokens[token]


def test_choices_give_one_of_them() -> None:
    choices = ("hello", "hel", 'qu"ote\n', "lo")
    texts = {o.text for o in constrained(Grammar("choice", choices=choices), seeds=12)}
    assert texts <= set(choices) and len(texts) > 1


def test_a_lark_grammar_and_greedy() -> None:
    grammar = Grammar("lark", 'start: "x" ("a" | "b")+ "."')
    for output in constrained(grammar, temperature=0.0, top_p=1.0, seeds=1):
        assert re.match(r"x[ab]+", output.text or "")


def test_a_grammar_ends_even_where_the_end_token_is_ignored() -> None:
    outputs = constrained(Grammar("choice", choices=("hello",)), seeds=1, ignore_eos=True)
    assert outputs[0].text == "hello" and outputs[0].finish_reason == "stop"


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("json_schema", "{"),
        Grammar("json_schema", '{"type": "nonsense"}'),
        Grammar("regex", "(a"),
        Grammar("lark", "nothing"),
    ],
)
def test_a_broken_grammar_is_refused_by_name(grammar: Grammar) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `grammar` (llguidance)")
    with pytest.raises(ValueError, match=f"grammar {grammar.kind}"):
        make_text_engine().add([1], SamplingParams(grammar=grammar))


def test_empty_grammars_and_grammar_with_a_mask_are_refused() -> None:
    with pytest.raises(ValueError, match="value is empty"):
        Grammar("regex", "")
    with pytest.raises(ValueError, match="choices"):
        Grammar("choice", choices=("a", ""))
    with pytest.raises(ValueError, match="give one of them"):
        SamplingParams(grammar=Grammar("regex", "a"), allowed_token_ids=(1,))
