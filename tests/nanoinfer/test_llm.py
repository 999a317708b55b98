"""A folder in, texts out."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
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
