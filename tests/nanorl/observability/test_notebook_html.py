"""`_repr_html_`: what a notebook shows says the figures, trusts no text, and needs no torch."""

from __future__ import annotations

import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import nanorl
from nanorl.observability.report.evaluation import Evaluation, TaskScore
from nanorl.observability.report.notebook import run_html

EVIL = '<script>alert("x")</script><img src=x onerror=y>'


class Reader(HTMLParser):
    """The elements of a page, and its text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.said: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.said.append(data)


def read(page: str) -> list[str]:
    """Its texts, of a page that has a table and nothing that runs or loads."""
    reader = Reader(page)
    assert reader.tags <= {"table", "caption", "tr", "td"}
    assert len(page) < 100_000
    return reader.said


def score(task_id: str, right: int, kind: str = "sums") -> TaskScore:
    return TaskScore(
        task_id=task_id,
        kind=kind,
        prompt="",
        num_samples=4,
        num_successes=right,
        mean_reward=right / 4,
    )


def test_an_evaluation_shows_success_and_pass_at_k() -> None:
    scores = [score("a", 4), score("b", 2, EVIL), score("c", 0)]
    costs = {"mean_turns": 1.0, "mean_action_tokens": 9.0, "seconds": 1.0}
    result = Evaluation(title=EVIL, about={}, scores=scores, **costs)
    said = read(result._repr_html_())
    assert said[0] == f"{EVIL}: 3 held-out tasks"
    assert said[said.index("success") + 1] == "50.0%"
    assert said[said.index("pass@4") + 1] == "66.7%"  # two of three tasks were solved once
    assert said[said.index("sums") + 1 : said.index("sums") + 3] == ["50.0%", "of 2 tasks"]


def test_a_rehearsal_shows_each_turn_with_its_reward() -> None:
    class Echo(nanorl.Env):
        def step(self, text: str) -> object:
            self.reward(-0.25)
            return self.done(reward=1.0) if text == "stop" else "x" * 5000

    task = nanorl.Task(EVIL, answer="")
    played = nanorl.rehearse(Echo, task, turns=["go", "stop"])
    said = read(played._repr_html_())
    assert said[0] == "reward 1, ended by the environment"
    assert EVIL in said and said.count("-0.25") == 2
    assert any("… 4,400 more characters" in text for text in said)
    open_end = read(nanorl.rehearse(Echo, task, turns=["go"])._repr_html_())
    assert open_end[0].endswith("not ended by the environment")


def test_a_run_shows_what_was_measured_and_where_it_lies() -> None:
    summary = {
        "preset": "tiny",
        "seed": 3,
        "steps": 20,
        "wall_s": 65.0,
        "heldout_n": 40,
        "heldout_n_untrained": 40,
        "heldout_success_untrained": 0.05,
        "heldout_success_before": None,
        "heldout_success_after": 0.925,
    }
    said = read(run_html(summary, Path(f"runs/{EVIL}")))
    assert said[0] == "tiny, seed 3: held-out tasks solved"
    assert said[said.index("untrained") + 1] == "5.0% of 40"
    assert said[said.index("after RL") + 1] == "92.5% of 40"
    assert "after the warm start" not in said and "1:05" in said and f"runs/{EVIL}" in said


def test_the_tables_need_no_torch() -> None:
    program = "import sys, nanorl.observability.report.notebook; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program]).returncode == 0
