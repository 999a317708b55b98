"""What the page of `nanorl serve RUN` tells of the run's agent."""

from __future__ import annotations

from pathlib import Path

import pytest
from viewer_runs import TOKENIZER, encode, make_rollout, small_run, store_step, write_run

pytest.importorskip("starlette", reason="needs the extra `serve`")

from nanoinfer.server.page import PageAbout
from nanorl.commands.serve_page import page_about
from nanorl.run.saved_models import SavedModels, read_run
from nanorl.task import Task
from nanorl.types import TurnSpan


def about(run: Path) -> PageAbout:
    folder = run / "model-trained"
    return page_about(SavedModels(name=str(run), place=folder, run=read_run(run)), folder)


def test_a_run_s_page_has_its_question_and_says_what_runs_the_tools(tmp_path: Path) -> None:
    told = about(small_run(tmp_path / "first"))
    assert told.title == "Chat with the agent of first"
    assert told.example == "A held-out question?" and told.tools == ()


def test_the_tools_are_those_that_held_out_rollouts_called(tmp_path: Path) -> None:
    run = write_run(tmp_path / "second")
    with_file = Task("Look into it.", answer="1", kind="a", files={"notes.txt": "1"})
    alone = Task("What is 6 * 7?", answer="42", kind="b")
    turns = [("<run>print(42)</run>", "42"), ("<ans>42", "")]
    rollouts = [
        make_rollout(task, f"eval-after-{place}", turns, reward=1.0)
        for place, task in enumerate((with_file, alone))
    ]
    store_step(run, rollouts, step=0, tasks=[with_file, alone], phase="after")
    told = about(run)
    assert told.example == "What is 6 * 7?", "the other one asks for a file"
    assert [one.name for one in told.tools] == ["python"]
    assert told.note.endswith(f"nanorl chat {run} does.")


def test_a_plain_model_and_a_run_without_rollouts_have_a_page_all_the_same(tmp_path: Path) -> None:
    plain = page_about(SavedModels(name="smollm2", place=tmp_path), tmp_path)
    assert plain == PageAbout() and plain.example
    assert about(write_run(tmp_path / "third")).title == "Chat with the agent of third"


def test_the_system_s_words_are_the_page_s_system_prompt(tmp_path: Path) -> None:
    run, task = write_run(tmp_path / "fourth"), Task("Why?", answer="so", kind="a")
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    opening = TOKENIZER.encode_chat(chat, add_generation_prompt=True)
    said = encode("so<|im_end|>")
    tokens = [*opening, *said]
    one = make_rollout(task, "eval-after-0", [("so", "")], reward=1.0)
    one.tokens, one.loss_mask = tokens, [0] * len(opening) + [1] * len(said)
    one.logps = [-1.0 * mask for mask in one.loss_mask]
    one.versions = [0 if mask else -1 for mask in one.loss_mask]
    span = TurnSpan(action_start=len(opening), action_end=len(tokens), observation_end=len(tokens))
    one.turn_spans = [span]
    store_step(run, [one], step=0, tasks=[task], phase="after")
    told = about(run)
    assert (told.system, told.example) == ("Be brief.", "Why?")
