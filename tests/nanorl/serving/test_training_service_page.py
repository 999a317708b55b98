"""docs/training_service.md: its command starts a service, its code runs against it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_text import save_folder

pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("tinker", reason="needs the package tinker, the official client")

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "training_service.md").read_text("utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL)


def test_the_page_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path / "model")
    bash, export = blocks("bash")
    command = next(line for line in bash.splitlines() if line.startswith("python -m nanorl"))
    command = command.replace("smollm2", str(tmp_path / "model")).replace("8000", "0")
    words = [sys.executable, *shlex.split(command)[1:], "--threads", "1"]
    words += ["--checkpoints", str(tmp_path / "checkpoints"), "--infer.num-blocks", "64"]
    service = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert service.stdout is not None
        line = next(line for line in service.stdout if line.startswith("training service at "))
        export = export.replace("runs/training-service", str(tmp_path / "checkpoints"))
        shell = ["bash", "-c", f"{export.strip()}; echo $TINKER_API_KEY"]
        key = subprocess.run(shell, capture_output=True, text=True, check=True).stdout.strip()
        monkeypatch.setenv("TINKER_API_KEY", key)
        names: dict[str, Any] = {}
        for code in blocks("python"):
            code = code.replace("http://127.0.0.1:8000", line.split()[3])
            exec(code.replace('"smollm2"', repr(str(tmp_path / "model"))), names)
    finally:
        service.terminate()
        service.wait(timeout=60)
    losses = [float(word) for word in capsys.readouterr().out.split()]
    assert len(losses) == 3 and losses[2] < losses[0]
    assert (tmp_path / "checkpoints" / names["path"].removeprefix("tinker://")).is_dir()
    assert names["again"].model_id != names["model"].model_id
