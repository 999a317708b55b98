"""`nanorl chat`, `nanorl serve` and `nanorl view` as a user runs them, on a run's folder."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from nanoengine.formats.hf import load_model
from nanoengine.state.checkpoint_writer import CheckpointWriter
from nanoengine.state.slices import make_piece
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl import cli
from nanorl.commands.terminal import printable
from nanorl.envs.tasks.tiny_model import build_tiny_model
from nanorl.observability.store import RolloutStore
from nanorl.options.presets import tiny
from nanorl.run.saved_models import find_models
from nanorl.sandbox.base import SandboxUnavailable
from nanorl.types import Rollout, Status, TurnSpan

TOKENS = "model.safetensors"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's folder as one leaves it: the model it began with, and another that it trained."""
    folder = tmp_path_factory.mktemp("chat") / "run-0"
    build_tiny_model(folder / "model", seed=0)
    build_tiny_model(folder / "model-trained", seed=1)
    options = tiny().to_json() | {"dtype": "fp32", "out": "/elsewhere"}  # it has been moved
    (folder / "config.json").write_text(json.dumps(options))
    return folder


@pytest.fixture
def unfinished(run: Path, tmp_path: Path) -> Path:
    """The same run before its end: in place of model-trained a checkpoint with those weights."""
    folder = tmp_path / "run-0"
    shutil.copytree(run, folder)
    model = load_model(folder / "model-trained")
    held = [
        (make_piece(f"master.{name}", parameter), parameter.detach())
        for name, parameter in model.named_parameters()
    ]
    CheckpointWriter(folder / "checkpoints").save(3, held, {"cursor": {}})
    shutil.rmtree(folder / "model-trained")
    return folder


@pytest.mark.sandbox
def test_a_chat_from_the_command_line_compares_saves_and_plays_a_task(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.json"
    lines = ["sum[3,4]", "/compare", "/temperature 0.7", "/task 1", f"/save {file}"]
    options = ["--max-tokens", "8", "--temperature", "2"]  # random weights say nothing likely
    assert cli.main(["chat", str(run), *options, "--say", *lines]) == 0
    shown = capsys.readouterr().out
    trained, base = shown.split("--- trained ---")[1].split("--- base ---")
    assert trained.split("\n")[1] != base.split("\n")[1], "different weights answer differently"
    first = shown.split("--- trained ---")[0].splitlines()[1]
    assert first.startswith("agent") and trained.split("\n")[1] == first, "the same seed"
    assert "\nwanted " in shown
    saved = json.loads(file.read_text())
    assert saved["replies"][0]["prompt"] == "sum[3,4]"
    assert len(saved["replies"]) == 2, "what was asked to compare is not part of it"
    text = ChatTokenizer.from_folder(run / "model").decode(saved["tokens"])
    assert text.startswith("<usr>sum[3,4]<bot>") and saved["replies"][1]["prompt"] in text


def test_words_that_an_environment_cannot_play_are_told_from_its_tasks(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    game = tmp_path / "game.py"
    game.write_text(
        "import nanorl\n\nclass Game(nanorl.Env):\n    def tasks(self, rng):\n"
        "        return nanorl.Task('sum[3,4]', data={'walls': [rng.random()]})\n"
        "    def step(self, text):\n        return self.done(reward=self.task.data['walls'][0])\n"
    )
    options = ["--max-tokens", "400", "--temperature", "3"]  # so that a turn ends by itself
    words = ["chat", str(run), "--env", str(game), *options, "--say"]
    hint = "it may need a task of its own"
    assert cli.main([*words, "/task 0"]) == 0
    assert hint not in capsys.readouterr().out
    assert cli.main([*words, "sum[3,4]"]) == 0
    shown = capsys.readouterr().out
    assert hint in shown and "KeyError: 'walls'" in shown


def test_a_plain_model_is_talked_to_without_an_environment(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = str(run / "model")
    other = ["--base", str(run / "model-trained"), "--max-tokens", "6"]
    assert cli.main(["chat", model, *other, "--say", "sum[3,4]", "/compare"]) == 0
    shown = capsys.readouterr().out
    assert "--- base ---" in shown and "6 tokens" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("RUN/nothing --say x", "no such folder"),
        ("RUN/model --say x --model base", "is a model, not a run"),
        ("RUN/model --say x --env moon", "--env moon: no env"),
        ("RUN/model --say x --temperature 99", "must be 0 to 10"),
        ("RUN/model --say /task", "has no tasks"),
        ("RUN/model --say /nonsense", "/nonsense: no such command; there are /model"),
    ],
)
def test_mistakes_are_said_in_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    assert cli.main(["chat", *arguments.replace("RUN", str(run)).split()]) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_machine_that_cannot_isolate_is_said_to_be_one(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise SandboxUnavailable("no namespaces", "allow them")

    monkeypatch.setattr("nanorl.options.agent_kit.run_sandbox", refuse)
    assert cli.main(["chat", str(run), "--say", "x"]) == 2
    assert "no namespaces\nhelp: allow them" in capsys.readouterr().err


def test_the_model_of_a_run_that_goes_on_is_its_newest_checkpoint(
    run: Path, unfinished: Path
) -> None:
    saved = find_models(str(unfinished))
    assert "step_00000003" in saved.describe() and "not finished" in saved.describe()
    before = sorted(unfinished.rglob("*"))
    with saved.folder() as folder:
        made, expected = load_file(folder / TOKENS), load_file(run / "model-trained" / TOKENS)
        assert made.keys() == expected.keys()
        assert all(torch.equal(made[name], expected[name]) for name in made)
        assert ChatTokenizer.from_folder(folder).encode("sum[3,4]")
        assert saved.base() == unfinished / "model"
    assert not folder.exists() and sorted(unfinished.rglob("*")) == before
    shutil.rmtree(unfinished / "checkpoints")
    with pytest.raises(ValueError, match="neither a model-trained nor a checkpoint"):
        find_models(str(unfinished))


@pytest.fixture
def server(unfinished: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """The address of `nanorl serve RUN`, and its process."""
    command = [sys.executable, "-m", "nanorl", "serve", str(unfinished), "--port", "0"]
    scratch = unfinished.parent / "scratch"
    scratch.mkdir()
    process = subprocess.Popen(
        [*command, "--threads", "1"], stdout=subprocess.PIPE, text=True,
        env=os.environ | {"TMPDIR": str(scratch)},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        address = next(
            line.split()[2] for line in process.stdout if line.startswith("chat at http")
        )
        yield address, process
    finally:
        process.kill()
        process.wait()


def test_a_run_is_served_by_its_name_and_says_where_the_page_is(
    server: tuple[str, subprocess.Popen[str]],
) -> None:
    openai = pytest.importorskip("openai", reason="needs the openai client")
    address, process = server
    with openai.OpenAI(base_url=f"{address}v1", api_key="none") as client:
        assert [model.id for model in client.models.list()] == ["run-0"]
        answer = client.chat.completions.create(
            model="run-0", messages=[{"role": "user", "content": "sum[3,4]"}], max_tokens=4
        )
        assert answer.usage.completion_tokens <= 4
        assert b"<title>Chat</title>" in client._client.get(address).content
    process.send_signal(signal.SIGINT)
    process.wait(timeout=60)


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, -15), (signal.SIGINT, 130)])
def test_a_server_that_is_stopped_leaves_no_model_behind(
    server: tuple[str, subprocess.Popen[str]], tmp_path: Path, number: int, status: int
) -> None:
    """A checkpoint's is written for it: of a large model, gigabytes with every restart."""
    left = lambda: [one.name for one in (tmp_path / "scratch").glob("nanorl-model-*")]  # noqa: E731
    assert len(left()) == 1
    server[1].send_signal(number)
    assert server[1].wait(timeout=200) == status
    assert not left()


@pytest.mark.parametrize(
    ("given", "expected"),
    [((), {"enable_thinking": False}), (('{"enable_thinking": true}',), {"enable_thinking": True})],
)
def test_a_run_is_served_with_the_template_s_variables_that_it_was_trained_with(
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    given: tuple[str, ...],
    expected: dict[str, bool],
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(run, folder)
    options = json.loads((folder / "config.json").read_text())
    options["agent"]["template_args"] = ["enable_thinking=false"]
    (folder / "config.json").write_text(json.dumps(options))
    served = []
    monkeypatch.setattr(
        "nanoinfer.server.running.run_server", lambda config, about: served.append(config)
    )
    flags = [word for text in given for word in ("--default-chat-template-kwargs", text)]
    assert cli.main(["serve", str(folder), *flags]) == 0
    assert json.loads(served[0].default_chat_template_kwargs) == expected


def stored(run: Path, *rollouts: Rollout) -> None:
    (run / "rollouts.sqlite").unlink(missing_ok=True)
    with RolloutStore(run / "rollouts.sqlite") as store:
        for step, rollout in enumerate(rollouts):
            store.add_group([rollout], step=step)


def rollout(run: Path, name: str, texts: tuple[str, str, str, str], **options: object) -> Rollout:
    """Of prompt, action, observation and answer."""
    tokenizer = ChatTokenizer.from_folder(run / "model")
    parts = [tokenizer.encode(text) for text in texts]
    ends = [sum(len(part) for part in parts[: count + 1]) for count in range(4)]
    mask = [place % 2 for place, part in enumerate(parts) for _ in part]
    given = {"reward": 0.0, "turn_rewards": [0.25, 0.0], "task_id": "sum-1"} | options
    return Rollout(
        group_id=name,
        rollout_id=name,
        tokens=[token for part in parts for token in part],
        loss_mask=mask,
        logps=[-0.5 * each for each in mask],
        versions=[each - 1 for each in mask],
        turn_spans=[
            TurnSpan(action_start=ends[0], action_end=ends[1], observation_end=ends[2]),
            TurnSpan(action_start=ends[2], action_end=ends[3], observation_end=ends[3]),
        ],
        **given,  # type: ignore[arg-type]
    )


def test_stored_rollouts_are_read_turn_by_turn_and_chosen(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = ("sum[3,4]", "<run>print(3+4)</run>", "7", "<ans>7")
    stored(
        run,
        rollout(run, "good", texts, reward=1.0),
        rollout(run, "bad", (*texts[:3], "<ans>8"), task_id="max-2"),
        rollout(run, "broken", texts, status=Status.FAILED),
    )

    def names(*arguments: str) -> list[str]:
        assert cli.main(["view", str(run), "--terminal", *arguments]) == 0
        shown = capsys.readouterr().out
        return re.findall(r"^(\w+)  step \d", shown, re.MULTILINE)

    assert names() == ["good", "bad"]
    assert names("--best") == ["good", "bad"] and names("--worst") == ["bad", "good"]
    assert names("--failed") == ["broken"]
    assert names("--step", "1") == names("--task", "max") == names("--text", r"ans>8\Z") == ["bad"]
    assert names("--text", "nowhere") == []
    assert cli.main(["view", str(run), "--step", "0"]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[1:] == [
        "task   sum[3,4]",
        "agent  <run>print(3+4)</run>",
        "reward 0.25 for this turn",
        "tool   7",
        "agent  <ans>7",
        "reward 0 for this turn",
    ]
    assert "reward 1  right  2 turns" in shown.splitlines()[0]
    assert cli.main(["view", str(run), "--text", "("]) == 2
    assert "is not a regular expression" in capsys.readouterr().err
    assert cli.main(["view", str(run / "model"), "--worst"]) == 2
    assert "is not a run's folder" in capsys.readouterr().err


def test_an_evaluation_is_read_in_the_terminal_too(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "evaluation"
    words = ("eval", str(run), "--num-tasks", "2", "--k", "1", "--out", str(folder))
    assert cli.main(words) == 0
    capsys.readouterr()
    assert cli.main(["view", str(folder), "--best"]) == 0
    shown = capsys.readouterr().out
    assert len(re.findall(r"^eval-\S+  step 0  reward ", shown, re.MULTILINE)) == 2
    assert len(re.findall(r"^task   ", shown, re.MULTILINE)) == 2


def test_a_terminal_obeys_nothing_that_a_model_wrote() -> None:
    assert printable("a\x1b]0;title\x07b\x1b[2Jc\x9bd\ne\tf\r\ng") == "a?]0;title?b?[2Jc?d\ne\tf\ng"
