"""A converted GGUF is the model it was made from: tensors, logits, rope, ids, chat template.

Equal to what transformers reads from the same file where it reads all of it, and to the model that
was written where it does not: it leaves out the factors of a rope, and has no SmolLM3.
"""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf_files import (
    SHAPES,
    TEMPLATE,
    Vocabulary,
    byte_vocabulary,
    make_model,
    sentencepiece_vocabulary,
    write_gguf,
)
from tiny_models import make_reference
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from nanoengine.formats.gguf import convert_gguf
from nanoengine.formats.hf import load_model
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.model.config import ModelConfig
from nanoengine.text.tokenizer import ChatTokenizer

KINDS = gguf.GGMLQuantizationType
IDS = torch.arange(40)[None] * 7 % 211


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits


@pytest.mark.parametrize(
    "shape",
    [
        "llama-gqa-tied",
        "llama-mha-untied",
        "llama-mqa-wide-head",
        "qwen2-tied",
        "qwen2-untied-theta",
        "qwen3-tied-narrow-head",
        "qwen3-untied-wide-head",
        *SHAPES,
    ],
)
def test_a_converted_folder_is_the_original_model(shape: str, tmp_path: Path) -> None:
    reference = make_model(shape)
    write_gguf(tmp_path / "m.gguf", reference)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    ours, theirs = again.state_dict(), reference.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():  # a norm of Gemma's had one added, and has lost it again
        assert torch.allclose(tensor, theirs[name], rtol=0, atol=1.2e-7 * (shape == "gemma3"))
    close = {"rtol": 0, "atol": 1e-5} if "others" in shape else {"rtol": 0, "atol": 1e-12}
    assert torch.allclose(logits(again), logits(reference), **close)
    assert again.config.rms_norm_eps == reference.config.rms_norm_eps
    assert again.config.max_position_embeddings == reference.config.max_position_embeddings


@pytest.mark.parametrize("shape", ["mistral", "llama-3.2", "smollm3", "phi3", "gemma3"])
def test_our_engine_computes_the_logits_of_the_original(shape: str, tmp_path: Path) -> None:
    reference = make_model(shape)
    write_gguf(tmp_path / "m.gguf", reference)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    model = load_model(tmp_path / "out")
    with torch.inference_mode():
        context = PackedContext.from_lengths([IDS.shape[1]])
        found = model.logits(model(IDS[0], packed_positions([IDS.shape[1]]), context))
    assert torch.allclose(found, logits(reference)[0], rtol=0, atol=2e-5)


@pytest.mark.parametrize("shape", ["llama-gqa-tied", "qwen2-tied", "mistral", "mistral-nemo"])
def test_transformers_reads_the_same_model_from_the_file(shape: str, tmp_path: Path) -> None:
    """What these tests write is a GGUF as others understand it, biases and order of rows too."""
    write_gguf(tmp_path / "m.gguf", make_model(shape))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name])
    assert torch.equal(logits(ours), logits(theirs))


@pytest.mark.parametrize(
    "kind", [KINDS.F16, KINDS.BF16, KINDS.Q8_0, KINDS.Q4_0, KINDS.Q4_1, KINDS.Q5_0, KINDS.Q5_1]
)
def test_quantised_tensors_are_the_numbers_that_transformers_reads(
    kind: gguf.GGMLQuantizationType, tmp_path: Path
) -> None:
    reference = make_model("wide")
    vocabulary = sentencepiece_vocabulary(reference.config.vocab_size)
    write_gguf(tmp_path / "m.gguf", _resized(reference, vocabulary), vocabulary, kind=kind)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, theirs.state_dict()[name]), name
        exact = reference.state_dict()[name]
        error = (tensor - exact).abs().max() / exact.abs().max()
        assert error < 0.14, f"{name}: {error}"  # four bits: half of a sixteenth, and its scale
    assert torch.equal(logits(ours), logits(theirs))


def _resized(model: PreTrainedModel, vocabulary: Vocabulary) -> PreTrainedModel:
    model.resize_token_embeddings(len(vocabulary.tokens), mean_resizing=False)
    return model


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("llama-3.1", ("llama3", 8.0, 8192)),
        ("llama-3.2", ("llama3", 32.0, 8192)),
        ("llama-3-rope-of-others", ("longrope", None, 512)),
        ("qwen2-yarn", ("yarn", 4.0, 128)),
        ("llama-linear", ("linear", 3.0, None)),
        ("phi3-longrope", ("longrope", None, 256)),
    ],
)
def test_the_rope_is_written_as_the_original_config_has_it(
    shape: str, expected: tuple, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", make_model(shape))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    rope = json.loads((tmp_path / "out" / "config.json").read_text())["rope_parameters"]
    names = ("rope_type", "factor", "original_max_position_embeddings")
    assert tuple(rope.get(name) for name in names) == expected


def test_a_model_with_a_rope_of_factors_may_use_its_whole_context(tmp_path: Path) -> None:
    for shape, longest in (("llama-3.2", 131072), ("llama-3-rope-of-others", 512)):
        write_gguf(tmp_path / "m.gguf", make_model(shape))
        convert_gguf(tmp_path / "m.gguf", tmp_path / shape)
        assert ModelConfig.from_folder(tmp_path / shape).max_position_embeddings == longest


def test_the_tokenizer_splits_digits_merges_and_knows_its_special_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_reference("llama-gqa-tied"))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = ChatTokenizer.from_folder(tmp_path / "out")
    text = "<|im_start|>ab ab12<think><|im_end|>"
    names = ["<|im_start|>", "ab", "Ġab", "1", "2", "<think>", "<|im_end|>"]
    ids = [tokenizer.token_to_id(name) for name in names]
    assert tokenizer.encode(text, allow_special=True) == ids
    assert tokenizer.decode(ids, skip_special=True) == "ab ab12<think>"
    assert tokenizer.vocab_size == 211
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


def test_a_mistral_folder_is_a_whole_chat_model(tmp_path: Path) -> None:
    """Begins texts with BOS, ends turns, renders chats, and cannot be made to speak control."""
    vocabulary = sentencepiece_vocabulary()
    write_gguf(tmp_path / "m.gguf", _resized(make_model("mistral"), vocabulary), vocabulary)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = ChatTokenizer.from_folder(tmp_path / "out")
    assert tokenizer.eos_ids == {2}
    assert tokenizer.prefix_ids == (1,)
    names = ["<s>", "\u2581hello", "\u2581world"]
    hello = [vocabulary.tokens.index(name) for name in names]
    assert tokenizer.encode_prompt("hello world") == hello
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="m.gguf")
    assert theirs("hello world").input_ids == hello
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert again("hello world").input_ids == hello
    assert not {1, 2, 3, 4} & set(tokenizer.encode("[INST] hello</s><s>"))
    said = tokenizer.encode_chat(
        [{"role": "user", "content": "[INST] hello"}, {"role": "assistant", "content": "[/INST]"}],
        add_generation_prompt=False,
    )
    assert 3 not in said and said[-1] == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "general.architecture='gemma'.*'llama', 'qwen2', 'qwen3'"),
        ({"architecture": "mistral3"}, "general.architecture='mistral3'"),
        (
            {"architecture": "qwen2", "extra_tensors": ["blk.0.attn_q_norm.weight"]},
            "in a qwen2 model",
        ),
        ({"extra_tensors": ["rope_factors_long.weight"]}, "rope_factors_long.weight"),
        ({"extra_tensors": ["rope_freqs.weight"]}, "rope_freqs.weight.*positive numbers"),
        ({"extra_tensors": ["blk.7.attn_norm.weight"]}, "unknown: model.layers.7"),
        ({"field": ("llama.rope.scaling.type", "su")}, "llama.rope.scaling.type='su'"),
        ({"field": ("llama.rope.scaling.alpha", 2.0)}, "llama.rope.scaling.alpha: not supp"),
        ({"field": ("llama.rope.dimension_count", 4)}, "llama.rope.dimension_count=4: must be 8"),
        ({"field": ("llama.rope.dimension_count", 9)}, "dimension_count=9: must be from 1 to 8"),
        ({"field": ("llama.rope.freq_base", 0.0)}, "freq_base=0: must be a number above 0"),
        ({"field": ("llama.rope.freq_base", float("nan"))}, "freq_base=nan: must be a number"),
        ({"field": ("llama.rope.scaling.factor", -2.0)}, "scaling.factor=-2: must be a number"),
        ({"field": ("llama.attention.layer_norm_rms_epsilon", -1.0)}, "epsilon=-1: must be"),
        ({"field": ("llama.attention.head_count", -6)}, "num_attention_heads=-6: must be at"),
        ({"field": ("llama.attention.value_length", 4)}, "llama.attention.value_length=4"),
        ({"field": ("llama.logit_scale", 0.5)}, "llama.logit_scale=0.5: not supported"),
        ({"field": ("llama.expert_count", 8)}, "llama.expert_count=8: not supported"),
        ({"field": ("llama.attention.causal", False)}, "llama.attention.causal=false: not supp"),
        ({"field": ("split.count", 3)}, "split.count=3: the model is in 3 files"),
        ({"field": ("llama.block_count", "two")}, "llama.block_count='two': must be an integer"),
        ({"field": ("llama.block_count", 99999)}, "num_hidden_layers=99999"),
        ({"field": ("llama.embedding_length", 1 << 30)}, "must be"),
    ],
)
def test_what_cannot_be_converted_is_named_and_leaves_nothing(
    changes: dict, message: str, tmp_path: Path
) -> None:
    options = dict(changes)
    if "extra_tensors" in options:
        zeros = np.zeros(4, dtype=np.float32)
        options["extra_tensors"] = dict.fromkeys(options["extra_tensors"], zeros)
    overridden = options.pop("field", None)
    write_gguf(
        tmp_path / "m.gguf", make_reference("llama-gqa-tied"), overridden=overridden, **options
    )
    with pytest.raises(ValueError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["m.gguf"]


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_reference("llama-gqa-tied"), byte_vocabulary())
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
