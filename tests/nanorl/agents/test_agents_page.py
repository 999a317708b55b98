"""docs/agents.md: its function and its program are trained by its commands."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("openai", reason="needs the extra `agents`")

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "agents.md").read_text("utf-8")
SHORT = """--preset tiny --out run --threads 1 --rl.steps 1 --rl.tasks-per-step 1 --rl.group-size 2
    --evaluation.num-tasks 1 --evaluation.num-tasks-untrained 0 --evaluation.num-tasks-no-tool 0
    --agent.max-turn-tokens 16 --agent.max-context-tokens 512
    --warm-start.steps 0"""


def section(title: str) -> str:
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def block(title: str, language: str) -> str:
    (found,) = re.findall(rf"```{language}\n(.*?)```", section(title), re.DOTALL)
    return found


@pytest.mark.parametrize(
    ("title", "file"), [("Five minutes", "my_agent.py"), ("Programs", "mine.py")]
)
def test_what_the_page_writes_is_trained_by_its_command(
    title: str, file: str, tmp_path: Path
) -> None:
    (tmp_path / file).write_text(block(title, "python"))
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    command, *options = shlex.split(block(title, "bash"))
    assert command == "nanorl" and file in " ".join(options)
    done = subprocess.run(
        [sys.executable, "-m", "nanorl", *options, *SHORT.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=300,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    (row,) = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").open()]
    assert row["logp_gap_max"] == 0.0 and row["logp_gap_tokens"] > 0
    assert "env/agent_failed" not in row, "none did"


def test_files_and_places_that_the_page_names_are_there() -> None:
    named = set(re.findall(r"`(\w+\.py)` \|", section("Frameworks")))
    files = {path.name for path in (ROOT / "examples" / "agents").glob("*.py")}
    assert named == files - {"few_words.py"}, "which is about a reward"
    titles = {line[3:].lower().replace(" ", "-").replace(",", "") for line in PAGE.splitlines()}
    for place in re.findall(r"\]\(#([^)]*)\)", PAGE):
        assert place in titles
