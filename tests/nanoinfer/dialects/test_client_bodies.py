"""Bodies as clients send them: accepted with their meaning, or one error with all that is wrong.

They follow the type files of openai, anthropic and litellm, the request types of vLLM, SGLang and
OpenRouter, and what OpenHands, DeepSeek's and Mistral's users send; those of Claude Code and Codex
were recorded from the programs themselves (client_bodies/, with texts cut short).
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_text import TEMPLATE, make_tokenizer

from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.chat.prompts import chat_ids
from nanoinfer.dialects.chat import ChatDialect
from nanoinfer.dialects.exchange import ApiAnswer, ApiCall, ApiReply, ApiToolCall, ToolForm
from nanoinfer.dialects.messages import MessagesDialect
from nanoinfer.dialects.responses import ResponsesDialect
from nanoinfer.http.api_error import ApiError
from nanoinfer.http.http_io import read_json_body
from nanoinfer.params import Grammar, Output
from nanoinfer.server.requests import ChatCompletion, Completion

TOKENIZER = make_tokenizer()
SPOKEN = ChatTokenizer(  # its prompts tell the variables that they were made with
    TOKENIZER._tokenizer,
    eos_ids=TOKENIZER.eos_ids,
    chat_template=(
        "{% if reasoning_effort is defined %}[effort {{ reasoning_effort }}]{% endif %}"
        "{% if enable_thinking is defined %}[thinking {{ enable_thinking }}]{% endif %}"
        "{% if mood is defined %}[mood {{ mood }}]{% endif %}"
        "{% if documents %}[documents {{ documents | length }}]{% endif %}" + TEMPLATE
    ),
)
USER = {"role": "user", "content": "hi"}
HI = "<|user|>hi<|end|>"
OPEN = "<|assistant|>"
WRITTEN = '<tool_call>\n{"name": "ls", "arguments": {}}\n</tool_call>'
LS = {"name": "ls", "description": "Lists.", "parameters": {"type": "object", "properties": {}}}
TOOL = {"type": "function", "function": LS}
RUN = {"type": "function", "function": {**LS, "name": "run"}}
CALL = {"id": "call_1", "type": "function", "function": {"name": "ls", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
DIGITS = Grammar("regex", "[0-9]+")
OBJECT = Grammar("json_schema", '{"type": "object"}')
CACHE = {"cache_control": {"type": "ephemeral"}}
PICTURE = {"type": "image_url", "image_url": {"url": "data:,"}}


def text(content: str, **more: Any) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def prompt_of(asked: ChatCompletion) -> str:
    """The prompt as text, without the tools."""
    ids = chat_ids(
        SPOKEN,
        [message.for_template() for message in asked.messages],
        variables=asked.variables(),
        has_opening=asked.has_opening,
        is_continued=asked.is_continued,
    )
    return SPOKEN.decode(ids)


# Of each body of a chat: its fields beside the message, and what they mean: fields of the engine's
# parameters, the prompt, the names of the tools that are offered.
CHATS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    # openai's client
    "openai: plain": ({}, {"prompt": HI + OPEN, "temperature": 1.0}),
    "openai: nulls everywhere": (
        dict.fromkeys(("stop", "seed", "tools", "tool_choice", "logit_bias", "reasoning_effort")),
        {"prompt": HI + OPEN, "stop": (), "grammar": None},
    ),
    "openai: accounts": (
        {"store": True, "metadata": {"a": "b"}, "service_tier": "flex", "user": "me",
         "safety_identifier": "x", "prompt_cache_key": "k", "prompt_cache_retention": "24h",
         "prompt_cache_options": {"mode": "implicit"}},
        {"prompt": HI + OPEN},
    ),
    "openai: modalities, verbosity, prediction": (
        {"modalities": ["text"], "verbosity": "low",
         "prediction": {"type": "content", "content": "x"}},
        {"prompt": HI + OPEN},
    ),
    "openai: reasoning_effort": (
        {"reasoning_effort": "low"}, {"prompt": f"[effort low][thinking True]{HI}{OPEN}"},
    ),
    "openai: reasoning_effort none": (
        {"reasoning_effort": "none"}, {"prompt": f"[effort none][thinking False]{HI}{OPEN}"},
    ),
    "openai: logprobs": ({"logprobs": True, "top_logprobs": 3}, {"top_logps": 3}),
    "openai: no logprobs": ({"logprobs": False, "top_logprobs": 0}, {"top_logps": 0}),
    "openai: schema": (
        {"response_format": {"type": "json_schema", "json_schema": {
            "name": "a", "strict": True, "schema": {"type": "integer"}}}},
        {"grammar": Grammar("json_schema", '{"type": "integer"}')},
    ),
    "openai: json_object": ({"response_format": {"type": "json_object"}}, {"grammar": OBJECT}),
    "openai: response_format text": ({"response_format": {"type": "text"}}, {"grammar": None}),
    "openai: allowed tools": (
        {"tools": [TOOL, RUN], "tool_choice": {"type": "allowed_tools", "allowed_tools": {
            "mode": "auto", "tools": [{"type": "function", "function": {"name": "run"}}]}}},
        {"tools": ["run"], "grammar": None},
    ),
    "openai: tool_choice none": ({"tools": [TOOL], "tool_choice": "none"}, {"tools": []}),
    "openai: developer": (
        {"messages": [{"role": "developer", "content": [text("be brief")]}, USER]},
        {"prompt": f"<|developer|>be brief<|end|>{HI}{OPEN}"},
    ),
    "openai: refusal part": (
        {"messages": [USER, {"role": "assistant", "content": [
            {"type": "refusal", "refusal": "no"}]}, USER]},
        {"prompt": f"{HI}{OPEN}no<|end|>{HI}{OPEN}"},
    ),
    "openai: result as parts": (
        {"messages": [USER, CALLED, {"role": "tool", "tool_call_id": "call_1",
                                     "content": [text("a"), text("b")]}]},
        {"prompt": f"{HI}{OPEN}{WRITTEN}<|end|><|tool|>ab<|end|>{OPEN}"},
    ),
    # litellm and openrouter
    "litellm: cache_control anywhere": (
        {"messages": [{"role": "user", "content": [text("hi", **CACHE)], **CACHE}],
         "tools": [{**TOOL, **CACHE}], **CACHE},
        {"prompt": HI + OPEN, "tools": ["ls"]},
    ),
    "litellm: an answer sent back": (
        {"messages": [USER, {"role": "assistant", "content": "a", "reasoning_content": "b",
                             "thinking_blocks": [], "provider_specific_fields": {"x": 1},
                             "images": [], "function_call": None}, USER]},
        {"prompt": f"{HI}{OPEN}a<|end|>{HI}{OPEN}"},
    ),
    "litellm: gemini's call sent back": (
        {"messages": [USER, {**CALLED, "tool_calls": [{
            **CALL, "index": 0, "extra_content": {"google": {"thought_signature": "x"}},
            "provider_specific_fields": {}}]},
            {"role": "tool", "tool_call_id": "call_1", "name": "ls", "content": "x"}]},
        {"prompt": f"{HI}{OPEN}{WRITTEN}<|end|><|tool|>x<|end|>{OPEN}"},
    ),
    "openrouter: routing": (
        {"provider": {"order": ["a"], "data_collection": "deny"}, "models": ["a", "b"],
         "route": "fallback", "transforms": ["middle-out"], "session_id": "s", "trace": {}},
        {"prompt": HI + OPEN},
    ),
    "openrouter: usage, reasoning": (
        {"usage": {"include": True}, "reasoning": {"effort": "high", "exclude": True}},
        {"prompt": f"[effort high][thinking True]{HI}{OPEN}"},
    ),
    "openrouter: reasoning off": (
        {"reasoning": {"enabled": False}}, {"prompt": f"[thinking False]{HI}{OPEN}"},
    ),
    "openrouter: structured_outputs is a flag": (
        {"structured_outputs": True, "response_format": {"type": "json_object"}},
        {"grammar": OBJECT},
    ),
    # vLLM's client
    "vllm: what it always may send": (
        {"min_tokens": 0, "skip_special_tokens": True, "spaces_between_special_tokens": True,
         "include_stop_str_in_output": False, "add_generation_prompt": True,
         "continue_final_message": False, "add_special_tokens": False, "top_k": -1,
         "min_p": 0.0, "repetition_penalty": 1.0, "length_penalty": 1.0, "echo": False,
         "use_beam_search": False, "bad_words": [], "stop": [], "stop_token_ids": [],
         "prompt_logprobs": None, "truncate_prompt_tokens": None, "best_of": 1, "tools": []},
        {"prompt": HI + OPEN, "top_k": 0, "stop": (), "min_tokens": 0, "prompt_logps": False},
    ),
    "vllm: ends": (
        {"min_tokens": 3, "stop": "x", "include_stop_str_in_output": True, "ignore_eos": True,
         "skip_special_tokens": False, "stop_token_ids": [7]},
        {"min_tokens": 3, "stop": ("x",), "include_stop": True, "ignore_eos": True,
         "skip_special": False, "stop_token_ids": (7,)},
    ),
    "vllm: variables of the template": (
        {"chat_template_kwargs": {"enable_thinking": False, "mood": "calm"}},
        {"prompt": f"[thinking False][mood calm]{HI}{OPEN}"},
    ),
    "vllm: variables go before an effort": (
        {"chat_template_kwargs": {"enable_thinking": False}, "reasoning_effort": "high"},
        {"prompt": f"[effort high][thinking False]{HI}{OPEN}"},
    ),
    "vllm: documents": (
        {"documents": [{"title": "a", "text": "b"}]}, {"prompt": f"[documents 1]{HI}{OPEN}"},
    ),
    "vllm: structured_outputs choice": (
        {"structured_outputs": {"choice": ["a", "b"]}},
        {"grammar": Grammar("choice", choices=("a", "b"))},
    ),
    "vllm: structured_outputs regex": (
        {"structured_outputs": {"regex": "[0-9]+", "json": None}}, {"grammar": DIGITS},
    ),
    "vllm: structured_outputs json": (
        {"structured_outputs": {"json": {}}}, {"grammar": Grammar("json_schema", "{}")},
    ),
    "vllm: structured_outputs json_object": (
        {"structured_outputs": {"json_object": True}}, {"grammar": OBJECT},
    ),
    "vllm: guided_grammar": (
        {"guided_grammar": 'root ::= "a"', "guided_decoding_backend": "xgrammar"},
        {"grammar": Grammar("lark", 'root ::= "a"')},
    ),
    "vllm: guided_json that allows everything": (
        {"guided_json": {}}, {"grammar": Grammar("json_schema", "{}")},
    ),
    "vllm: continue_final_message": (
        {"messages": [USER, {"role": "assistant", "content": "yes, "}],
         "add_generation_prompt": False, "continue_final_message": True},
        {"prompt": f"{HI}{OPEN}yes, "},
    ),
    "vllm: no generation prompt": ({"add_generation_prompt": False}, {"prompt": HI}),
    "vllm: prompt_logprobs": (
        {"prompt_logprobs": 2}, {"prompt_logps": True, "top_logps": 2},
    ),
    "vllm: one engine of many": (
        {"kv_transfer_params": {"a": 1}, "cache_salt": "s", "priority": 3, "request_id": "r"},
        {"prompt": HI + OPEN},
    ),
    # SGLang's client
    "sglang: what it may send": (
        {"separate_reasoning": True, "stream_reasoning": False, "no_stop_trim": True,
         "regex": "[0-9]+", "rid": "r", "extra_key": "k", "return_hidden_states": False,
         "bootstrap_room": 1, "lora_path": None},
        {"grammar": DIGITS, "include_stop": True},
    ),
    "sglang: ebnf": ({"ebnf": 'start: "a"'}, {"grammar": Grammar("lark", 'start: "a"')}),
    # others
    "llama.cpp: schema of a json_object": (
        {"response_format": {"type": "json_object", "schema": {"type": "integer"}},
         "cache_prompt": True},
        {"grammar": Grammar("json_schema", '{"type": "integer"}')},
    ),
    "deepseek: thinking disabled": (
        {"thinking": {"type": "disabled"}}, {"prompt": f"[thinking False]{HI}{OPEN}"},
    ),
    "deepseek: prefix": (
        {"messages": [USER, {"role": "assistant", "content": "```", "prefix": True}]},
        {"prompt": f"{HI}{OPEN}```"},
    ),
    "qwen: enable_thinking": (
        {"enable_thinking": True}, {"prompt": f"[thinking True]{HI}{OPEN}"},
    ),
    "mistral: any tool": ({"tools": [TOOL], "tool_choice": "any"}, {"tools": ["ls"]}),
    "mistral: thinking parts": (
        {"messages": [USER, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": [text("hm")]}, text("a")]}, USER]},
        {"prompt": f"{HI}{OPEN}a<|end|>{HI}{OPEN}"},
    ),
    "codecompanion: ids": (
        {"messages": [{**USER, "id": 3}]}, {"prompt": HI + OPEN},
    ),
    "openhands: a picture that a tool took": (
        {"messages": [USER, CALLED, {"role": "tool", "tool_call_id": "call_1", "name": "ls",
                                     "content": [text("shot: ", **CACHE), PICTURE]}]},
        {"prompt": f"{HI}{OPEN}{WRITTEN}<|end|><|tool|>shot: "
                   f"[image left out: this model reads text]<|end|>{OPEN}"},
    ),
    "langchain: arguments as an object, and none": (
        {"messages": [USER, {**CALLED, "tool_calls": [
            {**CALL, "function": {"name": "ls", "arguments": {"a": 1}}},
            {**CALL, "id": "call_2", "function": {"name": "ls", "arguments": ""}}]}, USER]},
        {"arguments": [{"a": 1}, {}]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CHATS)
def test_what_a_body_means(name: str) -> None:
    fields, meaning = CHATS[name]
    body = {"model": "tiny", "messages": [USER], "max_tokens": 8, **fields}
    asked = read_json_body(body, ChatCompletion)
    params = asked.params(8, 5)
    for what, expected in meaning.items():
        if what == "prompt":
            assert prompt_of(asked) == expected
        elif what == "tools":
            assert [tool["function"]["name"] for tool in asked.tool_specs()] == expected
        elif what == "arguments":
            calls = asked.messages[1].for_template()["tool_calls"]
            assert [call["function"]["arguments"] for call in calls] == expected
        else:
            assert getattr(params, what) == expected, what


COMPLETIONS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "openai: legacy": (
        {"suffix": None, "best_of": 1, "logprobs": 0, "user": "me"},
        {"top_logps": 0},
    ),
    "openai: best_of that is n": ({"best_of": 3, "n": 3}, {"n": 3}),
    "lm-eval: scores alone": ({"max_tokens": 0, "echo": True, "logprobs": 1}, {"top_logps": 1}),
    "sglang: json_schema": (
        {"json_schema": '{"type": "integer"}'},
        {"grammar": Grammar("json_schema", '{"type": "integer"}')},
    ),
    "vllm: response_format": ({"response_format": {"type": "json_object"}}, {"grammar": OBJECT}),
    "vllm: prompt_logprobs": ({"prompt_logprobs": 0}, {"prompt_logps": True, "top_logps": 0}),
}


@pytest.mark.parametrize("name", COMPLETIONS)
def test_what_a_plain_body_means(name: str) -> None:
    fields, meaning = COMPLETIONS[name]
    params = read_json_body({"prompt": "a", **fields}, Completion).params(8, 5)
    assert {what: getattr(params, what) for what in meaning} == meaning


def test_a_prompt_is_cut_at_the_side_that_was_asked_for() -> None:
    ids = list(range(10))

    def cut(**fields: Any) -> list[int]:
        return read_json_body({"prompt": "a", **fields}, Completion).cut(ids, 8, 3)

    assert cut() == ids
    assert cut(truncate_prompt_tokens=4) == ids[-4:]
    assert cut(truncate_prompt_tokens=4, truncation_side="right") == ids[:4]
    assert cut(truncate_prompt_tokens=-1) == ids[-5:], "8 tokens of context, 3 of them to answer"
    assert cut(truncate_prompt_tokens=20) == ids


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "all at once, each with its reason": (
        {"audio": {"voice": "x"}, "logits_processors": ["a"], "temprature": 0.5, "max_tokens": 0,
         "messages": [{"role": "user", "content": [PICTURE]}]},
        ["audio: this model writes text; leave it out",
         "logits_processors: a request brings no code",
         "temprature: unknown field; remove it, or write temperature",
         "max_tokens: Input should be greater than or equal to 1",
         "messages.0.content.0: image_url: this model reads text; leave it out"],
    ),
    "no guide in silence": ({"guided_choice": []}, ["guided_choice: List should have at least 1"]),
    "an empty structured_outputs": (
        {"structured_outputs": {}}, ["structured_outputs: give one of json, regex, choice"],
    ),
    "a structural tag": (
        {"structured_outputs": {"structural_tag": "x", "regex": "a"}},
        ["structured_outputs.structural_tag: give a schema, a regex or a grammar"],
    ),
    "best of many": ({"best_of": 4}, ["best_of: is more than n, and no best of them is picked"]),
    "variables that are the server's": (
        {"chat_template_kwargs": {"messages": [], "tools": []}},
        ["chat_template_kwargs: messages, tools: the server sets it"],
    ),
    "very many variables": (
        {"chat_template_kwargs": {f"a{i}": i for i in range(40)}},
        ["chat_template_kwargs: at most 32 variables"],
    ),
    "a template of the client's": (
        {"chat_template": "{{ 1 }}"}, ["chat_template: the model's own is used"],
    ),
    "continuing what is not open": (
        {"continue_final_message": True},
        ["continue_final_message: the last message is no text of an assistant"],
    ),
    "an opening and none": (
        {"messages": [USER, {"role": "assistant", "content": "a"}],
         "continue_final_message": True, "add_generation_prompt": True},
        ["add_generation_prompt: true opens a new answer"],
    ),
    "scores in a stream": (
        {"prompt_logprobs": 1, "stream": True}, ["prompt_logprobs: cannot be streamed"],
    ),
    "old functions, audio out, hosted search": (
        {"functions": [LS], "modalities": ["text", "audio"], "web_search_options": {"a": 1}},
        ["functions: the old form of tools", "modalities: this model writes text",
         "web_search_options: this server runs no tools"],
    ),
    "a freeform tool": (
        {"tools": [{"type": "custom", "custom": {"name": "a"}}]},
        ["tools.0.custom: tools without a schema are /v1/responses'"],
    ),
    "a budget of thinking, a beam": (
        {"thinking_token_budget": 9, "use_beam_search": True, "length_penalty": 0.8},
        ["thinking_token_budget: ", "use_beam_search: ", "length_penalty: "],
    ),
    "many pictures": (
        {"messages": [{"role": "user", "content": [PICTURE, text("a"), PICTURE]},
                      {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]},
        ["messages.0.content.0: image_url", "messages.0.content.2: image_url",
         "messages.1.content.0: input_audio"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_one_error_names_all_that_cannot_be(name: str) -> None:
    fields, told = REFUSED[name]
    body = {"messages": [USER], **fields}
    with pytest.raises(ApiError) as error:
        read_json_body(body, ChatCompletion)
    assert error.value.status == 400
    assert all(part in error.value.message for part in told), error.value.message
    if len(told) > 1:
        assert error.value.message.startswith(f"{len(told)} fields cannot be: ")


def test_an_error_of_very_many_faults_is_short() -> None:
    body = {f"no_such_{i}" + "x" * 500: 1 for i in range(5000)}
    with pytest.raises(ApiError) as error:
        read_json_body(body | {"messages": [USER]}, ChatCompletion)
    assert len(error.value.message) < 20_000 and "4970 more" in error.value.message


# The recording endpoint, whose prompts and answers are those of an episode.


def read_chat(**fields: Any) -> ApiCall:
    return ChatDialect(TOKENIZER).read({"messages": [USER], **fields})


def test_the_endpoint_does_what_says_where_an_answer_ends_and_what_the_template_is_told() -> None:
    call = read_chat(
        reasoning_effort="low", min_tokens=2, stop_token_ids=[5], ignore_eos=True, stop="x",
        reasoning={"exclude": True}, temperature=0.5, provider={"order": ["a"]},
    )  # fmt: skip
    assert call == ApiCall(
        messages=[USER], min_tokens=2, stop_token_ids=(5,), ignore_eos=True, stop=("x",),
        has_reasoning=False, ignored=("temperature",), sampling={"temperature": 0.5},
        variables={"reasoning_effort": "low", "enable_thinking": True, "thinking": True},
    )  # fmt: skip
    back = [USER, {"role": "assistant", "content": "a", "reasoning": "b"}, USER]
    said = {"role": "assistant", "content": "a", "reasoning_content": "b"}
    assert read_chat(messages=back).messages[1] == said


def test_the_endpoint_refuses_what_would_change_its_tokens_all_at_once() -> None:
    given = {
        "truncate_prompt_tokens": 5,
        "continue_final_message": True,
        "add_generation_prompt": False,
        "prompt_logprobs": 0,
        "return_token_ids": True,
        "skip_special_tokens": False,
        "logprobs_mode": "raw",
    }
    with pytest.raises(ApiError) as error:
        read_chat(**given)
    assert error.value.message.startswith(f"{len(given)} fields cannot be: ")
    assert all(f"{name}: " in error.value.message for name in given)
    with pytest.raises(ApiError, match="prefix: an episode keeps its prompts"):
        read_chat(messages=[USER, {"role": "assistant", "content": "a", "prefix": True}])
    usual = {"add_generation_prompt": True, "skip_special_tokens": True, "return_token_ids": False}
    assert read_chat(**usual) == read_chat()


# Claude Code and Codex, as they were recorded.


def recorded(name: str) -> dict[str, Any]:
    file = Path(__file__).parent / "client_bodies" / f"{name}.json"
    return json.loads(file.read_text())["body"]


def test_a_turn_of_claude_code() -> None:
    call = MessagesDialect().read(recorded("claude_code_turn"))
    roles = ["system", "user", "system", "assistant", "tool", "tool"]
    assert [message["role"] for message in call.messages] == roles
    calls = [use["function"] for use in call.messages[3]["tool_calls"]]
    assert [one["name"] for one in calls] == ["Read", "Bash"]
    assert call.messages[4]["content"] == "[image left out: this model reads text]"
    assert call.messages[5]["content"] == "Error: Exit code 1\nhi"
    assert {tool["function"]["name"] for tool in call.tools} >= {"Read", "Bash"}
    assert call.variables == {"reasoning_effort": "high"}
    assert (call.is_streamed, call.has_reasoning, call.ignored) == (True, True, ())


def test_the_title_that_claude_code_asks_for() -> None:
    call = MessagesDialect().read(recorded("claude_code_title"))
    assert call.grammar is not None and "title" in call.grammar.value
    assert call.tools == [] and call.max_tokens == 32000


def test_a_turn_of_codex() -> None:
    call = ResponsesDialect(TOKENIZER).read(recorded("codex_turn"))
    roles = ["developer", "developer", "user", "user", *["assistant", "tool"] * 3]
    assert [message["role"] for message in call.messages] == roles
    calls = [m["tool_calls"][0]["function"] for m in call.messages if "tool_calls" in m]
    assert [one["name"] for one in calls] == ["exec_command", "view_image", "apply_patch"]
    assert calls[2]["arguments"]["input"].startswith("*** Begin Patch")
    assert call.messages[7]["content"] == "[image left out: this model reads text]"
    assert call.tool_forms == {
        f"multi_agent_v1__{name}": ToolForm(name=name, namespace="multi_agent_v1")
        for name in ("close_agent", "resume_agent")
    }
    assert call.ignored == ("web_search",)


def test_codex_is_told_that_a_picture_of_the_person_cannot_be_read() -> None:
    with pytest.raises(ApiError, match=r"^input.3.content.1: input_image: this model reads text"):
        ResponsesDialect(TOKENIZER).read(recorded("codex_picture"))


class Taker:
    """Takes every picture for a model that sees."""

    def __init__(self) -> None:
        self.parts: list[Any] = []

    def take(self, part: Any) -> str:
        self.parts.append(part)
        return "5" * 64


def test_a_model_that_sees_is_shown_what_claude_code_and_codex_show() -> None:
    """In a tool's result, and by the person."""
    shown = {"type": "image", "sha256": "5" * 64}
    taker = Taker()
    call = MessagesDialect().read(recorded("claude_code_turn"), taker)
    assert call.messages[4]["content"] == [shown]
    assert taker.parts[0]["source"]["media_type"] == "image/png"
    codex = ResponsesDialect(TOKENIZER)
    assert codex.read(recorded("codex_turn"), taker).messages[7]["content"] == [shown]
    said = codex.read(recorded("codex_picture"), taker).messages[-1]["content"]
    assert shown in said and len(taker.parts) == 3
    assert all(part["type"] == "text" and part["text"] for part in said if part != shown)


PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}


def test_a_freeform_tool_is_offered_as_a_function_and_called_as_itself() -> None:
    dialect = ResponsesDialect(TOKENIZER)
    choice = {"type": "custom", "name": "apply_patch"}
    call = dialect.read({"input": "hi", "tools": [PATCH], "tool_choice": choice})
    (tool,) = call.tools
    assert tool["function"]["parameters"]["properties"] == {"input": {"type": "string"}}
    assert tool["function"]["description"] == (
        "Edits files.\n\n`input` must match this lark grammar:\nstart: /.+/"
    )
    assert call.forced_tool == "apply_patch"
    use = ApiToolCall(id="call_1", name="apply_patch", arguments='{"input": "a \\"b\\""}')
    reply = ApiReply(text="", calls=(use,), output=Output(ids=[1], logps=[0.0], versions=[0]))
    answer = ApiAnswer(id="0", model="m", created=1, num_prompt_tokens=1, replies=[reply])
    (item,) = dialect.write(call, answer)["output"]
    assert (item["type"], item["name"], item["input"]) == (
        "custom_tool_call", "apply_patch", 'a "b"',
    )  # fmt: skip
    names = [event.name for event in dialect.events(call, answer)]
    assert names[2:-1] == [
        "response.output_item.added",
        "response.custom_tool_call_input.delta",
        "response.custom_tool_call_input.done",
        "response.output_item.done",
    ]
    back = {"type": "custom_tool_call_output", "call_id": "call_1", "output": "done"}
    again = dialect.read({"input": [{"role": "user", "content": "hi"}, item, back]})
    function = again.messages[1]["tool_calls"][0]["function"]
    assert function == {"name": "apply_patch", "arguments": {"input": 'a "b"'}}
    assert again.messages[2]["content"] == "done"


def test_a_tool_of_a_namespace_is_called_as_its_client_knows_it() -> None:
    dialect = ResponsesDialect(TOKENIZER)
    run = {"type": "function", "name": "run", "parameters": {"type": "object"}}
    call = dialect.read(
        {"input": "hi", "tools": [run, {"type": "namespace", "name": "far", "tools": [run]}]}
    )
    assert [tool["function"]["name"] for tool in call.tools] == ["run", "far__run"]
    uses = tuple(ApiToolCall(id=name, name=name, arguments="{}") for name in ("run", "far__run"))
    reply = ApiReply(text="", calls=uses, output=Output(ids=[1], logps=[0.0], versions=[0]))
    answer = ApiAnswer(id="0", model="m", created=1, num_prompt_tokens=1, replies=[reply])
    items = dialect.write(call, answer)["output"]
    assert [(item["name"], item.get("namespace")) for item in items] == [
        ("run", None), ("run", "far"),
    ]  # fmt: skip
    again = dialect.read({"input": [{"role": "user", "content": "hi"}, *items]})
    calls = again.messages[1]["tool_calls"]
    assert [one["function"]["name"] for one in calls] == ["run", "far__run"]


MESSAGES: dict[str, tuple[dict[str, Any], Any]] = {
    "documents and search results of text": (
        {"messages": [{"role": "user", "content": [
            {"type": "document", "title": "T", "source": {"type": "text", "data": "d",
                                                          "media_type": "text/plain"}},
            {"type": "search_result", "title": "S", "source": "u", "content": [text("c")]}]}]},
        [{"role": "user", "content": "T\nd\nS\nu\nc\n"}],
    ),
    "a tool that a search found": (
        {"messages": [USER, {"role": "assistant", "content": [
            {"type": "tool_use", "id": "x", "name": "s", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x", "content": [
                {"type": "tool_reference", "tool_name": "Grep"}]}]}]},
        [USER, {"role": "assistant", "content": "", "tool_calls": [
            {"id": "x", "type": "function", "function": {"name": "s", "arguments": {}}}]},
         {"role": "tool", "tool_call_id": "x", "content": "[tool: Grep]"}],
    ),
    "a document that is no text, in a result": (
        {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "x",
            "content": [text("a "), {"type": "document", "source": {
                "type": "base64", "data": "x", "media_type": "application/pdf"}}]}]}]},
        [{"role": "tool", "tool_call_id": "x",
          "content": "a [document left out: this model reads text]"}],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGES)
def test_what_a_body_of_messages_means(name: str) -> None:
    fields, messages = MESSAGES[name]
    assert MessagesDialect().read({"model": "m", "max_tokens": 1, **fields}).messages == messages


def test_a_search_of_the_api_itself_is_left_out_and_counted() -> None:
    bash = {"name": "Bash", "input_schema": {"type": "object"}, "defer_loading": True}
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    finder = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    body = {"model": "m", "max_tokens": 1, "messages": [USER], "tools": [search, bash, finder]}
    call = MessagesDialect().read(body)
    assert [tool["function"]["name"] for tool in call.tools] == ["Bash"]
    assert call.ignored == (finder["type"], search["type"])


def test_the_bodies_are_sixty() -> None:
    assert len(CHATS) + len(COMPLETIONS) + len(REFUSED) + len(MESSAGES) + 4 >= 60
