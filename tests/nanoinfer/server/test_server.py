"""The HTTP side: the OpenAI client gets what the engine gives; /generate; the owner's routes."""

import re
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from serving import KEY, Served, serve, slow_steps
from tiny_text import make_model, make_text_engine, make_tokenizer, save_folder

from nanoengine.formats.hf import save_model
from nanoinfer.options.outputs import output_from_json
from nanoinfer.params import Output, SamplingParams

TOKENIZER = make_tokenizer()
MESSAGES = [{"role": "user", "content": "hello, the world"}]
CHAT_IDS = TOKENIZER.encode_chat(MESSAGES, add_generation_prompt=True)
FREE = {"ignore_eos": True, "seed": 7, "max_tokens": 24}


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serve() as running:
        yield running


@pytest.fixture(scope="module")
def openai(served: Served) -> Any:
    library = pytest.importorskip("openai", reason="needs the openai client")
    with library.OpenAI(base_url=f"http://127.0.0.1:{served.port}/v1", api_key=KEY) as client:
        yield client


def expected(ids: list[int], **options: Any) -> Output:
    params = SamplingParams(seed=7, ignore_eos=True, detokenize=True, **options)
    return make_text_engine().generate([ids], params)[0]


def test_chat_is_the_engines_text_with_its_logprobs(openai: Any) -> None:
    answer = openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        logprobs=True,
        top_logprobs=3,
        temperature=0.8,
        seed=7,
        max_tokens=24,
        extra_body={"ignore_eos": True},
    )
    output = expected(CHAT_IDS, max_tokens=24, temperature=0.8, top_logps=3)
    choice = answer.choices[0]
    assert choice.message.content == output.text and choice.message.role == "assistant"
    assert choice.finish_reason == "length"
    content = choice.logprobs.content
    assert [entry.logprob for entry in content] == output.logps
    assert [[t.logprob for t in e.top_logprobs] for e in content] == [
        [logp for _, logp in row] for row in output.top_logps
    ]
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(CHAT_IDS), 24)
    assert answer.model == "tiny"


def test_a_streamed_chat_adds_up_to_the_same(openai: Any) -> None:
    options = {"model": "tiny", "messages": MESSAGES, "seed": 7, "n": 3, "max_tokens": 24}
    whole = openai.chat.completions.create(
        **options, logprobs=True, extra_body={"ignore_eos": True}
    )
    chunks = list(
        openai.chat.completions.create(
            **options,
            logprobs=True,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
    )
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 72
    texts, logps, reasons = [""] * 3, [[], [], []], [None] * 3
    for chunk in chunks[:-1]:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
            if choice.logprobs is not None:
                logps[choice.index] += [entry.logprob for entry in choice.logprobs.content]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == ["length"] * 3
    assert logps == [[e.logprob for e in c.logprobs.content] for c in whole.choices]
    assert len(set(texts)) == 3
    assert len(chunks) > 3 * 10, "tokens are sent as they come"


def test_completions_with_echo_and_logprobs(openai: Any) -> None:
    answer = openai.completions.create(
        model="tiny",
        prompt="hello",
        echo=True,
        logprobs=2,
        seed=7,
        max_tokens=6,
        extra_body={"ignore_eos": True},
    )
    ids = TOKENIZER.encode("hello")
    output = expected(ids, max_tokens=6, top_logps=2, prompt_logps=True)
    choice = answer.choices[0]
    assert choice.text == "hello" + (output.text or "")
    assert choice.logprobs.token_logprobs == [None, *output.prompt_logps, *output.logps]
    assert len(choice.logprobs.tokens) == len(ids) + 6
    assert choice.logprobs.text_offset[:3] == [0, 3, 5]  # hel, lo


def test_completions_take_texts_and_ids_and_stop_texts(openai: Any, served: Served) -> None:
    free = {"model": "tiny", "seed": 7, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
    text = openai.completions.create(prompt="the", **free).choices[0].text
    ids = openai.completions.create(prompt=TOKENIZER.encode("the"), **free).choices[0].text
    several = openai.completions.create(prompt=["the", "lo"], **free).choices
    assert text == ids == several[0].text and [c.index for c in several] == [0, 1]
    clean = re.search(r"[^\ufffd]{2}", text[3:])
    assert clean is not None, "the seed gives two clean characters"
    answer = openai.completions.create(prompt="the", stop=[clean.group()], **free).choices[0]
    assert answer.text == text[: text.index(clean.group())] and answer.finish_reason == "stop"
    body = {"prompt": "the", "stop": clean.group(), **FREE}
    streamed = "".join(e["choices"][0]["text"] for e in served.events("/v1/completions", body))
    assert streamed == answer.text


@pytest.mark.parametrize("seeded", [{"seed": 7}, {}])
def test_equal_prompts_of_a_request_get_samples_of_their_own(
    openai: Any, seeded: dict[str, int]
) -> None:
    """As `n` does, and with a given seed the very same as `n`."""
    free = {"model": "tiny", "max_tokens": 24, "extra_body": {"ignore_eos": True}, **seeded}

    def texts(prompt: Any, **options: Any) -> list[str]:
        choices = openai.completions.create(prompt=prompt, **free, **options).choices
        assert [choice.index for choice in choices] == list(range(len(choices)))
        return [choice.text for choice in choices]

    found = [texts(["the"] * 6), texts(["the"] * 3, n=2), texts("the", n=6)]
    assert [len(set(one)) for one in found] == [6, 6, 6]
    assert (found[0] == found[1] == found[2]) == bool(seeded)
    assert len(set(texts(["the"] * 3, temperature=0))) == 1


def test_what_several_completions_find_in_the_cache_is_counted_once(openai: Any) -> None:
    """Two prompts of 62 tokens with three completions each: only the second prompt was seen."""
    first, second = [(3 * i) % 250 for i in range(62)], [(7 * i + 1) % 250 for i in range(62)]
    options = {"model": "tiny", "max_tokens": 2, "extra_body": {"ignore_eos": True}}
    openai.completions.create(prompt=second, **options)
    usage = openai.completions.create(prompt=[first, second], n=3, **options).usage
    assert usage.prompt_tokens == 124 and usage.completion_tokens == 12
    assert 48 <= usage.prompt_tokens_details.cached_tokens <= 61


def test_a_plain_prompt_begins_with_the_tokenizers_bos() -> None:
    """The ids that transformers would make are those that were computed."""
    bos = make_tokenizer(has_bos=True)
    ids = [bos.token_to_id("<|user|>"), *TOKENIZER.encode("hello")]
    with serve(tokenizer=bos) as served:
        body = {"prompt": "hello", **FREE}
        plain = served.send("/v1/completions", body)[1]
        given = served.send("/v1/completions", body | {"prompt": ids})[1]
        without = served.send("/v1/completions", body | {"add_special_tokens": False})[1]
        chat = served.send("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1})[1]
    assert plain["usage"]["prompt_tokens"] == len(ids) == 3
    assert plain["choices"][0]["text"] == given["choices"][0]["text"]
    assert without["usage"]["prompt_tokens"] == 2
    assert chat["usage"]["prompt_tokens"] == len(CHAT_IDS)  # a chat's is in its template


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "adds",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}},
                "required": ["a"],
                "additionalProperties": False,
            },
        },
    }
]


def test_a_forced_tool_call_is_a_call_that_fits_its_schema(openai: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `grammar` (llguidance)")
    for stream in (False, True):
        answer = openai.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": "add"}},
            temperature=0.3,
            seed=2,
            max_tokens=150,
            stream=stream,
        )
        if stream:
            last = [c.choices[0] for c in answer]
            calls, reason = last[-1].delta.tool_calls, last[-1].finish_reason
            assert not any(c.delta.content for c in last)
        else:
            calls, reason = answer.choices[0].message.tool_calls, answer.choices[0].finish_reason
        assert reason == "tool_calls" and len(calls) == 1
        assert calls[0].function.name == "add"
        assert re.fullmatch(r'\{\s*"a"\s*:\s*\d\s*\}', calls[0].function.arguments)


def test_response_format_gives_json(openai: Any) -> None:
    pytest.importorskip("llguidance", reason="needs the extra `grammar` (llguidance)")
    schema = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"]}
    schema["additionalProperties"] = False
    answer = openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        temperature=0.3,
        seed=1,
        max_tokens=100,
        response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
    )
    assert re.fullmatch(r'\{\s*"x"\s*:\s*[12]\s*\}', answer.choices[0].message.content)


def test_a_conversation_with_tools_and_parts_reaches_the_template(served: Served) -> None:
    messages = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "b"}],
        },
        {"role": "user", "content": "hel"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "add", "arguments": '{"a": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]
    status, answer = served.send(
        "/v1/chat/completions",
        {"messages": messages, "tools": TOOLS, "max_tokens": 2, "return_token_ids": True},
    )
    assert status == 200, answer
    called = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    shown = [
        {"role": "system", "content": "be b"},
        {"role": "user", "content": "hel"},
        {"role": "assistant", "content": called},
        # The template knows no role for results, so the user brings them.
        {"role": "user", "content": "<tool_response>\n2\n</tool_response>"},
    ]
    ids = TOKENIZER.encode_chat(shown, add_generation_prompt=True, tools=TOOLS)
    assert answer["prompt_token_ids"] == ids


def test_generate_takes_ids_and_gives_everything_the_engine_knows(served: Served) -> None:
    params = {"max_tokens": 9, "seed": 7, "ignore_eos": True, "top_logps": 2, "temperature": 0.5}
    status, answer = served.send("/generate", {"ids": CHAT_IDS, "params": params})
    assert status == 200, answer
    output = make_text_engine().generate([CHAT_IDS], SamplingParams(**params))[0]
    got = answer["outputs"][0]
    assert (got["ids"], got["logps"], got["versions"]) == (output.ids, output.logps, [0] * 9)
    assert got["top_logps"] == [[list(pair) for pair in row] for row in output.top_logps]
    events = served.events("/generate", {"ids": CHAT_IDS, "params": params | {"n": 2}})
    for index in range(2):
        ids = [token for event in events if event["index"] == index for token in event["ids"]]
        last = [event for event in events if event["index"] == index][-1]
        assert last["output"]["ids"] == ids and len(ids) == 9
    assert [t for e in events if e["index"] == 0 for t in e["ids"]] == output.ids


def test_token_ids_go_in_and_come_out_as_vllms_do(served: Served) -> None:
    params = {"max_tokens": 12, "seed": 7, "ignore_eos": True, "top_k": -1, "logprobs": 2}
    params |= {"skip_special_tokens": False, "prompt_logprobs": 1, "stop": "no such text", "n": 2}
    body = {"model": "tiny", "token_ids": CHAT_IDS, "sampling_params": params, "request_id": "mine"}
    status, answer = served.send("/inference/v1/generate", body)
    assert (status, answer["request_id"]) == (200, "mine")
    output = expected(CHAT_IDS, max_tokens=12, top_logps=2, prompt_logps=True)
    first, second = answer["choices"]
    assert first["token_ids"] == output.ids != second["token_ids"]
    assert (first["finish_reason"], first["versions"]) == ("length", [0] * 12)
    content = first["logprobs"]["content"]
    assert [entry["logprob"] for entry in content] == output.logps
    assert content[3]["token"] == f"token_id:{output.ids[3]}"
    assert [t["logprob"] for t in content[3]["top_logprobs"]] == [p for _, p in output.top_logps[3]]
    assert answer["prompt_logprobs"][0] is None
    assert [*answer["prompt_logprobs"][1]] == [str(CHAT_IDS[1])]
    assert answer["usage"]["completion_tokens"] == 24
    assert served.send("/v1/models")[1]["data"][0]["max_model_len"] == 512


def test_a_completion_is_taken_up_where_another_server_left_it(served: Served) -> None:
    output = expected(CHAT_IDS, max_tokens=20)
    part = asdict(output) | {"finish_reason": "abort"}
    for name in ("ids", "logps", "sampled_logps", "versions"):
        part[name] = part[name][:8]
    params = {"max_tokens": 20, "seed": 7, "ignore_eos": True, "detokenize": True}
    body = {"token_ids": CHAT_IDS, "sampling_params": params, "return_output": True}
    status, answer = served.send("/inference/v1/generate", body | {"sampled": part})
    assert status == 200
    found = output_from_json(answer["choices"][0]["output"])
    assert replace(found, num_cached_tokens=0) == replace(output, num_cached_tokens=0)
    for wrong, message in (
        ({"sampled": part | {"logps": []}}, "8 ids, but logps"),
        ({"sampled": part | {"ids": ["a"] * 8}}, "output: invalid literal"),
        ({"sampled": part | {"nothing": 1}}, "output.nothing: unknown"),
        ({"sampled": part | {"ids": 5}}, "output.ids: must be a list"),
        ({"sampled": part, "sampling_params": params | {"n": 2}}, "set n to 1"),
        ({"sampling_params": {"best_of": 3}}, "sampling_params.best_of: unknown"),
        ({"stream": True}, "stream"),
        ({"model": "huge"}, "is not served"),
    ):
        status, answer = served.send("/inference/v1/generate", body | wrong)
        assert status in (400, 404) and message in answer["error"]["message"], wrong


def test_health_models_and_metrics(served: Served) -> None:
    assert served.send("/health", key=None) == (
        200,
        {"status": "ok", "version": 0, "is_paused": False, "is_asleep": False, "is_drained": False},
    )
    assert served.send("/v1/models")[1]["data"][0]["id"] == "tiny"
    # Other tests of this server may run in another process: what is counted is asked for here.
    question = {"model": "tiny", "messages": MESSAGES, "max_tokens": 2}
    assert served.send("/v1/chat/completions", question)[0] == 200
    status, text = served.send("/metrics")
    assert status == 200
    about = r"# (TYPE nanoinfer_\w+ \w+|HELP nanoinfer_\w+ .+)"
    line = re.compile(rf"nanoinfer_\w+(\{{[^{{}}]*\}})? [-+0-9.e]+|{about}")
    assert all(line.fullmatch(row) for row in text.splitlines())
    values = dict(row.rsplit(" ", 1) for row in text.splitlines() if row[0] != "#")
    assert float(values["nanoinfer_sampled_tokens_total"]) > 0
    assert (
        values["nanoinfer_request_seconds_count"]
        == (values['nanoinfer_request_seconds_bucket{le="+Inf"}'])
    )
    assert 'nanoinfer_http_responses_total{route="/health",status="200"}' in values


def test_weights_change_under_a_request_in_flight_and_each_token_says_whose_it_is(
    tmp_path: Path,
) -> None:
    save_model(make_model(seed=5), tmp_path / "new")
    engine = make_text_engine()
    with serve(engine, weights_root=tmp_path) as served:
        body = {"ids": CHAT_IDS, "params": {"max_tokens": 200, "ignore_eos": True}, "stream": True}
        connection = served.connect()
        import json

        headers = {"Authorization": f"Bearer {KEY}"}
        with slow_steps(engine):
            connection.request("POST", "/generate", json.dumps(body), headers)
            response = connection.getresponse()
            response.readline()  # the first event: it is decoding
            assert served.send("/pause", {})[1]["is_paused"]
        steps = engine.metrics()["num_steps"]
        status, state = served.send("/update_weights", {"path": "new", "version": 3})
        assert (status, state["version"]) == (200, 3)
        assert engine.metrics()["num_steps"] == steps
        assert not served.send("/resume", {})[1]["is_paused"]
        assert served.send("/sleep", {})[1]["is_asleep"]
        assert not served.send("/wake", {})[1]["is_asleep"]
        last = [line for line in response.read().decode().split("\n\n") if line][-2]
        output = json.loads(last.removeprefix("data: "))["output"]
        connection.close()
        versions = output["versions"]
        assert set(versions) == {0, 3} and versions == sorted(versions) and len(versions) == 200
        for path, status in (("../elsewhere", 403), ("/etc", 403), ("nothing", 400)):
            assert served.send("/update_weights", {"path": path, "version": 4})[0] == status
        assert engine.version == 3


def test_a_server_from_the_command_line(tmp_path: Path) -> None:
    import subprocess
    import sys
    import urllib.request

    save_folder(tmp_path / "tiny-model")
    (tmp_path / "key").write_text("abc\n")
    command = [sys.executable, "-m", "nanoinfer.server", "--model", str(tmp_path / "tiny-model")]
    options = ["--port", "0", "--api-key-file", str(tmp_path / "key"), "--infer.num-blocks", "64"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        address = None
        for line in process.stderr:
            found = re.search(r"http://(\S+):(\d+)", line)
            if found:
                address = found
                break
        assert address is not None and address.group(1) == "127.0.0.1"
        request = urllib.request.Request(
            f"{address.group()}/v1/completions",
            b'{"prompt": "the", "max_tokens": 3, "model": "tiny-model"}',
            {"Authorization": "Bearer abc"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            assert response.status == 200 and b"text_completion" in response.read()
    finally:
        process.terminate()
        assert process.wait(timeout=30) in (0, -15)
