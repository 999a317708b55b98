"""Gives a text model a tower: the folder of a SmolVLM whose text is SmolLM2's, bit for bit, and
whose tower is small and knows nothing yet. How it learns to see from a game's pictures stands in
docs/pictures.md:

python examples/give_a_tower.py smollm2 seeing        # a name, or any folder of the llama family

A picture is `--side` pixels wide and high, in patches of 8, of which 2 x 2 make a token, between
three marks. Marks are tokens at the end of the vocabulary; the embedding grows by rows for them.
"""

import argparse
import json
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer

from nanoengine.formats.hf import copy_extra_files, load_state, read_state, save_model
from nanoengine.formats.sources import resolve_model
from nanoengine.formats.template_files import as_config, read_templates, remove_templates
from nanoengine.model.config import ModelConfig
from nanoengine.vision.seeing_transformer import SeeingTransformer
from nanoengine.vision.tower import Tower
from nanoengine.vision.tower_names import tower_views

PATCH, SHUFFLE, WIDTH, DEPTH = 8, 2, 128, 4
ROWS = 128  # an embedding has a multiple of so many: SmolVLM's 49,280 of SmolLM2's 49,152
MARKS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
}
AS_TEXT = (  # before the model's own template, which thereby reads texts alone
    "{% set told = namespace(chat=[]) %}{% for message in messages %}"
    "{% if message['content'] is string or not message['content'] %}"
    "{% set told.chat = told.chat + [message] %}"
    "{% else %}{% set said %}{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endset %}"
    "{% set told.chat = told.chat + [dict(message, content=said)] %}"
    "{% endif %}{% endfor %}{% set messages = told.chat %}"
)


def give_a_tower(text: Path, folder: Path, side: int = 48, seed: int = 0) -> None:
    """Write `folder` from the folder `text`; `seed` sets the tower's weights."""
    fields = json.loads((text / "config.json").read_text())
    if fields.get("model_type") != "llama":
        raise ValueError(f"{text}: model_type={fields.get('model_type')!r}: must be 'llama'")
    if side % (PATCH * SHUFFLE):
        raise ValueError(f"--side {side}: must be a multiple of {PATCH * SHUFFLE}")
    folder.mkdir(parents=True, exist_ok=True)
    image_id, num_tokens = write_words(text, folder, side)
    words = dict(read_state(text))
    embedding = words["model.embed_tokens.weight"]
    for name in words.keys() & {"model.embed_tokens.weight", "lm_head.weight"}:
        words[name] = grown(words[name], max(len(embedding), -(-num_tokens // ROWS) * ROWS))
    shape = seeing_fields(fields, len(words["model.embed_tokens.weight"]), image_id, side)
    model = SeeingTransformer(ModelConfig.from_hf_dict(shape), embedding.dtype)
    draw(model.visual, float(embedding.float().square().mean().sqrt()), seed)
    load_state(model, {**words, **tower_views(model.visual)}.items())
    save_model(model, folder)


def grown(matrix: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The matrix with rows of its mean at its end, so that no new token is likely to be said."""
    fresh = matrix.float().mean(0).to(matrix.dtype).expand(num_rows - len(matrix), -1)
    return torch.cat([matrix, fresh])


@torch.no_grad()
def draw(tower: Tower, loudness: float, seed: int) -> None:
    """First weights. Matrices are twice as wide as would keep the size of what they read, a place
    is as loud as a colour, and black says nothing: so two pictures that differ in one square differ
    in half of what is seen. The last norm makes a picture's tokens as loud as words; if the matrix
    behind it did, its numbers would be so small that a few steps are as large as they are."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in tower.named_parameters():
        if weight.dim() == 1:
            continue  # norms are 1 and biases 0
        keeping = name.endswith(("out.weight", "down.weight")) or name.startswith("merger")
        size = weight.shape[1] ** -0.5 * (1 if keeping else 2)
        if name.startswith("positions"):
            size = 1.0
        weight.copy_(torch.randn(weight.shape, generator=generator) * size)
    tower.patches.bias.copy_(tower.patches.weight.sum(1))  # black is -1 everywhere
    tower.last_norm.weight.fill_(loudness)


def seeing_fields(text: dict, num_rows: int, image_id: int, side: int) -> dict:
    """The content of config.json."""
    vision = {
        **{"num_hidden_layers": DEPTH, "hidden_size": WIDTH, "intermediate_size": 2 * WIDTH},
        **{"num_attention_heads": 4, "num_channels": 3, "image_size": side, "patch_size": PATCH},
    }
    return {
        "model_type": "smolvlm",
        "text_config": {**text, "vocab_size": num_rows},
        "vision_config": {"model_type": "smolvlm_vision", **vision},
        "scale_factor": SHUFFLE,
        "image_token_id": image_id,
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
    }


def write_words(text: Path, folder: Path, side: int) -> tuple[int, int]:
    """The files of tokenizer, templates and pictures; the placeholder's id, and how many tokens
    there are."""
    copy_extra_files(text, folder)
    tokenizer = Tokenizer.from_file(str(text / "tokenizer.json"))
    marks = [AddedToken(mark, special=True, normalized=False) for mark in MARKS.values()]
    tokenizer.add_special_tokens(marks)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = json.loads((text / "tokenizer_config.json").read_text())
    templates = {name: AS_TEXT + own for name, own in read_templates(text, config).items()}
    remove_templates(folder)
    words = {**config, "extra_special_tokens": MARKS, "chat_template": as_config(templates)}
    edge = {"longest_edge": side}
    pictures = {"image_processor_type": "SmolVLMImageProcessor", "do_image_splitting": False}
    half = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    around = {"processor_class": "SmolVLMProcessor"}
    around["image_seq_len"] = (side // PATCH // SHUFFLE) ** 2
    for name, content in {
        "tokenizer_config.json": words,
        "preprocessor_config.json": {**pictures, "size": edge, "max_image_size": edge, **half},
        "processor_config.json": around,
    }.items():
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    return tokenizer.token_to_id(MARKS["image_token"]), tokenizer.get_vocab_size()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("text", help="a folder of the llama family, or smollm2")
    parser.add_argument("folder", type=Path, help="where the model that sees is written")
    parser.add_argument("--side", type=int, default=48, help="pixels of a picture's sides")
    parser.add_argument("--seed", type=int, default=0, help="sets the tower's first weights")
    given = parser.parse_args()
    give_a_tower(resolve_model(given.text), given.folder, given.side, given.seed)
