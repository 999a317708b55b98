"""Text to ids and back: a folder's `tokenizer.json`, chat template and set of end-of-turn ids.

Three rules make it safe for agents. Text is ordinary by default: a control token spelled in it
stays text. In a chat, control tokens may come from the template and from trusted roles, never from
what a user or a tool wrote. There is a set of EOS ids, not one.
Left out: slow (Python) tokenizers and batching; padding does not exist in a packed engine.
Next: special_guard.py (how text is kept from spelling control tokens), chat_template.py,
template_files.py.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Tokenizer

from nanoengine.formats.template_files import as_config, read_templates, remove_templates
from nanoengine.text.special_guard import SpecialGuard, mask_strings

if TYPE_CHECKING:
    from nanoengine.spans import ImageSpan
    from nanoengine.text.chat_template import ChatTemplates, Message

TRUSTED_ROLES = frozenset({"system", "developer", "assistant"})
"""Roles whose content is written by us or by the policy; every other role is masked."""


class ChatTokenizer:
    """A tokenizer with the model's own chat template. Make one with `from_folder`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos_ids: Iterable[int],
        chat_template: str | Mapping[str, str] | None = None,
        config: Mapping[str, Any] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """`chat_template` is one template, or several by their names."""
        self.variables = dict(variables or {})
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._guard = SpecialGuard(self._tokenizer.to_str())
        self._config = {k: v for k, v in (config or {}).items() if k != "chat_template"}
        self.eos_ids = frozenset(eos_ids)
        if not self.eos_ids:
            raise ValueError(
                "no end-of-turn id: set eos_token_id in generation_config.json or config.json, "
                "or eos_token in tokenizer_config.json"
            )
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        # Every one that text cannot spell (special_guard.py), "special" or not.
        self.control_ids = frozenset(i for i, token in added.items() if token.content.strip())
        self.conversations: dict[bytes, Any] = {}
        """What chat/turns.py has found out about the template."""
        self._templates: ChatTemplates | None = None
        if chat_template:
            from nanoengine.text.chat_template import ChatTemplates  # needs jinja2

            self._templates = ChatTemplates(chat_template, _named_tokens(self._config))

    @classmethod
    def from_folder(
        cls, path: str | Path, variables: Mapping[str, Any] | None = None
    ) -> ChatTokenizer:
        """Read a Hugging Face model folder. `ValueError` names the missing or unusable file.

        `variables` are bound in every chat, such as Qwen3's {"enable_thinking": False}.
        """
        folder = Path(path)
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise ValueError(
                f"{file} does not exist: a model folder needs a fast tokenizer; save one with "
                "`transformers` (AutoTokenizer.from_pretrained(...).save_pretrained(folder))"
            )
        try:
            tokenizer = Tokenizer.from_str(file.read_text(encoding="utf-8"))
        except Exception as error:  # the library raises bare Exception for a bad file
            raise ValueError(f"{file} is not a tokenizer this library reads: {error}") from error
        config = _read_json(folder / "tokenizer_config.json")
        if "added_tokens_decoder" not in config:  # a folder of before transformers 4.34
            config |= _read_json(folder / "special_tokens_map.json")
        _add_tokens(tokenizer, config)
        return cls(
            tokenizer,
            eos_ids=_read_eos_ids(folder, tokenizer, config),
            chat_template=read_templates(folder, config),
            config=config,
            variables=variables,
        )

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; the model's embedding may be padded beyond it."""
        return max(self._tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @functools.cached_property
    def longest_token_bytes(self) -> int:
        """No token stands for more bytes of text: no piece of the vocabulary has more."""
        return max(len(piece.encode()) for piece in self._tokenizer.get_vocab())

    @property
    def chat_template(self) -> str | None:
        """The source of the one that a chat without tools is rendered with, or else with tools."""
        return self._templates.source if self._templates else None

    @property
    def templates(self) -> ChatTemplates | None:
        """All of them."""
        return self._templates

    def to_json(self) -> str:
        """The text of a `tokenizer.json`, for libraries that read one."""
        return self._tokenizer.to_str()

    def token_to_id(self, token: str) -> int | None:
        """The id of one token by its exact name, control tokens included."""
        return self._tokenizer.token_to_id(token)

    def id_to_token(self, token: int) -> str | None:
        """The piece of the vocabulary that an id stands for, as `tokenizer.json` spells it; None
        for an id that has none, as where the model's embedding is padded."""
        return self._tokenizer.id_to_token(token)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """Ids of `text`. By default no control token can come out, whatever the text spells."""
        if allow_special:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        return self._guard.encode_plain(text)

    @functools.cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """The control tokens, such as BOS, with which the tokenizer begins a plain text (the
        post-processor of its `tokenizer.json`). A chat's come from its template."""
        encoding = self._tokenizer.encode("a", add_special_tokens=True)
        marks = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return tuple(token for token, _ in takewhile(lambda mark: mark[1], marks))

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a plain text as the model expects one: `encode` after `prefix_ids`."""
        return [*self.prefix_ids, *self.encode(text)]

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The chat as text, for reading. Encode chats with `encode_chat`, never through this."""
        if self._templates is None:
            raise ValueError(
                "this tokenizer has no chat template: put one in chat_template.jinja or under "
                "chat_template in tokenizer_config.json"
            )
        return self._templates.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            tools=tools,
            variables={**self.variables, **(variables or {})},
        )

    def encode_chat(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        trusted_roles: frozenset[str] = TRUSTED_ROLES,
    ) -> list[int]:
        """Ids of the rendered chat. Messages of other roles than `trusted_roles` are plain text."""
        return self.encode_rendered(
            *self.render_masked(
                messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools,
                variables=variables,
                trusted_roles=trusted_roles,
            )
        )

    def render_masked(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        trusted_roles: frozenset[str] = TRUSTED_ROLES,
    ) -> tuple[str, dict[str, str]]:
        """The chat as `encode_rendered` takes it, whole or in part: the text, in which masks stand
        where what was said could spell a control token, and these masks."""
        masks = self._guard.masks(all_text(messages, tools, variables))
        masked = [self._masked(message, masks, trusted_roles) for message in messages]
        text = self.render(
            masked, add_generation_prompt=add_generation_prompt, tools=tools, variables=variables
        )
        return text, masks

    def _masked(
        self, message: Message, masks: dict[str, str], trusted_roles: frozenset[str]
    ) -> Message:
        if message.get("role") in trusted_roles:
            return message
        return {k: v if k == "role" else mask_strings(v, masks) for k, v in message.items()}

    def encode_rendered(self, text: str, masks: dict[str, str]) -> list[int]:
        """Ids of what `render_masked` made, or of a part of it."""
        return self._guard.encode_masked(text, masks)

    def images_in(
        self, ids: Sequence[int], messages: Sequence[Message], start: int
    ) -> list[ImageSpan]:
        """The pictures of encoded messages, whose tokens are `ids` from `start` on: none.
        `ValueError` for messages with pictures: this model reads text (vision/ has those that
        see)."""
        for message in messages:
            content = message.get("content")
            for part in content if isinstance(content, list) else ():
                if part.get("type") not in (None, "text"):
                    raise ValueError(
                        f"a part of type {part['type']!r} in a message of {message.get('role')!r}: "
                        "this model reads text alone; take one with a vision tower"
                    )
        return []

    def save(self, path: str | Path) -> None:
        """Write the files that `from_folder` reads; `config.json` belongs to the model."""
        folder = Path(path)
        folder.mkdir(parents=True, exist_ok=True)
        config = dict(self._config)
        remove_templates(folder)
        if self._templates is not None:
            config["chat_template"] = as_config(self._templates.sources)
        (folder / "tokenizer.json").write_text(self._tokenizer.to_str(), encoding="utf-8")
        _write_json(folder / "tokenizer_config.json", config)
        generation = _read_json(folder / "generation_config.json")
        _write_json(
            folder / "generation_config.json", {**generation, "eos_token_id": sorted(self.eos_ids)}
        )


def all_text(*values: Any) -> str:
    """Every string inside `values`, joined: what the masks must not occur in."""
    texts: list[str] = []
    pending = list(values)
    while pending:
        value = pending.pop()
        if isinstance(value, str):
            texts.append(value)
        elif isinstance(value, Mapping):
            pending += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            pending += value
    return "".join(texts)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{file} is not valid JSON: {error}; download it again") from error
    if not isinstance(data, dict):
        raise ValueError(f"{file} holds a {type(data).__name__}, expected a JSON object")
    return data


def _write_json(file: Path, data: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _read_eos_ids(folder: Path, tokenizer: Tokenizer, config: Mapping[str, Any]) -> set[int]:
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(folder / name).get("eos_token_id")
        found.update(eos if isinstance(eos, list) else [] if eos is None else [eos])
    eos_token = _named_tokens(config).get("eos_token")
    if eos_token is not None:
        index = tokenizer.token_to_id(eos_token)
        if index is None:
            raise ValueError(
                f"tokenizer_config.json names eos_token {eos_token!r}, which tokenizer.json does "
                "not hold: the two files are of different models"
            )
        found.add(index)
    return found


def _add_tokens(tokenizer: Tokenizer, config: Mapping[str, Any]) -> None:
    """Add the control tokens that tokenizer_config.json alone has, as transformers does; their
    names would be encoded as text. `ValueError` where one would get another id than is said."""
    held = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    listed = config.get("added_tokens_decoder") or {}
    for index, token in sorted(_added(listed).items()):
        if token.content not in held:
            tokenizer.add_tokens([token])
            if (found := tokenizer.token_to_id(token.content)) != index:
                raise ValueError(
                    f"tokenizer_config.json: its added token {token.content!r} has the id "
                    f"{index}, but {found} is the next one of tokenizer.json: the two files are "
                    "of different models"
                )


def _added(listed: Mapping[str, Any]) -> dict[int, AddedToken]:
    """The tokens of an `added_tokens_decoder` by their ids."""
    found, options = {}, ("lstrip", "rstrip", "normalized", "single_word", "special")
    try:
        for index, token in listed.items():
            given = {name: token[name] for name in options if name in token}
            found[int(index)] = AddedToken(token["content"], **given)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise ValueError(
            f"tokenizer_config.json: added_tokens_decoder: {error}; it must hold a token by its "
            f"id, each with a content and perhaps {', '.join(options)}"
        ) from None
    return found


def _named_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token`, ...: a string, or a dict with the string under `content`."""
    named: dict[str, str] = {}
    for key in ("bos_token", "eos_token", "pad_token", "unk_token"):
        token = config.get(key)
        if isinstance(token, dict):
            token = token.get("content")
        if isinstance(token, str):
            named[key] = token
    return named
