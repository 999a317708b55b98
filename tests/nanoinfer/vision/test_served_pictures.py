"""Pictures of clients on the server: each API's own form, hostile files, prefix hits, limits."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from seeing_server import TOKENS, base64_of, data_url, num_looks, png, serve_sight
from serving import Served, serve

from nanoengine.vision.png import write_png
from nanoinfer.server.config import CompletionLimits

Json = dict[str, Any]
ASKED = "what is it"
TOOL_ID = "call00000"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_sight(tmp_path_factory.mktemp("seeing")) as running:
        yield running


@dataclass(frozen=True)
class Api:
    """The way in which a client of an API shows a picture."""

    path: str
    body: Callable[[Json], Json]
    """With a picture's part in what a user says."""
    part: Callable[[bytes], Json]
    where: str
    """The path of the part in the body, as an error names it."""

    def shown(self, data: bytes, **more: Any) -> Json:
        return {"model": "tiny", **self.body(self.part(data)), **more}


def chat_part(data: bytes) -> Json:
    return {"type": "image_url", "image_url": {"url": data_url(data), "detail": "high"}}


def messages_part(data: bytes) -> Json:
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(data)}
    return {"type": "image", "source": source, "cache_control": {"type": "ephemeral"}}


def responses_part(data: bytes) -> Json:
    return {"type": "input_image", "image_url": data_url(data), "detail": "auto"}


def said(kind: str, text: str = ASKED) -> Json:
    return {"type": kind, "text": text}


APIS = {
    "chat": Api(
        "/v1/chat/completions",
        lambda part: {
            "messages": [{"role": "user", "content": [said("text"), part]}],
            "max_completion_tokens": 4,
        },
        chat_part,
        "messages.0.content.1",
    ),
    "messages": Api(
        "/v1/messages",
        lambda part: {
            "messages": [{"role": "user", "content": [said("text"), part]}],
            "max_tokens": 4,
        },
        messages_part,
        "messages.0.content.1",
    ),
    "responses": Api(
        "/v1/responses",
        lambda part: {
            "input": [{"role": "user", "content": [said("input_text"), part]}],
            "max_output_tokens": 4,
        },
        responses_part,
        "input.0.content.1",
    ),
}
each_api = pytest.mark.parametrize("api", APIS.values(), ids=APIS.keys())


def num_prompt(answer: Json) -> int:
    usage = answer["usage"]
    if "prompt_tokens" in usage:
        return int(usage["prompt_tokens"])
    return int(usage["input_tokens"] + usage.get("cache_read_input_tokens", 0))


def num_cached(answer: Json) -> int:
    usage = answer["usage"]
    if "cache_read_input_tokens" in usage:
        return int(usage["cache_read_input_tokens"])
    details = usage.get("input_tokens_details") or usage["prompt_tokens_details"]
    return int(details["cached_tokens"])


def answered(served: Served, path: str, body: Json) -> Json:
    status, answer = served.send(path, body)
    assert status == 200, answer
    return dict(answer)


def refused(served: Served, path: str, body: Json, status: int = 400) -> str:
    """The error's text, which has the form of its API."""
    found, answer = served.send(path, body)
    assert found == status, answer
    if path.startswith("/v1/messages"):
        assert (answer["type"], answer["error"]["type"]) == ("error", "invalid_request_error")
    else:
        assert answer["error"].keys() == {"message", "type", "param", "code"}
    return str(answer["error"]["message"])


@each_api
def test_a_picture_takes_its_tokens_and_decides_what_is_said(served: Served, api: Api) -> None:
    """Counted against the same words without it: nine placeholders and two marks around them."""
    sees = {"temperature": 0}
    if api.path != "/v1/messages":
        sees |= {"top_logprobs": 3}
    if api.path == "/v1/chat/completions":
        sees |= {"logprobs": True}
    if api.path == "/v1/responses":
        sees |= {"include": ["message.output_text.logprobs"]}
    first, again, other = (
        answered(served, api.path, api.shown(png(seed), **sees)) for seed in (1, 1, 2)
    )
    blind = answered(served, api.path, {"model": "tiny", **api.body(said("text", ""))} | sees)
    assert num_prompt(first) == num_prompt(other) == num_prompt(blind) + TOKENS + 2

    def told(answer: Json) -> Any:
        return answer.get("choices") or [
            {name: part for name, part in item.items() if name != "id"}
            for item in answer.get("content") or answer["output"]
        ]

    assert told(first) == told(again)
    assert told(first) != told(other)


@each_api
def test_a_history_that_is_sent_again_hits_the_cache_and_is_looked_at_once(
    served: Served, api: Api
) -> None:
    before = num_looks(served), served.engine.model.sight._pixels.num_read
    picture = png(100 + len(api.path))
    first = answered(served, api.path, api.shown(picture))
    again = answered(served, api.path, api.shown(picture))
    assert num_cached(first) < num_prompt(first) - TOKENS, "the words before it, at most"
    assert num_cached(again) >= num_prompt(again) - served.engine.config.block_size
    assert num_looks(served) == before[0] + 1
    assert served.engine.model.sight._pixels.num_read == before[1] + 1, "decoded once"


def in_results(data: bytes) -> dict[str, tuple[str, Json]]:
    """A conversation whose tool shows a picture, in each API that has such results."""
    function = {"name": "look", "arguments": "{}"}
    call = {"id": TOOL_ID, "type": "function", "function": function}
    asked = {"role": "user", "content": ASKED}
    block = {"type": "tool_use", "id": TOOL_ID, "name": "look", "input": {}}
    result = [said("text", "seen: "), messages_part(data)]
    called = {"type": "function_call", "call_id": TOOL_ID, **function}
    computer = {"type": "computer_call", "call_id": TOOL_ID, "id": "cu_1", "status": "completed",
                "action": {"type": "screenshot"}, "pending_safety_checks": []}  # fmt: skip
    screenshot = {"type": "computer_screenshot", "image_url": data_url(data)}
    return {
        "chat": (
            "/v1/chat/completions",
            {"messages": [
                asked, {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": TOOL_ID,
                 "content": [said("text", "seen: "), chat_part(data)]}],
             "max_tokens": 4},
        ),
        "messages": (
            "/v1/messages",
            {"messages": [
                asked, {"role": "assistant", "content": [block]},
                {"role": "user", "content": [
                    {"type": "tool_result", "tool_use_id": TOOL_ID, "content": result}]}],
             "max_tokens": 4},
        ),
        "responses": (
            "/v1/responses",
            {"input": [
                asked, called,
                {"type": "function_call_output", "call_id": TOOL_ID,
                 "output": [said("input_text", "seen: "), responses_part(data)]}],
             "max_output_tokens": 4},
        ),
        "computer": (
            "/v1/responses",
            {"input": [
                asked, computer,
                {"type": "computer_call_output", "call_id": TOOL_ID, "output": screenshot}],
             "max_output_tokens": 4},
        ),
    }  # fmt: skip


@pytest.mark.parametrize("name", ["chat", "messages", "responses", "computer"])
def test_results_of_tools_show_pictures(served: Served, name: str) -> None:
    before = num_looks(served)
    counts = []
    for seed in (200, 201):
        path, body = in_results(png(seed + 10 * list(in_results(b"")).index(name)))[name]
        counts.append(num_prompt(answered(served, path, {"model": "tiny", **body})))
    assert counts[0] == counts[1]
    assert num_looks(served) == before + 2


def test_a_history_is_the_same_prompt_in_every_api(served: Served) -> None:
    """So what was said in one is in the cache of the others."""
    histories = in_results(png(300))
    answers = []
    for name in ("chat", "messages", "responses"):
        path, body = histories[name]
        answers.append(answered(served, path, {"model": "tiny", **body}))
    assert len({num_prompt(one) for one in answers}) == 1
    for one in answers[1:]:
        assert num_cached(one) >= num_prompt(one) - served.engine.config.block_size


def test_tokens_are_counted_with_pictures(served: Served) -> None:
    api = APIS["messages"]
    body = api.shown(png(3))
    answer = answered(served, api.path, body)
    del body["max_tokens"]
    counted = answered(served, "/v1/messages/count_tokens", body)
    assert counted["input_tokens"] == num_prompt(answer)


def test_tokens_and_spans_of_tokenize_go_on_as_the_chat_does(served: Served) -> None:
    body = APIS["chat"].shown(png(4), temperature=0, return_token_ids=True)
    told = answered(served, "/tokenize", {"messages": body["messages"]})
    (span,) = told["images"]
    assert told["count"] == len(told["tokens"])
    assert (span["length"], span["grid"]) == (TOKENS, [1, 6, 6])
    params = {"temperature": 0, "max_tokens": 4, "images": told["images"]}
    generate = {"model": "tiny", "token_ids": told["tokens"], "sampling_params": params}
    (choice,) = answered(served, "/inference/v1/generate", generate)["choices"]
    chat = answered(served, "/v1/chat/completions", body)
    assert choice["token_ids"] == chat["choices"][0]["token_ids"]
    assert chat["prompt_token_ids"] == told["tokens"]
    for name, value, why in (
        ("sha256", "0" * 64, "is not kept"),
        ("sha256", "/dev/zero", "is not kept"),
        ("key", "another", "is another one here"),
        ("grid", [1, 4, 9], "is another one here"),
        ("sha256", 5, "are whole numbers, key and sha256 texts"),
        ("sha256", ["a"], "are whole numbers, key and sha256 texts"),
        ("start", str(span["start"]), "are whole numbers, key and sha256 texts"),
        ("start", float(span["start"]), "are whole numbers, key and sha256 texts"),
        ("length", 9.0, "are whole numbers, key and sha256 texts"),
        ("grid", [1.0, 6, 6], "are whole numbers, key and sha256 texts"),
    ):
        params["images"] = [{**span, name: value}]
        assert why in refused(served, "/inference/v1/generate", generate)
        plain = {"ids": told["tokens"], "params": params}
        assert why in refused(served, "/generate", plain)


def bomb() -> bytes:
    """A file of a few thousand bytes that says it is 60,000 x 60,000 pixels, and one within the
    limits whose data ends after the first row."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    return png_of(header, zlib.compress(bytes(4_000_000), 9))


def png_of(header: bytes, body: bytes) -> bytes:
    def chunk(name: bytes, content: bytes) -> bytes:
        crc = struct.pack(">I", zlib.crc32(name + content))
        return struct.pack(">I", len(content)) + name + content + crc

    chunks = [chunk(b"IHDR", header), chunk(b"IDAT", body), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def of_source(api: Api, kind: str, text: str) -> Json:
    if api.path == "/v1/messages":
        source = {"type": "base64", "media_type": kind, "data": text}
        return {"type": "image", "source": source}
    url = f"data:{kind};base64,{text}"
    if api.path == "/v1/responses":
        return {"type": "input_image", "image_url": url}
    return {"type": "image_url", "image_url": {"url": url}}


GOOD = base64_of(png(7))
SHORT = struct.pack(">IIBBBBB", 8_000, 8_000, 8, 2, 0, 0, 0)
HOSTILE: dict[str, tuple[str, str, str]] = {
    "broken base64": ("image/png", GOOD[:50] + "*" + GOOD[51:], "the base64 text is broken"),
    "base64 of odd length": ("image/png", GOOD[:53], "the base64 text is broken"),
    "nothing": ("image/png", "", "there is nothing in it"),
    "a lie about the type": ("image/jpeg", GOOD, "a PNG that is called image/jpeg"),
    "a lie the other way": (
        "image/png",
        base64_of(b"GIF89a" + bytes([1, 0, 1, 0])),
        "a GIF that is called",
    ),
    "no picture": ("image/png", base64_of(b"%PDF-1.7 hello"), "PNG, JPEG, WebP and GIF are read"),
    "another type": ("image/svg+xml", base64_of(b"<svg/>"), "is no type of picture that is read"),
    "truncated": ("image/png", base64_of(png(8)[:2000]), "it must be whole|is truncated|ends"),
    "ends within the header": (
        "image/jpeg",
        base64_of(b"\xff\xd8\xff\xe0\0"),
        "within its header",
    ),
    "a bomb": ("image/png", base64_of(bomb()), "a picture of 60000x60000 pixels"),
    "less than it promises": ("image/png", base64_of(png_of(SHORT, zlib.compress(b"\0\0"))), "PNG"),
    "a thread": ("image/png", base64_of(write_png(np.zeros((1, 2000, 3), np.uint8))), "200 times"),
}


@each_api
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_picture_is_one_error_that_names_its_part(
    served: Served, api: Api, name: str
) -> None:
    kind, text, why = HOSTILE[name]
    before = num_looks(served)
    message = refused(served, api.path, {"model": "tiny", **api.body(of_source(api, kind, text))})
    assert message.startswith(api.where), message
    assert any(one in message for one in why.split("|")), message
    assert len(message) < 500
    assert num_looks(served) == before


def test_all_pictures_that_cannot_be_are_told_at_once(served: Served) -> None:
    """Those whose header tells, or else those that turn out damaged when they are decoded."""
    damaged = png(9)
    damaged = damaged[:60] + bytes(9) + damaged[69:]
    parts = [chat_part(one) for one in (damaged, png(1), b"GIF89a", damaged)]
    content = {"messages": [{"role": "user", "content": parts}]}
    message = refused(served, "/v1/chat/completions", content)
    assert "messages.0.content.2" in message and "messages.0.content.0" not in message
    del parts[2]
    message = refused(served, "/v1/chat/completions", content)
    assert message.startswith("2 fields cannot be: messages.0.content.0")
    assert "messages.0.content.2" in message


def test_what_is_elsewhere_is_not_fetched(served: Served) -> None:
    url = {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
    source = {"type": "image", "source": {"type": "url", "url": "https://127.0.0.1:1/a.png"}}
    file = {"type": "input_image", "file_id": "file-1"}
    for name, part in (("chat", url), ("messages", source), ("responses", file)):
        api = APIS[name]
        message = refused(served, api.path, {"model": "tiny", **api.body(part)})
        assert message.startswith(api.where), message
        assert "fetches nothing" in message or "no files are kept" in message


@pytest.mark.parametrize("role", ["system", "assistant"])
def test_only_users_and_tools_show_pictures(served: Served, role: str) -> None:
    body = {"messages": [{"role": role, "content": [chat_part(png(1))]},
                         {"role": "user", "content": "x"}]}  # fmt: skip
    assert f"and {role} does not" in refused(served, "/v1/chat/completions", body)


def test_sounds_and_files_are_still_refused_by_what_the_model_does(served: Served) -> None:
    body = APIS["chat"].body({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})
    message = refused(served, "/v1/chat/completions", body)
    assert "this model reads text and sees pictures; leave it out" in message


def test_text_spells_no_placeholder_in_any_place_of_a_body(served: Served) -> None:
    """In words, in the description and the schema of a tool, and beside a picture."""
    pad = "<|image_pad|>"
    schema = {"type": "object", "properties": {pad: {"type": "string", "description": pad}}}
    tool = {"name": "f", "description": f"a {pad} b", "parameters": schema}
    body = {
        "messages": [
            {"role": "system", "content": pad},
            {"role": "user", "content": [said("text", f"{pad}{pad}"), chat_part(png(2))]},
        ],
        "tools": [{"type": "function", "function": tool}],
    }
    told = answered(served, "/tokenize", body)
    pad_id = served.engine.model.config.image_token_id
    assert told["tokens"].count(pad_id) == TOKENS
    (span,) = told["images"]
    assert told["tokens"][span["start"] : span["start"] + TOKENS] == [pad_id] * TOKENS


def test_pictures_beyond_the_context_are_refused_before_they_are_decoded(served: Served) -> None:
    """By their headers: none of these has any pixels."""
    parts = [chat_part(png_of(SHORT[:-5] + bytes([8, 2, 0, 0, 0]), bytes([i]))) for i in range(200)]
    body = {"messages": [{"role": "user", "content": parts}]}
    before = served.engine.model.sight._pixels.num_read
    assert "the prompt is too long" in refused(served, "/v1/chat/completions", body)
    assert served.engine.model.sight._pixels.num_read == before


def test_limits_of_a_server_that_sees(tmp_path: Path) -> None:
    limits = CompletionLimits(max_images=2, max_body_bytes=1000, max_picture_body_bytes=40_000)
    with serve_sight(tmp_path, limits=limits) as served:
        api = APIS["chat"]
        answered(served, api.path, api.shown(png(1)))  # longer than the limit of texts
        many = {"messages": [{"role": "user", "content": [chat_part(png(1, side=8))] * 3}]}
        assert "3 pictures in one request: at most 2" in refused(served, api.path, many)
        told = refused(served, api.path, api.shown(png(1, side=200)), status=413)
        assert told == (
            "the body is longer than the limit of 40000 bytes (0.038147 MiB), pictures included; "
            "send fewer or smaller ones"
        )
    assert CompletionLimits().with_pictures().max_body_bytes == 64 << 20


def test_a_model_that_reads_text_says_so_in_each_api() -> None:
    with serve() as served:
        for api in APIS.values():
            message = refused(served, api.path, {"model": "tiny", **api.body(api.part(png(1)))})
            assert message.startswith(f"{api.where}: "), message
            assert "this model reads text; leave it out" in message
