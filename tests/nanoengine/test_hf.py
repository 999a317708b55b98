"""Hugging Face folders: what we write transformers reads; what does not fit is refused whole."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import FAMILY_SHAPES, MOE_SHAPES, SHAPES, save_reference
from torch import Tensor
from transformers import AutoModelForCausalLM

from nanoengine.footprint import num_params
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.model.config import ModelConfig
from nanoengine.model.hf import export_state, load_model, load_state, save_model, shard_names
from nanoengine.model.transformer import Transformer
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
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "original_max_position_emb"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention"),
        ({"num_key_value_heads": 4}, "num_heads=6.*num_kv_heads=4"),
        ({"head_dim": 7}, "head_dim=7"),
        ({"vocab_size": None}, "vocab_size=None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
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
