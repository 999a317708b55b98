"""Hugging Face folders: what we write transformers reads; what does not fit is refused whole."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILY_SHAPES, MOE_SHAPES, SHAPES, make_reference, save_reference
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from nanoengine.formats.families import FAMILIES
from nanoengine.formats.hf import (
    export_state,
    hf_views,
    load_model,
    load_state,
    save_model,
    shard_names,
)
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.plan.footprint import num_params
from nanoengine.state.export import export_hf


def logits(model: Transformer, ids: Tensor) -> Tensor:
    with torch.inference_mode():
        context = PackedContext.from_lengths([len(ids)])
        return model.logits(model(ids, packed_positions([len(ids)]), context))


IDS = torch.arange(30) * 7 % 211


@pytest.mark.parametrize("shape", [*SHAPES, *MOE_SHAPES, *FAMILY_SHAPES])
@pytest.mark.parametrize("is_sharded", [False, True])
def test_transformers_loads_what_we_save(shape: str, is_sharded: bool, tmp_path: Path) -> None:
    reference = save_reference(shape, tmp_path / "theirs")
    model = load_model(tmp_path / "theirs")
    max_shard_bytes = 30_000 if is_sharded else 5_000_000_000
    save_model(model, tmp_path / "ours", max_shard_bytes=max_shard_bytes)
    assert (tmp_path / "ours" / "model.safetensors.index.json").exists() == is_sharded
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not any(info.values())
    theirs = reference.state_dict()
    assert theirs.keys() == again.state_dict().keys()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in again.state_dict().items())
    with torch.inference_mode():
        assert torch.equal(again(IDS[None]).logits, reference(IDS[None]).logits)
    assert torch.equal(logits(load_model(tmp_path / "ours"), IDS), logits(model, IDS))
    assert load_model(tmp_path / "ours").config == model.config


def test_we_load_the_shards_that_transformers_saves(tmp_path: Path) -> None:
    reference = save_reference("qwen3-untied-wide-head", tmp_path / "whole")
    reference.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    whole, shards = load_model(tmp_path / "whole"), load_model(tmp_path / "shards")
    assert torch.equal(logits(whole, IDS), logits(shards, IDS))


def test_two_models_in_one_folder_are_refused(tmp_path: Path) -> None:
    first = save_reference("llama-gqa-tied", tmp_path, seed=1)
    second = make_reference("llama-gqa-tied", seed=2)
    second.save_pretrained(tmp_path, max_shard_size="50KB")  # which leaves the whole file
    read = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        assert torch.equal(read(IDS[None]).logits, first(IDS[None]).logits)
    with pytest.raises(ValueError, match=r"model\.safetensors and .*index\.json of other files"):
        load_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    model = load_model(tmp_path)
    assert torch.equal(model.embedding.detach(), second.get_input_embeddings().weight.detach())


def test_tensors_of_another_file_are_refused(tmp_path: Path) -> None:
    save_reference("llama-gqa-tied", tmp_path, seed=1)
    (tmp_path / "model.safetensors").rename(tmp_path / "first.safetensors")
    first = load_file(tmp_path / "first.safetensors")
    save_reference("llama-gqa-tied", tmp_path, seed=2)
    fields = json.loads((tmp_path / "config.json").read_text())
    change = {"transformers_weights": "first.safetensors"}
    (tmp_path / "config.json").write_text(json.dumps(fields | change))
    read = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, read[name]) for name, tensor in first.items())
    with pytest.raises(ValueError, match=r"transformers_weights='first\.safetensors'"):
        load_model(tmp_path)


def test_saving_again_removes_the_old_shards(tmp_path: Path) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    model = load_model(tmp_path)
    save_model(model, tmp_path / "out", max_shard_bytes=30_000)
    save_model(model, tmp_path / "out")
    assert [f.name for f in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]


def test_bf16_export_rounds_each_tensor_once_and_names_a_tied_head_once(tmp_path: Path) -> None:
    reference = save_reference("llama-gqa-tied", tmp_path)
    exported = list(export_state(load_model(tmp_path), torch.bfloat16))
    names = [name for name, _ in exported]
    assert len(names) == len(set(names))
    assert set(names) == {name for name, _ in reference.named_parameters()}
    theirs = dict(reference.named_parameters())
    assert all(torch.equal(tensor, theirs[name].bfloat16()) for name, tensor in exported)


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    save_model(load_model(tmp_path), tmp_path / "out", extra_files_from=tmp_path)
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_a_refused_state_names_every_problem_and_writes_nothing(tmp_path: Path) -> None:
    save_reference("qwen2-tied", tmp_path)
    model = load_model(tmp_path)
    before = logits(model, IDS)
    state = {name: tensor * 2 for name, tensor in export_state(model)}
    del state["model.layers.1.mlp.up_proj.weight"]
    state["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(5)
    state["model.layers.9.mlp.up_proj.weight"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj.*layers\.9.*\(5,\).*\(48,\)"):
        load_state(model, state.items())
    model.repack()
    assert torch.equal(logits(model, IDS), before)


def test_a_state_that_fails_half_way_writes_nothing(tmp_path: Path) -> None:
    save_reference("qwen2-tied", tmp_path)
    model = load_model(tmp_path)
    before = logits(model, IDS)

    def broken_stream():
        name, tensor = next(export_state(model))
        yield name, tensor * 2
        raise ConnectionError("peer went away")

    with pytest.raises(ConnectionError):
        load_state(model, broken_stream())
    model.repack()
    assert torch.equal(logits(model, IDS), before)


def test_a_repeated_tensor_is_refused(tmp_path: Path) -> None:
    save_reference("qwen2-tied", tmp_path)
    model = load_model(tmp_path)
    with pytest.raises(ValueError, match="came twice"):
        load_state(model, [*export_state(model), next(export_state(model))])


def test_a_tied_model_accepts_an_equal_head_and_refuses_another(tmp_path: Path) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    model = load_model(tmp_path)
    state = dict(export_state(model))
    head = state["model.embed_tokens.weight"].clone()
    load_state(model, [*state.items(), ("lm_head.weight", head)])
    with pytest.raises(ValueError, match="tie_word_embeddings"):
        load_state(model, [*state.items(), ("lm_head.weight", head + 1)])


def _remove_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _break_config(folder: Path) -> None:
    (folder / "config.json").write_text('{"model_type": "lla')


def _remove_weights(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def _truncate_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


def _empty_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"")


def _only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def _broken_index(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")


def _another_size(folder: Path) -> None:
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"intermediate_size": 96}))


def _one_tensor_less(folder: Path) -> None:
    state = load_file(folder / "model.safetensors")
    del state["model.norm.weight"]
    save_file(state, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_remove_config, "config.json does not exist"),
        (_break_config, "not valid JSON"),
        (_remove_weights, "no model.safetensors.*fetch the model again"),
        (_truncate_weights, "model.safetensors is truncated"),
        (_empty_weights, "model.safetensors is truncated"),
        (_only_pickle, "pickle.*save_pretrained"),
        (_missing_shard, "missing model-00001-of-00002.safetensors"),
        (_broken_index, "not a safetensors index"),
        (_another_size, r"wrong shape.*\(80, 48\), must be \(96, 48\)"),
        (_one_tensor_less, "missing: model.norm.weight"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(damage, message: str, tmp_path: Path) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    damage(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere is not a folder"):
        load_model(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "mixtral"}, "model_type='mixtral'.*llama, qwen2, qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'.*'silu'"),
        (
            {"rope_scaling": {"rope_type": "ntk", "factor": 4.0}},
            "rope_type='ntk'.*'yarn'.*'llama3'",
        ),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn' needs factor"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"num_key_value_heads": 4}, "num_heads=6.*num_kv_heads=4"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"per_layer_config": {"0": {"rms_norm_eps": 0.1}}}, "per_layer_config="),
    ],
)
def test_an_unsupported_config_names_the_field(change: dict, message: str, tmp_path: Path) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields.pop("rope_parameters")
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf_dict(fields | change)


@pytest.mark.parametrize("shape", ["llama-gqa-tied", "qwen3-moe"])
def test_a_config_that_no_machine_holds_is_refused_before_anything_is_built(
    shape: str, tmp_path: Path
) -> None:
    save_reference(shape, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 10**9}, "num_hidden_layers=1000000000: must be at most 10000"),
        ({"num_hidden_layers": 10**4, "hidden_size": 6 * 10**5, "head_dim": 10**5},
         r"num_hidden_layers=10000, hidden_size=600000: a model of \d+.\d billion"),
    ):  # fmt: skip
        (tmp_path / "config.json").write_text(json.dumps(fields | change))
        with pytest.raises(ValueError, match=message):
            load_model(tmp_path)


@pytest.mark.parametrize("shape", [*SHAPES, *MOE_SHAPES, *FAMILY_SHAPES])
def test_the_estimate_counts_the_parameters_that_there_are(shape: str, tmp_path: Path) -> None:
    save_reference(shape, tmp_path)
    model = load_model(tmp_path)
    assert num_params(model.config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(("shape", "head_dim"), [("qwen3-bias", 128), ("mistral-window", 8)])
def test_a_head_dim_of_null_is_the_familys(shape: str, head_dim: int, tmp_path: Path) -> None:
    save_reference(shape, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    found = ModelConfig.from_hf_dict(fields | {"head_dim": None, "partial_rotary_factor": None})
    assert found.head_dim == head_dim


def test_both_spellings_of_rope_settings_are_read(tmp_path: Path) -> None:
    scaling = {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    save_reference("llama3-rope", tmp_path)
    new = ModelConfig.from_folder(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields.pop("rope_parameters")
    old = {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **scaling}}
    assert ModelConfig.from_hf_dict(fields | old) == new
    assert new.rope_scaling is not None and vars(new.rope_scaling) == scaling


def in_old_spelling(fields: dict) -> dict:
    """The rope as transformers 4 wrote it."""
    rope = fields.pop("rope_parameters")
    if "full_attention" in rope:
        if fields["model_type"] == "gemma3_text":
            fields["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            fields[name] = rope.pop(name)
    if rope["rope_type"] != "default":
        fields["rope_scaling"] = {"type": rope.pop("rope_type"), **rope}
    return fields


# two bases; and to gpt-oss no scaling at all means the one it was published with
_NEW_SPELLING = ("olmo3-yarn", "gpt-oss-full")


@pytest.mark.parametrize("shape", [s for s in FAMILY_SHAPES if s not in _NEW_SPELLING])
def test_the_old_spelling_of_every_familys_rope_is_read(shape: str, tmp_path: Path) -> None:
    save_reference(shape, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    assert ModelConfig.from_hf_dict(in_old_spelling(fields)) == ModelConfig.from_folder(tmp_path)


# As in the config.json of the repositories on the Hub, what does not matter here left out.
PUBLISHED = {
    "Mistral-7B-v0.1": {
        "model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 32768,
        "rope_theta": 10000.0, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
    },
    "SmolLM3-3B": {
        "model_type": "smollm3", "vocab_size": 128256, "hidden_size": 2048,
        "intermediate_size": 11008, "num_hidden_layers": 36, "num_attention_heads": 16,
        "num_key_value_heads": 4, "no_rope_layer_interval": 4, "use_sliding_window": False,
        "max_position_embeddings": 65536, "rope_theta": 5000000.0, "rope_scaling": None,
    },
    "granite-3.3-2b-instruct": {
        "model_type": "granite", "vocab_size": 49159, "hidden_size": 2048,
        "intermediate_size": 8192, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 8, "embedding_multiplier": 12.0, "logits_scaling": 8.0,
        "residual_multiplier": 0.22, "attention_multiplier": 0.015625, "rope_theta": 10000000.0,
        "max_position_embeddings": 131072, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
    },
    "OLMo-2-1124-7B": {
        "model_type": "olmo2", "vocab_size": 100352, "hidden_size": 4096,
        "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
        "num_key_value_heads": 32, "rope_theta": 500000, "rms_norm_eps": 1e-6,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    },
    "Phi-4-mini-instruct": {
        "model_type": "phi3", "vocab_size": 200064, "hidden_size": 3072,
        "intermediate_size": 8192, "num_hidden_layers": 32, "num_attention_heads": 24,
        "num_key_value_heads": 8, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
        "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
        "rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2] * 48},
        "sliding_window": 262144, "tie_word_embeddings": True, "attention_bias": False,
    },
    "gemma-3-1b-it": {
        "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 1152,
        "intermediate_size": 6912, "num_hidden_layers": 26, "num_attention_heads": 4,
        "num_key_value_heads": 1, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512, "sliding_window_pattern": 6, "rope_theta": 1000000,
        "rope_local_base_freq": 10000, "query_pre_attn_scalar": 256, "rope_scaling": None,
        "max_position_embeddings": 32768, "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    "GLM-4-9B-0414": {
        "model_type": "glm4", "vocab_size": 151552, "hidden_size": 4096,
        "intermediate_size": 13696, "num_hidden_layers": 40, "num_attention_heads": 32,
        "num_key_value_heads": 2, "head_dim": 128, "partial_rotary_factor": 0.5,
        "attention_bias": False, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_shapes_have_the_tensors_that_transformers_gives_them(name: str) -> None:
    """Nothing is allocated. The tensors of two layers; how many all of them would have."""
    fields = {**PUBLISHED[name], "num_hidden_layers": 2}
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(**fields))
    config = ModelConfig.from_hf_dict(fields)
    ours = hf_views(Transformer(replace(config, max_position_embeddings=8), device="meta"))
    shapes = {key: view.shape for key, view in ours.items()}
    assert shapes == {key: tensor.shape for key, tensor in theirs.named_parameters()}
    again = AutoConfig.for_model(**config.to_hf_dict()).to_dict()
    mine = theirs.config.to_dict()
    mine["rope_parameters"].pop("type", None)  # the old name, which is left beside the new one
    for key in config.to_hf_dict().keys() & mine.keys():
        if key != "architectures" and not key.endswith("token_id"):
            assert again[key] == mine[key], key
    whole = ModelConfig.from_hf_dict(PUBLISHED[name])
    assert whole.sliding_window == PUBLISHED[name].get("sliding_window")
    if name == "gemma-3-1b-it":
        assert whole.window_layers == tuple(i for i in range(26) if i % 6 != 5)
        assert num_params(whole) == 999_885_952
    if name == "SmolLM3-3B":
        assert whole.unroped_layers == tuple(range(3, 36, 4))
        assert num_params(whole) == 3_075_098_624
    if name == "Phi-4-mini-instruct":
        assert num_params(whole) == 3_836_021_760
        assert whole.max_position_embeddings == 4096
        assert whole.to_hf_dict()["max_position_embeddings"] == 131072


@pytest.mark.parametrize(
    ("shape", "change", "message"),
    [
        ("gemma3", {"final_logit_softcapping": 30.0}, "final_logit_softcapping=30"),
        ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping=50"),
        ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
        ("gemma3", {"hidden_activation": "silu"}, "hidden_activation='silu'.*gelu_pytorch_tanh"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 3}, "chunked_attention"),
        ("gemma3", {"layer_types": ["sliding_attention"]}, "1 kinds for 3 layers"),
        ("olmo3", {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0,
          "original_max_position_embeddings": 8}}}, "sliding_attention has rope_type='yarn'"),
        ("qwen2-window", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}},
          "full_attention: this family has one rope for all layers"),
        ("mistral-window", {"layer_types": ["full_attention"] * 3}, "all layers"),
        ("gemma3", {"sliding_window": None, "layer_types": None}, "windows in most layers"),
        ("qwen2-window", {"use_sliding_window": False}, "sliding_attention, but"),
        ("granite", {"sliding_window": 9}, "use_sliding_window"),
        ("smollm3", {"no_rope_layers": [1]}, "1 flags for 3 layers"),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, "interval=0: must be"),
        ("mistral-window", {"sliding_window": "9"}, "sliding_window='9': must be an integer"),
        ("mistral-window", {"sliding_window": 0}, "sliding_window=0: must be at least 1"),
        ("phi3-longrope", {"partial_rotary_factor": 0.5, "rope_parameters": None,
          "rope_scaling": {"type": "longrope"}}, "needs short_factor"),
        ("glm4", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "rotates 3 numbers"),
    ],
)  # fmt: skip
def test_what_a_family_cannot_express_names_the_field(
    shape: str, change: dict, message: str, tmp_path: Path
) -> None:
    save_reference(shape, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_hf_dict(fields | change)


@pytest.mark.parametrize("shape", ["llama-gqa-tied", "qwen2-window", "gemma3", "qwen3-moe"])
def test_attention_that_is_not_causal_is_refused(shape: str, tmp_path: Path) -> None:
    reference = save_reference(shape, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {"is_causal": False}))
    both_ways = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.inference_mode():
        moved = both_ways(IDS[None]).logits - reference(IDS[None]).logits
    assert moved.abs().max() > 1
    with pytest.raises(ValueError, match="is_causal=false: not supported"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("tie_word_embeddings", "false", "true or false"),
        ("attention_bias", 0, "true or false"),
        ("mlp_bias", "false", "true or false"),
        ("rms_norm_eps", "1e-5", "a number"),
        ("rms_norm_eps", True, "a number"),
        ("max_position_embeddings", "64", "an integer"),
        ("max_position_embeddings", 64.0, "an integer"),
        ("head_dim", 8.0, "an integer"),
        ("eos_token_id", "2", "an integer, or a list of them"),
        ("eos_token_id", [2.0], "an integer, or a list of them"),
        ("bos_token_id", "1", "an integer"),
    ],
)
def test_a_field_of_another_type_is_refused_as_transformers_does(
    field: str, value: object, rule: str, tmp_path: Path
) -> None:
    save_reference("llama-gqa-tied", tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(fields | {field: value}))
    with pytest.raises(Exception, match=field):
        AutoConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=re.escape(f"{field}={value!r}: must be {rule}; mend")):
        load_model(tmp_path)


def test_an_index_whose_shards_are_gone_does_not_hide_the_file_saved_over_them(
    tmp_path: Path,
) -> None:
    reference = save_reference("qwen3-moe", tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    shards = {"model.norm.weight": "model-00001-of-00002.safetensors", "x": "model-2.safetensors"}
    index.write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path).lm_head.weight, reference.lm_head.weight
    )
    assert torch.equal(load_model(tmp_path).head, reference.lm_head.weight)
    (tmp_path / "model-2.safetensors").touch()  # which of the two is meant?
    with pytest.raises(ValueError, match="missing model-00001-of-00002"):
        load_model(tmp_path)


def test_an_adapter_is_no_model_and_one_beside_a_model_is_spoken_of(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    reference = save_reference("qwen2-window", tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    settings = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    peft.get_peft_model(base, settings).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="holds a LoRA adapter, not a model: give"):
        load_model(tmp_path / "adapter")
    shutil.copytree(tmp_path / "adapter", tmp_path / "base", dirs_exist_ok=True)
    with pytest.warns(UserWarning, match=r"adapter_config\.json lies beside.*without the adapter"):
        ours = load_model(tmp_path / "base")
    matrix = reference.model.layers[0].self_attn.q_proj.weight
    assert torch.equal(hf_views(ours)["model.layers.0.self_attn.q_proj.weight"], matrix)


def test_the_page_about_models_lists_every_family() -> None:
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    families = page.partition("GGUF file")[0]  # whose architectures have a table of their own
    listed = re.findall(r"^\| `(\w+)` \|", families, re.MULTILINE)
    assert listed == ["model_type", *FAMILIES]
    assert all(f"`{kind}`" in page for kind in ("linear", "yarn", "llama3", "dynamic", "longrope"))


def test_factors_of_a_longrope_must_fit_the_heads(tmp_path: Path) -> None:
    config = ModelConfig.from_hf_dict(PUBLISHED["Phi-4-mini-instruct"] | {"head_dim": 64})
    with pytest.raises(ValueError, match=r"short_factor has 48 numbers.*24 pairs"):
        Transformer(config, device="meta")


def test_switches_of_another_family_are_refused(tmp_path: Path) -> None:
    save_reference("gemma3", tmp_path / "gemma3")
    save_reference("llama-gqa-tied", tmp_path / "llama")
    gemma, llama = (ModelConfig.from_folder(tmp_path / name) for name in ("gemma3", "llama"))
    for config, change, message in (
        (llama, {"logits_scaling": 2.0}, "logits_scaling=2.0: llama has none"),
        (llama, {"qk_norm": True}, "qk_norm=True: must be False for llama"),
        (llama, {"window_layers": (0,), "sliding_window": 4}, "not supported for llama"),
        (llama, {"unroped_layers": (0,)}, "llama has a rope in every layer"),
        (llama, {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        (llama, {"local_rope_theta": 10.0}, "leave it None"),
        (gemma, {"local_rope_theta": None}, "its default is 10000"),
        (gemma, {"sliding_window": None}, "sliding_window=None: must be at least 1"),
        (gemma, {"window_layers": (7,)}, r"window_layers: \[7\] are not among the 3"),
        (gemma, {"attention_output_bias": True}, "set it equal to attention_bias"),
    ):
        with pytest.raises(ValueError, match=message):
            replace(config, **change)  # type: ignore[arg-type]


def test_the_same_seed_initialises_the_same_weights() -> None:
    config = ModelConfig(
        vocab_size=50,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        tie_word_embeddings=True,
    )
    a, b, c = Transformer(config), Transformer(config, torch.bfloat16), Transformer(config)
    a.init_weights(1)
    b.init_weights(1)
    c.init_weights(2)
    assert torch.equal(a.embedding.bfloat16(), b.embedding)
    assert not torch.equal(a.embedding, c.embedding)
    assert 0.015 < a.embedding.std() < 0.025


def test_an_export_in_slices_has_the_dtype_asked_for(tmp_path: Path) -> None:
    save_reference("qwen3-bias", tmp_path / "reference")
    model = load_model(tmp_path / "reference")
    save_model(model, tmp_path / "whole", dtype=torch.bfloat16)
    export_hf(None, [model], tmp_path / "slices", torch.bfloat16)
    whole, slices = (load_file(tmp_path / n / "model.safetensors") for n in ("whole", "slices"))
    assert whole.keys() == slices.keys()
    for name, tensor in whole.items():
        assert slices[name].dtype == torch.bfloat16 and torch.equal(slices[name], tensor)
    configs = [(tmp_path / name / "config.json").read_text() for name in ("whole", "slices")]
    assert configs[0] == configs[1]


def test_shards_are_filled_to_their_limit() -> None:
    sizes = {"a": 4, "b": 4, "c": 3, "d": 9, "e": 1, "f": 4, "g": 4}
    found = shard_names(sizes, 8)
    assert list(found.values()) == [["a", "b"], ["c"], ["d"], ["e", "f"], ["g"]]
    assert list(found) == [f"model-0000{i}-of-00005.safetensors" for i in range(1, 6)]
    assert shard_names(sizes, 100) == {"model.safetensors": list(sizes)}
