"""A folder in, texts out."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from starlette.testclient import TestClient
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
    assert [o.ids for o in llm.generate([ids], params)] == [o.ids for o in expected]
    outputs = llm.generate(["hello"], params)
    assert [o.ids for o in outputs] == [o.ids for o in expected]
    assert [o.text for o in outputs] == [
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


def test_a_server_has_defaults_for_the_template_which_a_request_overrides(tmp_path: Path) -> None:
    save_folder(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings["chat_template"] = "{{ 'the' if mood == 'calm' else 'hello' }}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    options = {"model": tmp_path, "infer": InferConfig(num_blocks=8)}
    app = make_app(ServerConfig(**options, default_chat_template_kwargs='{"mood": "calm"}'))
    body: dict[str, object] = {"messages": [{"role": "user", "content": "x"}]}
    with TestClient(app.starlette(), base_url="http://127.0.0.1") as client:
        for asked, text in (({}, "the"), ({"chat_template_kwargs": {"mood": "merry"}}, "hello")):
            answer = client.post("/tokenize", json=body | asked).json()
            assert answer["tokens"] == make_tokenizer().encode(text)
    for wrong, message in (
        ("[1]", "not a list"), ('{"messages": 1}', "the server sets it"), ("{", "Expecting"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"--default-chat-template-kwargs .*{message}"):
            make_app(ServerConfig(**options, default_chat_template_kwargs=wrong))


def test_a_server_runs_at_most_four_threads_a_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_folder(tmp_path)
    told: list[int] = []
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    infer = InferConfig(num_blocks=8)
    for threads in (1, 8):
        make_app(ServerConfig(model=tmp_path, threads=threads, infer=infer))
    assert told == [1, 8]
    for threads in (0, 9):
        with pytest.raises(ValueError, match=f"threads={threads}: must be 1 to 8"):
            make_app(ServerConfig(model=tmp_path, threads=threads, infer=infer))


def test_every_output_of_a_call_has_a_seed_of_its_own(tmp_path: Path) -> None:
    """Equal prompts are sampled anew, as `n` does; a call says the same again, and the first prompt
    what it says alone."""
    save_folder(tmp_path)
    llm = LLM(tmp_path, InferConfig(num_blocks=64))
    params = SamplingParams(max_tokens=12, seed=4, ignore_eos=True)

    def ids(prompts: list[str], **options: int) -> list[list[int]]:
        return [output.ids for output in llm.generate(prompts, replace(params, **options))]

    four = ids(["the"] * 4)
    assert len(set(map(tuple, four))) == 4
    assert four == ids(["the"] * 4) == ids(["the"], n=4) == ids(["the"] * 2, n=2)
    assert four[:1] == ids(["the"]) and four != ids(["the"] * 4, seed=5)
    mixed = ids(["the", "hello", "the"])
    assert mixed[0] == four[0] and mixed[2] == four[2] and mixed[1] not in ids(["hello"])
    greedy = ids(["the"] * 3, temperature=0)
    assert greedy[0] == greedy[1] == greedy[2]
    assert ids([]) == []


@given(seed=st.integers(-(2**70), 2**70), n=st.integers(1, 8), count=st.integers(1, 40))
def test_no_two_requests_of_a_call_share_a_seed(seed: int, n: int, count: int) -> None:
    params = SamplingParams(seed=seed, n=n)
    members = [member for place in range(count) for member in params.members(place)]
    assert len({member.seed % 2**64 for member in members}) == len(members) == n * count
    assert members == replace(params, n=n * count).members() and members[0].seed == seed
