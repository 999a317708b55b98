"""The folder of the tiny model, from nothing but a seed: tokenizer, configuration, random weights.

656 thousand parameters in the architecture of Qwen3, written under Hugging Face's names so that
any reader of such folders loads it. The same seed gives the same bytes.

The tokenizer has 512 tokens and is trained on the traces that it will encode. Numbers are cut into
pairs from the left; a pair is one token, and so is a pair with the comma before it: `[38,45,1234]`
is `[` `38` `,45` `,12` `34` `]`. Copying a list of numbers below 100 is then one induction step per
number. Brackets, quotes and capital letters stand alone, so that an argument is the same tokens in
the question, in the program and in the output. Everything else is plain BPE over printable ASCII;
other characters become `<unk>` (the tasks have none).
Left out: training the model, which is the business of the warm start and of reinforcement learning.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from nanorl.envs.tasks.teachers import slip
from nanorl.envs.tasks.tiny import tiny_family

VOCAB_SIZE = 512
CHAT_MARKERS = ("<pad>", "<unk>", "<usr>", "<bot>", "<out>", "<eos>")
# Not `special`: a decoder that skips special tokens must still show what an action asks for.
ACTION_MARKERS = ("<run>", "</run>", "<ans>")
ALPHABET = ("\n", *map(chr, range(32, 127)))
PAIRS = tuple(f"{n:02d}" for n in range(100))
PIECES = Regex(
    r",?\d{1,2}"  # a pair of digits, with the comma before it
    r"|[ \n]?[a-z_]+(?:,[a-z])*\(?"  # a word or names `a,b`, with a blank before, ( after
    r"|[A-Z]|[\[\]\"]"  # alone
    r"|(?:(?!,\d|[ \n][a-z_])[^A-Za-z0-9_\[\]\"])+"  # other marks together
)
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<bot>{{ m['content'] }}<eos>"
    "{% elif m['role'] == 'tool' %}<out>{{ m['content'] }}"
    "{% else %}<usr>{{ m['content'] }}{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<bot>{% endif %}"
)

HIDDEN_SIZE, INTERMEDIATE_SIZE, NUM_LAYERS = 128, 384, 3
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 32
WEIGHT_STD = 0.02

CORPUS_SIZE = 3000
ERRORS = (
    "line 1: ValueError: invalid literal for int() with base 10: '?\\n'",
    "line 2: TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "(no output)",
)


def build_tiny_model(folder: Path | str, seed: int = 0) -> Path:
    """Write the folder; the seed sets the weights, the tokenizer is the same for all seeds."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = train_tokenizer(corpus())
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    write_json(folder / "tokenizer_config.json", tokenizer_config())
    write_json(folder / "config.json", tiny_config())
    write_json(folder / "generation_config.json", {"eos_token_id": 5, "pad_token_id": 0})
    (folder / "model.safetensors").write_bytes(save(random_weights(seed), {"format": "pt"}))
    return folder


def tiny_config() -> dict[str, object]:
    """The content of the tiny model's config.json."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": INTERMEDIATE_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": NUM_HEADS,
        "num_key_value_heads": NUM_KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100.0,  # contexts are short; heads that look one token back form sooner
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "initializer_range": WEIGHT_STD,
        "use_sliding_window": False,
        "bos_token_id": None,
        "eos_token_id": 5,
        "pad_token_id": 0,
        "dtype": "float32",
    }


def random_weights(seed: int) -> dict[str, torch.Tensor]:
    """Normal weights; norms are ones, and what writes into the residual is scaled down by depth."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes().items():
        if len(shape) == 1:
            weights[name] = torch.ones(shape)
            continue
        is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        std = WEIGHT_STD / (2 * NUM_LAYERS) ** 0.5 if is_residual else WEIGHT_STD
        weights[name] = torch.randn(shape, generator=generator) * std
    return weights


def weight_shapes() -> dict[str, tuple[int, ...]]:
    """Hugging Face's names and shapes, in the order in which the weights are drawn."""
    d, ff = HIDDEN_SIZE, INTERMEDIATE_SIZE
    q, kv = NUM_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, d)}
    for i in range(NUM_LAYERS):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.self_attn.q_proj.weight": (q, d),
            f"{layer}.self_attn.k_proj.weight": (kv, d),
            f"{layer}.self_attn.v_proj.weight": (kv, d),
            f"{layer}.self_attn.o_proj.weight": (d, q),
            f"{layer}.self_attn.q_norm.weight": (HEAD_DIM,),
            f"{layer}.self_attn.k_norm.weight": (HEAD_DIM,),
            f"{layer}.mlp.gate_proj.weight": (ff, d),
            f"{layer}.mlp.up_proj.weight": (ff, d),
            f"{layer}.mlp.down_proj.weight": (d, ff),
            f"{layer}.input_layernorm.weight": (d,),
            f"{layer}.post_attention_layernorm.weight": (d,),
        }
    return shapes | {"model.norm.weight": (d,)}


def write_json(path: Path, data: dict[str, object]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def corpus(size: int = CORPUS_SIZE) -> list[str]:
    """Questions, programs with and without slips, and error messages, as the tokenizer sees them.

    Answers and outputs are numbers, which the tokenizer cuts without learning.
    """
    rng = random.Random("corpus of the tiny tokenizer")
    generators = tiny_family().generators
    kinds = sorted(generators)
    texts = []
    for i in range(size):
        problem = generators[kinds[i % len(kinds)]](rng)
        for program in rng.choice(problem.solutions) + problem.habit:
            texts += [problem.prompt, program, slip(program, rng)]
        texts += ERRORS if "repair" in problem.kind else ()
    return texts


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """The tokenizer for `texts` (traces without markers); the same texts give the same one."""
    markers = [*CHAT_MARKERS, *ACTION_MARKERS]
    num_words = VOCAB_SIZE - 2 * len(PAIRS)
    learner = new_tokenizer(models.BPE(unk_token="<unk>"))
    trainer = trainers.BpeTrainer(
        vocab_size=num_words,
        special_tokens=markers,
        initial_alphabet=list(ALPHABET),
        limit_alphabet=len(ALPHABET),
        show_progress=False,
    )
    # Without numbers: all pairs become tokens anyway, however often each occurs.
    learner.train_from_iterator((re.sub(r",?\d{1,2}", "", text) for text in texts), trainer)
    learned = json.loads(learner.to_str())["model"]
    words = sorted(learned["vocab"], key=learned["vocab"].get)
    tokens = [*words, *PAIRS, *(f",{pair}" for pair in PAIRS)]
    merges = [tuple(merge) for merge in learned["merges"]]
    merges += [(pair[0], pair[1]) for pair in PAIRS] + [(",", pair) for pair in PAIRS]
    if len(tokens) != VOCAB_SIZE:
        raise ValueError(
            f"{len(tokens)} tokens instead of {VOCAB_SIZE}: the texts hold too few different "
            "words to learn from; pass more of them"
        )
    vocab = {token: index for index, token in enumerate(tokens)}
    tokenizer = new_tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in CHAT_MARKERS])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ACTION_MARKERS])
    return tokenizer


def new_tokenizer(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(PIECES, behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<eos>",
        "pad_token": "<pad>",
        "unk_token": "<unk>",
        "model_max_length": 1024,
        "chat_template": CHAT_TEMPLATE,
    }
