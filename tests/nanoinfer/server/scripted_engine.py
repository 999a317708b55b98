"""A real engine that says what it is told to: the grammar of each request allows nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from tiny_text import VOCAB, make_tokenizer

from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.text.tokenizer import ChatTokenizer
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine
from nanoinfer.params import Grammar, Output, SamplingParams

POSITIONS = 8192


class ScriptedEngine(LLMEngine):
    """Says the texts of `script`, one a request and the last for ever. What it was asked with is
    kept in `asked`."""

    script: list[str]
    asked: list[SamplingParams]
    prompts: list[list[int]]

    def add(
        self,
        ids: Sequence[int],
        params: SamplingParams,
        priority: int = 0,
        sampled: Output | None = None,
    ) -> int:
        said = self.script[0] if len(self.script) == 1 else self.script.pop(0)
        self.asked.append(params)
        self.prompts.append(list(ids))
        forced = params if params.grammar else replace(params, grammar=one_text(said))
        return super().add(ids, forced, priority, sampled)


def one_text(text: str) -> Grammar:
    return Grammar("choice", choices=(text,))


def scripted_engine(
    *script: str, tokenizer: ChatTokenizer | None = None, **options: Any
) -> ScriptedEngine:
    pytest.importorskip("llguidance", reason="needs the extra `grammar`")
    shape = ModelConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
        eos_ids=tuple(make_tokenizer().eos_ids),
    )
    model = Transformer(shape)
    model.init_weights(0, std=0.4)
    sizes = {"num_blocks": 2048, "max_batch_tokens": 2048, "max_num_seqs": 16}
    engine = ScriptedEngine(
        model, InferConfig(**(sizes | options)), tokenizer=tokenizer or make_tokenizer()
    )
    engine.script, engine.asked, engine.prompts = list(script), [], []
    return engine
