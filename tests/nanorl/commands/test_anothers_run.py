"""The run of another user, whose folder may be read and not written to: whatever only looks at a
run says what it says to its owner, and leaves nothing there."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from viewer_runs import small_run

from nanorl import cli
from nanorl.commands.serve_page import page_about
from nanorl.inspection.replay.past_run import open_past
from nanorl.run.saved_models import SavedModels, read_run

NOBODY = 65534


@pytest.fixture
def run() -> Iterator[Path]:
    """Not in tmp_path, which only its owner may enter."""
    folder = Path(tempfile.mkdtemp(prefix="anothers-"))
    folder.chmod(0o755)
    (folder / "anybodys").mkdir()
    (folder / "anybodys").chmod(0o777)
    yield small_run(folder / "run")
    shutil.rmtree(folder)


@contextmanager
def somebody_else(run: Path) -> Iterator[None]:
    """Be a user who may not write to the run."""
    if os.geteuid() == 0:
        os.seteuid(NOBODY)
        try:
            yield
        finally:
            os.seteuid(0)
        return
    everything = [run, *run.rglob("*")]
    for path in everything:
        path.chmod(0o555 if path.is_dir() else 0o444)
    yield
    for path in everything:
        path.chmod(0o755)


def files(run: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}


def say(*words: str) -> Callable[[Path, pytest.CaptureFixture[str]], str]:
    """What a command prints about the run, last among its words."""

    def said(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
        status = cli.main([*words, str(run)])
        out, err = capsys.readouterr()
        assert status == 0, err
        return out

    return said


def exported(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    file = run.parent / "anybodys" / "rollouts.jsonl"
    say("export", "--to", "jsonl", "--force", "--out", str(file))(run, capsys)
    return file.read_text()


def replayed(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    with open_past(run) as past:
        return str([(one, past.rollout(one).tokens) for one in past.entries])


def page(run: Path, capsys: pytest.CaptureFixture[str]) -> str:
    saved = SavedModels(name=str(run), place=run / "model-trained", run=read_run(run))
    return str(page_about(saved, run / "model-trained"))


@pytest.mark.parametrize(
    "look",
    [
        say("view", "--terminal"),
        say("store"),
        say("store", "--where", "success"),
        exported,
        replayed,
        page,
    ],
    ids=["view", "store", "slice", "export", "replay", "page"],
)
def test_who_may_read_a_run_is_told_what_its_owner_is_told(
    look: Callable[[Path, pytest.CaptureFixture[str]], str],
    run: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    wanted = look(run, capsys)
    before = files(run)
    with somebody_else(run):
        assert look(run, capsys) == wanted
    assert files(run) == before
