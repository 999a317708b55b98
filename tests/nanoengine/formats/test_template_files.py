"""Chat templates of a folder: which file counts, which of several is taken; none is lost."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from nanoengine.formats.hf import save_model
from nanoengine.formats.template_files import read_templates, template_files
from nanoengine.model.config import ModelConfig
from nanoengine.model.transformer import Transformer
from nanoengine.text.tokenizer import ChatTokenizer
from nanorl.run.manifest import model_fingerprint

USER = [{"role": "user", "content": "a"}]
TOOLS = [{"type": "function", "function": {"name": "ls", "parameters": {}}}]
DEFAULT, TOOL_USE = "D{{ messages[0].content }}<e>", "T{{ tools | length }}<e>"


def folder_of(path: Path, files: dict[str, Any], config: dict[str, Any] | None = None) -> Path:
    """A folder with a tokenizer of single letters and these files; a dict is written as JSON."""
    path.mkdir(parents=True, exist_ok=True)
    vocab = {letter: index for index, letter in enumerate("aDTJM0123")} | {"<e>": 9}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.add_special_tokens(["<e>"])
    (path / "tokenizer.json").write_text(tokenizer.to_str())
    named = {"eos_token": "<e>", "tokenizer_class": "PreTrainedTokenizerFast", **(config or {})}
    for name, content in {"tokenizer_config.json": named, **files}.items():
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def named(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": source} for name, source in templates.items()]


FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({}, {"chat_template": DEFAULT}),
    "two in a list": ({}, {"chat_template": named(default=DEFAULT, tool_use=TOOL_USE)}),
    "no default": ({}, {"chat_template": named(tool_use=TOOL_USE, rag="x")}),
    "other names": ({}, {"chat_template": named(first="x", second="y")}),
    "a file": ({"chat_template.jinja": DEFAULT}, {}),
    "a file before the config": ({"chat_template.jinja": DEFAULT}, {"chat_template": "M"}),
    "files": (
        {"chat_template.jinja": DEFAULT, "additional_chat_templates/tool_use.jinja": TOOL_USE},
        {"chat_template": named(default="M", tool_use="M")},
    ),
    "a file for tools alone": (
        {"additional_chat_templates/tool_use.jinja": TOOL_USE},
        {"chat_template": "M"},
    ),
}


@pytest.mark.parametrize("kind", FOLDERS)
@pytest.mark.parametrize("tools", [None, TOOLS], ids=["plain", "tools"])
def test_a_folder_s_template_is_the_one_that_transformers_takes(
    tmp_path: Path, kind: str, tools: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    files, config = FOLDERS[kind]
    folder = folder_of(tmp_path / "model", files, config)
    peer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    ours = ChatTokenizer.from_folder(folder)
    try:
        theirs = peer.apply_chat_template(USER, tools=tools, tokenize=False)
    except ValueError:
        with pytest.raises(ValueError, match="none of the name 'default'"):
            ours.render(USER, add_generation_prompt=False, tools=tools)
        return
    assert ours.render(USER, add_generation_prompt=False, tools=tools) == theirs


def test_a_processor_s_template_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    processor = {"chat_template.json": {"chat_template": DEFAULT}}
    alone = ChatTokenizer.from_folder(folder_of(tmp_path / "alone", processor))
    assert alone.render(USER, add_generation_prompt=False) == "Da<e>"
    beside = folder_of(tmp_path / "beside", processor, {"chat_template": "M"})
    assert ChatTokenizer.from_folder(beside).chat_template == "M"


@pytest.mark.parametrize("given", [5, [5], [{"name": "default"}], [{"name": 1, "template": "x"}]])
def test_a_template_that_is_none_is_said(tmp_path: Path, given: Any) -> None:
    folder = folder_of(tmp_path / "model", {}, {"chat_template": given})
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template must be a text"):
        ChatTokenizer.from_folder(folder)
    processor = folder_of(tmp_path / "processor", {"chat_template.json": "{"})
    with pytest.raises(ValueError, match=r"chat_template\.json is not valid JSON"):
        ChatTokenizer.from_folder(processor)


@pytest.mark.parametrize("kind", FOLDERS)
def test_saving_and_copying_keep_every_template(tmp_path: Path, kind: str) -> None:
    files, config = FOLDERS[kind]
    folder = folder_of(tmp_path / "model", files, config)
    tokenizer = ChatTokenizer.from_folder(folder)
    assert tokenizer.templates is not None
    sources = tokenizer.templates.sources
    tokenizer.save(tmp_path / "saved")
    shape = ModelConfig(
        vocab_size=10, hidden_size=8, intermediate_size=8, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=8, max_position_embeddings=16, tie_word_embeddings=True,
        eos_ids=(9,),
    )  # fmt: skip
    model = Transformer(shape, torch.float32)
    model.init_weights(0)
    save_model(model, tmp_path / "trained", folder)
    # Over a folder that had other ones, whose files would be read first.
    other = folder_of(
        tmp_path / "other",
        {"chat_template.jinja": "M", "additional_chat_templates/tool_use.jinja": "M"},
    )
    tokenizer.save(other)
    for place in (tmp_path / "saved", tmp_path / "trained", other):
        again = ChatTokenizer.from_folder(place)
        assert again.templates is not None and again.templates.sources == sources


def test_another_template_for_tools_is_another_model(tmp_path: Path) -> None:
    files = {"additional_chat_templates/tool_use.jinja": TOOL_USE}
    folder = folder_of(tmp_path / "model", files)
    before = model_fingerprint(folder)
    (folder / "additional_chat_templates/tool_use.jinja").write_text("T")
    assert model_fingerprint(folder) != before
    assert template_files(folder) == ["additional_chat_templates/tool_use.jinja"]
    assert read_templates(folder, {}) == {"tool_use": "T"}


def test_a_template_that_adds_text_to_nothing_rejects_the_messages() -> None:
    tokenizer = Tokenizer(models.BPE({"a": 0, "<e>": 1}, []))
    tokenizer.add_special_tokens(["<e>"])
    for source in ("{{ 'a' + messages[0].content }}", "{% for t in tools %}{% endfor %}"):
        chat = ChatTokenizer(tokenizer, eos_ids=[1], chat_template=source)
        with pytest.raises(ValueError, match=r"rejects messages with roles \['user'\]"):
            chat.render([{"role": "user", "content": None}], add_generation_prompt=False)
