"""Text to ids and back, as the model sees them: /tokenize and /detokenize.

Bodies are vLLM's; SGLang's clients may send several prompts, and lists of lists of tokens. The ids
of messages are those that /v1/responses and /v1/messages make of them; the pictures among them are
told as `images`, which the routes of token ids take.
Left out: templates that a client brings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any, Literal

from pydantic import Field, StrictBool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from nanoinfer.chat.form import ChatForm
from nanoinfer.chat.prompts import ChatPrompt
from nanoinfer.http.api_error import ApiError, user_errors
from nanoinfer.http.http_io import (
    in_proportion,
    parse_object,
    read_body,
    read_bytes,
    read_json_body,
)
from nanoinfer.http.http_limits import HttpLimits
from nanoinfer.server.media import PictureTaker
from nanoinfer.server.requests import ChatMessage, OfferedTool, StrictBody
from nanoinfer.server.served_model import ServedModel

_TokenIds = list[Annotated[int, Field(ge=0, strict=True)]]
_Json = dict[str, Any]


class TokenizePrompt(StrictBody):
    """/tokenize of plain text."""

    model: str | None = None
    prompt: str | Annotated[list[str], Field(min_length=1)]
    add_special_tokens: StrictBool = True
    """Begin with the BOS of a tokenizer that adds one."""
    return_token_strs: StrictBool = False


class TokenizeChat(StrictBody):
    """/tokenize of a conversation."""

    model: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    add_generation_prompt: StrictBool = True
    add_special_tokens: StrictBool = False
    """Begin with the BOS once more, beside what the template writes."""
    continue_final_message: Literal[False] = False
    chat_template_kwargs: _Json = Field(default_factory=dict)
    """Variables of the template, such as {"enable_thinking": false}."""
    tools: list[OfferedTool] = Field(default_factory=list)
    return_token_strs: StrictBool = False


class Detokenize(StrictBody):
    model: str | None = None
    tokens: _TokenIds | list[_TokenIds]
    skip_special_tokens: StrictBool = False


class TextRoutes:
    """The two routes, over one model."""

    def __init__(self, model: ServedModel, limits: HttpLimits) -> None:
        self._model, self._limits = model, limits

    async def tokenize(self, request: Request) -> Response:
        """POST /tokenize."""
        raw = await read_bytes(request, self._limits)

        def read(taker: PictureTaker | None) -> TokenizeChat | TokenizePrompt:
            given = parse_object(raw)
            if "messages" in given:
                return read_json_body(given, TokenizeChat, taker)
            return read_json_body(given, TokenizePrompt)

        body = await self._model.read(len(raw), read)
        if isinstance(body, TokenizeChat):
            return await self._tokenize_chat(body)
        return await self._tokenize_prompt(body)

    async def _tokenize_prompt(self, body: TokenizePrompt) -> Response:
        self._model.adapter(body.model)
        tokenizer = self._model.tokenizer
        encode: Callable[[str], list[int]] = tokenizer.encode
        if body.add_special_tokens:
            encode = tokenizer.encode_prompt
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        with user_errors():
            ids = [await self._model.bound.encoded([one], partial(encode, one)) for one in texts]
        if isinstance(body.prompt, str):
            return self._told(len(ids[0]), ids[0], body.return_token_strs)
        return self._told([len(one) for one in ids], ids, body.return_token_strs)

    async def _tokenize_chat(self, body: TokenizeChat) -> Response:
        self._model.adapter(body.model)
        tokenizer = self._model.tokenizer
        messages = [message.for_template() for message in body.messages]
        tools = [tool.model_dump(exclude_none=True) for tool in body.tools]

        def encode() -> ChatPrompt:
            form = ChatForm.of(tokenizer, tools)
            opened = form.opening(messages)
            ids = tokenizer.encode_chat(
                opened,
                add_generation_prompt=body.add_generation_prompt,
                tools=form.schemas,
                variables=body.chat_template_kwargs,
            )
            before = list(tokenizer.prefix_ids) if body.add_special_tokens else []
            images = tokenizer.images_in(ids, opened, len(before))
            return ChatPrompt([*before, *ids], tuple(images))

        with user_errors():
            prompt = await self._model.bound.encoded(
                [messages, tools], encode, is_seeing=self._model.pictures is not None
            )
        images = [asdict(span) for span in prompt.images]
        return self._told(len(prompt.ids), prompt.ids, body.return_token_strs, images)

    def _told(
        self,
        count: int | list[int],
        ids: list[int] | list[list[int]],
        has_texts: bool,
        images: Sequence[_Json] = (),
    ) -> Response:
        told: _Json = {"count": count, "max_model_len": self._model.max_model_len, "tokens": ids}
        told |= {"images": images} if images else {}
        return JSONResponse(told | {"token_strs": self._texts(ids) if has_texts else None})

    def _texts(self, ids: list[Any]) -> list[Any]:
        return [
            self._texts(one) if isinstance(one, list) else self._model.tokenizer.decode([one])
            for one in ids
        ]

    async def detokenize(self, request: Request) -> Response:
        """POST /detokenize."""
        body = await read_body(request, Detokenize, self._limits)
        self._model.adapter(body.model)
        lists: list[Any] = body.tokens if _is_nested(body.tokens) else [body.tokens]
        size, vocab = sum(map(len, lists)), self._model.tokenizer.vocab_size
        wrong = [token for one in lists for token in one if token >= vocab]
        if wrong:
            raise ApiError(
                400, f"tokens: {wrong[0]} is outside the vocabulary of {vocab}", "tokens"
            )
        decode = partial(self._model.tokenizer.decode, skip_special=body.skip_special_tokens)
        texts = await in_proportion(size, lambda: [decode(one) for one in lists])
        text = texts if _is_nested(body.tokens) else texts[0]
        return JSONResponse({"prompt": text, "text": text})  # vLLM's name and SGLang's


def _is_nested(tokens: list[Any]) -> bool:
    return bool(tokens) and isinstance(tokens[0], list)
