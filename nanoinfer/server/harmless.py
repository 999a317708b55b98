"""Fields of other servers and clients that cannot change an answer, or that cannot be done here.

Names come from the clients' own type files (openai, anthropic, litellm) and from the request types
of vLLM, SGLang, llama.cpp and OpenRouter. A field that could change what a model says is either
done (requests.py) or refused, with what to do instead; it is never without effect.
"""

from __future__ import annotations

from nanoinfer.http.strict_body import Refused

ACCOUNTS = frozenset(
    {"metadata", "safety_identifier", "service_tier", "store", "user"}
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
)
"""OpenAI's, about billing, storage and its caches."""
ROUTING = frozenset(
    {"debug", "models", "provider", "route", "session_id", "trace", "transforms"}
    | {"client_metadata", "extra_headers", "litellm_metadata", "num_retries", "timeout"}
    | {"bootstrap_host", "bootstrap_port", "bootstrap_room", "data_parallel_rank"}
    | {"disagg_prefill_dp_rank", "ec_transfer_params", "kv_transfer_params", "routed_dp_rank"}
    | {"custom_labels", "ngram_corpus_id"}
)
"""Which of many servers answers, at OpenRouter, LiteLLM, SGLang and vLLM: there is one."""
CACHES = frozenset({"cache_control", "cache_prompt", "cache_salt", "extra_key", "id_slot"})
"""How prefixes are cached: never seen in an answer."""
HINTS = frozenset(
    {"parallel_tool_calls", "prediction", "spaces_between_special_tokens", "verbosity"}
    | {"guided_decoding_backend", "stream_reasoning", "image_config", "mm_processor_kwargs"}
    | {"media_io_kwargs", "return_cached_tokens_details", "log_metrics", "timings_per_token"}
    | {"return_progress", "use_audio_in_video", "max_dynamic_patch", "min_dynamic_patch"}
    | {"images_config", "return_mm_kwargs", "return_token_offsets", "stream_interval"}
    | {"routed_experts_prompt_start", "routed_experts_start_len"}
)
"""Wishes that a server need not fill, and options of parts that are not there."""

HARMLESS = ACCOUNTS | ROUTING | CACHES | HINTS

_SAMPLER = "no sampler of this server has it; use temperature, top_p, top_k or min_p"
_IDENTITY = (1, 1.0)
SAMPLERS = {
    "bad_words": Refused("give logit_bias, or allowed_token_ids"),
    "dry_multiplier": Refused(_SAMPLER),
    "early_stopping": Refused("there is no beam search; leave it out"),
    "length_penalty": Refused("there is no beam search; leave it out", _IDENTITY),
    "mirostat": Refused(_SAMPLER),
    "repetition_detection": Refused("give repetition_penalty or frequency_penalty"),
    "tfs_z": Refused(_SAMPLER, _IDENTITY),
    "thinking_token_budget": Refused("thinking has no budget of its own; give max_tokens"),
    "top_a": Refused(_SAMPLER),
    "typical_p": Refused(_SAMPLER, _IDENTITY),
    "use_beam_search": Refused("sampling is one token at a time; give n samples"),
    "watermarking": Refused("samples carry no mark; leave it out"),
    "xtc_probability": Refused(_SAMPLER),
}
"""Ways to draw tokens."""
_CODE = "a request brings no code; leave it out"
CODE = {
    "custom_logit_processor": Refused(_CODE),
    "custom_params": Refused(_CODE),
    "logits_processors": Refused(_CODE),
    "vllm_xargs": Refused("no plugin reads it; leave it out"),
}
"""What would run in the engine."""
_NOT_HERE = "leave it out"
ANSWERS = {
    "guided_whitespace_pattern": Refused("blanks in JSON follow the grammar; leave it out"),
    "logprob_token_ids": Refused("give top_logprobs, or allowed_token_ids"),
    "lora_path": Refused("give the name of a loaded adapter as model"),
    "return_hidden_states": Refused(f"answers have no hidden states; {_NOT_HERE}"),
    "return_meta_info": Refused(f"answers have usage alone; {_NOT_HERE}"),
    "return_prompt_text": Refused("ask /v1/completions with the text, or for return_token_ids"),
    "return_prompt_token_ids": Refused("give return_token_ids, which tells them, too"),
    "return_routed_experts": Refused(f"answers have no routing; {_NOT_HERE}"),
    "session_params": Refused("nothing is kept from call to call; send the whole conversation"),
    "stop_regex": Refused("give texts in stop, or regex for the whole answer"),
    "structural_tag": Refused("give a schema, a regex or a grammar for the whole answer"),
}
"""What an answer is, or has beside its text."""

REFUSED = SAMPLERS | CODE | ANSWERS

_HOSTED = "this server runs no tools; offer it as a function that the client runs"
CHAT_REFUSED = REFUSED | {
    "add_special_tokens": Refused("the chat template writes them; leave it out"),
    "audio": Refused("this model writes text; leave it out"),
    "chat_template": Refused("the model's own is used; render by yourself for /v1/completions"),
    "echo": Refused("a chat is not repeated; ask /v1/completions"),
    "function_call": Refused("the old form of tool_choice; send that", ("none", "auto")),
    "functions": Refused("the old form of tools; send those"),
    "input_ids": Refused("send token ids to /inference/v1/generate or /v1/completions"),
    "modalities": Refused('this model writes text; give ["text"]', (["text"],)),
    "moderation": Refused("nothing is moderated here; leave it out"),
    "plugins": Refused(_HOSTED),
    "separate_reasoning": Refused("reasoning is told apart; leave it out", (True,)),
    "task": Refused("say in words what is to be done"),
    "web_search_options": Refused(_HOSTED),
}
TEXT_REFUSED = REFUSED | {
    "prompt_embeds": Refused("send text or token ids in prompt"),
    "suffix": Refused("nothing is filled in between texts; put both into prompt"),
}
