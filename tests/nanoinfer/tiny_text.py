"""A tiny model that has a tokenizer: bytes, a few merges that straddle words, control tokens."""

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from nanoengine.formats.hf import save_model
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine

VOCAB = 300
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(has_bos: bool = False) -> ChatTokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("he", "l"), ("l", "o"), ("t", "h"), (",", "Ġ")]
    tokens = alphabet + [a + b for a, b in merges]
    bpe = models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    end, begin = tokenizer.token_to_id(SPECIAL[0]), SPECIAL[1]
    if has_bos:
        marks = [(begin, tokenizer.token_to_id(begin))]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", pair=f"{begin} $A $B", special_tokens=marks
        )
    return ChatTokenizer(
        tokenizer, eos_ids=[end], chat_template=TEMPLATE, config={"eos_token": SPECIAL[0]}
    )


def make_model(seed: int = 0, dtype: torch.dtype = torch.float32) -> Transformer:
    shape = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_ids=tuple(make_tokenizer().eos_ids),
    )
    model = Transformer(shape, dtype)
    model.init_weights(seed, std=0.4)
    return model


def make_text_engine(seed: int = 0, **options: object) -> LLMEngine:
    sizes = {"num_blocks": 128, "max_batch_tokens": 64, "max_num_seqs": 16}
    config = InferConfig(**{**sizes, **options})  # type: ignore[arg-type]
    return LLMEngine(make_model(seed), config, tokenizer=make_tokenizer())


def save_folder(folder: Path, seed: int = 0) -> None:
    save_model(make_model(seed), folder)
    make_tokenizer().save(folder)
