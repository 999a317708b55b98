"""docs/algorithms.md: a section for every recipe, settings as the specs have them, figures as
benchmarks/ has them, and code that runs."""

from __future__ import annotations

import json
import re
import sys
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from nanoengine.packing import make_micro_batches
from nanorl.algorithms.option_groups import (
    BOUNDS,
    Advantage,
    Correction,
    KLEstimator,
    Loss,
)
from nanorl.algorithms.recipes import RECIPES
from nanorl.algorithms.registry import AGGREGATIONS, LOSSES
from nanorl.algorithms.spec import AlgorithmSpec
from nanorl.batching import build_batch
from nanorl.run.parse import parse_arguments
from nanorl.types import Rollout

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "scripts")]
import algorithms_page as page  # noqa: E402
from generated_part import GeneratedPart  # noqa: E402

TEXT = page.PAGE.read_text("utf-8")


def section(title: str, level: str = "###") -> str:
    return TEXT.split(f"\n{level} {title}\n")[1].split("\n## ")[0].split(f"\n{level} ")[0]


def test_every_recipe_has_a_section_of_all_its_parts() -> None:
    missing = page.sections_missing(TEXT)
    assert not missing, f"write '### {missing[0]}' in docs/algorithms.md; missing: {missing}"
    for name in RECIPES:
        own = section(name)
        for part in (
            "```text\n",
            "- **Use it when** ",
            "- **Not when** ",
            "- *Source:* ",
            "*Code:* ",
        ):
            assert part in own, f"docs/algorithms.md, section {name}: no {part.strip()!r}"


def code_of(text: str) -> list[tuple[str, str]]:
    """The (file, function or class) that a section says are its code, below nanorl/."""
    _, _, said = " ".join(text.split()).partition("*Code:* ")
    places = re.findall(r"((?:`\w+`(?: and )?)+) in \[\w+\.py\]\(\.\./nanorl/([\w/]+)\.py\)", said)
    return [(file, name) for names, file in places for name in re.findall(r"`(\w+)`", names)]


def defined(file: str, name: str) -> bool:
    own = getattr(import_module(f"nanorl.{file.replace('/', '.')}"), name, None)
    return getattr(own, "__module__", None) == f"nanorl.{file.replace('/', '.')}"


def test_every_recipe_names_its_code_and_the_code_is_there() -> None:
    named = {name: code_of(section(name)) for name in RECIPES}
    assert not [name for name, places in named.items() if not places]
    gone = {place for places in named.values() for place in places if not defined(*place)}
    assert not gone, f"docs/algorithms.md names code that is not there: {gone}"
    assert ("algorithms/losses", "gspo_ratio") in named["gspo"]


def test_code_that_is_not_there_is_noticed() -> None:
    said = "*Code:* `gspo` and `gone` in [losses.py](../nanorl/algorithms/losses.py)."
    wanted = [("algorithms/losses", "gspo"), ("algorithms/losses", "gone")]
    assert code_of(said) == wanted
    assert [defined(*place) for place in wanted] == [True, False]
    assert not defined("algorithms/losses", "clipped"), "it is another file's"


def test_the_page_is_what_specs_and_benchmarks_say() -> None:
    found = page.parts(page.newest("algorithms"), {name: page.newest(name) for name in page.TABLES})
    assert page.written(TEXT, found) == TEXT, "call: python scripts/algorithms_page.py --write"


def test_a_recipe_that_came_later_has_the_figure_of_the_hard_table() -> None:
    hard = page.newest("hard")
    assert hard is not None
    rows: list[dict[str, Any]] = hard["rows"]
    first = hard | {"rows": [row for row in rows if row["name"] != "gspo"]}
    found = page.parts(first, {"hard": hard})
    [row] = [row for row in rows if row["name"] == "gspo"]
    assert f"| `hard` alone: {row['value']:+.1f} (" in found["overview"]
    assert "With `--variants hard` alone. Ours: " in found["gspo"]
    assert "alone" not in found["grpo"] and found["overview"].count("alone") == 1
    assert page.UNMEASURED in page.parts(None, dict.fromkeys(page.TABLES))["gspo"]


def test_a_new_section_gets_its_part_and_a_lacking_one_is_named() -> None:
    found = page.parts(None, dict.fromkeys(page.TABLES))
    bare = re.sub(r"<!-- gspo: .*?<!-- end -->\n\n", "", TEXT, flags=re.DOTALL)
    assert bare != TEXT and page.written(bare, found) == page.written(TEXT, found)
    without = TEXT.replace("\n### gspo\n", "\n### gone\n")
    assert page.sections_missing(without) == ["gspo"]
    with pytest.raises(ValueError, match=r"no section for gspo; write one under .*'### gspo'"):
        page.written(without, found)
    with pytest.raises(ValueError, match="the page has no place for 'gspo'; write '<!-- gspo: "):
        GeneratedPart("gspo", "algorithms_page.py").put(
            "<!-- gspo: scripts/algorithms_page.py -->", ""
        )


def test_what_no_recipe_has_stands_among_the_building_blocks() -> None:
    used = [recipe.spec for recipe in RECIPES.values()]
    blocks = section("Building blocks", "##")
    for name in set(get_args(Advantage)) - {spec.advantage for spec in used}:
        assert f"### Advantage {name}\n" in blocks, name
    for name in set(get_args(Loss)) - {spec.loss for spec in used}:
        assert f"### Loss {name}\n" in blocks, name
    tables = {
        "Corrections": set(get_args(Correction)) - {"auto"},
        "KL to a reference": set(get_args(KLEstimator)),
        "Aggregation": set(AGGREGATIONS),
    }
    for title, names in tables.items():
        rows = re.findall(r"^\| (\w+)(?: \(default\))? \|", section(title), re.MULTILINE)
        assert set(rows) - {"name", "estimator"} == names, title


def test_the_numbers_in_the_formulas_are_the_code_s() -> None:
    spec = AlgorithmSpec()
    said = {
        "dppo_tv": [LOSSES["dppo_tv"].clip[0]],
        "dppo_kl": [LOSSES["dppo_kl"].clip[0]],
        "cispo": [LOSSES["cispo"].clip[1]],
        "gmpo": [*LOSSES["gmpo"].clip],
        "pass_at_k": [spec.pass_k],
        "kpop": [spec.correction_kl],
        "clip_cov": [LOSSES["clip_cov"].chosen_share, spec.covariance_low, spec.covariance_high],
        "kl_cov": [LOSSES["kl_cov"].chosen_share, spec.covariance_kl_coef],
        "sapo": [spec.tau_positive, spec.tau_negative],
        "dapo": [1 + RECIPES["dapo"].spec.clip[1], 1 - RECIPES["dapo"].spec.clip[0]],
        "echo": [RECIPES["echo"].spec.observation_coef],
        "grpo": [spec.dual_clip],
        "Corrections": [*BOUNDS["icepop"], *BOUNDS["geometric"], spec.correction_cap],
    }
    for title, values in said.items():
        by_hand = re.sub(r"<!-- .*?<!-- end -->", "", section(title), flags=re.DOTALL)
        numbers = [float(one) for one in re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?", by_hand)]
        absent = [value for value in values if value not in numbers]
        assert not absent, f"section {title} does not have {absent}"


# -- figures ---------------------------------------------------------------------------------------


def row(name: str, **changes: Any) -> dict[str, Any]:
    return {
        "name": name, "options": f"--rl.minibatches 2 --algorithm {name}", "reason": "",
        "value": 30.0, "runs": [{}],
        "before": 0.4, "after": {"value": 0.7}, "num_seeds": 3, "note": "", "is_little": False,
        "seconds_to_level": 12.3, "step_to_level": None,
        "gain": {"value": 0.3, "low": 0.25, "high": 0.35}, "share_of_baseline": 1.0,
        "wall_s": 50.4, "sampled_tokens": 63431.0,
    } | changes  # fmt: skip


def test_what_differs_is_said_by_the_intervals_alone() -> None:
    rows = [
        {"name": name, "against_baseline": against}
        for name, against in {
            "grpo": None,
            "sure": {"value": 0.05, "low": 0.01, "high": 0.09},
            "lucky": {"value": 0.05, "low": -0.01, "high": 0.11},
            "worse": {"value": -0.05, "low": -0.09, "high": -0.01},
            "one seed": {"value": 0.2, "low": None, "high": None},
        }.items()
    ]
    assert page.differences(rows, "grpo") == (
        "Better than grpo is sure; worse than grpo is worse; 2 of 4 variants cannot be told from "
        "it."
    )


def test_figures_come_from_the_newest_comparison(tmp_path: Path) -> None:
    head = {
        "date": "2026-11-24", "hardware": "a laptop", "preset": "tiny", "steps": 12,
        "seeds": [0, 1, 2], "baseline": "grpo", "command": "compare_algorithms.py --jobs 2",
    }  # fmt: skip
    little = row(
        "gspo", share_of_baseline=0.25, is_little=True, note="it was told to", reason="so",
        num_seeds=1, gain={"value": 0.075, "low": None, "high": None}, value=7.5,
    )  # fmt: skip
    rows = [row("grpo"), little, {"name": "ppo", "value": None, "runs": []}]
    for name, of in (("2026-11-01", []), ("2026-11-24", rows)):
        data = json.dumps(head | {"rows": of})
        (tmp_path / f"algorithms_{name}.json").write_text(data)
    measured = page.newest("algorithms", tmp_path)
    assert measured is not None and page.newest("staleness", tmp_path) is None
    table = head | {"file": "f.json", "rows": [row("tis-s0")], "level": 0.6}
    found = page.parts(measured, {"staleness": table, "reuse": None})
    grpo = "Ours: 40.0% → 70.0%, +30.0 points (+25.0 to +35.0), in 50 s and 63,431 sampled tokens"
    assert f"{grpo} (3 seeds)." in found["grpo"]
    assert "+7.5 points, 0.25 of grpo's, in 50 s" in found["gspo"] and "(1 seed)" in found["gspo"]
    assert "With `--algorithm gspo`: so." in found["gspo"], "its own options alone"
    assert "Why so little: it was told to." in found["gspo"]
    assert "Ours: not measured yet." in found["ppo"] and "Ours: not measured yet." in found["opd"]
    assert "| [gspo](#gspo) | grpo | gspo | aggregation | +7.5 |" in found["overview"]
    measured_how = "preset tiny, 12 RL steps with `--rl.minibatches 2`, seeds 0, 1, 2; `compare_"
    assert f"on 2026-11-24 (a laptop): {measured_how}" in found["conditions"]
    assert "benchmarks/algorithms_2026-11-24.json" in found["conditions"]
    line = "`--rl.minibatches 2 --algorithm tis-s0` | +30.0 (+25.0 to +35.0) | 1.00 | – | 12 |"
    assert f"| tis-s0 | {line}" in found["staleness"]


def test_settings_are_what_differs_from_the_default() -> None:
    assert page.settings(AlgorithmSpec()) == "the defaults of `--rl.algorithm`."
    spec = AlgorithmSpec(loss="gspo", kl_coef=0.5, dual_clip=None)
    assert page.settings(spec) == (
        "`loss` `gspo`, `dual-clip` off, `kl-coef` `0.5`, "
        "the loss brings its bounds, 0.0003 below and 0.0004 above."
    )


# -- one of your own -------------------------------------------------------------------------------


def test_the_own_algorithm_of_the_page_runs_and_does_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = section("One of your own", "##")
    [code] = re.findall(r"```python\n(.*?)```", own, re.DOTALL)
    [command] = re.findall(r"```bash\n(.*?)```", own, re.DOTALL)
    assert len(code.splitlines()) <= 30
    (tmp_path / "mine.py").write_text(code)
    monkeypatch.chdir(tmp_path)
    words = command.split()
    assert words[:2] == ["nanorl", "train"]
    spec = parse_arguments(words[2:]).rl.algorithm
    rewards = {"a": [1.0, 0.25, 0.0], "b": [0.5, 0.5]}
    groups = [
        [
            Rollout(
                task_id=group, group_id=group, rollout_id=f"{group}{i}", tokens=[1, 2],
                loss_mask=[0, 1], logps=[0.0, -1.0], versions=[-1, 0], reward=reward,
            )
            for i, reward in enumerate(values)
        ]
        for group, values in rewards.items()
    ]  # fmt: skip
    batch = build_batch(groups, spec, max_tokens=8, version=0)
    advantages = [sample.fields["advantage"][1] for sample in batch.samples]
    assert advantages == [0.0, -0.75, -1.0, 0.0, 0.0]
    (micro,) = make_micro_batches(batch.samples, max_tokens=64)
    # a second step on the batch: the policy has moved by log 2 from the old one
    micro.fields_T["old_logp"] = micro.fields_T["rollout_logp"].clone()
    logp_T = (micro.fields_T["rollout_logp"] + 0.6931472).requires_grad_()
    total, _ = batch.loss_fn(logp_T, None, micro)
    total.backward()
    factor = 2 / (1 + 0.6931472**2)  # r = 2, over 1 + (log r)²; a fifth of it for each of 5 tokens
    wanted = 0.2 * factor * 1.75
    assert total.item() == pytest.approx(wanted, rel=1e-5)
    assert logp_T.grad is not None
    assert logp_T.grad.sum().item() == pytest.approx(wanted, rel=1e-5)
    assert torch.equal(logp_T.grad != 0, micro.fields_T["advantage"] != 0)
