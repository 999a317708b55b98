"""The folder of the tiny model: reproducible, readable by transformers, the tokens it claims."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from nanorl.envs.tasks.family import generators_of
from nanorl.envs.tasks.source import GeneratedTasks
from nanorl.envs.tasks.tiny import tiny_family
from nanorl.envs.tasks.tiny_model import build_tiny_model, train_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_model(tmp_path_factory.mktemp("tiny"), seed=0)


def digests(folder: Path) -> dict[str, str]:
    return {f.name: hashlib.sha256(f.read_bytes()).hexdigest() for f in folder.iterdir()}


def test_the_folder_is_the_same_byte_for_byte_in_every_process(
    folder: Path, tmp_path: Path
) -> None:
    program = (
        "import sys; from nanorl.envs.tasks.tiny_model import build_tiny_model as b; b(sys.argv[1])"
    )
    for hash_seed in ("1", "2"):
        subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / hash_seed)],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(Path(__file__).parents[3])},
            check=True,
        )
        assert digests(tmp_path / hash_seed) == digests(folder)


def test_another_seed_changes_the_weights_alone(folder: Path, tmp_path: Path) -> None:
    other = digests(build_tiny_model(tmp_path, seed=1))
    changed = {name for name, digest in digests(folder).items() if digest != other[name]}
    assert changed == {"model.safetensors"}


def test_transformers_loads_the_folder_and_finds_every_weight(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder, output_loading_info=True
    )
    assert type(model).__name__ == "Qwen3ForCausalLM"
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert sum(p.numel() for p in model.parameters()) == 656_448  # 512·128 + 3·196_928 + 128
    with torch.no_grad():
        loss = model(input_ids=(ids := torch.arange(9, 109)[None]), labels=ids).loss
    assert abs(loss.item() - 6.24) < 0.2  # ln 512: it knows nothing


def test_weights_that_write_the_residual_are_smaller(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    std = {name: w.std().item() for name, w in weights.items() if w.dim() == 2}
    for name, value in std.items():
        writes = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert value == pytest.approx(0.02 / 6**0.5 if writes else 0.02, rel=0.05)


def test_numbers_below_100_are_one_token_wherever_they_stand(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for n in range(10, 100):
        assert tokenizer.encode(f"[{n},{n},{n}{n}]").tokens == [
            "[", f"{n}", f",{n}", f",{n}", f"{n}", "]",
        ]  # fmt: skip


def test_arguments_are_the_same_tokens_in_question_and_program(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    for problem in GeneratedTasks(generators_of([tiny_family()]), seed=0).batch(0, 190):
        opening = '"' if '"' in problem.prompt else "[" if "[" in problem.prompt else "("
        closing = {'"': '"', "[": "]", "(": ")"}[opening]
        start = problem.prompt.index(
            opening, problem.prompt.index("c") if "*" in problem.prompt else 0
        )
        data = problem.prompt[start + 1 : problem.prompt.index(closing, start + 1)]
        wanted = tokenizer.encode(data).tokens
        for text in (problem.prompt, problem.solutions[0][-1 if opening == "(" else 0]):
            tokens = tokenizer.encode(text).tokens
            runs = [tokens[i : i + len(wanted)] for i in range(len(tokens))]
            assert wanted in runs, (text, wanted)


def test_the_tokenizer_loses_nothing(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = [
        text
        for problem in GeneratedTasks(generators_of([tiny_family()]), seed=1).batch(0, 190)
        for text in (problem.prompt, problem.answer, *problem.solutions[0], *problem.habit)
    ]
    texts += ["".join(map(chr, range(32, 127))), "a\n\n  b,  1,2,345 _x [,] ,,7"]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("é").tokens == ["<unk>"]


def test_markers_are_single_tokens_and_actions_stay_visible(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 512
    text = "<usr>sum[12,34]<bot><run>print(1)</run><eos><out>1<bot><ans>1<eos>"
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "sum[12,34]<run>print(1)</run>1<ans>1"
    assert [tokenizer.token_to_id(t) for t in ("<pad>", "<eos>")] == [0, 5]


def test_the_chat_template_grows_by_appending(folder: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "sum[12,34]"}]
    opening = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert opening == "<usr>sum[12,34]<bot>"
    chat += [
        {"role": "assistant", "content": "<run>print(12+34)</run>"},
        {"role": "tool", "content": "46"},
    ]
    longer = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert longer == opening + "<run>print(12+34)</run><eos><out>46<bot>"
    assert tokenizer.eos_token_id == 5


def test_too_few_words_to_learn_from_are_refused() -> None:
    with pytest.raises(ValueError, match="pass more of them"):
        train_tokenizer(["sum[12,34]"])
