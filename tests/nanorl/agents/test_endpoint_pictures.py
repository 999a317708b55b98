"""An agent that knows an API alone shows the policy screenshots, which are trained as they were."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from agent_doubles import EOS, output_of

import nanorl
from nanoengine.spans import content_ids
from nanoengine.vision.picture_store import PictureStore
from nanoengine.vision.png import write_png
from nanoengine.vision.seeing_tokenizer import SeeingTokenizer, seeing_tokenizer
from nanoinfer.dialects import all_dialects
from nanoinfer.http.api_error import ApiError
from nanoinfer.params import Output, SamplingParams
from nanorl.agents.endpoint.endpoint_server import ApiSession, RecordingServer
from nanorl.agents.endpoint.recording import Recording
from nanorl.agents.limits import Limits
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model
from nanorl.observability.store import RolloutStore
from nanorl.types import Rollout

openai = pytest.importorskip("openai", reason="needs the extra `agents`")

TOKENS = 9  # of a picture
AGENT = '''
import base64, itertools
from pathlib import Path

PICTURES = [
    "data:image/png;base64," + base64.b64encode(file.read_bytes()).decode()
    for file in sorted(Path(__file__).parent.glob("*.png"))
]
calls = itertools.count()

async def agent(task, client):
    """Asks, shows a screenshot, and asks about another one of that size in its place."""
    async def ask(messages, **more):
        answer = await client.chat.completions.create(model="policy", messages=messages, **more)
        return answer.choices[0].message.content

    def screenshot(url):
        shown = {"type": "image_url", "image_url": {"url": url}}
        return {"role": "user", "content": [{"type": "text", "text": "now"}, shown]}

    number = next(calls)
    first, other = (PICTURES[(number + i) % len(PICTURES)] for i in (0, 1))
    begun = [*task.messages]
    begun.append({"role": "assistant", "content": await ask(begun)})
    seen = [*begun, screenshot(first)]
    seen.append({"role": "assistant", "content": await ask(seen)})
    await ask([*seen, {"role": "user", "content": "and then"}])
    await ask([*begun, screenshot(other)], n=2)
    return float(number % 2)
'''


def png(seed: int) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 256, (48, 48, 3), dtype=np.uint8)
    return write_png(noise)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_tiny_vision_model(tmp_path_factory.mktemp("seeing") / "model")


OPTIONS: dict[str, Any] = {
    **{"dtype": "fp32", "threads": 1, "env_workers": 0, "warm_start.steps": 0},
    **{"rl.tasks_per_step": 1, "rl.group_size": 4, "rl.lr": 1e-2, "rl.temperature": 1.0},
    **{"agent.max_turns": 6, "agent.max_turn_tokens": 6, "agent.max_context_tokens": 200},
    **{"evaluation.num_tasks": 1, "evaluation.num_tasks_untrained": 0},
    **{"evaluation.num_tasks_no_tool": 0, "evaluation.num_tasks_hidden": 0},
}


def test_what_an_agent_saw_by_screenshots_is_what_is_trained(model: Path, tmp_path: Path) -> None:
    """Two steps, the second with weights that the first has moved. Members of a group see different
    screenshots in the same place, and so do branches of one episode."""
    (tmp_path / "agent.py").write_text(AGENT)
    files = {f"{seed}.png": png(seed) for seed in range(3)}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    tasks = tmp_path / "tasks.jsonl"
    rows = [{"prompt": f"look {i}", "answer": "x", "split": "train" if i else "heldout"}
            for i in range(4)]  # fmt: skip
    tasks.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = {**OPTIONS, "tasks": str(tasks), "agent.loop": f"{tmp_path / 'agent.py'}:agent"}
    run = nanorl.train(str(model), env="answer", steps=2, out=tmp_path / "run", options=options)
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").open()]
    assert [row["logp_gap_max"] for row in metrics] == [0.0, 0.0]
    assert all(row["grad_norm"] > 0 for row in metrics)
    stored = {file.read_bytes() for file in (run.folder / "pictures").iterdir()}
    assert stored == set(files.values()), "each once, as it came"
    with RolloutStore(run.folder / "rollouts.sqlite", is_read_only=True) as store:
        rollouts = [one for one in store.query() if one.images]
    assert len(rollouts) == 2 * 1 * 4
    for rollout in rollouts:
        check_branches(rollout)


def check_branches(rollout: Rollout) -> None:
    """One picture in each sequence; those that begin with the same tokens differ where it is."""
    sequences = rollout.sequences
    assert all(len(one.images) == 1 for one in sequences)
    assert all(one.images[0].length == TOKENS for one in sequences)
    assert len({one.images[0].key for one in sequences}) == 2
    for one in sequences:
        for other in sequences:
            span = one.images[0]
            same_tokens = one.tokens[: span.end] == other.tokens[: span.end]
            keys = [content_ids(each.tokens, each.images)[: span.end] for each in (one, other)]
            assert (keys[0] == keys[1]) == (same_tokens and span == other.images[0])
    covered = [sum(one.loss_mask) for one in sequences]
    assert sum(covered) == sum(
        span.action_end - span.action_start for one in sequences for span in one.turn_spans
    )


class Noted:
    """Says one letter, and keeps what it was asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[list[int], SamplingParams]] = []

    async def generate(self, ids: list[int], params: SamplingParams) -> Output:
        self.asked.append((ids, params))
        return output_of([64, EOS])


@pytest.fixture
def tokenizer(model: Path, tmp_path: Path) -> SeeingTokenizer:
    return seeing_tokenizer(model, tmp_path / "pictures")


LIMITS = Limits(max_turns=6, max_turn_tokens=9, max_context_tokens=150, max_images=2)


def talk(
    tokenizer: SeeingTokenizer,
    converse: Callable[[ApiSession, Any], Any],
    limits: Limits = LIMITS,
) -> tuple[Noted, Recording]:
    engine = Noted()
    recording = Recording(engine, tokenizer, limits=limits, sampling=SamplingParams(seed=5))

    async def run() -> None:
        server = RecordingServer(all_dialects(tokenizer), model="policy", max_model_len=150)
        server.let_see(tokenizer.store)
        try:
            async with server.episode(recording) as session:
                options = {"base_url": session.openai_url, "api_key": session.key}
                async with openai.AsyncOpenAI(**options, max_retries=0) as client:
                    await converse(session, client)
        finally:
            await server.close()

    asyncio.run(run())
    return engine, recording


def shown(*seeds: int, text: str = "look") -> dict[str, Any]:
    urls = [f"data:image/png;base64,{base64.b64encode(png(seed)).decode()}" for seed in seeds]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    return {"role": "user", "content": [{"type": "text", "text": text}, *parts]}


async def ask(client: Any, *messages: dict[str, Any]) -> dict[str, Any]:
    answer = await client.chat.completions.create(model="policy", messages=list(messages))
    return {"role": "assistant", "content": answer.choices[0].message.content}


def test_a_conversation_goes_on_from_its_own_picture_alone(tokenizer: SeeingTokenizer) -> None:
    """Tokens and pictures of what was answered are taken as they were; the same words beside
    another picture are another conversation."""

    async def converse(session: ApiSession, client: Any) -> None:
        said = await ask(client, shown(1))
        await ask(client, shown(1), said, shown(2, text="and"))
        await ask(client, shown(2), said, shown(1, text="and"))

    engine, recording = talk(tokenizer, converse)
    first, second, third = engine.asked
    assert [len(params.images) for _, params in engine.asked] == [1, 2, 2]
    assert second[0][: len(first[0]) + 2] == [*first[0], 64, EOS]
    assert second[0] == third[0], "the tokens are no difference"
    assert second[1].images[0] == first[1].images[0]
    keys = [[span.key for span in params.images] for _, params in engine.asked]
    assert keys[1] == keys[2][::-1]
    assert second[1].seed != third[1].seed, "a seed for each prompt, pictures included"
    pad = tokenizer.token_to_id("<|image_pad|>")
    for ids, params in engine.asked:
        places = [place for span in params.images for place in range(span.start, span.end)]
        assert places == [place for place, one in enumerate(ids) if one == pad]
    sequences = recording.tree.sequences()
    assert [len(one.turn_spans) for one in sequences] == [1, 2]
    assert tokenizer.store.num_read == 2


def test_the_engine_is_given_spans_of_what_responses_and_messages_show(
    tokenizer: SeeingTokenizer,
) -> None:
    anthropic = pytest.importorskip("anthropic", reason="needs the anthropic client")
    data = base64.b64encode(png(3)).decode()

    async def converse(session: ApiSession, client: Any) -> None:
        part = {
            "type": "input_image",
            "detail": "auto",
            "image_url": f"data:image/png;base64,{data}",
        }
        words = {"type": "input_text", "text": "look"}
        asked = [{"role": "user", "content": [words, part]}]
        answer = await client.responses.create(model="policy", input=asked)
        await client.responses.create(
            model="policy", previous_response_id=answer.id, input="and now"
        )
        source = {"type": "base64", "media_type": "image/png", "data": data}
        result = {"type": "tool_result", "tool_use_id": "a",
                  "content": [{"type": "image", "source": source}]}  # fmt: skip
        use = {"type": "tool_use", "id": "a", "name": "look", "input": {}}
        turns = [{"role": "user", "content": "look"}, {"role": "assistant", "content": [use]},
                 {"role": "user", "content": [result]}]  # fmt: skip
        own = anthropic.AsyncAnthropic(base_url=session.url, api_key=session.key, max_retries=0)
        async with own:
            counted = await own.messages.count_tokens(model="policy", messages=turns)
            answer = await own.messages.create(model="policy", max_tokens=9, messages=turns)
            assert answer.usage.input_tokens == counted.input_tokens

    engine, _ = talk(tokenizer, converse)
    assert [len(params.images) for _, params in engine.asked] == [1, 1, 1]
    assert len({params.images[0].key for _, params in engine.asked}) == 1
    assert tokenizer.store.num_read == 1, "one picture, four requests"


def test_token_ids_go_on_beside_the_spans_that_were_told(tokenizer: SeeingTokenizer) -> None:
    sha256 = tokenizer.store.add(png(4))
    (span,) = tokenizer.store.spans(sha256, range(1, TOKENS + 1))
    ids = [64, *[tokenizer.token_to_id("<|image_pad|>")] * TOKENS, 65]
    fields = {"start": 1, "length": TOKENS, "key": span.key, "grid": [1, 6, 6], "sha256": sha256}
    faults: list[str] = []

    async def converse(session: ApiSession, client: Any) -> None:
        for given in (fields, {**fields, "key": "made up"}, {**fields, "sha256": "0" * 64}):
            body = {"token_ids": ids, "sampling_params": {"max_tokens": 4, "images": [given]}}
            try:
                await client.post("/../inference/v1/generate", body=body, cast_to=object)
            except openai.APIStatusError as error:
                faults.append(f"{error.status_code} {error.message}")

    engine, recording = talk(tokenizer, converse)
    assert [params.images for _, params in engine.asked] == [(span,)]
    (sequence,) = recording.tree.sequences()
    assert sequence.images == [span]
    assert "400" in faults[0] and "is another one here" in faults[0]
    assert "400" in faults[1] and "no picture 000000000000" in faults[1]


def test_limits_of_an_episode_hold_for_pictures(tokenizer: SeeingTokenizer) -> None:
    """Too many in one prompt, too many tokens of pictures, and too many different ones, which would
    fill the disk; each before a picture is decoded."""
    faults: list[Any] = []

    async def fails(work: Any) -> None:
        with pytest.raises(openai.BadRequestError) as caught:
            await work
        faults.append((caught.value.message, tokenizer.store.num_read))

    async def converse(session: ApiSession, client: Any) -> None:
        await fails(ask(client, shown(1, 2, 3)))
        said = await ask(client, shown(1))
        await fails(ask(client, shown(1), said, shown(2, 3)))
        for seed in range(2, 12, 2):  # counting costs no call
            content = [
                {"type": "image", "source": {"type": "base64", "media_type": "image/png",
                                             "data": base64.b64encode(png(one)).decode()}}
                for one in (seed, seed + 1)
            ]  # fmt: skip
            body = {"model": "m", "messages": [{"role": "user", "content": content}]}
            await client.post("/messages/count_tokens", body=body, cast_to=object)
        await fails(ask(client, shown(50, 51)))

    talk(tokenizer, converse)
    assert [count for _, count in faults] == [0, 1, 11]
    assert all("one prompt with 3 pictures of" in m for m, _ in faults[:2])
    assert all("max_images is 2; leave older pictures out" in m for m, _ in faults[:2])
    assert "may bring 12" in faults[2][0]
    few = Limits(max_turns=6, max_turn_tokens=9, max_context_tokens=2 * TOKENS)
    faults.clear()
    talk(tokenizer, lambda _, client: fails(ask(client, shown(60, 61))), few)
    assert "context length" in faults[0][0]


def test_calls_under_way_have_a_size_together() -> None:
    """Four of the longest; texts alone never come that far."""
    session = ApiSession(recording=None, url="", key="")  # type: ignore[arg-type]
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(session.counted(64, 64 << 20))
        with pytest.raises(ApiError, match="at most 256 MiB of calls at once") as caught:
            stack.enter_context(session.counted(64, 1))
        assert caught.value.status == 429
    assert (session.num_open, session.open_bytes) == (0, 0)


class Gallery(nanorl.Env):
    """Opens with a picture."""

    def tasks(self, rng: Any) -> nanorl.Task:
        return nanorl.Task("look", answer="x")

    def reset(self) -> list[Any]:
        return ["What is it?", nanorl.Image(png(70))]


def test_an_agent_sends_what_an_environment_opens_with_as_it_is(
    tokenizer: SeeingTokenizer,
) -> None:
    """Its messages are those of an API, and the picture comes back as the one that it was."""
    from nanorl.envs.images import with_pictures, with_urls, without_pictures

    opening = with_pictures(Gallery().reset(), tokenizer)
    (message,) = with_urls(opening, tokenizer)
    assert without_pictures(message)["content"] == "What is it?"
    engine, _ = talk(tokenizer, lambda _, client: ask(client, message))
    ((ids, params),) = engine.asked
    assert ids == tokenizer.encode_chat(opening, add_generation_prompt=True)
    assert list(params.images) == tokenizer.images_in(ids, opening, 0)
    assert isinstance(tokenizer.store, PictureStore) and tokenizer.store.num_read == 1
