"""Real clients show a picture, each in its own way and unchanged, and the answer depends on it.

Two pictures of one size are shown, the first of them twice; answers are greedy.
"""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from seeing_server import base64_of, data_url, num_looks, png, serve_sight
from serving import KEY, Served

ASKED = "what is it"
Ask = Callable[[Served, bytes], Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve_sight(tmp_path_factory.mktemp("seeing")) as running:
        yield running


def url(served: Served, path: str = "/v1") -> str:
    return f"http://127.0.0.1:{served.port}{path}"


def openai_client(served: Served) -> Any:
    openai = pytest.importorskip("openai", reason="needs the openai client")
    return openai.OpenAI(base_url=url(served), api_key=KEY, max_retries=0)


def chat_parts(data: bytes) -> list[dict[str, Any]]:
    shown = {"type": "image_url", "image_url": {"url": data_url(data)}}
    return [{"type": "text", "text": ASKED}, shown]


def openai_chat(served: Served, data: bytes) -> Any:
    messages = [{"role": "user", "content": chat_parts(data)}]
    with openai_client(served) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=6, temperature=0, logprobs=True
        )
    return [(one.token, one.logprob) for one in answer.choices[0].logprobs.content]


def openai_stream(served: Served, data: bytes) -> Any:
    messages = [{"role": "user", "content": chat_parts(data)}]
    with openai_client(served) as client:
        chunks = client.chat.completions.create(
            model="tiny", messages=messages, max_tokens=6, temperature=0, logprobs=True, stream=True
        )
        return [
            (one.token, one.logprob)
            for chunk in chunks
            for choice in chunk.choices
            if choice.logprobs
            for one in choice.logprobs.content
        ]


def openai_responses(served: Served, data: bytes) -> Any:
    """A picture, and the same conversation goes on by its id."""
    part = {"type": "input_image", "detail": "auto", "image_url": data_url(data)}
    asked = [{"role": "user", "content": [{"type": "input_text", "text": ASKED}, part]}]
    options: dict[str, Any] = {
        **{"model": "tiny", "max_output_tokens": 6, "temperature": 0},
        "include": ["message.output_text.logprobs"],
    }
    with openai_client(served) as client:
        first = client.responses.create(input=asked, **options)
        second = client.responses.create(input="and", previous_response_id=first.id, **options)
    return [
        (one.token, one.logprob)
        for answer in (first, second)
        for one in answer.output[-1].content[0].logprobs
    ]


def anthropic_messages(served: Served, data: bytes) -> Any:
    anthropic = pytest.importorskip("anthropic", reason="needs the anthropic client")
    source = {"type": "base64", "media_type": "image/png", "data": base64_of(data)}
    use = {"type": "tool_use", "id": "toolu_1", "name": "screenshot", "input": {}}
    result = {
        "type": "tool_result",
        "tool_use_id": "toolu_1",
        "content": [{"type": "image", "source": source}],
    }
    turns = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    with anthropic.Anthropic(base_url=url(served, ""), api_key=KEY, max_retries=0) as client:
        answer = client.messages.create(
            model="tiny", max_tokens=12, messages=turns, extra_body={"temperature": 0}
        )
    return answer.content[0].text


def _litellm(served: Served, data: bytes, model: str, path: str) -> Any:
    litellm = pytest.importorskip("litellm", reason="needs litellm")
    answer: Any = litellm.completion(
        model=model,
        api_base=url(served, path),
        api_key=KEY,
        messages=[{"role": "user", "content": chat_parts(data)}],
        max_tokens=12,
        temperature=0,
    )
    return answer.choices[0].message.content


def litellm_chat(served: Served, data: bytes) -> Any:
    return _litellm(served, data, "openai/tiny", "/v1")


def litellm_messages(served: Served, data: bytes) -> Any:
    return _litellm(served, data, "anthropic/tiny", "")


def pydantic_ai(served: Served, data: bytes) -> Any:
    ai = pytest.importorskip("pydantic_ai", reason="needs pydantic-ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    provider = OpenAIProvider(base_url=url(served), api_key=KEY)
    agent = ai.Agent(
        OpenAIChatModel("tiny", provider=provider),
        model_settings={"max_tokens": 12, "temperature": 0},
    )

    async def talk() -> str:
        shown = ai.BinaryContent(data=data, media_type="image/png")
        return str((await agent.run([ASKED, shown])).output)

    return asyncio.run(talk())


def langchain(served: Served, data: bytes) -> Any:
    library = pytest.importorskip("langchain_openai", reason="needs langchain-openai")
    from langchain_core.messages import HumanMessage

    model = library.ChatOpenAI(
        model="tiny", base_url=url(served), api_key=KEY, max_tokens=6, temperature=0, logprobs=True
    )
    shown = {"type": "image", "base64": base64_of(data), "mime_type": "image/png"}
    answer = model.invoke([HumanMessage(content=[{"type": "text", "text": ASKED}, shown])])
    return [
        (one["token"], one["logprob"]) for one in answer.response_metadata["logprobs"]["content"]
    ]


def openai_agents(served: Served, data: bytes) -> Any:
    agents = pytest.importorskip("agents", reason="needs openai-agents")
    openai = pytest.importorskip("openai")
    agents.set_tracing_disabled(True)

    async def talk() -> str:
        async with openai.AsyncOpenAI(base_url=url(served), api_key=KEY) as client:
            agent = agents.Agent(
                "looker",
                instructions="Be brief.",
                model=agents.OpenAIChatCompletionsModel("tiny", client),
                model_settings=agents.ModelSettings(temperature=0, max_tokens=12),
            )
            part = {"type": "input_image", "detail": "auto", "image_url": data_url(data)}
            words = {"role": "user", "content": ASKED}
            asked = [words, {"role": "user", "content": [part]}]
            return str((await agents.Runner.run(agent, asked)).final_output)

    return asyncio.run(talk())


def smolagents(served: Served, data: bytes) -> Any:
    library = pytest.importorskip("smolagents", reason="needs smolagents")
    images = pytest.importorskip("PIL.Image", reason="Pillow is not installed")
    model = library.OpenAIModel(
        "tiny", api_base=url(served), api_key=KEY, max_tokens=12, temperature=0
    )
    shown = {"type": "image", "image": images.open(io.BytesIO(data))}
    message = {"role": "user", "content": [{"type": "text", "text": ASKED}, shown]}
    return model.generate([library.ChatMessage.from_dict(message)]).content


CLIENTS: dict[str, Ask] = {
    function.__name__: function
    for function in (
        *(openai_chat, openai_stream, openai_responses, anthropic_messages, litellm_chat),
        *(litellm_messages, pydantic_ai, langchain, openai_agents, smolagents),
    )
}


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_shows_a_picture_in_its_own_way(
    served: Served, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    monkeypatch.setenv("OPENAI_API_KEY", os.environ.get("OPENAI_API_KEY", "none"))
    before = num_looks(served)
    ask, number = CLIENTS[name], 2 * list(CLIENTS).index(name)
    first, again, other = (ask(served, png(number + seed)) for seed in (1000, 1000, 1001))
    assert first
    assert first == again
    assert first != other
    assert num_looks(served) - before == 2, "once at each, whatever is asked again"
