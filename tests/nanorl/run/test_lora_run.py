"""Runs that train an adapter: warm start, RL, resuming, and what they leave in their folder."""

import json
import shutil
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from forked_runs import rows
from safetensors.torch import load_file
from talking_runs import WEIGHTS, talk
from transformers import AutoModelForCausalLM

from nanoengine.adapters.lora import merge_lora
from nanoengine.formats.hf import load_model, save_model
from nanoengine.state.checkpoint import list_checkpoints, open_checkpoint
from nanorl.run.parse import parse_arguments
from nanorl.run.saved_models import find_models

OWN: dict[str, Any] = {"warm_start.steps": 6, "lora.rank": 4, "lora.alpha": 8.0}
pytestmark = pytest.mark.xdist_group("heavy")


def run(out: Path, steps: int, **options: Any) -> Path:
    return talk(out, steps, OWN, options)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def whole(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("whole") / "run", 3, dtype=request.param)


def test_rollouts_and_training_have_the_same_bits_in_every_step(whole: Path) -> None:
    found = rows(whole)
    assert len(found) == 3
    assert all(row["logp_gap_max"] == 0 and row["logp_gap_tokens"] > 0 for row in found)
    assert all(row["grad_norm"] > 0 for row in found)


def test_a_resumed_run_ends_with_the_same_bits(whole: Path, tmp_path: Path) -> None:
    dtype = json.loads((whole / "config.json").read_text())["dtype"]
    resumed = run(tmp_path / "run", 1, dtype=dtype)
    run(tmp_path / "run", 3, dtype=dtype, resume=True)
    for name in (WEIGHTS, "adapter-trained/adapter_model.safetensors"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes(), name
    assert [row["loss"] for row in rows(resumed)] == [row["loss"] for row in rows(whole)]


def test_the_adapter_on_the_model_it_began_with_is_the_trained_model(
    whole: Path, tmp_path: Path
) -> None:
    trained, began = (load_file(whole / name / "model.safetensors") for name in
                      ("model-trained", "model"))  # fmt: skip
    dtype = trained["model.norm.weight"].dtype
    model = load_model(whole / "model", dtype)
    merge_lora(model, whole / "adapter-trained")
    save_model(model, tmp_path / "merged")
    assert (tmp_path / "merged/model.safetensors").read_bytes() == (whole / WEIGHTS).read_bytes()
    for name, weight in trained.items():
        is_adapted = "_proj" in name
        assert is_adapted != torch.equal(weight, began[name].to(dtype)), name


def test_peft_reads_the_adapter_of_a_run(whole: Path) -> None:
    trained = AutoModelForCausalLM.from_pretrained(whole / "model-trained", dtype=torch.float32)
    base = AutoModelForCausalLM.from_pretrained(whole / "model", dtype=torch.float32)
    ids = torch.tensor([[5, 17, 99, 3, 140, 7, 23, 61]])
    with torch.no_grad():
        plain, merged = base(ids).logits, trained(ids).logits
        adapted = peft.PeftModel.from_pretrained(base, whole / "adapter-trained")(ids).logits
    is_exact = json.loads((whole / "config.json").read_text())["dtype"] == "fp32"
    atol = (1e-5 if is_exact else 3e-2) * float(merged.abs().max())  # bf16 rounds the merged ones
    torch.testing.assert_close(adapted, merged, rtol=0, atol=atol)
    assert float((adapted - plain).abs().max()) > 10 * atol


def test_the_adapter_names_its_base_and_no_path_of_this_machine(whole: Path) -> None:
    written = json.loads((whole / "adapter-trained/adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "tiny-seed0"
    for folder in ("adapter-trained", "model-trained"):
        card = (whole / folder / "README.md").read_text()
        assert str(whole.parent) not in card and "`tiny-seed0`" in card
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["model_source"].startswith("a small model of random weights")


def test_a_stopped_run_is_read_from_its_checkpoint(whole: Path, tmp_path: Path) -> None:
    stopped = tmp_path / "run"
    shutil.copytree(whole, stopped)
    shutil.rmtree(stopped / "model-trained")
    newest = list_checkpoints(stopped / "checkpoints")[-1]
    names = [name for name in open_checkpoint(newest).names() if name.startswith("master.")]
    assert names and all(name.endswith(("lora_A", "lora_B")) for name in names)
    saved = find_models(str(stopped))
    assert saved.is_checkpoint
    with saved.folder() as folder:
        theirs = (whole / WEIGHTS).read_bytes()
        assert (folder / "model.safetensors").read_bytes() == theirs


def test_a_run_over_an_int8_base_is_exact_and_resumes_to_the_bit(tmp_path: Path) -> None:
    """Rollouts read the trainer's own model, and what is left is what it stood for, merged."""
    options = {"dtype": "bf16", "lora.base_dtype": "int8"}
    whole = run(tmp_path / "whole", 3, **options)
    found = rows(whole)
    assert len(found) == 3
    assert all(row["logp_gap_max"] == 0 and row["logp_gap_tokens"] > 0 for row in found)
    assert all(row["grad_norm"] > 0 for row in found)
    resumed = run(tmp_path / "resumed", 1, **options)
    run(tmp_path / "resumed", 3, **options, resume=True)
    for name in (WEIGHTS, "adapter-trained/adapter_model.safetensors"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes(), name
    trained, began = (load_file(whole / name / "model.safetensors") for name in
                      ("model-trained", "model"))  # fmt: skip
    for name, weight in trained.items():
        assert ("_proj" in name) != torch.equal(weight, began[name].bfloat16()), name
    shutil.rmtree(whole / "model-trained")
    with find_models(str(whole)).folder() as folder:
        theirs = (resumed / WEIGHTS).read_bytes()
        assert (folder / "model.safetensors").read_bytes() == theirs


def refusal(*words: str) -> str:
    """What the command line answers."""
    with pytest.raises(ValueError) as caught:
        parse_arguments(list(words))
    return str(caught.value)


def test_what_does_not_go_with_an_adapter_is_refused_before_any_work(
    whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ("--preset", "tiny", "--out", str(tmp_path / "run"))
    rank = ("--lora.rank", "4")
    for words, message in (
        (("--lora.rank", "-1"), "rank=-1: must be positive, or 0"),
        (("--lora.alpha", "8"), "--lora.alpha 8.0: there is no adapter; set --lora.rank"),
        ((*rank, "--lora.alpha", "0"), "alpha=0.0: must be positive"),
        (
            (*rank, "--cluster.backend", "local"),
            "--lora.rank 4 with --cluster.backend local: an adapter is trained in one process",
        ),
        (("--lora.base-dtype", "int8"), "--lora.base-dtype int8: there is no adapter"),
        (
            (*rank, "--lora.base-dtype", "int8", "--rl.max-staleness", "1"),
            "--lora.base-dtype int8 with --rl.max-staleness 1: rollouts and training take turns",
        ),
        (
            (*rank, "--lora.base-dtype", "int8", "--engine.quantization", "fp8"),
            "--lora.base-dtype int8 with --engine.quantization fp8",
        ),
        (
            (*rank, "--lora.base-dtype", "int8", "--algorithm", "ppo"),
            "--lora.base-dtype int8 with --algorithm ppo, which trains a critic",
        ),
        (
            (*rank, "--lora.base-dtype", "int8", "--device", "cuda"),
            "--lora.base-dtype int8 with --device cuda",
        ),
        ((*rank, "--learner.tp", "2"), "--learner.tp 2: needs processes of its own"),
    ):
        assert message in refusal(*out, *words)
    with pytest.raises(ValueError, match=r"--lora\.targets: 'lm_head' names no matrix"):
        run(tmp_path / "run", 1, lora__targets=("lm_head",))
    assert not (tmp_path / "run" / "checkpoints").exists()
    message = "--lora.rank 4 -> 8 (the checkpoint holds the run's own adapter"
    assert message in refusal("--resume", "--out", str(whole), "--lora.rank", "8")
