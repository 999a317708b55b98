"""Templates that list tools and write calls after the shape of published ones, with the control
tokens of their models, for one tokenizer of bytes."""

from __future__ import annotations

import torch
from tiny_text import TEMPLATE, VOCAB
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "note": {"type": "string"}},
            },
        },
    }
]
_HEAD = "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
_REASON = "{% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}"
_OTHERS = (
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _chatml(calls: str, *, reasons: bool = True) -> str:
    knows = (
        "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant', 'tool'] %}"
        "{{ raise_exception('role') }}{% endif %}{% if m.role == 'assistant' %}"
    )
    said = f"<|im_start|>assistant\n{_REASON if reasons else ''}{{{{ m.content }}}}"
    return (
        f"{_HEAD}{knows}{said}{{% for c in m.tool_calls or [] %}}{{% set f = c.function %}}"
        f"{{{{ '\\n' if m.content or not loop.first }}}}{calls}{{% endfor %}}<|im_end|>\n"
        f"{_OTHERS}"
    )


_CODER = (
    "<tool_call>\n<function={{ f.name }}>\n{% for k, v in f.arguments | items %}<parameter={{ k }}>"
    "\n{{ v | tojson | safe if v is mapping else v | string }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>"
)
_GLM = (
    "<tool_call>{{ f.name }}\n{% for k, v in f.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v | tojson if v is not string else v }}</arg_value>\n{% endfor %}</tool_call>"
)
_MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}"
    "{% if tools and loop.first %}[TOOLS] {{ tools | tojson }}[/TOOLS]{% endif %}"
    "[INST] {{ m.content }}[/INST]{% elif m.role == 'assistant' and m.tool_calls %}CALLS</s>"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% elif m.role == 'tool' %}"
    "{% if m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 signs') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}[TOOL_CONTENT]{{ m.content }}[/TOOL_RESULTS]"
    "{% else %}{{ raise_exception('role') }}{% endif %}{% endfor %}"
)
_MISTRAL_LIST = (
    "[TOOL_CALLS] [{% for c in m.tool_calls %}{% set out = c.function | tojson %}{{ out[:-1] }}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids have 9 signs') }}{% endif %}"
    ', "id": "{{ c.id }}"}{{ ", " if not loop.last }}{% endfor %}]'
)
_MISTRAL_ARGS = (
    "{% for c in m.tool_calls %}[TOOL_CALLS]{{ c.function.name }}ID[ARGS]"
    "{{ c.function.arguments | tojson }}{% endfor %}"
)
_DEEPSEEK = (
    "{{ bos_token }}{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ m.content }}"
    "{% elif m.role == 'user' %}<｜User｜>{{ m.content }}<｜Assistant｜></think>"
    "{% elif m.role == 'assistant' and m.tool_calls %}{{ m.content }}<｜tool▁calls▁begin｜>"
    "{% for c in m.tool_calls %}CALL{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    "{% elif m.role == 'assistant' %}{{ m.content }}<｜end▁of▁sentence｜>"
    "{% elif m.role == 'tool' %}"
    "<｜tool▁output▁begin｜>{{ m.content }}<｜tool▁output▁end｜>{% endif %}{% endfor %}"
)
_V31 = (
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments"
    " + '<｜tool▁call▁end｜>' }}"
)
_V3 = (
    "{{ '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' + "
    "c.function.arguments + '\\n```<｜tool▁call▁end｜>' }}"
)
_HARMONY = (
    "<|start|>system<|message|>Channels.{% if tools %}{{ tools | tojson }}{% endif %}<|end|>"
    "{% set last = namespace(name=none) %}{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}{% if m.thinking %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant to=functions.{{ f.name }}<|channel|>commentary json<|message|>"
    "{{ f.arguments | tojson }}<|call|>{% set last.name = f.name %}{% else %}"
    "{% if m.thinking and loop.last and not add_generation_prompt %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{% if not last.name %}{{ raise_exception('no call') }}{% endif %}"
    "<|start|>functions.{{ last.name }} to=assistant<|channel|>commentary<|message|>"
    "{{ m.content | tojson }}<|end|>{% elif m.role in ['system', 'user', 'developer'] %}"
    "<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% else %}"
    "{{ raise_exception('role') }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_LLAMA = (
    "{% if m.tool_calls | length > 1 %}{{ raise_exception('This model only supports single "
    "tool-calls at once!') }}{% endif %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
)
_PARAMETERS = (
    '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>'
)
FORMS = {
    "hermes": _chatml(_PARAMETERS),
    "hermes_plain": _chatml(_PARAMETERS, reasons=False),
    "qwen3_coder": _chatml(_CODER),
    "glm45": _chatml(_GLM),
    "llama": _chatml(_LLAMA),
    "mistral": _MISTRAL.replace("CALLS", _MISTRAL_LIST),
    "mistral_v11": _MISTRAL.replace("CALLS", _MISTRAL_ARGS.replace("ID", "[CALL_ID]{{ c.id }}")),
    "mistral_v13": _MISTRAL.replace("CALLS", _MISTRAL_ARGS.replace("ID", "")),
    "deepseek": _DEEPSEEK.replace("CALL{", _V31 + "{"),
    "deepseek_v3": _DEEPSEEK.replace("CALL{", _V3 + "{"),
    "harmony": _HARMONY,
    "none": TEMPLATE.replace("{% if tools %}{{ tools | tojson }}{% endif %}", "").replace(
        "{% for c in m.tool_calls or [] %}<tool_call>\n{{ c.function | tojson }}\n</tool_call>"
        "{% endfor %}", "",
    ),
}  # fmt: skip
ENDS = {"mistral": "</s>", "deepseek": "<｜end▁of▁sentence｜>", "none": "<|end|>"}
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[ARGS]"),
    *("[CALL_ID]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "<|start|>", "<|end|>", "<|message|>"),
    *("<|channel|>", "<|constrain|>", "<|return|>", "<|call|>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜end▁of▁sentence｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>", "[THINK]"),
    "[/THINK]",
)
WORDS = (
    "<｜tool▁calls▁begin｜>",
    "<｜tool▁calls▁end｜>",
    "<｜tool▁call▁begin｜>",
    "<｜tool▁call▁end｜>",
)
WORDS += ("<｜tool▁sep｜>", "<think>", "</think>", "<tool_call>", "</tool_call>")


def tokenizer_of(form: str) -> ChatTokenizer:
    """The tokenizer of a model with that form's template."""
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={one: i for i, one in enumerate(tokens)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    is_harmony = form == "harmony"
    special = [one for one in SPECIAL if is_harmony or one not in ("<|channel|>", "<|message|>")]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in special])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in WORDS])
    end = next((end for name, end in ENDS.items() if form.startswith(name)), "<|im_end|>")
    ends = ["<|return|>", "<|call|>"] if is_harmony else [end]
    assert tokenizer.get_vocab_size() <= VOCAB
    return ChatTokenizer(
        tokenizer, eos_ids=map(tokenizer.token_to_id, ends), chat_template=FORMS[form]
    )


def engine_of(tokenizer: ChatTokenizer) -> LLMEngine:
    """Random weights with room for a conversation of bytes."""
    shape = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=16,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_ids=tuple(tokenizer.eos_ids),
    )
    model = Transformer(shape, torch.float32)
    model.init_weights(0, std=0.4)
    config = InferConfig(num_blocks=512, max_batch_tokens=2048, max_num_seqs=4)
    return LLMEngine(model, config, tokenizer=tokenizer)
