"""Kills in the middle of a game with pictures, between its first turn and its third: a run goes on
and ends with the bits of one that nobody disturbed, and the first picture is still attended to."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from forked_runs import ROOT, RunProcess
from paced_run import Pace
from run_outcomes import differences
from seeing_options import NUM_ROLLOUTS, SEEING
from test_faults import LIMIT_S, await_steps, await_true, paced

from nanoengine.formats.hf import load_model
from nanoengine.heads.scorer import Scorer
from nanoengine.packing import Sample
from nanorl.cli import main
from nanorl.distributed.roles.give_sight import give_sight
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model
from nanorl.observability.store import RolloutStore
from nanorl.types import Rollout

sys.path.insert(0, str(ROOT / "scripts"))
try:
    from fault_run import SCORERS, DisturbedRun, stored_rollouts, weights_digest
    from signal_run import classified
finally:
    sys.path.pop(0)

ALL_ROLES = (
    *("environment host", "collector", "replica", "trainer", "store", "reference", "critic"),
    "fork server",
)
CLUSTER = (
    *("--cluster.backend", "local", "--rollout.replicas", "2", "--cluster.heartbeat-s", "0.3"),
    *("--cluster.hang-s", "60", "--cluster.start-s", "120", "--monitor.restarts", "30"),
    *("--env-workers", "1", "--env-deadline-s", "300"),
)


class Game:
    """The file that holds all games at their second turn for as long as it is there."""

    def __init__(self, folder: Path) -> None:
        self.file, self._held = folder / "hold", folder / "hold.held"

    @property
    def arguments(self) -> tuple[str, ...]:
        return "--env-args", f"hold={self.file}"

    def kill(self, run: DisturbedRun, kind: str, go_on: Callable[[], None] = lambda: None) -> None:
        """Kill a process of that kind as soon as a game is held, and let games go on. `go_on` has a
        run make the step after which the next games begin, where it waits for that."""
        step = run.step()
        self._held.unlink(missing_ok=True)
        self.file.touch()
        go_on()
        await_true(run, self._held.exists)
        processes = [p for name, p in classified(run.driver.pid) if name == kind]
        assert processes, (kind, [name for name, _ in classified(run.driver.pid)])
        os.kill(processes[0].pid, signal.SIGKILL)
        self.file.unlink()
        if kind != "driver":
            await_true(run, lambda: run.step() > step)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision_model(tmp_path_factory.mktemp("seeing") / "model")


def calm_run(folder: Path, *options: str) -> Path:
    """A run of one process that nobody disturbs."""
    run = RunProcess(folder / "calm.log", *options, "--out", str(folder / "calm"))
    assert run.wait(LIMIT_S) == 0, run.output()
    return folder / "calm"


def logps(model: Path, run: Path, rollout: Rollout, is_hidden: bool) -> list[float]:
    """Of the tokens of the last turn, by the trained model; the first picture may be grey."""
    seeing = load_model(run / "model-trained")
    give_sight(seeing, model, run / "pictures")
    store, (first, *others) = seeing.sight._pixels, rollout.images
    if is_hidden:
        first = replace(
            first,
            **{
                name: getattr(
                    store.spans(store.grey(first.sha256), range(first.start, first.end))[0], name
                )
                for name in ("sha256", "key")
            },
        )
    begin = rollout.images[-1].end
    sample = Sample(tokens=rollout.tokens, loss_mask=rollout.loss_mask, images=(first, *others))
    (found,) = Scorer(seeing).forward_logprobs([sample])
    return [
        float(value)
        for value, counts in zip(found[begin:], rollout.loss_mask[begin:], strict=True)
        if counts
    ]


def check_attention(model: Path, run: Path) -> None:
    """What is said in the third turn of the last step depends on the picture of the first."""
    with RolloutStore(run / "rollouts.sqlite", is_read_only=True) as store:
        played = [one for one in store.query() if len(one.images) == 3]
    assert len(played) > NUM_ROLLOUTS
    shown, hidden = (logps(model, run, played[-1], is_hidden) for is_hidden in (False, True))
    assert shown and all(abs(a - b) > 1e-6 for a, b in zip(shown, hidden, strict=True))


def check_replay(run: Path, num_rollouts: int, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stored rollout, once, to the bit."""
    capsys.readouterr()
    assert main(["replay", str(run), "--phase", "rl", "--num", "0", "--as-json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert [one["difference"] for one in told["rollouts"]] == [None] * num_rollouts


@pytest.mark.slow
def test_a_driver_that_is_killed_within_a_game_goes_on_with_the_same_bits(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, game, pace = tmp_path / "run", Game(tmp_path), Pace(tmp_path / "pace")
    options = (*SEEING, "--dtype", "bf16", "--keep-start", "--env-workers", "1", *game.arguments)
    options = (*options, "--model", str(model))
    pace.allow(0)
    with paced(out, pace, *options) as run:
        await_steps(run, pace, 1)
        game.kill(run, "driver", go_on=lambda: pace.allow(2))
        run.wait(LIMIT_S)
    before = {file.name for file in (out / "pictures").iterdir()}
    with DisturbedRun(out, ["--resume", "--out", str(out)]) as run:
        assert run.wait(LIMIT_S) == 0, run.output()
    assert differences(out, calm_run(tmp_path, *options)) == []
    assert before <= {file.name for file in (out / "pictures").iterdir()}
    assert not list((out / "pictures").glob(".new-*"))
    check_attention(model, out)
    check_replay(out, 3 * NUM_ROLLOUTS, capsys)


@pytest.mark.rare
@pytest.mark.timeout(1800)
def test_any_role_may_die_within_a_game(model: Path, tmp_path: Path) -> None:
    out, game = tmp_path / "run", Game(tmp_path)
    options = (
        *(*SEEING, "--dtype", "bf16", *SCORERS["both"], "--model", str(model), *game.arguments),
        *("--rl.steps", str(len(ALL_ROLES) + 3)),
    )
    with DisturbedRun(out, [*options, *CLUSTER, "--out", str(out)]) as run:
        await_true(run, lambda: run.step() >= 1)
        for role in ALL_ROLES:
            game.kill(run, role)
        assert run.wait(LIMIT_S) == 0, run.output()
        assert not any(run.leftovers().values()), run.leftovers()
    calm = calm_run(tmp_path, *options)
    assert weights_digest(out) == weights_digest(calm)
    # a group whose environment died is kept as failed, too, and played again
    stored, wanted = stored_rollouts(out), stored_rollouts(calm)
    assert {name: stored.get(name) for name in wanted} == wanted
    assert all("failed" in name for name in stored.keys() - wanted.keys())
    check_attention(model, out)
