"""LoRA folders: every key of adapter_config.json is used, without effect, or refused by its name.

The lists are held against peft's own dataclass, which modules a config names against peft's own
matching, and folders that peft writes against the logits of the peft model."""

from __future__ import annotations

import json
import random
from dataclasses import fields
from pathlib import Path

import peft
import pytest
import torch
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import load_file, save_file
from tiny_models import make_reference, save_reference

from nanoengine.adapters.lora import LowRank, merge_lora, read_adapter
from nanoengine.adapters.lora_adapter import LoraAdapter, LoraBase
from nanoengine.adapters.lora_config import LoraConfig
from nanoengine.adapters.peft_config import PLAIN, USED, WITHOUT_EFFECT, read_peft_config
from nanoengine.formats.hf import load_model
from nanoengine.formats.matrices import adaptable
from nanoengine.model.attention import PackedContext, packed_positions
from nanoinfer.config import InferConfig
from nanoinfer.engine import LLMEngine

SHAPE = "qwen2-untied-theta"
IDS = torch.tensor([5, 17, 99, 3, 140, 7])
Q0 = "model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_reference(SHAPE, path)
    return path


def write(folder: Path, modules: list[str], model: Path, rank: int = 2, **options: object) -> Path:
    """A folder of noise for `modules`; `options` are keys of its adapter_config.json."""
    folder.mkdir(exist_ok=True)
    places, generator = adaptable(load_model(model)), torch.Generator().manual_seed(0)
    tensors = {}
    for module in modules:
        out, width = places[module].weight.shape
        for letter, shape in (("A", (rank, width)), ("B", (out, rank))):
            value = torch.randn(shape, generator=generator)
            tensors[f"base_model.model.{module}.lora_{letter}.weight"] = value
    save_file(tensors, folder / "adapter_model.safetensors")
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": 4, "target_modules": ["q_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(plain | options))
    return folder


def logits(model: Path, adapter: Path) -> torch.Tensor:
    ours = load_model(model)
    merge_lora(ours, adapter)
    with torch.no_grad():
        hidden = ours(IDS, packed_positions([len(IDS)]), PackedContext.from_lengths([len(IDS)]))
        return ours.logits(hidden).float()


def test_every_key_of_peft_is_in_one_list() -> None:
    lists = (USED, WITHOUT_EFFECT, PLAIN.keys())
    ours = set().union(*lists)
    theirs = {each.name for each in fields(peft.LoraConfig)}
    assert ours == theirs and sum(map(len, lists)) == len(ours)


def test_what_peft_writes_by_default_is_taken(tmp_path: Path) -> None:
    peft.LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(tmp_path)
    config = read_peft_config(tmp_path / "adapter_config.json")
    assert (config.rank, config.alpha, config.targets) == (4, 8.0, ("q_proj",))
    written = json.loads((tmp_path / "adapter_config.json").read_text())
    assert all(written[name] in (value, None, [], {}) for name, value in PLAIN.items())


OTHER_ARITHMETIC = {
    "fan_in_fan_out": True,
    "bias": "lora_only",
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "trainable_token_indices": [1, 2],
    "layer_replication": [[0, 2], [1, 2]],
    "megatron_config": {"hidden_size": 8},
    "alora_invocation_tokens": [1, 2],
    "use_dora": True,
    "use_qalora": True,
    "use_bdlora": {"target_modules_bd_a": ["q_proj"]},
    "arrow_config": {"top_k": 2},
    "kasa_config": {"beta": 1.0},
    "monteclora_config": {"num_samples": 4},
}


def test_arithmetic_that_is_not_done_here_is_refused_by_name(folder: Path, tmp_path: Path) -> None:
    assert OTHER_ARITHMETIC.keys() == PLAIN.keys()
    others = [
        *OTHER_ARITHMETIC.items(),
        *(("init_lora_weights", s) for s in ("pissa_niter_4", "olora", "corda", "loftq")),
        ("a_key_of_2031", {"x": 1}),
        ("layers_pattern", "h"),
    ]
    model = load_model(folder)
    engine = LLMEngine(load_model(folder), InferConfig(num_blocks=8))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for name, value in others:
        layers = {"layers_to_transform": [0]} if name == "layers_pattern" else {}
        bad = write(tmp_path / "bad", [Q0], folder, **{name: value}, **layers)
        for load in (lambda at: merge_lora(model, at), lambda at: engine.load_adapter("a", at)):
            with pytest.raises(ValueError, match=rf"adapter_config\.json: {name}="):
                load(bad)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert engine.adapters == []


def test_keys_without_effect_and_unknown_ones_that_are_off_are_taken(
    folder: Path, tmp_path: Path
) -> None:
    expected = logits(folder, write(tmp_path / "plain", [Q0], folder))
    quiet = dict.fromkeys(WITHOUT_EFFECT, "anything") | {"a_key_of_2031": None, "another": False}
    quiet |= {"init_lora_weights": "gaussian", "bias": None, "modules_to_save": []}
    assert torch.equal(logits(folder, write(tmp_path / "all", [Q0], folder, **quiet)), expected)


def test_options_and_tensors_that_differ_are_refused(folder: Path, tmp_path: Path) -> None:
    v0, at = "model.layers.0.self_attn.v_proj", tmp_path / "adapter"
    cases: list[tuple[list[str], dict[str, object], str]] = [
        ([], {}, "adapts no module"),
        ([Q0], {"target_modules": ["q_proj", "v_proj"]}, "names model.layers.0.self_attn.v_proj"),
        ([Q0], {"target_modules": ".*(q|v)_proj"}, "names model.layers.0.self_attn.v_proj"),
        ([Q0], {"target_modules": "all-linear"}, "names model.layers.0.self_attn.k_proj"),
        ([Q0, v0], {}, f"the tensors adapt {v0}"),
        ([Q0], {"exclude_modules": ["layers.0.self_attn.q_proj"]}, f"the tensors adapt {Q0}"),
        ([Q0], {"layers_to_transform": [1]}, f"the tensors adapt {Q0}"),
        ([Q0], {"layers_to_transform": [0, 1]}, "names model.layers.1.self_attn.q_proj"),
        ([Q0], {"r": 8}, "has rank 8, and its tensors have 2"),
        ([Q0], {"rank_pattern": {"q_proj": 3}}, "has rank 3, and its tensors have 2"),
        ([Q0], {"r": 2.0}, "r=2.0: must be a whole number"),
        ([Q0], {"r": None}, "r=None"),
        ([Q0], {"lora_alpha": float("nan")}, "lora_alpha=nan: must be a finite number"),
        ([Q0], {"alpha_pattern": {"q_proj": float("inf")}}, "must be a finite number"),
        ([Q0], {"target_modules": 3}, "target_modules=3"),
        ([Q0], {"target_modules": "(.*)*x"}, "target_modules .* is not supported"),
        ([Q0], {"layers_to_transform": "0"}, "layers_to_transform='0'"),
    ]
    for modules, options, message in cases:
        with pytest.raises(ValueError, match=message):
            merge_lora(load_model(folder), write(at, modules, folder, **options))
    # the rank is that of the pattern, and so is the scale
    (change,) = read_adapter(write(at, [Q0], folder, r=8, rank_pattern={"q_proj": 2})).values()
    assert change.scale == 4 / 2


def test_targets_that_the_model_does_not_have_name_nothing(folder: Path, tmp_path: Path) -> None:
    """As in peft: one list of names is written for several families."""
    expected = logits(folder, write(tmp_path / "adapter", [Q0], folder))
    for more in (["qkv_proj", "gate_up_proj"], ["embed_tokens"]):
        at = write(tmp_path / "adapter", [Q0], folder, target_modules=["q_proj", *more])
        assert torch.equal(logits(folder, at), expected)


@pytest.mark.parametrize("letter", "AB")
@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_numbers_that_are_none_are_refused_by_the_tensors_name(
    folder: Path, tmp_path: Path, letter: str, value: float
) -> None:
    at = write(tmp_path / "adapter", [Q0], folder)
    file, name = at / "adapter_model.safetensors", f"base_model.model.{Q0}.lora_{letter}.weight"
    tensors = load_file(file)
    tensors[name][1, 1] = value
    save_file(tensors, file)
    engine = LLMEngine(load_model(folder), InferConfig(num_blocks=8))
    adapter = LoraAdapter(LoraBase(load_model(folder)), LoraConfig(rank=2, targets=(Q0,)))
    mine = {Q0: LowRank(tensors[name.replace(f"_{letter}.", "_A.")], torch.ones(48, 2), 1.0)}
    for load in (
        lambda: merge_lora(load_model(folder), at),
        lambda: engine.load_adapter("a", at),
        lambda: adapter.load(at),
        *([lambda: engine.load_adapter("a", mine)] if letter == "A" else []),
    ):
        with pytest.raises(ValueError, match=rf"{Q0}\.lora_{letter} holds NaN or infinity"):
            load()
    assert engine.adapters == []
    save_file({**tensors, name: torch.ones(tensors[name].shape, dtype=torch.int32)}, file)
    with pytest.raises(ValueError, match=r"is int32 .*must be a matrix of floats"):
        merge_lora(load_model(folder), at)


def test_which_modules_a_config_names_is_what_peft_matches(folder: Path, tmp_path: Path) -> None:
    every = [*adaptable(load_model(folder)), "lm_head", "model.layers.12.mlp.up_proj"]
    ends = [
        "q_proj",
        "proj",
        "self_attn.v_proj",
        "mlp.up_proj",
        "layers.1.mlp.down_proj",
        "lm_head",
    ]
    patterns = [
        ".*self_attn.*(q|v)_proj",
        r"model\.layers\.(0|2)\..*",
        "q_proj",
        "lm_.*",
        # as a popular trainer writes it
        r"(?:.*?(?:language|text).*?(?:self_attn|mlp).*?(?:q_proj|v_proj).*?)"
        r"|(?:\bmodel\.layers\.[\d]{1,}\.(?:self_attn|mlp)\.(?:(?:q_proj|up_proj)))",
    ]
    draw, file, seen = random.Random(0), tmp_path / "adapter_config.json", set()
    for _ in range(300):
        chosen = draw.sample([*ends, *every], draw.randint(1, 4))
        options: dict[str, object] = {
            "target_modules": draw.choice([chosen, draw.choice(patterns)])
        }
        if draw.random() < 0.5:
            options["exclude_modules"] = draw.choice([draw.sample(ends, 2), draw.choice(patterns)])
        if isinstance(options["target_modules"], list) and draw.random() < 0.5:
            options["layers_to_transform"] = draw.choice([0, [0, 12], [1, 2], []])
            options["layers_pattern"] = draw.choice([None, "layers", ["h", "layers"]])
        theirs = peft.LoraConfig(**options)
        # peft keeps a set, whose order says nothing
        file.write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | options))
        ours = read_peft_config(file)
        for module in every:
            expected = check_target_module_exists(theirs, module)
            is_meant = bool(expected) and type(expected).__name__ != "_ExcludedModule"
            try:
                ours.check_modules([module])
                found = True
            except ValueError:
                found = False
            assert found == is_meant, (options, module)
            seen.add(found)
    assert seen == {True, False}


def test_a_pattern_of_targets_does_not_run_for_ever(folder: Path, tmp_path: Path) -> None:
    """Five repeats are the most that is taken."""
    worst = ".*.*.*.*.*x"
    with pytest.raises(ValueError, match="the tensors adapt"):
        read_adapter(write(tmp_path / "adapter", [Q0], folder, target_modules=worst))
    with pytest.raises(ValueError, match=r"target_modules .* is not supported"):
        read_adapter(write(tmp_path / "adapter", [Q0], folder, target_modules=".*" + worst))


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": ["q_proj", "down_proj"], "layers_to_transform": [0, 2]},
        {"target_modules": "all-linear", "exclude_modules": ["o_proj"]},
        {"target_modules": ["q_proj", "v_proj"], "rank_pattern": {"layers.1.self_attn.q_proj": 3}},
        {
            "target_modules": r".*layers\.(0|2).*(up|gate)_proj",
            "alpha_pattern": {"^model.layers.0.mlp.up_proj": 40},
            "use_rslora": True,
        },
        {"target_modules": ["k_proj", "o_proj"], "init_lora_weights": "orthogonal", "r": 2},
        {"target_modules": ["q_proj", "down_proj"], "r": 1, "lora_alpha": 16},
    ],
)
def test_a_folder_that_peft_writes_is_computed_as_peft_does(
    folder: Path, tmp_path: Path, options: dict[str, object]
) -> None:
    torch.manual_seed(1)
    reference = peft.get_peft_model(make_reference(SHAPE), peft.LoraConfig(**{"r": 4} | options))
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.3)
        expected = reference(IDS[None]).logits[0]
        plain = make_reference(SHAPE)(IDS[None]).logits[0]
    reference.save_pretrained(tmp_path)
    scale = float(expected.abs().max())
    torch.testing.assert_close(logits(folder, tmp_path), expected, rtol=1e-4, atol=1e-4 * scale)
    assert float((expected - plain).abs().max()) > 0.05
