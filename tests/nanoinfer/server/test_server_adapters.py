"""The HTTP side of adapters: a client names one as its model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import KEY, Served, serve
from tiny_text import make_model, make_text_engine, make_tokenizer, save_folder

from nanoengine.adapters.lora import LowRank, write_adapter
from nanoengine.adapters.lora_config import LoraConfig
from nanoengine.formats.matrices import adaptable
from nanoinfer.params import Output, SamplingParams
from nanoinfer.server.app import make_app
from nanoinfer.server.config import ServerConfig

MESSAGES = [{"role": "user", "content": "hello, the world"}]
FREE = {"ignore_eos": True, "seed": 7, "max_tokens": 24}
NAMES = ("poet", "coder")


def changes(seed: int) -> dict[str, LowRank]:
    generator = torch.Generator().manual_seed(seed)
    return {
        module: LowRank(
            torch.randn(2, place.weight.shape[1], generator=generator),
            torch.randn(place.weight.shape[0], 2, generator=generator) * 0.3,
            1.0,
        )
        for module, place in adaptable(make_model()).items()
    }


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    engine = make_text_engine(num_blocks=512, max_num_seqs=32, max_batch_tokens=128)
    for seed, name in enumerate(NAMES):
        engine.load_adapter(name, changes(seed))
    with serve(engine) as running:
        yield running


def expected(name: str) -> Output:
    engine = make_text_engine()
    if name:
        engine.load_adapter(name, changes(NAMES.index(name)))
    ids = make_tokenizer().encode_chat(MESSAGES, add_generation_prompt=True)
    params = SamplingParams(detokenize=True, adapter=name, **FREE)
    return engine.generate([ids], params)[0]


def test_the_model_field_names_an_adapter(served: Served) -> None:
    library = pytest.importorskip("openai", reason="needs the openai client")
    texts = {}
    with library.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=KEY) as client:
        for name in ("tiny", *NAMES):
            answer = client.chat.completions.create(
                model=name,
                messages=MESSAGES,
                seed=7,
                max_tokens=24,
                extra_body={"ignore_eos": True},
            )
            texts[name] = answer.choices[0].message.content
            assert answer.model == name
        listed = {card.id: card for card in client.models.list().data}
        assert list(listed) == ["tiny", *NAMES]
        assert listed["poet"].parent == "tiny" and not hasattr(listed["tiny"], "parent")
        assert client.models.retrieve("coder").id == "coder"
    outputs = {name: expected("" if name == "tiny" else name) for name in texts}
    assert texts == {name: output.text for name, output in outputs.items()}
    assert len({tuple(output.ids) for output in outputs.values()}) == 3


def test_token_requests_name_adapters_too(served: Served) -> None:
    ids = make_tokenizer().encode_chat(MESSAGES, add_generation_prompt=True)
    wanted = expected("coder").ids
    asked: Any = {"token_ids": ids, "sampling_params": FREE}
    for body in (
        asked | {"model": "coder"},
        asked | {"sampling_params": FREE | {"adapter": "coder"}},
    ):
        status, answer = served.send("/inference/v1/generate", body)
        assert status == 200 and answer["choices"][0]["token_ids"] == wanted
    params = FREE | {"adapter": "coder"}
    status, answer = served.send("/generate", {"ids": ids, "params": params})
    assert status == 200 and answer["outputs"][0]["ids"] == wanted


def test_unknown_names_are_refused_with_those_that_there_are(served: Served) -> None:
    status, answer = served.send("/v1/chat/completions", {"model": "painter", "messages": MESSAGES})
    assert status == 404
    assert "'painter' is not served; this is 'tiny', 'poet', 'coder'" in answer["error"]["message"]
    status, answer = served.send("/generate", {"ids": [1], "params": {"adapter": "painter"}})
    assert status == 400 and "is not loaded (loaded: poet, coder)" in answer["error"]["message"]


def test_the_servers_option_loads_folders(tmp_path: Path) -> None:
    save_folder(tmp_path / "model")
    adapter = changes(0)
    write_adapter(tmp_path / "poet", adapter, LoraConfig(rank=2, alpha=2), targets=list(adapter))
    config = ServerConfig(
        model=tmp_path / "model",
        model_name="tiny",
        device="cpu",
        adapters=(f"poet={tmp_path / 'poet'}",),
    )
    assert make_app(config).client.engine.adapters == ["poet"]
    for given, message in (
        ("poet", "must be name=folder"),
        ("tiny=x", "'tiny' is taken"),
        (f"other={tmp_path}", r"adapter_config\.json does not exist"),
    ):
        with pytest.raises(ValueError, match=message):
            make_app(replace(config, adapters=(given,)))
