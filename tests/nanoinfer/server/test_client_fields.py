"""Every field that a client's own type files name is done, without effect, or refused by name.

The files of openai, anthropic and litellm are read as text: nothing of a client is imported, and a
new version of one that brings a field is a failure here. Names of servers that clients also speak
to (vLLM, SGLang, OpenRouter) are in a list, as their request types have them.
"""

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from nanoinfer.dialects import chat, messages, responses
from nanoinfer.http import strict_body
from nanoinfer.http.strict_body import StrictBody
from nanoinfer.server import chat_messages, grammar_fields, requests, template_fields

CHAT, RECORDED = requests.ChatCompletion, chat.RecordedChat
OPENAI = {
    "chat/completion_create_params.py": {
        "CompletionCreateParamsBase": [CHAT, RECORDED],
        "CompletionCreateParamsStreaming": [CHAT],
    },
    "completion_create_params.py": {"CompletionCreateParamsBase": [requests.Completion]},
    "chat/chat_completion_stream_options_param.py": {
        "ChatCompletionStreamOptionsParam": [requests.StreamOptions]
    },
    "chat/chat_completion_user_message_param.py": {
        "ChatCompletionUserMessageParam": [chat_messages.ChatMessage]
    },
    "chat/chat_completion_assistant_message_param.py": {
        "ChatCompletionAssistantMessageParam": [chat_messages.ChatMessage]
    },
    "chat/chat_completion_tool_message_param.py": {
        "ChatCompletionToolMessageParam": [chat_messages.ChatMessage]
    },
    "chat/chat_completion_developer_message_param.py": {
        "ChatCompletionDeveloperMessageParam": [chat_messages.ChatMessage]
    },
    "chat/chat_completion_system_message_param.py": {
        "ChatCompletionSystemMessageParam": [chat_messages.ChatMessage]
    },
    "chat/chat_completion_content_part_text_param.py": {
        "ChatCompletionContentPartTextParam": [chat_messages.TextPart]
    },
    "chat/chat_completion_content_part_refusal_param.py": {
        "ChatCompletionContentPartRefusalParam": [chat_messages.RefusalPart]
    },
    "chat/chat_completion_function_tool_param.py": {
        "ChatCompletionFunctionToolParam": [chat_messages.OfferedTool]
    },
    "chat/chat_completion_custom_tool_param.py": {
        "ChatCompletionCustomToolParam": [chat_messages.OfferedTool]
    },
    "chat/chat_completion_message_function_tool_call_param.py": {
        "ChatCompletionMessageFunctionToolCallParam": [chat_messages.Call],
        "Function": [chat_messages.CalledFunction],
    },
    "chat/chat_completion_allowed_tools_param.py": {
        "ChatCompletionAllowedToolsParam": [requests.AllowedTools]
    },
    "shared_params/function_definition.py": {"FunctionDefinition": [chat_messages.Function]},
    "shared_params/response_format_json_schema.py": {
        "JSONSchema": [grammar_fields.JsonSchema],
        "ResponseFormatJSONSchema": [grammar_fields.ResponseFormat],
    },
    "shared_params/reasoning.py": {"Reasoning": [template_fields.Reasoning]},
    "responses/response_create_params.py": {
        "ResponseCreateParamsBase": [responses.ResponseRequest],
        "ResponseCreateParamsStreaming": [responses.ResponseRequest],
    },
    "responses/response_text_config_param.py": {"ResponseTextConfigParam": [responses.TextConfig]},
    "responses/response_format_text_json_schema_config_param.py": {
        "ResponseFormatTextJSONSchemaConfigParam": [responses.TextFormatChoice]
    },
    "responses/function_tool_param.py": {"FunctionToolParam": [responses.FlatTool]},
    "responses/custom_tool_param.py": {"CustomToolParam": [responses.CustomTool]},
    "responses/namespace_tool_param.py": {"NamespaceToolParam": [responses.Namespace]},
    "responses/easy_input_message_param.py": {"EasyInputMessageParam": [responses.MessageItem]},
    "responses/response_output_message_param.py": {
        "ResponseOutputMessageParam": [responses.MessageItem]
    },
    "responses/response_output_text_param.py": {"ResponseOutputTextParam": [responses.ItemText]},
    "responses/response_output_refusal_param.py": {
        "ResponseOutputRefusalParam": [responses.RefusalPart]
    },
    "responses/response_input_text_param.py": {"ResponseInputTextParam": [responses.ItemText]},
    "responses/response_function_tool_call_param.py": {
        "ResponseFunctionToolCallParam": [responses.CallItem]
    },
    "responses/response_custom_tool_call_param.py": {
        "ResponseCustomToolCallParam": [responses.CallItem]
    },
    "responses/response_custom_tool_call_output_param.py": {
        "ResponseCustomToolCallOutputParam": [responses.OutputItem]
    },
    "responses/response_input_item_param.py": {
        "Message": [responses.MessageItem],
        "FunctionCallOutput": [responses.OutputItem],
        "AdditionalTools": [responses.MoreToolsItem],
    },
}
TOOL_USES = {"ToolUseBlockParam": [messages.ToolUseBlock]}
ANTHROPIC = {
    "message_create_params.py": {
        "MessageCreateParamsBase": [messages.MessageRequest],
        "MessageCreateParamsStreaming": [messages.MessageRequest],
    },
    "beta/message_create_params.py": {
        "MessageCreateParamsBase": [messages.MessageRequest],
        "MessageCreateParamsStreaming": [messages.MessageRequest],
    },
    "message_count_tokens_params.py": {"MessageCountTokensParams": [messages.Prompt]},
    "text_block_param.py": {"TextBlockParam": [messages.TextBlock]},
    "beta/beta_text_block_param.py": {"BetaTextBlockParam": [messages.TextBlock]},
    "tool_result_block_param.py": {"ToolResultBlockParam": [messages.ToolResultBlock]},
    "beta/beta_tool_result_block_param.py": {
        "BetaToolResultBlockParam": [messages.ToolResultBlock]
    },
    "tool_use_block_param.py": TOOL_USES,
    "beta/beta_tool_use_block_param.py": {"BetaToolUseBlockParam": [messages.ToolUseBlock]},
    "thinking_block_param.py": {"ThinkingBlockParam": [messages.ThinkingBlock]},
    "redacted_thinking_block_param.py": {"RedactedThinkingBlockParam": [messages.ThinkingBlock]},
    "tool_param.py": {"ToolParam": [messages.MessagesTool]},
    "beta/beta_tool_param.py": {"BetaToolParam": [messages.MessagesTool]},
    "output_config_param.py": {"OutputConfigParam": [messages.OutputConfig]},
    "beta/beta_output_config_param.py": {"BetaOutputConfigParam": [messages.OutputConfig]},
    "json_output_format_param.py": {"JSONOutputFormatParam": [messages.OutputFormat]},
    "user_message_param.py": {"UserMessageParam": [messages.UserTurn]},
    "assistant_message_param.py": {"AssistantMessageParam": [messages.AssistantTurn]},
    "system_message_param.py": {"SystemMessageParam": [messages.SystemTurn]},
    "tool_choice_tool_param.py": {"ToolChoiceToolParam": [messages.AnyToolChoice]},
    "tool_choice_auto_param.py": {"ToolChoiceAutoParam": [messages.AnyToolChoice]},
}
LITELLM = {
    "openai.py": {
        "OpenAIChatCompletionUserMessage": [chat_messages.ChatMessage],
        "ChatCompletionUserMessage": [chat_messages.ChatMessage],
        "OpenAIChatCompletionAssistantMessage": [chat_messages.ChatMessage],
        "ChatCompletionAssistantMessage": [chat_messages.ChatMessage],
        "ChatCompletionToolMessage": [chat_messages.ChatMessage],
        "OpenAIChatCompletionSystemMessage": [chat_messages.ChatMessage],
        "ChatCompletionSystemMessage": [chat_messages.ChatMessage],
        "ChatCompletionResponseMessage": [chat_messages.ChatMessage],
        "OpenAIChatCompletionTextObject": [chat_messages.TextPart],
        "ChatCompletionTextObject": [chat_messages.TextPart],
        "OpenAIChatCompletionToolParam": [chat_messages.OfferedTool],
        "ChatCompletionToolParam": [chat_messages.OfferedTool],
        "ChatCompletionToolCallChunk": [chat_messages.Call],
        "ChatCompletionToolCallFunctionChunk": [chat_messages.CalledFunction],
    },
}
VLLM = """allowed_token_ids bad_words add_generation_prompt add_special_tokens cache_salt
chat_template chat_template_kwargs continue_final_message documents ec_transfer_params echo
ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty
logprob_token_ids max_completion_tokens media_io_kwargs min_p min_tokens mm_processor_kwargs
priority prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id
return_mm_kwargs return_prompt_text return_token_ids return_token_offsets
return_tokens_as_token_ids routed_experts_prompt_start session_id skip_special_tokens
spaces_between_special_tokens stop_token_ids stream_interval structured_outputs
thinking_token_budget top_k truncate_prompt_tokens truncation_side use_beam_search vllm_xargs
watermarking guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
guided_whitespace_pattern structural_tag logits_processors"""
SGLANG = """bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
continue_final_message custom_logit_processor custom_params data_parallel_rank
disagg_prefill_dp_rank ebnf extra_key ignore_eos images_config input_ids lora_path
max_dynamic_patch min_dynamic_patch min_p min_tokens ngram_corpus_id no_stop_trim priority regex
repetition_penalty return_cached_tokens_details return_hidden_states return_meta_info
return_prompt_token_ids return_routed_experts return_token_ids rid routed_dp_rank
routed_experts_start_len separate_reasoning session_id session_params skip_special_tokens
stop_regex stop_token_ids stream_reasoning task top_k use_audio_in_video"""
OPENROUTER = """debug image_config include_reasoning min_p models plugins provider reasoning
repetition_penalty route session_id structured_outputs top_a top_k trace transforms usage
verbosity"""


def files_of(package: str, files: dict[str, dict[str, list[type[StrictBody]]]], folder: str):
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        pytest.skip(f"needs {package}")
    root = Path(spec.origin).parent / folder
    for name, classes in files.items():
        tree = ast.parse((root / name).read_text())
        for class_name, bodies in classes.items():
            yield name, class_name, list(named(tree, class_name)), bodies


def named(tree: ast.Module, class_name: str) -> Iterator[str]:
    """The fields of a TypedDict; `functional` ones (`TypedDict("A", {...})`) too."""
    for node in tree.body:
        is_class = isinstance(node, ast.ClassDef) and node.name.lstrip("_") == class_name
        if is_class:
            yield from (
                one.target.id
                for one in node.body
                if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
            )
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(one, ast.Name) and one.id.lstrip("_") == class_name for one in targets):
            call = node.value
            if isinstance(call, ast.Call) and isinstance(call.args[-1], ast.Dict):
                yield from (key.value for key in call.args[-1].keys)


@pytest.mark.parametrize(
    ("package", "files", "folder", "least"),
    [
        ("openai", OPENAI, "types", 170),
        ("anthropic", ANTHROPIC, "types", 90),
        ("litellm", LITELLM, "types/llms", 25),
    ],
    ids=["openai", "anthropic", "litellm"],
)
def test_no_field_of_a_clients_types_is_unknown(
    package: str, files: dict[str, dict[str, list[type[StrictBody]]]], folder: str, least: int
) -> None:
    unknown, count = [], 0
    for file, name, fields, bodies in files_of(package, files, folder):
        assert fields, f"{file} has no {name} any more"
        count += len(fields)
        unknown += [
            f"{name}.{field} of {file} in {body.__name__}"
            for body in bodies
            for field in fields
            if body.standing(field) == "unknown"
        ]
    assert not unknown
    assert count >= least, "so many fields were looked at"


@pytest.mark.parametrize(
    ("fields", "bodies"),
    [
        (VLLM.split(), [CHAT, RECORDED]),
        (SGLANG.split(), [CHAT, RECORDED]),
        (OPENROUTER.split(), [CHAT, RECORDED]),
        (sorted({*VLLM.split()} & {*SGLANG.split()}), [requests.Completion]),
    ],
    ids=["vllm", "sglang", "openrouter", "completions"],
)
def test_no_field_of_servers_of_the_same_api_is_unknown(
    fields: list[str], bodies: list[type[StrictBody]]
) -> None:
    chat_only = {"chat_template_kwargs", "continue_final_message"}
    for body in bodies:
        names = [f for f in fields if body in (CHAT, RECORDED) or f not in chat_only]
        assert [field for field in names if body.standing(field) == "unknown"] == []


def all_bodies(kind: type[StrictBody] = StrictBody) -> Iterator[type[StrictBody]]:
    for one in kind.__subclasses__():
        yield one
        yield from all_bodies(one)


def test_a_field_has_one_standing() -> None:
    """A name without effect is no field, and neither is refused: an inherited list that hides a
    field would make it so in silence."""
    found = list(all_bodies())
    assert len(found) > 40
    for body in found:
        assert not body.ignored & body.own_names(), body
        assert not body.ignored & body.refused.keys(), body
        own = {n for n in body.refused if n in body.own_names()}
        assert body is RECORDED or not own, body
        assert all(len(refused.why.split()) > 3 for refused in body.refused.values())


def test_what_is_refused_has_its_reason_in_the_error_and_is_the_field_named() -> None:
    for body in (CHAT, RECORDED, requests.Completion, messages.MessageRequest):
        for name, refused in body.refused.items():
            given = {name: object()}
            with pytest.raises(ValueError) as error:
                body.model_validate(given)
            message, _ = strict_body.explained(error.value, given)
            assert f"{name}: {refused.why}" in message
            for nothing in refused.unless:
                try:
                    body.model_validate({name: nothing})
                except ValueError as other:
                    assert refused.why not in strict_body.explained(other, {name: nothing})[0]


def test_bodies_that_take_any_field_are_few() -> None:
    """Those of which only the type is read, and which are left out or refused whole."""
    loose = {
        one.__name__
        for module in (messages, responses, chat_messages)
        for one in vars(module).values()
        if isinstance(one, type) and issubclass(one, BaseModel) and not issubclass(one, StrictBody)
    } - {"BaseModel"}
    assert loose == {
        "ForeignTool", "MediaPart", "OtherItem", "SilentItem", "Thinking", "ThinkingPart",
    }  # fmt: skip
