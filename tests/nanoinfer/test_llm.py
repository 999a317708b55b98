"""A folder in, texts out."""

from pathlib import Path

import pytest
from tiny_text import make_text_engine, make_tokenizer, save_folder

from nanoinfer.config import InferConfig
from nanoinfer.llm import LLM
from nanoinfer.params import SamplingParams


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
