"""The notebooks run from the first cell to the last, and keep no outputs in the repository."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_without_outputs(notebook: Path) -> None:
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    assert not [cell for cell in cells if cell.get("outputs") or cell.get("execution_count")]
    assert cells[0]["cell_type"] == "markdown"


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_to_its_end(
    notebook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbclient = pytest.importorskip(
        "nbclient", reason="nbclient runs notebooks: the extra `notebooks`"
    )
    nbformat = pytest.importorskip(
        "nbformat", reason="nbformat reads notebooks: the extra `notebooks`"
    )
    pytest.importorskip("ipykernel", reason="ipykernel runs their cells: the extra `notebooks`")
    (tmp_path / "notebooks").mkdir()
    (tmp_path / "scripts").symlink_to(ROOT / "scripts")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    content = nbformat.read(notebook, as_version=4)
    where = {"metadata": {"path": str(tmp_path / "notebooks")}}
    nbclient.NotebookClient(content, timeout=120, kernel_name="python3", resources=where).execute()
    shown = [out for cell in content.cells for out in cell.get("outputs", [])]
    assert not [out for out in shown if out.output_type == "error"]
    if "nanorl.rehearse" in notebook.read_text("utf-8"):
        assert any("<table>" in out.get("data", {}).get("text/html", "") for out in shown)
