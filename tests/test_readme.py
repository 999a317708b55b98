"""The README's commands: each is one that CI runs, or stands in a list with its reason."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
sys.path.insert(0, str(ROOT / "scripts"))

import check_readme  # noqa: E402


def test_every_script_that_the_readme_calls_exists() -> None:
    for command in check_readme.commands(README.read_text()):
        words = command.split()
        if words[0] == "bash":
            assert (ROOT / words[1]).is_file(), command


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
