"""Stored rollouts of real runs come out equal to the last bit, and what was changed is named.

The programs of this file's environment print their interpreter and a file of the task, whatever the
policy says, so that an untrained model tells what it ran on.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import sys
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from forked_runs import SMALL, RunProcess, Slow
from safetensors.torch import load_file, save_file

from nanorl.cli import main
from nanorl.inspection.viewer.runs import find_runs
from nanorl.observability.store import RolloutStore
from nanorl.observability.store.rows import Filed, to_rows

pytestmark = pytest.mark.sandbox
ROOM = "/opt" if os.geteuid() == 0 else str(Path.home())
"""Where the sandbox sees an interpreter, and other users may read it."""

MINE = '''
import nanorl
from neighbour import SCALE

PROGRAM = "import sys; print(sys.executable, open('data.txt').read())"

class Calls:
    """Whatever the policy says is a call of the program."""
    name = "calls"
    def read(self, text):
        return [nanorl.ToolCall("python", {"code": PROGRAM})]
    def write(self, call):
        return "!" + call.name
    def describe(self, tools):
        return ""
    def observation(self, results):
        return [{"role": "user", "content": " ".join(results)}]

class Probe(nanorl.Env):
    tools = (nanorl.python,)
    parser = Calls()
    def teacher(self, observations, rng):
        return nanorl.ToolCall("python", {"code": PROGRAM})
    def score(self, transcript):
        return nanorl.Score(len(set(transcript.text)) / SCALE, parts={"letters": 1.0})

async def two_turns(episode):
    await episode.start()
    for _ in range(2):
        text = await episode.turn()
        step = await episode.step(text or "")
        if step.is_done or not episode.observe(step):
            return
'''
OPTIONS = """--preset tiny --dtype fp32 --threads 1 --tool.workers 1 --env-workers 0
    --warm-start.steps 1 --warm-start.traces-per-step 2 --save-every 2 --keep-checkpoints 1
    --rl.steps 3 --rl.tasks-per-step 2 --rl.group-size 2 --agent.max-turn-tokens 6
    --agent.max-turns 3 --evaluation.num-tasks 2 --evaluation.num-tasks-untrained 1
    --evaluation.num-tasks-no-tool 1"""


class Probed:
    """A run of that environment in a folder that every user can read, and what it stands on."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "run"
        self.mine, self.tasks, self.python = folder / "mine.py", folder / "t.jsonl", folder / "py"

    def make(self) -> None:
        self.mine.write_text(MINE)
        (self.folder / "neighbour.py").write_text("SCALE = 64\n")
        self.write_tasks("12")
        self.python.symlink_to(self.interpreter("one"))
        words = f"""train {OPTIONS} --env {self.mine}:Probe --agent {self.mine}:two_turns
            --tasks {self.tasks} --tool.python {self.python} --out {self.run}"""
        assert main(words.split()) == 0

    def write_tasks(self, first: str) -> None:
        contents = [first, "345", "6", "7"]
        rows = [
            {"prompt": f"p{i}", "answer": "1", "task_id": f"t{i}", "files": {"data.txt": text},
             "split": "train" if i < 2 else "heldout"}
            for i, text in enumerate(contents)
        ]  # fmt: skip
        self.tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def interpreter(self, name: str) -> Path:
        """A Python of its own: the system's, and a few bytes after its end."""
        file = self.folder / f"python-{name}"
        file.write_bytes(Path("/usr/bin/python3").resolve().read_bytes() + name.encode())
        file.chmod(0o755)
        return file

    def replay(self, capsys: pytest.CaptureFixture[str], words: str = "") -> dict:
        capsys.readouterr()
        status = main(["replay", str(self.run), *words.split(), "--as-json"])
        said = capsys.readouterr()
        assert status in (0, 1), said.err
        result = json.loads(said.out)
        assert (status == 0) == (result["num_equal"] == result["num_rollouts"])
        return result


@pytest.fixture(scope="module")
def made() -> Iterator[Probed]:
    folder = Path(tempfile.mkdtemp(prefix="replay-", dir=ROOM))
    folder.chmod(0o755)
    try:
        probed = Probed(folder)
        probed.make()
        yield probed
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def probed(made: Probed) -> Iterator[Probed]:
    """The run as it was made, whatever a test does to it."""
    kept = made.folder / "kept"
    shutil.copytree(made.run, kept)
    try:
        yield made
    finally:
        shutil.rmtree(made.run)
        kept.rename(made.run)
        made.mine.write_text(MINE)
        made.write_tasks("12")


def first(result: dict) -> dict:
    return next(one for one in result["rollouts"] if not one["is_equal"])


def causes(rollout: dict) -> list[str]:
    return [one["name"] for one in rollout["causes"]]


def test_every_rollout_of_a_run_comes_out_equal(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    result = probed.replay(capsys)
    # untrained, before, 3 steps of 4, after, without the tool
    assert result["num_rollouts"] == 1 + 2 + 3 * 4 + 2 + 1
    assert result["num_equal"] == result["num_rollouts"], first(result)
    assert result["weights"] == {str(version): "equal" for version in range(4)}
    assert result["changed"] == {} and result["notes"] == []
    # The first checkpoint of RL is kept beside the newest, so every version can be made again.
    assert len(list((probed.run / "start").glob("step_*"))) == 1
    assert len(list((probed.run / "checkpoints").glob("step_*"))) == 1


def alter(run: Path, rollout_id: str, column: str, place: int, change: float) -> None:
    """Change one number of a stored rollout, behind the back of the store."""
    name = "evaluations" if rollout_id.startswith("eval") else "rollouts"
    with RolloutStore(run / f"{name}.sqlite") as store:
        rollout = store.get(rollout_id)
    getattr(rollout, column)[place] += change
    filed = Filed(step=0, version=None, kind="", worth=0)  # the content holds none of them
    content = to_rows([rollout], [filed])[0].content
    with closing(sqlite3.connect(run / f"{name}.sqlite")) as db, db:
        sql = "SELECT id FROM rollouts WHERE rollout_id = ?"
        number = db.execute(sql, (rollout_id,)).fetchone()[0]
        changed = db.execute("UPDATE contents SET content = ? WHERE id = ?", (content, number))
        assert changed.rowcount == 1


def place_of_action(run: Path, rollout_id: str, number: int) -> int:
    """The position of its sampled token of that number."""
    name = "evaluations" if rollout_id.startswith("eval") else "rollouts"
    with RolloutStore(run / f"{name}.sqlite") as store:
        mask = store.get(rollout_id).loss_mask
    return [place for place, is_action in enumerate(mask) if is_action][number]


def test_a_log_prob_that_was_altered_is_told_from_the_trainers_own(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    with RolloutStore(probed.run / "rollouts.sqlite") as store:
        trained = next(
            entry.rollout_id
            for entry in store.entries(step=0)
            if "trained_logp" in store.token_stats(entry.rollout_id).values
        )
    token = place_of_action(probed.run, trained, 3)
    alter(probed.run, trained, "logps", token, 2**-20)
    result = probed.replay(capsys, trained)
    (one,) = result["rollouts"]
    assert one["difference"]["kind"] == "logp" and one["difference"]["token"] == token
    then, now = float(one["difference"]["then"]), float(one["difference"]["now"])
    assert then - now == pytest.approx(2**-20, rel=1e-3)
    assert causes(one) == ["store"] and repr(now) in one["causes"][0]["detail"]
    # What was made of it is of other weights from then on, and the replay says of which.
    weights = probed.replay(capsys, "--from-step 0 --to-step 1")["weights"]
    assert weights["0"] == "equal" and "made again by the stored rollouts of step 0" in weights["1"]


def test_where_nothing_recorded_differs_that_is_said(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    rollout_id = "eval-before-0"  # no trainer has seen its tokens
    alter(probed.run, rollout_id, "logps", place_of_action(probed.run, rollout_id, 0), 0.25)
    (one,) = probed.replay(capsys, rollout_id)["rollouts"]
    assert not one["is_equal"] and one["causes"] == []
    assert main(["replay", str(probed.run), rollout_id]) == 1
    assert "why   nothing that is recorded differs" in capsys.readouterr().out


def test_a_token_that_was_altered_is_known_by_the_content_hash(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    token = place_of_action(probed.run, "s0-g0-m0", 2)
    alter(probed.run, "s0-g0-m0", "tokens", token, 1)
    (one,) = probed.replay(capsys, "s0-g0-m0")["rollouts"]
    assert one["difference"]["kind"] == "token" and one["difference"]["token"] == token
    assert causes(one) == ["store"] and "content hash" in one["causes"][0]["detail"]


def test_a_tasks_file_that_was_changed_is_named(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    probed.write_tasks("13")
    result = probed.replay(capsys, "--phase rl")
    differing = [one for one in result["rollouts"] if not one["is_equal"]]
    assert 0 < len(differing) < len(result["rollouts"]), "the other task is as it was"
    for one in differing:
        assert one["difference"]["kind"] == "observation" and one["difference"]["turn"] == 0
        assert causes(one) == ["task"]
        assert one["causes"][0]["detail"] == "files['data.txt']: '12' -> '13'"
    stored = probed.replay(capsys, "--phase rl --stored-tasks")
    assert stored["num_equal"] == stored["num_rollouts"]


def test_stored_tasks_are_played_when_their_file_is_gone(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    probed.tasks.unlink()
    result = probed.replay(capsys, "--from-step 1 --stored-tasks")
    assert result["num_equal"] == result["num_rollouts"] == 4
    assert main(["replay", str(probed.run), "--from-step", "1"]) == 2
    assert str(probed.tasks) in capsys.readouterr().err


def test_another_interpreter_in_the_sandbox_is_named(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    then = probed.python.resolve()
    probed.python.unlink()
    probed.python.symlink_to(probed.interpreter("two"))
    try:
        result = probed.replay(capsys, "--from-step 0")
    finally:
        probed.python.unlink()
        probed.python.symlink_to(then)
    one = first(result)
    assert one["difference"]["kind"] == "observation"
    assert causes(one)[0] == "sandbox"
    detail = one["causes"][0]["detail"]
    assert "python-one" in detail and "python-two" in detail and "binary" in detail
    assert "version" not in detail, "it is the same Python but for its name"


def test_an_environments_file_that_was_changed_is_named(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    forget(probed.folder)
    probed.mine.write_text(MINE.replace('"letters": 1.0', '"letters": 2.0'))
    try:
        result = probed.replay(capsys, "--from-step 0")
    finally:
        forget(probed.folder)
    one = first(result)
    assert one["difference"]["kind"] == "reward"
    assert one["difference"]["then"] == "reward/letters 1.0"
    assert causes(one) == ["environment"] and str(probed.mine) in one["causes"][0]["detail"]


def forget(folder: Path) -> None:
    """Have the user's modules imported anew, as in another process."""
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]


def test_one_weight_that_was_changed_is_named_with_its_tensor(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    (checkpoint,) = (probed.run / "start").glob("step_*")
    change_weight(checkpoint, "master.norm")
    result = probed.replay(capsys, "--from-step 0 --to-step 1")
    assert "model.norm.weight the first; they were read from a checkpoint" in result["weights"]["0"]
    one = first(result)
    assert one["difference"]["kind"] in ("logp", "token")
    assert causes(one) == ["weights"]


def change_weight(checkpoint: Path, name: str) -> None:
    """One number of a checkpoint's tensor, by one unit in the last place; checksums are right."""
    file = checkpoint / "rank_00000.safetensors"
    tensors = load_file(file)
    names = [one for one in tensors if one.startswith(name)]
    assert len(names) == 1, sorted(tensors)
    value = tensors[names[0]].view(-1)
    value[0] = torch.nextafter(value[0], value.new_tensor(9.0))
    save_file(tensors, file)
    outer = json.loads((checkpoint / "meta.json").read_text())
    record = json.loads(outer["body"])
    content = file.read_bytes()
    record["files"][file.name] = {"bytes": len(content), "crc32": zlib.crc32(content)}
    body = json.dumps(record)
    text = json.dumps({"crc32": zlib.crc32(body.encode()), "body": body})
    (checkpoint / "meta.json").write_text(text)


def test_other_code_and_another_machine_are_named_where_they_can_matter(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    with RolloutStore(probed.run / "rollouts.sqlite") as store:
        manifest = store.facts("start/")["start/0"]
        manifest["code"] |= {"source": "older", "commit": "0123"}
        manifest["packages"]["torch"] = "2.0"
        store.put_fact("start/0", manifest)
    result = probed.replay(capsys, "eval-after-0")
    assert result["num_equal"] == 1, "what differs need not matter"
    assert result["changed"].keys() == {"code", "packages"}
    assert result["changed"]["packages"].startswith("torch 2.0 -> ")
    alter(probed.run, "eval-after-0", "logps", place_of_action(probed.run, "eval-after-0", 0), 0.5)
    assert causes(first(probed.replay(capsys, "eval-after-0"))) == ["packages", "code"]


def test_a_run_without_its_first_checkpoint_says_what_is_missing(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(probed.run / "start")
    assert main(["replay", str(probed.run), "--from-step", "0"]) == 2
    said = capsys.readouterr().err
    assert "no checkpoint at or before version 0 (there are: 3)" in said and "keep-start" in said
    result = probed.replay(capsys, "--phase after")  # which the newest checkpoint is enough for
    assert result["num_equal"] == result["num_rollouts"] == 2


def test_a_run_that_was_killed_and_resumed_with_other_options_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    slow = Slow(update=3 + 3, seconds=60.0, marker=tmp_path / "marker")
    options = (*SMALL, "--save-every", "1", "--keep-checkpoints", "1", "--rl.steps", "4")
    process = RunProcess(tmp_path / "log", *options, "--out", str(run), slow=slow)
    process.await_file(slow.marker)  # in the third of the RL steps, whose rollouts are not stored
    process.signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    changed = ("--rl.lr", "1e-3", "--rl.temperature", "0.8", "--agent.max-turn-tokens", "9")
    assert main(["train", "--resume", "--out", str(run), *changed]) == 0
    capsys.readouterr()
    assert main(["replay", str(run), "--num", "0", "--as-json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_equal"] == result["num_rollouts"] == 2 + 4 * 4 + 2 + 1
    assert result["weights"] == {str(version): "equal" for version in range(5)}
    # The last step alone: its weights come of steps under the options before and after.
    assert main(["replay", str(run), "--from-step", "3"]) == 0


def test_weights_are_not_made_again_of_a_part_of_a_step(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest was let go (--keep-rollout-mb), the least valuable first."""
    with RolloutStore(probed.run / "rollouts.sqlite") as store:
        used = store.stats().used_bytes
        while len(store) == 3 * 4:
            used -= 1024
            store.expire(max_bytes=used)
        lost = [step for step in range(3) if len(store.entries(step=step)) < 4]
    assert 0 < len(lost) < 3
    for step in lost:
        words = ["replay", str(probed.run), "--from-step", str(step + 1)]
        assert main(words) == 2
        assert f"step {step} are not all stored any more" in capsys.readouterr().err


def test_what_an_evaluation_sampled_comes_out_equal_and_another_model_is_named(
    probed: Probed, capsys: pytest.CaptureFixture[str]
) -> None:
    out = probed.folder / "evaluation"
    words = ["eval", str(probed.run), "--k", "3", "--num-tasks", "2", "--out", str(out)]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["replay", str(out), "--as-json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_equal"] == result["num_rollouts"] == 6
    file = probed.run / "model-trained" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] *= 2
    save_file(tensors, file, {"format": "pt"})
    assert main(["replay", str(out), "--as-json"]) == 1
    one = first(json.loads(capsys.readouterr().out))
    assert one["difference"]["kind"] in ("logp", "token") and causes(one) == ["model"]
    shutil.rmtree(out)


def test_an_evaluation_of_a_checkpoint_is_replayed_by_that_checkpoint(
    probed: Probed, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its model's folder is gone as soon as the evaluation is over."""
    out = tmp_path / "evaluation"
    words = ["eval", f"{probed.run}:before", "--num-tasks", "2", "--out", str(out)]
    assert main(words) == 0
    capsys.readouterr()
    assert main(["replay", str(out), "--as-json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_equal"] == result["num_rollouts"] == 2
    assert result["changed"] == {}
    (viewed,) = find_runs([out]).values()
    with viewed.open("evaluation") as store:
        rollout = store.get("eval-model-0")
    (shown,) = find_runs([probed.run]).values()
    assert viewed.decode(rollout.tokens) == shown.decode(rollout.tokens)


def test_an_evaluation_is_replayed_from_its_own_store(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And not from the one that its run's rollouts of RL are kept in."""
    run, out = tmp_path / "run", tmp_path / "evaluation"
    store = ("--store", str(tmp_path / "elsewhere.sqlite"))
    assert main(["train", *SMALL, *store, "--out", str(run)]) == 0
    assert main(["eval", str(run), "--num-tasks", "2", "--out", str(out)]) == 0
    capsys.readouterr()
    assert main(["replay", str(out), "--as-json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_equal"] == result["num_rollouts"] == 2
    assert main(["replay", str(run), "--from-step", "0", "--as-json"]) == 0


BREAKS = """
import zlib
def score(text, task):
    if zlib.crc32(text.encode()) % 5 == 0:
        raise RuntimeError("broken")
    return zlib.crc32(text.encode()) % 8 / 7
"""


def test_groups_that_a_step_was_made_without_are_left_out_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, reward = tmp_path / "run", tmp_path / "breaks.py"
    reward.write_text(BREAKS)
    options = f"--reward {reward} --rl.max-retries 0 --rl.batch.spoilt replace"
    assert main(["train", *SMALL, *options.split(), "--out", str(run)]) == 0
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    assert sum(row["groups_spoilt"] for row in rows) > 0
    capsys.readouterr()
    assert main(["replay", str(run), "--num", "0", "--as-json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_equal"] == result["num_rollouts"]
    assert result["weights"] == {str(version): "equal" for version in range(4)}


def test_steps_of_an_averaged_teacher_are_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From RL's first checkpoint, which has no average yet, and from one that has."""
    run = tmp_path / "run"
    options = """--algorithm sdft --rl.algorithm.hindsight-teacher average --rl.steps 4
        --save-every 2 --keep-checkpoints 3"""
    assert main(["train", *SMALL, *options.split(), "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["replay", str(run), "--num", "0", "--as-json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_equal"] == result["num_rollouts"] == 2 + 4 * 4 + 2 + 1
    assert result["weights"] == {str(version): "equal" for version in range(5)}


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_rollouts_of_several_versions_are_scored_by_each(
    quantization: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = (
        *SMALL,
        "--engine.quantization",
        quantization,
        "--rl.max-staleness",
        "2",
        "--rl.steps",
        "8",
        "--agent.max-turn-tokens",
        "64",
    )
    assert main(["train", *options, "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["replay", str(run), "--phase", "rl", "--num", "0", "--as-json"]) == 0
    result = json.loads(capsys.readouterr().out)
    scored = [one for one in result["rollouts"] if one["is_scored"]]
    assert scored, "no weights came while a rollout was played"
    assert result["num_equal"] == result["num_rollouts"] == 8 * 4
    # The scores are of this replay and not the stored ones again.
    alter(
        run, scored[0]["rollout_id"], "logps", place_of_action(run, scored[0]["rollout_id"], 1), 0.5
    )
    assert main(["replay", str(run), scored[0]["rollout_id"], "--as-json"]) == 1
    (one,) = json.loads(capsys.readouterr().out)["rollouts"]
    assert one["difference"]["kind"] == "logp"


def test_log_probs_over_kept_caches_are_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = "--engine.in-flight keep --rl.max-staleness 2 --rl.steps 8 --agent.max-turn-tokens 64"
    assert main(["train", *SMALL, *options.split(), "--out", str(run)]) == 0
    with RolloutStore(run / "rollouts.sqlite") as store:
        rollouts = [store.get(entry.rollout_id) for entry in store.entries()]
    num_old = sum(one.metrics.get("old_cache_tokens", 0) > 0 for one in rollouts)
    assert num_old, "no weights came while a rollout was played"
    capsys.readouterr()
    assert main(["replay", str(run), "--phase", "rl", "--num", "0", "--as-json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_equal"] == result["num_rollouts"] == 8 * 4
    (note,) = [note for note in result["notes"] if "older weights" in note]
    assert note.startswith(f"{num_old} rollouts")


@pytest.mark.slow
def test_a_run_of_two_replicas_in_processes_replays_in_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    options = (*SMALL, "--cluster.backend", "local", "--rollout.replicas", "2")
    assert main(["train", *options, "--out", str(run)]) == 0
    capsys.readouterr()
    assert main(["replay", str(run), "--num", "0", "--as-json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["num_equal"] == result["num_rollouts"] == 2 + 3 * 4 + 2 + 1
    assert result["weights"] == {str(version): "equal" for version in range(4)}


@pytest.mark.parametrize("algorithm", ["--algorithm ppo", "--algorithm grpo --rl.replay.share 0.5"])
def test_a_replay_leaves_the_run_as_it_is(
    algorithm: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are made again from older checkpoints, beside which the newer ones stay."""
    run = tmp_path / "run"
    options = (*SMALL, *algorithm.split(), "--save-every", "1", "--keep-checkpoints", "3")
    assert main(["train", *options, "--out", str(run)]) == 0
    before = contents(run)
    assert any("critic/" in name for name in before) == ("ppo" in algorithm)
    capsys.readouterr()
    for _ in range(2):
        assert main(["replay", str(run), "--num", "0", "--as-json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["num_equal"] == result["num_rollouts"] == 2 + 3 * 4 + 2 + 1
        assert contents(run) == before


def contents(run: Path) -> dict[str, int]:
    """A sum of every file but the databases, which take in what was last written to them."""
    files = (file for file in run.rglob("*") if file.is_file() and ".sqlite" not in file.name)
    return {str(file.relative_to(run)): zlib.crc32(file.read_bytes()) for file in files}
