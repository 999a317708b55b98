"""The example that gives a text model a tower: what it writes is loaded by transformers without a
name missing, reads text exactly as the text model did, and sees as transformers does."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from seen_families import planes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    SmolVLMForConditionalGeneration,
)
from vision_cases import redraw

from nanoengine.formats.hf import load_model
from nanoengine.model.attention import PackedContext
from nanoengine.text.tokenizer import ChatTokenizer
from nanoengine.vision.png import write_png
from nanoengine.vision.processor import PictureProcessor
from nanoengine.vision.seeing_tokenizer import seeing_tokenizer
from nanoengine.vision.seeing_transformer import ImageRows
from nanorl.envs.shipped.room import drawn

SCRIPT = Path(__file__).parents[3] / "examples" / "give_a_tower.py"
give_a_tower = runpy.run_path(str(SCRIPT))["give_a_tower"]
ENDS = ["<|im_start|>", "<|im_end|>"]
TEMPLATE = (  # of SmolLM2's kind: it adds texts to each other
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def write_text_model(folder: Path, *, tie: bool) -> LlamaForCausalLM:
    """A small Llama of random numbers, with a tokenizer of bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({one: i for i, one in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(ENDS)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=48,
        intermediate_size=80,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 5e4},
        tie_word_embeddings=tie,
        eos_token_id=tokenizer.token_to_id(ENDS[1]),
        pad_token_id=tokenizer.token_to_id(ENDS[1]),
    )
    model = LlamaForCausalLM._from_config(config, attn_implementation="eager")
    redraw(model, 3)
    model.tie_weights()
    model.save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": ENDS[1],
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(words))
    return model.eval()


@pytest.fixture(params=[True, False], ids=["tied", "untied"])
def both(request: Any, tmp_path: Path) -> tuple[LlamaForCausalLM, Path]:
    """A text model, and the folder of one that sees."""
    text = write_text_model(tmp_path / "text", tie=request.param)
    give_a_tower(tmp_path / "text", tmp_path / "seeing", 32)
    return text, tmp_path / "seeing"


def read(folder: Path) -> SmolVLMForConditionalGeneration:
    """As transformers reads it, strictly."""
    model, info = SmolVLMForConditionalGeneration.from_pretrained(
        folder, output_loading_info=True, attn_implementation="eager"
    )
    assert not any(info.values()), info
    return model.eval()


@torch.no_grad()
def test_text_is_read_exactly_as_before(both: tuple[LlamaForCausalLM, Path]) -> None:
    """By transformers and here; the rows of new tokens are the mean of the old ones."""
    text, folder = both
    ids = torch.randint(0, text.config.vocab_size, (1, 60))
    num_rows, theirs = text.config.vocab_size, read(folder)
    wanted = text(ids).logits[0]
    assert theirs.config.text_config.vocab_size == 384, "258 tokens and three marks"
    assert torch.equal(theirs(input_ids=ids).logits[0, :, :num_rows], wanted)
    for name, tensor in text.state_dict().items():
        kept = theirs.state_dict()[name.replace("model.", "model.text_model.")][: len(tensor)]
        assert torch.equal(kept, tensor), name
    fresh = theirs.get_input_embeddings().weight[num_rows:]
    old = text.get_input_embeddings().weight
    assert torch.allclose(fresh, old.mean(0).expand_as(fresh), atol=1e-6)
    context, places = PackedContext.from_lengths([60]), torch.arange(60)
    ours, before = (load_model(one) for one in (folder, folder.parent / "text"))
    said, old_said = (one.logits(one(ids[0], places, context)) for one in (ours, before))
    assert torch.equal(said[:, :num_rows], old_said)


def test_chats_of_text_are_written_as_before(both: tuple[LlamaForCausalLM, Path]) -> None:
    _, folder = both
    chat = [
        {"role": "user", "content": "Which side? <image>"},
        {"role": "assistant", "content": "left"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "And "}, {"type": "text", "text": "?"}],
        },
    ]
    plain = [*chat[:2], {"role": "user", "content": "And ?"}]
    before = ChatTokenizer.from_folder(folder.parent / "text")
    after = seeing_tokenizer(folder, folder.parent / "pictures")
    asked: dict[str, Any] = {"add_generation_prompt": True}
    assert after.encode_chat(chat, **asked) == before.encode_chat(plain, **asked)
    theirs = AutoTokenizer.from_pretrained(folder)
    assert theirs.image_token == "<image>" and theirs.convert_tokens_to_ids("<image>") == 258
    shown = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}]
    told = theirs.apply_chat_template(shown, tokenize=False)
    assert told == "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\n<image>?<|im_end|>\n"


@torch.no_grad()
def test_pictures_are_seen_as_transformers_sees_them(both: tuple[LlamaForCausalLM, Path]) -> None:
    """Two pictures of a chat: tokens by hand, logits beside transformers', and other ones for
    another picture. What the tower gives is as loud as words."""
    text, folder = both
    tokenizer = seeing_tokenizer(folder, folder.parent / "pictures")
    rng = np.random.default_rng(0)
    files = [write_png(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(2)]
    chat = [
        {"role": "user", "content": [{"type": "image", "sha256": tokenizer.store.add(one)}]}
        for one in files
    ]
    ids = tokenizer.encode_chat(chat, add_generation_prompt=False)
    spans = tokenizer.images_in(ids, chat, 0)
    around, whole, slot = (
        tokenizer.token_to_id(f"<{name}>")
        for name in ("fake_token_around_image", "global-img", "image")
    )
    marked = [around, whole, *[slot] * 4, around]
    assert [ids[span.start - 2 : span.end + 1] for span in spans] == [marked] * 2
    theirs, ours = read(folder), load_model(folder)
    values = torch.from_numpy(np.concatenate([tokenizer.store.values(span) for span in spans]))
    seen = ours.visual(values, [span.grid for span in spans])
    places = torch.cat([torch.arange(span.start, span.end) for span in spans])
    context = PackedContext.from_lengths([len(ids)])
    rows = ImageRows(places, seen.features_TE)
    said = ours.logits(ours(torch.tensor(ids), torch.arange(len(ids)), context, rows=rows))
    pixels = planes(theirs, values, 4)[None]
    wanted = theirs(input_ids=torch.tensor([ids]), pixel_values=pixels).logits[0]
    assert (said - wanted).abs().max() <= 2e-5 * wanted.abs().max()
    other = theirs(input_ids=torch.tensor([ids]), pixel_values=pixels.flip(1)).logits[0]
    assert (other - wanted)[places[0] :].abs().max() > 0.1
    words = text.get_input_embeddings().weight
    loudness = seen.features_TE.square().mean().sqrt() / words.square().mean().sqrt()
    assert 0.8 < float(loudness) < 1.25


@torch.no_grad()
def test_pictures_that_differ_in_one_square_are_told_apart_at_first(
    both: tuple[LlamaForCausalLM, Path],
) -> None:
    """Rooms whose red square is elsewhere: what is seen of each is far from what is seen of all."""
    _, folder = both
    model, processor = load_model(folder), PictureProcessor.from_folder(folder)
    rooms = [drawn(4, (row, column), (0, 0)) for row in range(1, 4) for column in range(4)]
    values = [processor.pixel_values(processor.process(room).pixels) for room in rooms]
    seen = model.visual(torch.from_numpy(np.concatenate(values)), [(1, 4, 4)] * len(rooms))
    each = seen.features_TE.view(len(rooms), -1)
    assert (each - each.mean(0)).norm(dim=1).mean() > 0.35 * each.norm(dim=1).mean()


def test_another_family_and_another_size_are_refused(tmp_path: Path) -> None:
    write_text_model(tmp_path / "text", tie=True)
    with pytest.raises(ValueError, match="--side 40: must be a multiple of 16"):
        give_a_tower(tmp_path / "text", tmp_path / "seeing", 40)
    (tmp_path / "text" / "config.json").write_text('{"model_type": "qwen3"}')
    with pytest.raises(ValueError, match="model_type='qwen3': must be 'llama'"):
        give_a_tower(tmp_path / "text", tmp_path / "seeing")
    assert not (tmp_path / "seeing").exists(), "refused before any work"
