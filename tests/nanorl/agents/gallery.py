"""Chat templates after the shape of published ones, with the tokens and eos ids of their models.

What a template does to a conversation is the published one's; its words are ours, and so is the
tokenizer: a token a byte, and the control tokens of the model with their flags. `EXPECTED` has for
each what a proof of it finds (doctor/template_proof.py), but for what is exact; after a
change, `python tests/nanorl/agents/gallery.py` writes it anew, to be read before it is committed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from nanoengine.text.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from nanorl.inspection.doctor.template_proof import Proof

FOLDER = Path(__file__).parent / "template_gallery"
TABLE = FOLDER / "expected.json"
EXPECTED: Mapping[str, Mapping[str, str]] = MappingProxyType(json.loads(TABLE.read_text()))
CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_WORDS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
THINK = ("<think>", "</think>")
LLAMA3 = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eom_id|>", "<|eot_id|>", "<|python_tag|>"),
)
MISTRAL = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]"),
    *("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
)
PHI3 = ("<|assistant|>", "<|system|>", "<|end|>", "<|user|>")
GLM = (
    *("<|endoftext|>", "[gMASK]", "<sop>"),
    *("<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"),
)
HARMONY = (
    *("<|startoftext|>", "<|endoftext|>", "<|return|>", "<|constrain|>", "<|channel|>"),
    *("<|start|>", "<|end|>", "<|message|>", "<|call|>"),
)
GRANITE = ("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>")
COHERE = (
    *("<PAD>", "<BOS_TOKEN>", "<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|USER_TOKEN|>", "<|CHATBOT_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|START_THINKING|>"),
    *("<|END_THINKING|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>"),
    *("<|END_RESPONSE|>", "<|START_TOOL_RESULT|>", "<|END_TOOL_RESULT|>"),
)
LFM = (
    *("<|pad|>", "<|startoftext|>", *CHATML),
    *("<|tool_list_start|>", "<|tool_list_end|>", "<|tool_call_start|>", "<|tool_call_end|>"),
    *("<|tool_response_start|>", "<|tool_response_end|>"),
)
DEEPSEEK = (
    *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
    *("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>"),
    *("<｜tool▁call▁end｜>", "<｜tool▁sep｜>", "<｜tool▁outputs▁begin｜>"),
    *("<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"),
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model's template, its control tokens and what they mean to it."""

    special: tuple[str, ...]
    eos: tuple[str, ...]
    """Those of the published generation_config.json."""
    eos_token: str
    bos_token: str = ""
    words: tuple[str, ...] = ()
    """Added tokens that are not special."""
    rstrip: tuple[str, ...] = ()
    """Special tokens that swallow the blanks behind them."""
    template: str = ""
    """The file's name, where it is another's."""


def _qwen(**more: object) -> Family:
    return Family(
        special=CHATML, eos=("<|im_end|>", "<|endoftext|>"), eos_token="<|im_end|>", **more
    )  # type: ignore[arg-type]


def _llama(**more: object) -> Family:
    return Family(
        special=LLAMA3, eos=("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"),
        eos_token="<|eot_id|>", bos_token="<|begin_of_text|>", **more,
    )  # type: ignore[arg-type] # fmt: skip


def _mistral(**more: object) -> Family:
    return Family(special=MISTRAL, eos=("</s>",), eos_token="</s>", bos_token="<s>", **more)  # type: ignore[arg-type]


def _phi3(**more: object) -> Family:
    return Family(
        special=("<s>", "<|endoftext|>", *PHI3),
        eos=("<|end|>", "<|assistant|>", "<|endoftext|>"),
        eos_token="<|endoftext|>",
        bos_token="<s>",
        rstrip=PHI3,
        **more,
    )  # type: ignore[arg-type]


def _glm(**more: object) -> Family:
    return Family(
        special=GLM, eos=("<|endoftext|>", "<|user|>", "<|observation|>"),
        eos_token="<|endoftext|>", **more,
    )  # type: ignore[arg-type] # fmt: skip


def _gemma(**more: object) -> Family:
    return Family(
        special=("<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
        eos=("<eos>", "<end_of_turn>"), eos_token="<eos>", bos_token="<bos>", **more,
    )  # type: ignore[arg-type] # fmt: skip


def _granite(**more: object) -> Family:
    return Family(special=GRANITE, eos=("<|end_of_text|>",), eos_token="<|end_of_text|>", **more)  # type: ignore[arg-type]


def _cohere(**more: object) -> Family:
    return Family(
        special=COHERE, eos=("<|END_OF_TURN_TOKEN|>",), eos_token="<|END_OF_TURN_TOKEN|>",
        bos_token="<BOS_TOKEN>", **more,
    )  # type: ignore[arg-type] # fmt: skip


def _deepseek(**more: object) -> Family:
    return Family(
        special=DEEPSEEK, eos=("<｜end▁of▁sentence｜>",), eos_token="<｜end▁of▁sentence｜>",
        bos_token="<｜begin▁of▁sentence｜>", words=THINK, **more,
    )  # type: ignore[arg-type] # fmt: skip


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2_5": _qwen(words=QWEN_WORDS[:2]),
        "qwen3": _qwen(words=(*QWEN_WORDS, *THINK)),
        "qwen3_coder": _qwen(words=(*QWEN_WORDS, *THINK)),
        "smollm2": _qwen(template="chatml"),
        "smollm3": Family(
            special=CHATML, eos=("<|im_end|>",), eos_token="<|im_end|>", words=THINK
        ),
        "llama3": _llama(),
        "llama3_1": _llama(),
        "llama3_2": _llama(),
        "llama3_3": _llama(template="llama3_1"),
        "mistral_v3": _mistral(),
        "mistral_tekken": _mistral(),
        "mistral_v7": _mistral(),
        "phi3": _phi3(),
        "phi3_5": _phi3(),
        "phi4": Family(
            special=(*CHATML, "<|im_sep|>"), eos=("<|endoftext|>", "<|im_end|>"),
            eos_token="<|im_end|>", bos_token="<|endoftext|>",
        ),
        "phi4_mini": Family(
            special=("<|endoftext|>", *PHI3, "<|tool|>", "<|/tool|>", "<|tool_call|>"),
            eos=("<|endoftext|>", "<|end|>"), eos_token="<|endoftext|>",
        ),
        "glm4": _glm(),
        "glm4_5": _glm(words=(*QWEN_WORDS, *THINK, "<arg_key>", "<arg_value>", "/nothink")),
        "gpt_oss": Family(
            special=HARMONY, eos=("<|return|>", "<|endoftext|>", "<|call|>"),
            eos_token="<|return|>", bos_token="<|startoftext|>",
        ),
        "granite3": _granite(),
        "granite4": _granite(words=QWEN_WORDS),
        "olmo2": Family(
            special=("<|endoftext|>",), eos=("<|endoftext|>",), eos_token="<|endoftext|>",
            bos_token="<|endoftext|>",
        ),
        "gemma2": _gemma(),
        "gemma3": _gemma(),
        "command_r": _cohere(),
        "command_r7b": _cohere(),
        "lfm2": Family(
            special=LFM, eos=("<|im_end|>",), eos_token="<|im_end|>", bos_token="<|startoftext|>"
        ),
        "deepseek_v3": _deepseek(),
        "deepseek_r1": _deepseek(),
        "deepseek_v3_1": _deepseek(),
        "hermes3": Family(
            special=("<|end_of_text|>", "<|begin_of_text|>", "<|im_start|>", "<|im_end|>"),
            eos=("<|im_end|>", "<|end_of_text|>"), eos_token="<|im_end|>",
            bos_token="<|begin_of_text|>",
        ),
    }
)  # fmt: skip


def templates_of(name: str) -> dict[str, str]:
    """The sources of a family's templates, by the names that its model gives them."""
    file = FAMILIES[name].template or name
    found = {"default": (FOLDER / f"{file}.jinja").read_text(encoding="utf-8")}
    tools = FOLDER / f"{file}.tool_use.jinja"
    return found | ({"tool_use": tools.read_text(encoding="utf-8")} if tools.is_file() else {})


@cache
def tokenizer_of(name: str) -> ChatTokenizer:
    """The tokenizer of a family; the same object each time."""
    family = FAMILIES[name]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {char: index for index, char in enumerate(alphabet)}
    made = Tokenizer(models.BPE(vocab, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(
        [
            AddedToken(one, special=True, normalized=False, rstrip=one in family.rstrip)
            for one in family.special
        ]
    )
    made.add_tokens([AddedToken(one, special=False, normalized=False) for one in family.words])
    config = {"bos_token": family.bos_token or None, "eos_token": family.eos_token}
    return ChatTokenizer(
        made,
        eos_ids=[made.token_to_id(one) for one in family.eos],
        chat_template=templates_of(name),
        config={"tokenizer_class": "PreTrainedTokenizerFast", **config},
    )


def line_with(name: str, piece: str) -> int:
    """The number of the one line of a family's templates that has this piece."""
    lines = [
        number
        for source in templates_of(name).values()
        for number, line in enumerate(source.splitlines(), 1)
        if piece in line
    ]
    assert len(lines) == 1, f"{name}: {piece!r} stands in lines {lines}"
    return lines[0]


def outcomes(proofs: Sequence[Proof]) -> dict[str, str]:
    """What is not exact: by the conversation's name the outcome, and the template's line."""
    found = {}
    for proof in proofs:
        line = re.search(r"line \d+", proof.where)
        if proof.outcome != "exact":
            found[proof.name] = f"{proof.outcome}, {line[0] if line else proof.where}"
    return found


def write_table() -> None:
    """Write what the proofs find."""
    from nanorl.inspection.doctor.template_proof import prove

    found = {name: outcomes(prove(tokenizer_of(name))) for name in FAMILIES}
    TABLE.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    write_table()
