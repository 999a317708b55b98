"""Tokens that are no text by themselves keep their bytes, and a name of their own."""

from __future__ import annotations

import itertools
import random

import pytest
from tiny_text import make_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.server.responses import chat_logprobs, text_logprobs
from nanoinfer.server.token_text import TextOffsets, token_bytes, token_names

TEXTS = (
    "hello, the world",
    "naïve café  – “quoted”",
    "机器学习 🎉👩‍🚀 end",
    " two  spaces\nand a line",
    "",
)


def pieces_tokenizer() -> ChatTokenizer:
    """As Llama 2's and Mistral's: words begin with `▁`, unknown characters fall back to bytes."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁helotruwd,"]
    merges = [("▁", "t"), ("l", "o"), ("▁", "h"), ("▁", "▁"), ("t", "r"), ("u", "e"), ("tr", "ue")]
    merges += [("▁t", "r"), ("▁tr", "ue")]
    vocab = {piece: i for i, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    bpe = models.BPE(vocab=vocab, merges=merges, byte_fallback=True, unk_token="<unk>")
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return ChatTokenizer(tokenizer, eos_ids=[1])


BOTH = pytest.mark.parametrize("make", [make_tokenizer, pieces_tokenizer])


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_a_texts_tokens_are_those_of_the_text(make, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    joined = b"".join(token_bytes(tokenizer, token) or b"?" for token in ids)
    assert joined == (b" " if make is pieces_tokenizer and text else b"") + text.encode()
    entries = chat_logprobs(tokenizer, ids, [0.0] * len(ids), ())["content"]
    assert bytes(byte for entry in entries for byte in entry["bytes"]) == joined


@BOTH
def test_names_of_a_whole_vocabulary_are_distinct_and_say_the_bytes(make) -> None:
    tokenizer = make()
    ids = list(range(tokenizer.vocab_size + 3))  # as where the embedding is padded
    names = token_names(tokenizer, ids)
    assert list(names) == ids and len(set(names.values())) == len(ids)
    for token in ids[: tokenizer.vocab_size]:
        raw = token_bytes(tokenizer, token)
        assert raw is not None
        if names[token].startswith("bytes:"):
            spelled = names[token].removeprefix("bytes:").encode()
            assert spelled.decode("unicode_escape").encode("latin-1") == raw
            assert "\ufffd" in raw.decode(errors="replace")
        elif not names[token].startswith("token_id:"):
            assert names[token].encode() == raw
    assert names[ids[-1]] == f"token_id:{ids[-1]}"  # no piece: its empty text is another's name


def test_a_word_with_its_space_is_not_the_word_without() -> None:
    tokenizer = pieces_tokenizer()
    spaced, bare = tokenizer.token_to_id("▁true"), tokenizer.token_to_id("true")
    assert tokenizer.decode([spaced]) == tokenizer.decode([bare]) == "true"
    assert token_names(tokenizer, [spaced, bare]) == {spaced: " true", bare: "true"}


def test_the_likeliest_tokens_are_as_many_as_were_asked_for() -> None:
    """Of 128 bytes that are no character, all used to be one key."""
    tokenizer = make_tokenizer()
    dice = random.Random(0)
    rows = [[(token, -0.5 - i) for i, token in enumerate(dice.sample(range(259), 20))]
            for _ in range(12)]  # fmt: skip
    ids = [row[dice.randrange(20)][0] for row in rows[:-1]] + [rows[-1][0][0]]
    shown = text_logprobs(tokenizer, ids, [-1.0] * 12, rows, TextOffsets(tokenizer))
    for token, name, row, given in zip(
        ids, shown["tokens"], shown["top_logprobs"], rows, strict=True
    ):
        assert list(row.values()) == [logp for _, logp in given]
        assert row[name] == dict(given)[token]  # by this lm-eval says if a token is the likeliest
    outside = text_logprobs(tokenizer, [200], [-9.0], [rows[0][:3]], TextOffsets(tokenizer))
    assert len(outside["top_logprobs"][0]) == 3 and outside["tokens"][0] not in rows[0]


@BOTH
@pytest.mark.parametrize("text", TEXTS)
def test_offsets_cut_the_text_where_its_tokens_begin(make, text: str) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text)
    offsets = TextOffsets(tokenizer)
    offsets.push(min(tokenizer.special_ids))  # BOS takes no room
    places = [offsets.push(token) for token in [*ids, 0]]
    ends = list(itertools.accumulate(len(char.encode()) for char in text))
    num_bytes = -1 if make is pieces_tokenizer else 0  # without the space before a text
    for token, place in zip([*ids, None], places, strict=True):
        assert place == sum(end <= num_bytes for end in ends), (text, place)
        num_bytes += 0 if token is None else len(token_bytes(tokenizer, token) or b"")
    assert places[-1] == len(tokenizer.decode(ids))
