"""What OpenAI's client and lm-eval send is taken, and what they read is there."""

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from serving import KEY, Served, serve, slow_steps
from tiny_text import make_text_engine, make_tokenizer
from waiting import wait_until

from nanoinfer.params import SamplingParams

TOKENIZER = make_tokenizer()
MESSAGES = [{"role": "user", "content": "hello, the world"}]
CHAT_IDS = TOKENIZER.encode_chat(MESSAGES, add_generation_prompt=True)
CHAT: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "seed": 7}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def openai(served: Served) -> Any:
    library = pytest.importorskip("openai", reason="needs the openai client")
    with library.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=KEY) as client:
        yield client


def test_fields_without_effect_and_nulls_change_nothing(openai: Any) -> None:
    plain = openai.chat.completions.create(**CHAT)
    dressed = openai.chat.completions.create(
        **CHAT,
        parallel_tool_calls=True,
        store=False,
        metadata={"a": "b"},
        user="me",
        service_tier="auto",
        safety_identifier="x",
        prompt_cache_key="y",
        stop=None,
        tools=None,
        temperature=None,
        response_format=None,
        extra_body={"logit_bias": None, "top_k": None},
    )
    assert dressed.choices[0].message.content == plain.choices[0].message.content
    assert dressed.usage.completion_tokens == 5


def test_an_answers_message_can_be_sent_back_as_it_was(openai: Any) -> None:
    answer = openai.chat.completions.create(**CHAT).choices[0].message
    called = {
        "id": "1", "type": "function", "index": 0, "function": {"name": "f", "arguments": "{}"}
    }  # fmt: skip
    again = [*MESSAGES, answer.model_dump(), {"role": "user", "content": "x"}]
    short = [*MESSAGES, {"role": "assistant", "content": answer.content}, again[-1]]
    counts = [
        openai.chat.completions.create(**CHAT | {"messages": messages}).usage.prompt_tokens
        for messages in (again, short, [*again, answer.model_dump() | {"tool_calls": [called]}])
    ]
    assert counts[0] == counts[1] < counts[2]


def test_a_model_has_its_own_page(openai: Any) -> None:
    assert openai.models.retrieve("tiny").id == "tiny"
    assert [model.id for model in openai.models.list()] == ["tiny"]
    with pytest.raises(Exception, match="'other/one' is not served; this is 'tiny'"):
        openai.models.retrieve("other/one")


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_come_where_they_were_asked_for(openai: Any, stream: bool) -> None:
    body = {"return_token_ids": True, "ignore_eos": True}
    answer = openai.chat.completions.create(**CHAT, stream=stream, extra_body=body)
    events = list(answer) if stream else [answer]
    choices = [choice.model_dump() for event in events for choice in event.choices]
    params = SamplingParams(max_tokens=5, seed=7, ignore_eos=True)
    expected = make_text_engine().generate([CHAT_IDS], params)[0].ids
    assert [t for choice in choices for t in choice.get("token_ids", [])] == expected
    assert events[0].model_dump()["prompt_token_ids"] == CHAT_IDS
    plain = openai.chat.completions.create(**CHAT).model_dump()
    assert "token_ids" not in plain["choices"][0] and "prompt_token_ids" not in plain


@pytest.mark.parametrize("top", [1, 3])
def test_what_lm_eval_asks_of_a_prompt(openai: Any, top: int) -> None:
    """Its `local-completions`: several prompts of ids with echo; every token but the first has its
    log-prob, and the likeliest beside it. Checked token by token against one-token requests."""
    prompts = [[5, 9, 200, 31, 8, 77], [40, 41, 42]]
    answer = openai.completions.create(
        model="tiny", prompt=prompts, max_tokens=1, logprobs=top, temperature=0, echo=True, seed=1
    )
    engine = make_text_engine()
    for choice, ids in zip(answer.choices, prompts, strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(logprobs.top_logprobs) == len(ids) + 1
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        params = SamplingParams(max_tokens=1, temperature=0, top_logps=300)
        for i in range(1, len(ids)):
            after = engine.generate([ids[:i]], params)[0].top_logps[0]
            assert logprobs.token_logprobs[i] == dict(after)[ids[i]]
            row, name = logprobs.top_logprobs[i], logprobs.tokens[i]
            assert list(row.values()) == [logp for _, logp in after[:top]]
            assert row.get(name) == dict(after[:top]).get(ids[i])


@pytest.mark.parametrize("stream", [False, True])
def test_a_token_that_is_half_a_character_tells_its_bytes(openai: Any, stream: bool) -> None:
    """In a chat beside its text, in a completion as its name; every likeliest token is there."""
    options = {"stream": stream, "extra_body": {"ignore_eos": True}}
    asked = {"model": "tiny", "seed": 3, "max_tokens": 30, **options}
    answer = openai.chat.completions.create(
        messages=[{"role": "user", "content": "hello"}], logprobs=True, top_logprobs=9, **asked
    )
    events = list(answer) if stream else [answer]
    choices = [choice.model_dump() for event in events for choice in event.choices]
    text = "".join(
        (choice.get("delta") or choice.get("message"))["content"] or "" for choice in choices
    )
    entries = [e for choice in choices for e in (choice["logprobs"] or {}).get("content") or []]
    assert len(entries) == 30 and any("\ufffd" in entry["token"] for entry in entries)
    assert bytes(b for e in entries for b in e["bytes"]).decode(errors="replace") == text
    for entry in entries:  # the model has some ids that stand for nothing
        said = [tuple(likely["bytes"]) for likely in entry["top_logprobs"] if likely["bytes"]]
        assert len(entry["top_logprobs"]) == 9 and len(set(said)) == len(said) > 4
    answer = openai.completions.create(prompt="hello", logprobs=9, **asked)
    events = list(answer) if stream else [answer]
    shown = [event.choices[0].logprobs for event in events if event.choices[0].logprobs]
    rows = [row for one in shown for row in one.top_logprobs]
    assert len(rows) == 30 and {len(row) for row in rows} == {9}
    assert all(list(row.values()) == sorted(row.values(), reverse=True) for row in rows)
    assert any(name.startswith("bytes:\\x") for row in rows for name in row)
    text = "".join(event.choices[0].text for event in events)
    offsets = [place for one in shown for place in one.text_offset]
    assert offsets == sorted(offsets) and offsets[0] == 0 and offsets[-1] <= len(text)


def test_aborted_requests_answer_what_they_have() -> None:
    engine = make_text_engine(num_blocks=512, max_num_seqs=32, max_batch_tokens=128)
    with serve(engine) as served:
        body = {"ids": CHAT_IDS, "params": {"max_tokens": 400, "ignore_eos": True}}
        alone = make_text_engine().generate([CHAT_IDS], SamplingParams(**body["params"]))[0]
        answers: dict[str, Any] = {}

        def ask(name: str) -> None:
            answers[name] = served.send("/generate", body | {"request_id": name})

        threads = [threading.Thread(target=ask, args=(name,)) for name in "abc"]
        with slow_steps(engine):
            for thread in threads:
                thread.start()
            wait_until(
                lambda: engine.metrics()["sampled_tokens"] >= 12 and engine.num_unfinished == 3
            )
            assert served.send("/pause", {})[0] == 200
        assert served.send("/abort", {"request_id": "b"}) == (200, {"num_aborted": 1})
        threads[1].join()
        assert engine.num_unfinished == 2
        assert served.send("/abort", {"request_id": "b"}) == (200, {"num_aborted": 0})
        assert served.send("/abort", {})[0] == 400
        assert served.send("/abort", {"all": True}) == (200, {"num_aborted": 2})
        for thread in threads:
            thread.join()
        served.send("/resume", {})
        for status, answer in answers.values():
            output = answer["outputs"][0]
            assert status == 200 and output["finish_reason"] == "abort"
            assert output["ids"] == alone.ids[: len(output["ids"])]
        assert sum(len(a["outputs"][0]["ids"]) for _, a in answers.values()) >= 12
        assert not served.app.client._names
