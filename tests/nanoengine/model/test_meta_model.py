"""A model on the device meta, of which only names and shapes are asked, costs nothing beside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from nanoengine.formats.hf import hf_views
from nanoengine.model.transformer import Transformer
import tiny_shapes
model = Transformer(tiny_shapes.{shape}, device="meta")
assert sum(one.numel() for one in model.parameters()) > 1000 and hf_views(model)
loaded = [name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules]
sys.exit(f"loaded: {{loaded}}" if loaded else 0)
"""


@pytest.mark.parametrize("shape", ["DENSE", "MOE"])
def test_it_loads_no_compiler_and_leaves_no_folder_in_tmpdir(tmp_path: Path, shape: str) -> None:
    """Importing TorchDynamo makes torchinductor_USER there."""
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests/nanoengine")])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(shape=shape)],
        env=os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []
