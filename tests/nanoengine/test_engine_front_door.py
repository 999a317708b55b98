"""`from nanoengine import ...`: every name resolves where a type checker looks, and costs nothing
before it is used."""

from __future__ import annotations

import ast
import math
import subprocess
import sys
from pathlib import Path

import pytest

import nanoengine

ROOT = Path(__file__).resolve().parents[2]


def test_the_names_for_type_checkers_are_the_names_at_run_time() -> None:
    tree = ast.parse((ROOT / "nanoengine" / "__init__.py").read_text())
    (checked,) = [node for node in tree.body if isinstance(node, ast.If)]
    homes = {
        alias.name: node.module
        for node in checked.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert homes == {name: f"nanoengine.{home}" for name, home in nanoengine._HOMES.items()}
    assert sorted(homes) == sorted(nanoengine.__all__)
    for name, home in homes.items():
        found = getattr(nanoengine, name)
        assert getattr(found, "__module__", home) == home, name


def test_importing_the_package_imports_nothing_else() -> None:
    code = "import nanoengine, sys; print({'torch', 'kernels', 'nanorl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


def test_the_example_in_the_docstring_takes_a_step(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from nanoengine import ModelConfig, Transformer, save_model

    config = ModelConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=8, tie_word_embeddings=True,
    )  # fmt: skip
    model = Transformer(config)
    model.init_weights(0)
    save_model(model, tmp_path)
    text = nanoengine.__doc__ or ""
    lines = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    code = "\n".join(lines).replace("path/to/a/hugging-face-folder", str(tmp_path))
    exec(compile(code, "docstring", "exec"), {})
    result = ast.literal_eval(capsys.readouterr().out)
    # Of 16 tokens a fresh model finds each about equally likely, and something was learned.
    assert abs(result["loss"] - math.log(16)) < 0.2 and result["grad_norm"] > 0
