"""Chat templates: the jinja2 program of a model folder, run as `transformers` runs it.

The environment is the immutable sandbox with `trim_blocks`, `lstrip_blocks`, loop controls, a plain
`tojson`, `raise_exception`, `strftime_now` and a `{% generation %}` block that renders its body.

A tool that prints `<|im_end|>` must not end the model's turn. `SpecialGuard` has a twin of the
tokenizer that knows every added token only under an unguessable name, so ordinary text can never
become one (not through the added-token matcher, not through a vocabulary that lists the string, not
through merges), while the template's own control tokens are renamed on purpose before encoding. One
`encode` call sees the whole text, so the result is the very ids that the original tokenizer gives
for harmless text. Whitespace-only added tokens (runs of spaces in some vocabularies) are ordinary
text and stay.

Left out: tracking which text lies in generation blocks (masks come from sampled ids, never from
templates) and image or audio parts.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

Message = Mapping[str, Any]
"""`{"role": ..., "content": ...}`, plus whatever else the model's template reads."""


class GenerationTag(Extension):
    """`{% generation %}` marks assistant text in some templates: keep the body."""

    tags = {"generation"}  # noqa: RUF012  jinja2 reads a plain class attribute

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML characters, which would change the prompt.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


class ChatTemplate:
    """A compiled template. `variables` are bound for every rendering (`bos_token` and the like)."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self.source = source
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except jinja2.exceptions.TemplateSyntaxError as error:
            raise ValueError(f"the chat template does not compile: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. `ValueError` when the template itself rejects the messages."""
        bound = {**self._variables, **(variables or {})}
        try:
            return self._template.render(
                messages=[dict(message) for message in messages],
                tools=list(tools) if tools is not None else None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **bound,
            )
        except jinja2.exceptions.TemplateError as error:
            roles = [message.get("role") for message in messages]
            raise ValueError(
                f"the chat template rejects messages with roles {roles}: {error}"
            ) from error


_FENCE = "\U0010fffd"  # last private-use code point: no pre-tokenizer treats it as a letter
_FIRST_MASK = 0x100000  # start of private-use plane 16


class SpecialGuard:
    """Encodes text in which control tokens are allowed nowhere, or only outside masked parts."""

    def __init__(self, tokenizer_json: str) -> None:
        spec: dict[str, Any] = json.loads(tokenizer_json)
        tokens = [t for t in spec.get("added_tokens") or [] if t["content"].strip()]
        # Random on purpose: the name must not be known to a program whose output is encoded. The
        # ids do not depend on it.
        nonce = secrets.token_hex(16)
        self._names = {t["content"]: f"{_FENCE}{nonce}.{t['id']}{_FENCE}" for t in tokens}
        self._pattern = _match_any(tokens)
        self._first_chars = sorted({content[0] for content in self._names})
        self._tokenizer = _renamed(spec, self._names)
        for token in tokens:
            held = self._tokenizer.token_to_id(self._names[token["content"]])
            assert held == token["id"], f"{token['content']!r}: id {token['id']} became {held}"

    def encode_plain(self, text: str) -> list[int]:
        """Ids of `text` read as ordinary text: never a control token."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def masks(self, text: str) -> dict[str, str]:
        """Stand-ins, absent from `text`, for every character that can open a control token."""
        free = (chr(i) for i in range(_FIRST_MASK, _FIRST_MASK + 0xFFFD) if chr(i) not in text)
        return dict(zip(self._first_chars, free, strict=False))

    def encode_masked(self, text: str, masks: dict[str, str]) -> list[int]:
        """Ids of `text`: control tokens are recognised, but none that opens at a masked character.

        Masked characters are put back before encoding, so they tokenise as themselves.
        """
        renamed = self._pattern.sub(lambda match: self._names[match.group()], text)
        unmask = {ord(mask): char for char, mask in masks.items()}
        return self.encode_plain(renamed.translate(unmask))


def mask_strings(value: Any, masks: dict[str, str]) -> Any:
    """`value` with every string inside it masked; keys of dicts and other types are kept."""
    if isinstance(value, str):
        return value.translate({ord(char): mask for char, mask in masks.items()})
    if isinstance(value, dict):
        return {key: mask_strings(item, masks) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [mask_strings(item, masks) for item in value]
    return value


def _match_any(tokens: list[dict[str, Any]]) -> re.Pattern[str]:
    """Leftmost-longest, as the tokenizers library matches; flags are applied by the library."""
    ordered = sorted(tokens, key=lambda token: -len(token["content"]))
    parts = []
    for token in ordered:
        part = re.escape(token["content"])
        parts.append(rf"(?<!\w){part}(?!\w)" if token.get("single_word") else part)
    return re.compile("|".join(parts) or "(?!)")


def _renamed(spec: dict[str, Any], names: dict[str, str]) -> Tokenizer:
    model = spec["model"]
    vocab = model["vocab"]
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in vocab.items()}
    else:  # Unigram: [piece, score] pairs
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in vocab]
    if isinstance(model.get("unk_token"), str):
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if model.get("merges"):  # a merge that spells a control token would have no result any more
        model["merges"] = [merge for merge in model["merges"] if _merged(merge) not in names]
    spec["added_tokens"] = [
        {**token, "content": names.get(token["content"], token["content"])}
        for token in spec.get("added_tokens") or []
    ]
    spec["post_processor"] = None  # adds control tokens by name; encoding here adds none
    spec["truncation"] = spec["padding"] = None
    return Tokenizer.from_str(json.dumps(spec))


def _merged(merge: str | list[str]) -> str:
    return merge.replace(" ", "", 1) if isinstance(merge, str) else "".join(merge)
