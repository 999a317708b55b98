"""A folder in, texts out."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_text import make_text_engine, make_tokenizer, save_folder

from nanoinfer.config import InferConfig
from nanoinfer.llm import LLM
from nanoinfer.params import SamplingParams
from nanoinfer.server.app import make_app
from nanoinfer.server.config import ServerConfig


def test_texts_ids_and_chats_from_a_folder(tmp_path: Path) -> None:
    save_folder(tmp_path)
    llm = LLM(tmp_path, InferConfig(num_blocks=64))
    tokenizer = make_tokenizer()
    params = SamplingParams(max_tokens=8, seed=4, n=2)
    ids = tokenizer.encode("hello")
    expected = make_text_engine().generate([ids], params)
    outputs = llm.generate(["hello", ids], params)
    assert [o.ids for o in outputs] == [o.ids for o in expected] * 2
    assert [o.text for o in outputs[:2]] == [
        tokenizer.decode(o.ids, skip_special=True) for o in expected
    ]
    messages = [{"role": "user", "content": "the"}]
    chat_ids = tokenizer.encode_chat(messages, add_generation_prompt=True)
    assert llm.chat([messages], params)[1].ids == llm.generate([chat_ids], params)[1].ids
    with pytest.raises(ValueError, match="a list of prompts"):
        llm.generate("hello", params)


def test_dtype_auto_is_the_folders_own(tmp_path: Path) -> None:
    """What config.json says, in either spelling; else what the tensors are in."""
    save_folder(tmp_path)
    file, weights = tmp_path / "config.json", tmp_path / "model.safetensors"
    fields = json.loads(file.read_text())
    fields.pop("dtype", None)
    tensors = load_file(weights)

    def loaded(stored: torch.dtype, dtype: torch.dtype | str = "auto", **said: str) -> torch.dtype:
        save_file({name: x.to(stored) for name, x in tensors.items()}, weights)
        file.write_text(json.dumps(fields | said))
        llm = LLM(tmp_path, InferConfig(num_blocks=8), dtype=dtype, device="cpu")
        return llm.engine.model.dtype

    fp32, bf16, fp16 = torch.float32, torch.bfloat16, torch.float16
    assert loaded(fp32, dtype="bfloat16") == bf16 and loaded(bf16, dtype=fp32) == fp32
    assert loaded(fp32, torch_dtype="bfloat16") == bf16
    assert loaded(bf16, dtype="auto") == bf16
    assert loaded(fp32, dtype="auto") == loaded(fp16, dtype="auto") == fp32
    for said, expected in (("bfloat16", bf16), ("float32", fp32), ("float16", fp32)):
        fields["dtype"] = said
        assert loaded(bf16, dtype="auto") == expected
    fields["dtype"] = "float8_e4m3fn"
    with pytest.raises(ValueError, match="dtype='float8_e4m3fn': no model runs in it"):
        loaded(bf16, dtype="auto")
    with pytest.raises(ValueError, match="dtype='half': must be float32, bfloat16 or auto"):
        loaded(bf16, dtype="half")
    with pytest.raises(ValueError, match="model folder"):
        LLM(tmp_path / "none", dtype="auto")


def test_a_server_serves_a_folder_in_its_own_dtype(tmp_path: Path) -> None:
    save_folder(tmp_path)
    file = tmp_path / "config.json"
    fields = json.loads(file.read_text())
    for said in ("bfloat16", "float32"):
        file.write_text(json.dumps({**fields, "dtype": said}))
        config = ServerConfig(model=tmp_path, dtype="auto", infer=InferConfig(num_blocks=8))
        app = make_app(config)
        assert app.client.engine.model.dtype == getattr(torch, said)
    assert ServerConfig(model=tmp_path).dtype == "float32"
