"""DPO and reward models end to end: what counts of a pair, the reference, resuming, the folder."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import AutoModelForSequenceClassification

from nanoengine.engine import LossFn
from nanoengine.formats.families import FAMILIES, sees
from nanoengine.formats.hf import hf_views, load_model
from nanoengine.heads.scorer import Scorer
from nanoengine.heads.sequence_classifier import (
    classifier_class,
    load_sequence_classifier,
    rated_chat,
    score_sequences,
)
from nanoengine.packing import Sample
from nanoengine.sft import sft_run
from nanoengine.sft.chats import Order, chat_sample
from nanoengine.sft.pair_loss import REFERENCE
from nanoengine.sft.pair_objectives import DpoObjective, RewardModelObjective
from nanoengine.sft.sft_config import SftConfig
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.envs.rewards.base import Transcript
from nanorl.envs.rewards.reward_model import ModelReward
from nanorl.task import Task
from nanorl.types import Rollout

ROOT = Path(__file__).resolve().parents[3]
LOSSES = ("dpo", "reward_model")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from nanorl.envs.tasks.tiny_model import build_tiny_model

    return build_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sums, of which the right and short answer is preferred; one is a chat of two turns."""
    rng, path = random.Random(0), tmp_path_factory.mktemp("data") / "pairs.jsonl"
    lines = []
    for _ in range(10):
        a, b = rng.randint(1, 49), rng.randint(1, 49)
        answers = {"chosen": f"{a + b}", "rejected": f"it may be {a * b + 1}"}
        lines.append(json.dumps({"prompt": f"add {a} {b}", **answers}))
    said = [("user", "hello"), ("assistant", "hello"), ("user", "add 2 3")]
    prompt = [{"role": role, "content": text} for role, text in said]
    lines.append(json.dumps({"prompt": prompt, "chosen": "5", "rejected": "6"}))
    path.write_text("\n".join(lines) + "\n")
    return path


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("train_sft", ROOT / "scripts/train_sft.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["train_sft"] = module
    spec.loader.exec_module(module)
    return module


def options(loss: str, folder: Path, pairs: Path, out: Path, *more: str) -> list[str]:
    fixed = ["--loss", loss, "--preferences", str(pairs), "--model", str(folder)]
    sizes = ["--steps", "4", "--batch-size", "4", "--save-every", "2", "--warmup-steps", "1"]
    return [*fixed, "--out", str(out), *sizes, "--lr", "1e-3", *more]


def rows(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


def weights(loss: str, out: Path) -> dict[str, torch.Tensor]:
    if loss == "dpo":
        return hf_views(load_model(out / "model"))
    model = load_sequence_classifier(out / "model")
    return hf_views(model) | {"score": model.score_head.detach()}


def half_way(out: Path, target: Path) -> None:
    shutil.copytree(out, target, ignore=shutil.ignore_patterns("model", "latest", "*04"))


def test_only_the_answer_counts_whatever_the_assistant_said_before(
    folder: Path, pairs: Path
) -> None:
    tokenizer = ChatTokenizer.from_folder(folder)
    config = SftConfig(loss="dpo", preferences=pairs, model=str(folder))
    examples, num_long = DpoObjective(config).read(tokenizer)
    assert (len(examples), num_long) == (11, 0)
    counted = [
        [
            tokenizer.decode(
                [token for token, m in zip(one.tokens, one.loss_mask, strict=True) if m],
                skip_special=True,
            )
            for one in examples[place]
        ]
        for place in (0, 10)
    ]
    first = json.loads(pairs.read_text().splitlines()[0])
    assert counted == [[first["chosen"], first["rejected"]], ["5", "6"]]
    assert all(sum(one.loss_mask) >= 2 for one in examples[10]), "and the end of the turn"


def test_pairs_with_a_long_answer_are_left_out(folder: Path, pairs: Path) -> None:
    tokenizer = ChatTokenizer.from_folder(folder)
    config = SftConfig(loss="dpo", preferences=pairs, model=str(folder))
    examples, _ = DpoObjective(config).read(tokenizer)
    longest = sorted(max(len(one.tokens) for one in pair) for pair in examples)
    config = SftConfig(loss="dpo", preferences=pairs, model=str(folder), max_tokens=longest[4])
    kept, num_long = DpoObjective(config).read(tokenizer)
    assert len(kept) == sum(n <= longest[4] for n in longest) < 11
    assert len(kept) + num_long == 11
    config = SftConfig(loss="dpo", preferences=pairs, model=str(folder), max_tokens=3)
    with pytest.raises(ValueError, match="no pair of at most 3 tokens"):
        DpoObjective(config).read(tokenizer)


def test_bad_lines_are_one_error_with_a_line_for_each(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(
        '{"prompt": "a"}\n{"prompt": "a", "chosen": "b", "rejected": "c"}\n' + "{\n" * 6
    )
    config = SftConfig(loss="dpo", preferences=file, model=str(folder))
    with pytest.raises(ValueError, match="line 1") as caught:
        DpoObjective(config).read(ChatTokenizer.from_folder(folder))
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines[:5]] == [
        f"{file}, line {n}" for n in (1, 3, 4, 5, 6)
    ]
    assert lines[5:] == ["and 2 more lines"]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_prefers_what_was_chosen_and_resumes_bit_equal(
    loss: str, folder: Path, pairs: Path, tmp_path: Path
) -> None:
    train_sft, one = script(), tmp_path / "one"
    sft_run.SftRun(train_sft.parse(options(loss, folder, pairs, one))).train()
    found = rows(one)
    # Nothing has been learnt yet: both are as likely, or score, as before.
    assert found[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert found[0]["margin"] == pytest.approx(0, abs=1e-5)
    assert found[-1]["loss"] < 0.65 and found[-1]["accuracy"] >= 0.75
    assert found[-1]["num_pairs"] == 4
    margin = found[-1]["chosen_reward"] - found[-1]["rejected_reward"]
    assert found[-1]["margin"] == pytest.approx(margin, abs=1e-5)
    assert (one / "reference.json").exists() == (loss == "dpo")
    expected = weights(loss, one)

    half_way(one, tmp_path / "again")
    sft_run.SftRun(train_sft.parse(["--resume", "--out", str(tmp_path / "again")])).train()
    assert all(torch.equal(weights(loss, tmp_path / "again")[n], t) for n, t in expected.items())
    assert [row["loss"] for row in rows(tmp_path / "again")] == [row["loss"] for row in found]
    with pytest.raises(ValueError, match=r"--resume: beta=0.5 differs from the run's 0.1"):
        train_sft.parse(["--resume", "--out", str(one), "--beta", "0.5"])


def test_the_reference_is_the_starting_policy_of_all_pairs_that_are_drawn(
    folder: Path, pairs: Path, tmp_path: Path
) -> None:
    train_sft, out = script(), tmp_path / "run"
    config = train_sft.parse(options("dpo", folder, pairs, out, "--steps", "2"))
    run = sft_run.SftRun(config)
    drawn = set(Order(11, 0).take(8))
    logps = json.loads((out / "reference.json").read_text())["logps"]
    kept = {int(i): sums for i, sums in logps.items()}
    assert kept.keys() == drawn and len(drawn) == 8
    tokenizer, policy = ChatTokenizer.from_folder(folder), Scorer(load_model(folder))
    lines = [json.loads(line) for line in pairs.read_text().splitlines()]
    for i in drawn - {10}:
        prompt = {"role": "user", "content": lines[i]["prompt"]}
        answers = [lines[i][name] for name in ("chosen", "rejected")]
        chats = [
            chat_sample(tokenizer, [prompt, {"role": "assistant", "content": text}])
            for text in answers
        ]
        sums = [float(logp.sum()) for logp in policy.forward_logprobs(chats)]
        assert kept[i] == pytest.approx(sums, abs=1e-3)
        fields = [one.fields[REFERENCE] for one in run.examples[i]]
        assert [sum(values) for values in fields] == kept[i]
    run.train()

    for name, change in {
        "appended": lambda lines: [*lines, lines[0].replace("add", "sum")],
        "turned": lambda lines: lines[::-1],
        "other answer": lambda lines: [lines[0].replace("it may", "it might"), *lines[1:]],
    }.items():
        half_way(out, tmp_path / name)
        edited = tmp_path / f"{name}.jsonl"
        edited.write_text("\n".join(change(pairs.read_text().splitlines())) + "\n")
        saved = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(
            json.dumps(saved | {"preferences": str(edited)})
        )
        with pytest.raises(ValueError, match="does not hold the pairs that the run began with"):
            sft_run.SftRun(train_sft.parse(["--resume", "--out", str(tmp_path / name)]))

    half_way(out, tmp_path / "lost")
    (tmp_path / "lost/reference.json").unlink()
    with pytest.raises(ValueError, match="holds the log-probs of the policy as the run began"):
        sft_run.SftRun(train_sft.parse(["--resume", "--out", str(tmp_path / "lost")]))


def test_the_reward_model_scores_alike_here_in_transformers_and_as_a_reward(
    folder: Path, pairs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    sft_run.SftRun(script().parse(options("reward_model", folder, pairs, out))).train()
    tokenizer = ChatTokenizer.from_folder(out / "model")
    chats = [
        [{"role": "user", "content": "add 2 40"}, {"role": "assistant", "content": text}]
        for text in ("42", "it may be 81", "42<eos>")
    ]
    sequences = [rated_chat(tokenizer, chat) for chat in chats]
    theirs = AutoModelForSequenceClassification.from_pretrained(
        out / "model", dtype=torch.float32
    ).eval()
    assert (theirs.config.num_labels, type(theirs).__name__) == (
        1,
        "Qwen3ForSequenceClassification",
    )
    with torch.no_grad():
        expected = [float(theirs(torch.tensor([ids])).logits) for ids in sequences]
    ours = score_sequences(load_sequence_classifier(out / "model"), sequences)
    assert ours == pytest.approx(expected, abs=1e-5)
    assert expected[0] > expected[1] + 0.05, "the right and short one"

    rollout = Rollout(
        task_id="t", group_id="g", rollout_id="r", tokens=[1, 2], loss_mask=[0, 1],
        logps=[0.0, -1.0], versions=[-1, 0],
    )  # fmt: skip
    reward = ModelReward(out / "model")
    try:
        for chat, score in zip(chats, expected, strict=True):
            text = chat[1]["content"]
            transcript = Transcript(messages=chat, text=text, answer=text)
            said = asyncio.run(reward.score(rollout, Task("add 2 40"), transcript))
            assert said.total == pytest.approx(score, abs=1e-5)
    finally:
        reward.close()


def test_the_last_token_that_is_rated_is_the_one_that_transformers_reads(folder: Path) -> None:
    """Padding at the end of a chat is not read there, so training does not read it either."""
    config = SftConfig(loss="reward_model", preferences=Path("none"), model=str(folder))
    objective = RewardModelObjective(config)
    objective._pad_id = 5  # what ends a turn
    sample = objective.sample(
        ChatTokenizer.from_folder(folder),
        preference("a", "b"),
        [{"role": "assistant", "content": "b"}],
    )
    ids = rated_chat(ChatTokenizer.from_folder(folder), chat("a", "b"))
    assert ids[-1] == 5 and sample.tokens == [*ids[:-1], 0]
    assert sample.loss_mask == [0] * (len(ids) - 1) + [1]


def chat(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def preference(prompt: str, answer: str):  # type: ignore[no-untyped-def]
    from nanoengine.sft.preferences import Preference

    said = chat(prompt, answer)
    return Preference(said[:1], said[1:], chat(prompt, answer + "?")[1:])


def test_a_reward_model_is_called_what_transformers_calls_it() -> None:
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES as CLASSES,
    )

    assert {name: CLASSES[name] for name in FAMILIES if name in CLASSES} == {
        name: classifier_class(name) for name in FAMILIES if name != "granite" and not sees(name)
    }
    with pytest.raises(ValueError, match="no sequence classification for 'granite'"):
        classifier_class("granite")


def test_a_batch_may_have_a_pair_twice(folder: Path, pairs: Path, tmp_path: Path) -> None:
    """At the seam of two epochs: 11 pairs, batches of 9."""
    seen: list[list[str | None]] = []
    config = script().parse(
        options("dpo", folder, pairs, tmp_path / "run", "--batch-size", "9", "--steps", "3")
    )
    run = sft_run.SftRun(config)
    step = run.engine.train_step

    def watched(samples: list[Sample], loss: LossFn, weight: object) -> dict[str, float]:
        seen.append([one.group for one in samples])
        assert len({tuple(one.tokens) for one in samples}) < 18 or len(seen) == 1
        return step(samples, loss, weight)  # type: ignore[arg-type]

    run.engine.train_step = watched  # type: ignore[method-assign, assignment]
    run.train()
    assert all(len(set(groups)) == 9 for groups in seen)
    assert [row["num_pairs"] for row in rows(tmp_path / "run")] == [9, 9, 9]


@pytest.mark.xdist_group("gloo")
@pytest.mark.parametrize(
    ("loss", "layout"),
    [("dpo", ("--pp", "2")), ("reward_model", ("--dp", "2", "--zero", "3"))],
    ids=LOSSES,
)
def test_a_run_split_over_processes_is_the_same_run(
    loss: str, layout: tuple[str, ...], folder: Path, pairs: Path, tmp_path: Path
) -> None:
    given = options(loss, folder, pairs, tmp_path / "one", "--batch-size", "5")
    sft_run.SftRun(script().parse(given)).train()
    given = options(loss, folder, pairs, tmp_path / "split", "--batch-size", "5", *layout)
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/train_sft.py"), *given],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for name in ("loss", "margin", "num_pairs"):
        found, expected = ([row[name] for row in rows(tmp_path / x)] for x in ("split", "one"))
        assert found == pytest.approx(expected, abs=1e-4)
    expected_weights, found_weights = (weights(loss, tmp_path / x) for x in ("one", "split"))
    for tensor_name, tensor in expected_weights.items():
        torch.testing.assert_close(found_weights[tensor_name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--loss", "dpo"), "preferences: missing; give a jsonl file of pairs"),
        (("--loss", "dpo", "--data", "a"), "data: loss='dpo' does not read it"),
        (("--preferences", "a"), "preferences: loss='sft' does not read it"),
        (("--loss", "dpo", "--preferences", "a", "--cp", "2"), "set cp to 1"),
        (("--loss", "reward_model", "--preferences", "a", "--tp", "2"), "use dp and zero"),
        (("--loss", "dpo", "--preferences", "a", "--beta", "0"), "beta=0.0: must be positive"),
        (("--loss", "dpo", "--label-smoothing", "0.5"), "must be at least 0 and below 0.5"),
    ],
)
def test_bad_options_are_told_before_any_work(given: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        script().parse([*given, "--out", "/nowhere"])


def test_every_loss_has_a_learning_rate_of_its_own_unless_it_is_given() -> None:
    rates = [SftConfig(loss=loss).engine_config.lr for loss in ("sft", "dpo", "reward_model")]
    assert rates == [2e-5, 1e-6, 1e-5]
    assert SftConfig(loss="dpo", lr=0.5).engine_config.lr == 0.5
