"""Trained adapters: gradients, initial values and folders against `peft` on the same model, and the
bits of rollouts against those of training."""

import math
from pathlib import Path

import peft
import pytest
import torch
from tiny_models import make_reference, optimizer_state, save_reference

from nanoengine.adapters.lora import merge_lora, read_adapter
from nanoengine.adapters.lora_adapter import LoraAdapter, LoraBase
from nanoengine.adapters.lora_config import LoraConfig
from nanoengine.adapters.lora_engine import LoraEngine
from nanoengine.architectures.quantized import quantize
from nanoengine.config import EngineConfig
from nanoengine.formats.hf import load_model, save_model
from nanoengine.model.attention import PackedContext, packed_positions
from nanoengine.packing import Sample
from nanoengine.sft.chats import num_loss_tokens, sft_loss
from nanoengine.state.whole_engine import Engine

SHAPE = "qwen2-untied-theta"
IDS = [5, 17, 99, 3, 140, 7, 23, 5, 61, 88]
OTHER = [9, 9, 31, 200, 4, 77]
SAMPLES = [
    Sample(tokens=ids, loss_mask=[0] + [1] * (len(ids) - 1), group=str(i))
    for i, ids in enumerate((IDS, OTHER))
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_reference(SHAPE, tmp_path / "model")
    return tmp_path / "model"


def make_adapter(base: LoraBase, seed: int = 0, **options: object) -> LoraAdapter:
    """An adapter whose B is random too, so that it changes something."""
    adapter = LoraAdapter(base, LoraConfig(**{"rank": 4, "alpha": 6.0} | options), seed=seed)
    generator = torch.Generator().manual_seed(seed + 100)
    with torch.no_grad():
        for name, parameter in adapter.named_parameters():
            if name.endswith("lora_B"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return adapter


def reference_with(adapter: LoraAdapter, folder: Path, shape: str = SHAPE) -> peft.PeftModel:
    """The transformers model with our adapter, as `peft` reads it from a folder."""
    adapter.save(folder)
    return peft.PeftModel.from_pretrained(make_reference(shape), folder, is_trainable=True)


def our_logits(model, ids: list[int] = IDS) -> torch.Tensor:
    with torch.no_grad():
        context = PackedContext.from_lengths([len(ids)])
        return model.logits(model(torch.tensor(ids), packed_positions([len(ids)]), context))


def their_loss(model: torch.nn.Module) -> torch.Tensor:
    """The sum of both sequences' negative log-probs, over their count."""
    total, count = torch.zeros(()), 0
    for ids in (IDS, OTHER):
        logits = model(torch.tensor(ids)[None]).logits[0, :-1]
        total = total + torch.nn.functional.cross_entropy(
            logits, torch.tensor(ids[1:]), reduction="sum"
        )
        count += len(ids) - 1
    return total / count


def gradients(engine: LoraEngine) -> dict[str, torch.Tensor]:
    engine.optimizer.zero_grad()
    engine.forward_backward(SAMPLES, sft_loss, num_loss_tokens(SAMPLES))
    return {name: p.main_grad.clone() for name, p in engine.adapter.named_parameters()}


# Matrices of a layer; some families keep several as one.
MATRICES = {
    SHAPE: 7, "qwen3-tied-narrow-head": 7, "llama-bias": 7,
    "granite": 7, "olmo3": 7, "phi3": 4, "gemma3": 7, "glm4": 6, "gpt-oss": 4,
}  # fmt: skip


@pytest.mark.parametrize("shape", MATRICES)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_equal_those_of_peft(tmp_path: Path, shape: str, checkpointing: bool) -> None:
    save_reference(shape, tmp_path / "model")
    adapter = make_adapter(LoraBase(load_model(tmp_path / "model")))
    engine = LoraEngine(adapter, EngineConfig(activation_checkpointing=checkpointing))
    ours = gradients(engine)
    reference = reference_with(adapter, tmp_path / "adapter", shape)
    their_loss(reference).backward()
    theirs = {
        name.removeprefix("base_model.model.").replace(".default.weight", ""): p.grad
        for name, p in reference.named_parameters()
        if p.requires_grad
    }
    assert ours.keys() == theirs.keys()
    assert len(ours) == 3 * MATRICES[shape] * 2
    for name, gradient in ours.items():
        torch.testing.assert_close(gradient, theirs[name], rtol=1e-5, atol=1e-5)
    assert min(float(g.abs().max()) for g in ours.values()) > 1e-4


def test_the_step_of_the_adapter_is_that_of_torch(folder: Path, tmp_path: Path) -> None:
    adapter = make_adapter(LoraBase(load_model(folder)))
    reference = reference_with(adapter, tmp_path / "adapter")
    config = EngineConfig(lr=1e-2, weight_decay=0.0, max_grad_norm=0.0)
    engine = LoraEngine(adapter, config)
    theirs = [p for p in reference.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(theirs, lr=1e-2, betas=config.betas, weight_decay=0.0)
    for _ in range(3):
        result = engine.train_step(SAMPLES, sft_loss, num_loss_tokens)
        loss = their_loss(reference)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert result["loss"] == pytest.approx(loss.item(), abs=1e-4)
    with torch.no_grad():
        expected = reference(torch.tensor(IDS)[None]).logits[0]
    torch.testing.assert_close(our_logits(engine.model), expected, rtol=1e-3, atol=1e-3)


def test_a_new_adapter_starts_as_pefts_do_and_changes_nothing(folder: Path) -> None:
    base = LoraBase(load_model(folder))
    plain = our_logits(base.model)
    adapter = LoraAdapter(base, LoraConfig(rank=8), seed=3)
    adapter.activate()
    assert torch.equal(our_logits(base.model), plain)
    again, other = (LoraAdapter(base, LoraConfig(rank=8), seed=seed) for seed in (3, 4))
    for name, change in adapter.changes().items():
        assert torch.equal(change.low_RI, again.changes()[name].low_RI)
        assert not torch.equal(change.low_RI, other.changes()[name].low_RI)
        assert not change.high_OR.any()
        bound = 1 / math.sqrt(change.shape[1])  # kaiming-uniform with a = √5
        assert 0.9 * bound < float(change.low_RI.abs().max()) <= bound
    theirs = peft.get_peft_model(
        make_reference(SHAPE), peft.LoraConfig(r=8, target_modules="all-linear")
    )
    found = {
        name.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight")
        for name, _ in theirs.named_parameters()
        if "lora_A" in name
    }
    assert found == set(adapter.targets)


@pytest.mark.parametrize(
    ("targets", "written"),
    [
        (("all-linear",), 7),
        (("q_proj", "v_proj"), 2),
        ((r".*layers\.[02]\.mlp\..*", "model.layers.1.self_attn.k_proj"), 7),
    ],
)
@pytest.mark.parametrize("rslora", [False, True])
def test_peft_reads_our_folder_and_we_read_its(
    folder: Path, tmp_path: Path, targets: tuple[str, ...], written: int, rslora: bool
) -> None:
    adapter = make_adapter(LoraBase(load_model(folder)), targets=targets, rslora=rslora)
    adapter.activate()
    ours = our_logits(adapter.base.model)
    reference = reference_with(adapter, tmp_path / "ours")
    assert len(reference.peft_config["default"].target_modules) == written
    with torch.no_grad():
        unmerged = reference(torch.tensor(IDS)[None]).logits[0]
    torch.testing.assert_close(ours, unmerged, rtol=1e-5, atol=1e-5 * float(ours.abs().max()))
    plain = our_logits(load_model(folder))
    assert float((ours - plain).abs().max()) > 0.1

    reference.save_pretrained(tmp_path / "theirs")
    merged = load_model(folder)
    merge_lora(merged, tmp_path / "theirs")
    assert torch.equal(our_logits(merged), ours)
    back = make_adapter(LoraBase(load_model(folder)), 7, targets=targets, rslora=rslora)
    back.load(tmp_path / "theirs")
    back.activate()
    assert torch.equal(our_logits(back.base.model), ours)


@pytest.mark.usefixtures("cpu_path")
def test_adapters_on_one_base_do_not_touch_each_other(folder: Path) -> None:
    config = EngineConfig(lr=1e-2)
    kinds = [{"seed": 1}, {"seed": 2, "rank": 2, "targets": ("q_proj", "down_proj")}]

    def train(engine: LoraEngine) -> list[torch.Tensor]:
        engine.train_step(SAMPLES, sft_loss, num_loss_tokens)
        return engine.forward_logprobs(SAMPLES)

    alone = []
    for kind in kinds:
        engine = LoraEngine(make_adapter(LoraBase(load_model(folder)), **kind), config)
        alone.append([train(engine) for _ in range(3)])
    base = LoraBase(load_model(folder))
    plain = our_logits(base.model)
    engines = [LoraEngine(make_adapter(base, **kind), config) for kind in kinds]
    together = [[train(engine) for engine in engines] for _ in range(3)]
    for i, expected in enumerate(alone):
        for step, logps in enumerate(expected):
            assert all(map(torch.equal, logps, together[step][i]))
    base.activate(None)
    assert torch.equal(our_logits(base.model), plain)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_merged_folder_has_the_policys_bits(folder: Path, tmp_path: Path, dtype: str) -> None:
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]
    adapter = make_adapter(LoraBase(load_model(folder), kind))
    engine = LoraEngine(adapter, EngineConfig(lr=1e-2, dtype=dtype))
    engine.train_step(SAMPLES, sft_loss, num_loss_tokens)
    logps = engine.forward_logprobs(SAMPLES)
    save_model(engine.model, tmp_path / "merged")
    again = Engine(load_model(tmp_path / "merged"), EngineConfig(dtype=dtype))
    assert all(map(torch.equal, again.forward_logprobs(SAMPLES), logps))
    # and so has the base with the adapter's folder
    adapter.save(tmp_path / "adapter")
    loaded = load_model(folder, kind)
    merge_lora(loaded, tmp_path / "adapter")
    assert torch.equal(our_logits(loaded), our_logits(engine.model))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_resumed_adapter_goes_on_to_the_bit(folder: Path, tmp_path: Path, dtype: str) -> None:
    config = EngineConfig(lr=1e-2, dtype=dtype)
    kind = {"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]

    def new() -> LoraEngine:
        return LoraEngine(make_adapter(LoraBase(load_model(folder), kind)), config)

    whole = new()
    whole.train_step(SAMPLES, sft_loss, num_loss_tokens)
    whole.save(tmp_path / "checkpoints", {"at": 1})
    whole.train_step(SAMPLES, sft_loss, num_loss_tokens)
    resumed = new()
    assert resumed.load(tmp_path / "checkpoints") == {"at": 1}
    resumed.train_step(SAMPLES, sft_loss, num_loss_tokens)
    ours, theirs = optimizer_state(whole), optimizer_state(resumed)
    assert "master.model.layers.0.self_attn.q_proj.lora_A" in ours
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert all(map(torch.equal, whole.forward_logprobs(SAMPLES), resumed.forward_logprobs(SAMPLES)))


def test_only_the_adapter_has_an_optimizers_memory(folder: Path) -> None:
    engine = LoraEngine(make_adapter(LoraBase(load_model(folder))), EngineConfig())
    numbers = sum(p.numel() for p in engine.adapter.parameters())
    assert engine.optimizer.exp_avg.numel() < 1.3 * numbers  # each parameter begins a cache line
    engine.train_step(SAMPLES, sft_loss, num_loss_tokens)
    assert all(p.grad is None and not hasattr(p, "main_grad") for p in engine.model.parameters())


def test_what_cannot_be_trained_is_refused(folder: Path, tmp_path: Path) -> None:
    base = LoraBase(load_model(folder))
    for options, message in (
        ({"rank": -1}, "rank=-1: must be positive"),
        ({"rank": 4, "alpha": 0.0}, "alpha=0.0: must be positive"),
        ({"rank": 4, "targets": "q_proj"}, "must be a tuple"),
        ({"rank": 0}, "rank=0: there is no adapter"),
        ({"rank": 4, "targets": ("lm_head",)}, "'lm_head' names no matrix"),
        ({"rank": 4, "targets": ("q_proj", "w(")}, "is no regular expression"),
    ):
        with pytest.raises(ValueError, match=message):
            LoraAdapter(base, LoraConfig(**options))
    adapter = make_adapter(base)
    with pytest.raises(ValueError, match="the adapter's base is in torch"):
        LoraEngine(adapter, EngineConfig(dtype="bf16"))
    with pytest.raises(ValueError, match="is frozen"):
        LoraEngine(adapter, EngineConfig()).load_weights({}.items())
    adapter.save(tmp_path / "saved")
    before = adapter.changes()["model.layers.0.mlp.up_proj"].low_RI.clone()
    for options, message in (
        ({"rank": 2}, "has rank 4"),
        ({"alpha": 7.0}, "scale 1.5, not"),
        ({"targets": ("q_proj",)}, "adapts other modules"),
    ):
        with pytest.raises(ValueError, match=message):
            make_adapter(base, **options).load(tmp_path / "saved")
    wrong = dict(read_adapter(tmp_path / "saved"))
    del wrong["model.layers.0.mlp.up_proj"]
    with pytest.raises(ValueError, match="adapts other modules"):
        adapter.load(wrong)
    assert torch.equal(adapter.changes()["model.layers.0.mlp.up_proj"].low_RI, before)
    split = load_model(folder)
    quantize(split, "fp8")
    with pytest.raises(ValueError, match="is in fp8 or split"):
        LoraBase(split)
