"""Shapes of published models by name, for tools that need no weights (`nanoengine.estimate`).

Figures are those of each model's config.json. Left out: everything that does not change a size
(rope, token ids).
"""

from __future__ import annotations

from pathlib import Path

from nanoengine.model.config import ModelConfig

# family, vocabulary, hidden, MLP, layers, heads, key heads, head dimension, tied
_SHAPES: dict[str, tuple[str, int, int, int, int, int, int, int, bool]] = {
    "smollm2-135m": ("llama", 49152, 576, 1536, 30, 9, 3, 64, True),
    "llama3.1-8b": ("llama", 128256, 4096, 14336, 32, 32, 8, 128, False),
    "llama3.1-70b": ("llama", 128256, 8192, 28672, 80, 64, 8, 128, False),
    "qwen2.5-0.5b": ("qwen2", 151936, 896, 4864, 24, 14, 2, 64, True),
    "qwen2.5-1.5b": ("qwen2", 151936, 1536, 8960, 28, 12, 2, 128, True),
    "qwen2.5-7b": ("qwen2", 152064, 3584, 18944, 28, 28, 4, 128, False),
    "qwen3-0.6b": ("qwen3", 151936, 1024, 3072, 28, 16, 8, 128, True),
    "qwen3-1.7b": ("qwen3", 151936, 2048, 6144, 28, 16, 8, 128, True),
    "qwen3-4b": ("qwen3", 151936, 2560, 9728, 36, 32, 8, 128, True),
    "qwen3-8b": ("qwen3", 151936, 4096, 12288, 36, 32, 8, 128, False),
    "qwen3-14b": ("qwen3", 151936, 5120, 17408, 40, 40, 8, 128, False),
    "qwen3-32b": ("qwen3", 151936, 5120, 25600, 64, 64, 8, 128, False),
}


def model_shape(name: str | Path) -> ModelConfig:
    """The configuration of a model known by name, or of a Hugging Face folder."""
    key = str(name).lower()
    if key in _SHAPES:
        family, vocab, hidden, mlp, layers, heads, kv_heads, head_dim, tied = _SHAPES[key]
        return ModelConfig(
            model_type=family,
            vocab_size=vocab,
            hidden_size=hidden,
            intermediate_size=mlp,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            tie_word_embeddings=tied,
            attention_bias=family == "qwen2",
            qk_norm=family == "qwen3",
        )
    if Path(name).is_dir():
        return ModelConfig.from_folder(name)
    raise ValueError(
        f"model={str(name)!r}: neither a folder nor a known name; known are {', '.join(_SHAPES)}"
    )
