"""The tokenizer inside a GGUF file, rebuilt as a Hugging Face `tokenizer.json` and its settings.

Two kinds: byte-level BPE, where `tokenizer.ggml.pre` names how text is cut before it is merged, and
SentencePiece, whose file has scores and no merges: two neighbours merge into a token that the
vocabulary holds, best score first, so the merges are read off the vocabulary. A space is put before
a text, and not behind a control token inside of it, as transformers does; Phi-3 has it there too,
and drops what space a text has behind a control token. Which ids end a turn is a set: llama.cpp's
fields, and the control tokens that it knows by name.
Left out: unigram and WordPiece vocabularies, other cuts. Each is refused by name.
Source: llama.cpp's loader of vocabularies for what a file leaves unsaid, and the models' own
`tokenizer.json` for the patterns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from nanoengine.formats.gguf_file import GgufFields

_FIELD = "tokenizer.ggml"
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6
_MOST_CHARS = 512  # of a token with a score: each of its cuts is looked up
_SPACE = "\u2581"
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")
_PHI_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")  # behind it; its other control tokens do not
_SENTENCEPIECE_IDS = {"bos": 1, "eos": 2, "unknown": 0}  # where a file does not say
_ENDS = (
    "<|eot_id|>",
    "<|eom_id|>",
    "<|im_end|>",
    "<|end|>",
    "<end_of_turn>",
    "<|end_of_text|>",
    "<|endoftext|>",
    "<\uff5cend\u2581of\u2581sentence\uff5c>",
    "<eos>",
    "</s>",
)
"""Control tokens that end a turn in whatever model has them."""

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_QWEN_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA3_WORDS = _QWEN_WORDS.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}"
_TEKKEN_WORDS = (
    rf"{_CASED}*{_LOWER}+|{_CASED}+{_LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, kw_only=True)
class _Cut:
    """The treatment of a text by a byte-level tokenizer before it merges."""

    words: str = ""
    """The pattern of a word; "" is that of GPT-2."""
    is_by_digit: bool = False
    """Each digit is a word."""
    is_composed: bool = False
    """The text is brought to NFC."""
    keeps_words: bool = False
    """A word that is a token is one, whatever the merges say."""
    adds_bos: bool = False
    """Texts begin with BOS where the file does not say whether."""


_QWEN = _Cut(words=_QWEN_WORDS, is_composed=True)
_LLAMA3 = _Cut(words=_LLAMA3_WORDS, keeps_words=True, adds_bos=True)
_CUTS = {
    "gpt-2": _Cut(),
    "smollm": _Cut(is_by_digit=True),
    "starcoder": _Cut(is_by_digit=True),
    "refact": _Cut(is_by_digit=True),
    "qwen2": _QWEN,
    "deepseek-r1-qwen": _QWEN,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _Cut(words=_LLAMA3_WORDS),  # SmolLM3's
    "tekken": _Cut(words=_TEKKEN_WORDS, keeps_words=True, adds_bos=True),
}
"""By `tokenizer.ggml.pre`."""


class GgufTokenizer:
    """The tokenizer that a file's fields describe. `ValueError` names what is not supported."""

    def __init__(self, fields: GgufFields) -> None:
        self._fields = fields
        kind = fields.need(f"{_FIELD}.model", str)
        if kind not in ("gpt2", "llama"):
            raise ValueError(
                f"{_FIELD}.model={kind!r}: not supported; supported are 'gpt2' (byte-level BPE) "
                "and 'llama' (SentencePiece)"
            )
        self._is_byte_level = kind == "gpt2"
        is_phi = fields.get("general.architecture", str) == "phi3"
        self._is_phi = is_phi and not self._is_byte_level
        self._cut = self._read_cut() if self._is_byte_level else None
        listed = fields.need(f"{_FIELD}.tokens", list)
        self.tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(listed)]
        self._ids = {token: index for index, token in enumerate(self.tokens)}
        if len(self._ids) != len(self.tokens):
            raise ValueError(f"{_FIELD}.tokens: a token is listed twice; convert the model anew")
        self._special = {name: self._read_id(name) for name in _IDS}
        self._types = self._read_types()
        self._adds = {name: self._read_adds(name) for name in ("bos", "eos")}

    @property
    def end_ids(self) -> list[int]:
        """The ids that end a turn."""
        named = [self._ids[name] for name in _ENDS if name in self._ids]
        ends = {index for index in named if self._types.get(index) == _CONTROL}
        # SmolLM2 has <|endoftext|> for what it does not know, and ends nothing with it
        ends -= {self._special["unknown"]}
        given = (self._special[name] for name in ("eos", "eot", "eom"))
        return sorted(ends | {index for index in given if index is not None})

    @property
    def id_fields(self) -> dict[str, Any]:
        """The fields about ids of config.json and generation_config.json; None: not in the file."""
        ends: list[int] | int | None = self.end_ids or None
        if len(self.end_ids) == 1:
            ends = self.end_ids[0]
        return {
            "bos_token_id": self._special["bos"],
            "eos_token_id": ends,
            "pad_token_id": self._special["padding"],
        }

    def build(self) -> Tokenizer:
        """The tokenizer, with its control tokens and with what it puts around a plain text."""
        tokenizer = self._byte_level() if self._is_byte_level else self._sentencepiece()
        for is_special, kinds in ((True, (_CONTROL, _UNKNOWN)), (False, (_USER_DEFINED,))):
            add = tokenizer.add_special_tokens if is_special else tokenizer.add_tokens
            add(
                [
                    self._added(self.tokens[index], is_special)
                    for index, kind in self._types.items()
                    if kind in kinds
                ]
            )
        before, after = self._edge("bos"), self._edge("eos")
        if before or after:
            tokenizer.post_processor = processors.TemplateProcessing(
                single=[*before, "$A", *after],
                pair=[*before, "$A", *after, *before, "$B", *after],
                special_tokens=[(token, self._ids[token]) for token in (*before, *after)],
            )
        return tokenizer

    def _edge(self, name: str) -> list[str]:
        """The token that a text has there, if any."""
        index = self._special[name]
        if not self._adds[name] or index is None:
            return []
        token = self.tokens[index]
        if token.startswith("$") or ":" in token:  # a template would read it as something else
            raise ValueError(
                f"{_FIELD}.{name}_token_id={index}: {token!r} cannot be added to texts"
            )
        return [token]

    def _added(self, token: str, is_special: bool) -> AddedToken:
        strips = self._is_phi and token not in _PHI_KEEPS_SPACE
        return AddedToken(token, special=is_special, normalized=False, rstrip=strips)

    def config(self, longest: int) -> dict[str, Any]:
        """The fields of `tokenizer_config.json`."""
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if self._is_byte_level:
            config["add_prefix_space"] = False
        config |= {"clean_up_tokenization_spaces": False, "model_max_length": longest}
        names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
        for name, field in names.items():
            index = self._special[field]
            if index is not None:
                config[f"{name}_token"] = self.tokens[index]
        template = self._chat_template()
        return config if template is None else config | {"chat_template": template}

    def _chat_template(self) -> str | list[dict[str, str]] | None:
        """The template, or each with its name where there are several."""
        field = "tokenizer.chat_template"
        named = {"default": self._fields.get(field, str)}
        for name in self._fields.names():
            if name.startswith(f"{field}."):
                named[name.removeprefix(f"{field}.")] = self._fields.get(name, str)
        found = [{"name": n, "template": text} for n, text in named.items() if text is not None]
        return found if named.keys() > {"default"} else named["default"]

    # -- what is read

    def _read_cut(self) -> _Cut:
        pre = self._fields.get(f"{_FIELD}.pre", str) or "gpt-2"
        if pre not in _CUTS:
            raise ValueError(
                f"{_FIELD}.pre={pre!r}: not supported; supported are {', '.join(_CUTS)}"
            )
        return _CUTS[pre]

    def _read_id(self, name: str) -> int | None:
        field = f"{_FIELD}.{name}_token_id"
        index = self._fields.get(field, int)
        if index is None and not self._is_byte_level:
            index = _SENTENCEPIECE_IDS.get(name)
        if index is not None and not 0 <= index < len(self.tokens):
            raise ValueError(f"{field}={index}: there are {len(self.tokens)} tokens")
        return index

    def _read_adds(self, name: str) -> bool:
        field = f"{_FIELD}.add_{name}_token"
        adds = self._fields.get(field, bool)
        if adds is None:
            adds = name == "bos" and (self._cut is None or self._cut.adds_bos)
            return adds and self._special[name] is not None
        if adds and self._special[name] is None:
            raise ValueError(f"{field}=true: needs the field {_FIELD}.{name}_token_id")
        return adds

    def _read_types(self) -> dict[int, int]:
        """Those of the tokens that are not normal ones."""
        field = f"{_FIELD}.token_type"
        given = self._fields.get(field, np.ndarray)
        kinds = [_NORMAL] * len(self.tokens) if given is None else given.tolist()
        if len(kinds) != len(self.tokens):
            raise ValueError(f"{field}: has {len(kinds)} numbers for {len(self.tokens)} tokens")
        types = {index: kind for index, kind in enumerate(kinds) if kind != _NORMAL}
        for name in ("bos", "eos", "eot", "eom"):
            index = self._fields.get(f"{_FIELD}.{name}_token_id", int)
            if index is not None:
                types[index] = _CONTROL  # some files have these as words of the text
        return types

    # -- byte-level BPE

    def _byte_level(self) -> Tokenizer:
        cut = self._cut
        assert cut is not None
        model = models.BPE(
            vocab=self._ids, merges=self._read_merges(), ignore_merges=cut.keeps_words
        )
        tokenizer = Tokenizer(model)
        if cut.is_composed:
            tokenizer.normalizer = normalizers.NFC()
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not cut.words)
        first: list[Any] = []
        if cut.is_by_digit:
            first = [pre_tokenizers.Digits(individual_digits=True)]
        if cut.words:
            first = [pre_tokenizers.Split(Regex(cut.words), behavior="isolated")]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*first, to_bytes]) if first else to_bytes
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    def _read_merges(self) -> list[tuple[str, str]]:
        merges = []
        for line in self._fields.need(f"{_FIELD}.merges", list):
            left, _, right = line.partition(" ")
            if not {left, right, left + right} <= self._ids.keys():
                raise ValueError(
                    f"{_FIELD}.merges: {line[:80]!r} has a part that is no token; convert the "
                    "model anew"
                )
            merges.append((left, right))
        return merges

    # -- SentencePiece

    def _sentencepiece(self) -> Tokenizer:
        has_space = self._fields.get(f"{_FIELD}.add_space_prefix", bool) is not False
        unknown = self._special["unknown"]
        tokenizer = Tokenizer(
            models.BPE(
                vocab=self._ids,
                merges=self._scored_merges(),
                unk_token=None if unknown is None else self.tokens[unknown],
                fuse_unk=True,
                byte_fallback=True,
            )
        )
        if self._is_phi:
            before = [normalizers.Prepend(_SPACE)] if has_space else []
            spaces = normalizers.Replace(" ", _SPACE)
            tokenizer.normalizer = normalizers.Sequence([*before, spaces])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(
                replacement=_SPACE, prepend_scheme="first" if has_space else "never", split=False
            )
        steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
        if has_space:
            steps.append(decoders.Strip(content=" ", left=1))
        tokenizer.decoder = decoders.Sequence(steps)
        return tokenizer

    def _scored_merges(self) -> list[tuple[str, str]]:
        """The pairs of tokens that make a token, by its score; of one token's, those with the
        longest left part first."""
        field = f"{_FIELD}.scores"
        scores = self._fields.need(field, np.ndarray)
        if len(scores) != len(self.tokens) or not np.isfinite(scores).all():
            raise ValueError(f"{field}: must be a finite number for each of the tokens")
        pairs: list[tuple[float, int, str, str]] = []
        for token, score in zip(self.tokens, scores.tolist(), strict=True):
            if self._types.get(self._ids[token], _NORMAL) in (_NORMAL, _USER_DEFINED):
                pairs += [(-score, -len(left), left, right) for left, right in self._pairs(token)]
        pairs.sort(key=lambda pair: pair[:2])
        return [(left, right) for _, _, left, right in pairs]

    def _pairs(self, token: str) -> Iterator[tuple[str, str]]:
        if len(token) > _MOST_CHARS:
            raise ValueError(
                f"{_FIELD}.tokens: {token[:20]!r}... has {len(token)} characters, at most "
                f"{_MOST_CHARS} are supported"
            )
        for place in range(1, len(token)):
            left, right = token[:place], token[place:]
            if left in self._ids and right in self._ids:
                yield left, right
