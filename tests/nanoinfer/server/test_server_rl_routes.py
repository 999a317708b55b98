"""Other stacks drive our engine: what their client code sends is understood, with the admin's key
alone, and no path leads out of the folder that was named at the start."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rl_client_bodies import CONTROL, QUESTIONS, SLIME_SAMPLING, Sent
from serving import KEY, Served, serve, slow_steps
from starlette.testclient import TestClient
from test_server_adapters import changes
from tiny_text import make_model, make_text_engine, make_tokenizer, save_folder
from waiting import wait_until

from nanoengine.adapters.lora import write_adapter
from nanoengine.adapters.lora_config import LoraConfig
from nanoengine.formats.hf import save_model
from nanoinfer.params import SamplingParams
from nanoinfer.server.app import HttpApp, make_app
from nanoinfer.server.config import ServerConfig

ADMIN = "the-admins-key"
IDS = [5, 9, 200, 31, 8, 77]
LONG = {"ids": IDS, "params": {"max_tokens": 400, "ignore_eos": True}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("weights")
    with serve(admin_key=ADMIN, weights_root=root) as running:
        yield running


def control_routes(app: HttpApp) -> list[tuple[str, str]]:
    """(method, path) of every route that a client without the admin's key is refused."""
    posts = ["/abort", "/drain", "/pause", "/resume", "/sleep", "/wake", "/update_weights"]
    rows = {("POST", path) for path in posts}
    rows |= {(one.method, one.path.partition("?")[0]) for one in CONTROL}
    return sorted(rows)


def test_what_their_clients_send_is_understood(served: Served) -> None:
    for one in CONTROL:
        status, told = served.send(one.path, one.body, ADMIN, one.method)
        assert status == one.status, (one, told)
        if one.status == 501:
            assert "/update_weights_from_disk" in told["message"] and told["success"] is False
    for one in QUESTIONS:
        assert served.send(one.path, one.body, KEY, one.method)[0] == one.status, one
    assert served.send("/health", key=None)[1]["is_paused"] is False


@pytest.mark.parametrize("key", [KEY, "wrong", None])
def test_control_is_the_admins_alone(served: Served, key: str | None) -> None:
    for method, path in control_routes(served.app):
        status, told = served.send(path, {}, key, method)
        assert status == (403 if key == KEY else 401), path
        assert ("send the key of --admin-key-file" in told["error"]["message"]) == (key == KEY)
    assert served.send("/health", key=None)[1]["is_paused"] is False


def test_a_server_without_an_admins_key_keeps_control_closed() -> None:
    for options in ({"admin_key": None}, {"admin_key": None, "api_key": None}):
        with serve(**options) as served:
            for method, path in control_routes(served.app):
                status, told = served.send(path, {}, KEY, method)
                assert status == 403 and "--admin-key-file" in told["error"]["message"], path


def test_the_admins_key_opens_everything_and_may_be_the_only_one() -> None:
    with serve(admin_key=ADMIN, api_key=None) as served:
        assert served.send("/v1/models", key=ADMIN)[0] == 200
        assert served.send("/v1/models", key=None)[0] == 401
        assert served.send("/heartbeat", {}, ADMIN)[0] == 200


def test_a_key_comes_in_each_way_that_clients_know(served: Served) -> None:
    requests = pytest.importorskip("requests")
    url = f"127.0.0.1:{served.port}"
    with requests.Session() as session:
        session.trust_env = False
        get = session.get
        assert get(f"http://{url}/v1/models").status_code == 401
        assert get(f"http://{url}/v1/models", headers={"x-api-key": KEY}).status_code == 200
        assert get(f"http://any:{KEY}@{url}/v1/models").status_code == 200
        assert get(f"http://any:{KEY}x@{url}/v1/models").status_code == 401
        assert get(f"http://any:{ADMIN}@{url}/flush_cache").status_code == 200
        page = {"Origin": "http://evil.example"}  # a browser sends a password it once learnt
        assert get(f"http://any:{ADMIN}@{url}/flush_cache", headers=page).status_code == 401
        broken = {"Authorization": "Basic %%%"}
        assert get(f"http://{url}/v1/models", headers=broken).status_code == 401
    aiohttp = pytest.importorskip("aiohttp")

    async def ask() -> int:
        async with (
            aiohttp.ClientSession() as asking,
            asking.post(f"http://any:{ADMIN}@{url}/reset_prefix_cache") as answer,
        ):
            status: int = answer.status
            return status

    assert asyncio.run(ask()) == 200


def in_flight(served: Served, count: int) -> list[threading.Thread]:
    """So many long requests, each under way."""
    answers: dict[int, Any] = {}
    threads = [
        threading.Thread(
            target=lambda i=i: answers.update(
                {i: served.send("/generate", LONG | {"request_id": f"r{i}"})}
            )
        )
        for i in range(count)
    ]
    for thread in threads:
        thread.answers = answers  # type: ignore[attr-defined]
        thread.start()
    wait_until(lambda: served.engine.metrics()["num_running"] == count)
    return threads


def test_slimes_update_under_requests_in_flight(tmp_path: Path) -> None:
    """pause_generation ends them with what they have, the cache is flushed, the new weights serve
    under their name, and generation goes on."""
    save_model(make_model(seed=5), tmp_path / "step_3")
    engine = make_text_engine(num_blocks=512)
    with serve(engine, weights_root=tmp_path) as served:
        with slow_steps(engine):
            threads = in_flight(served, 2)
            assert served.send("/flush_cache", None, method="GET")[0] == 400
            assert served.send("/pause_generation", {})[0] == 200
        for thread in threads:
            thread.join()
        for status, answer in threads[0].answers.values():  # type: ignore[attr-defined]
            assert status == 200 and answer["outputs"][0]["finish_reason"] == "abort"
        load = served.send("/v1/loads")[1]
        assert load["loads"][0]["num_reqs"] == 0
        assert served.send("/flush_cache", None, method="GET")[0] == 200
        body = {
            "model_path": str(tmp_path / "step_3"), "load_format": None,
            "abort_all_requests": False, "weight_version": "step-3", "flush_cache": True,
        }  # fmt: skip
        status, told = served.send("/update_weights_from_disk", body)
        assert status == 200 and told["success"] is True
        assert served.send("/get_weight_version")[1] == {"weight_version": "step-3"}
        assert served.send("/continue_generation", {})[1]["is_paused"] is False
        answer = served.send("/generate", {"ids": IDS, "params": {"temperature": 0}})[1]
        new = make_text_engine(seed=5)
        expected = new.generate([IDS], SamplingParams(temperature=0))[0].ids
        assert answer["outputs"][0]["ids"] == expected
        assert set(answer["outputs"][0]["versions"]) == {1}


def test_primes_update_keeps_requests_in_flight(tmp_path: Path) -> None:
    save_model(make_model(seed=5), tmp_path / "broadcasts" / "step_1")
    engine = make_text_engine(num_blocks=512)
    with serve(engine, weights_root=tmp_path) as served:
        with slow_steps(engine):
            threads = in_flight(served, 2)
            assert served.send("/pause?mode=keep&clear_cache=false", {})[1]["is_paused"]
        folder = str(tmp_path / "broadcasts" / "step_1")
        assert served.send("/update_weights", {"weight_dir": folder})[1]["version"] == 1
        served.send("/resume", {})
        for thread in threads:
            thread.join()
        for _, answer in threads[0].answers.values():  # type: ignore[attr-defined]
            output = answer["outputs"][0]
            assert output["finish_reason"] == "length" and set(output["versions"]) == {0, 1}


def test_a_pause_may_wait_for_the_requests_in_flight() -> None:
    engine = make_text_engine(num_blocks=512)
    with serve(engine) as served:
        with slow_steps(engine):
            threads = in_flight(served, 2)
        assert served.send("/pause?mode=wait", {})[1]["is_paused"]
        assert engine.num_unfinished == 0
        for thread in threads:
            thread.join()
        for _, answer in threads[0].answers.values():  # type: ignore[attr-defined]
            assert answer["outputs"][0]["finish_reason"] == "length"
        served.send("/resume", {})


def test_memory_is_given_back_and_taken_again_in_stages() -> None:
    with serve() as served:
        told = served.send("/release_memory_occupation", {})[1]
        assert told["released"] == ["kv_cache"] and told["is_asleep"]
        assert served.send("/is_sleeping")[1] == {"is_sleeping": True}
        assert served.send("/resume_memory_occupation", {"tags": ["weights"]})[1]["is_asleep"]
        told = served.send("/resume_memory_occupation", {"tags": ["kv_cache"]})[1]
        assert told["is_asleep"] is False
        assert served.send("/release_memory_occupation", {"tags": ["weights"]})[1]["released"] == []
        assert served.send("/release_memory_occupation", {"tags": ["all"]})[0] == 400


def paths_out(root: Path) -> list[str]:
    """Folders that are not below `root`, by every way that leads there."""
    elsewhere = root.parent / "elsewhere"
    save_model(make_model(seed=5), elsewhere)
    (root.parent / "empty").mkdir()
    (root / "link").symlink_to(elsewhere)
    (root / "step_9").mkdir()
    for file in elsewhere.iterdir():
        (root / "step_9" / file.name).symlink_to(file)
    inside = root / "step_1"
    return [
        "../elsewhere", "../empty", str(elsewhere), str(inside / ".." / ".." / "elsewhere"),
        "link", "step_9", "/", "/etc", "step_1/../../elsewhere", "~",
    ]  # fmt: skip


def test_no_path_leads_out_of_the_folder_that_was_named(tmp_path: Path) -> None:
    root = tmp_path / "weights"
    save_model(make_model(seed=5), root / "step_1")
    with serve(weights_root=root) as served:
        for path in paths_out(root):
            for route, body in (
                ("/update_weights_from_disk", {"model_path": path}),
                ("/update_weights", {"path": path, "version": 9}),
                ("/update_weights", {"weight_dir": path}),
                ("/load_lora_adapter", {"lora_name": "poet", "lora_path": path}),
                ("/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": path}),
            ):
                status, told = served.send(route, body)
                assert status == (400 if path == "~" else 403), (route, path, told)
        assert served.engine.version == 0 and served.engine.adapters == []
        for path in ("step_1", str(root / "step_1"), "./step_1/../step_1"):
            assert served.send("/update_weights_from_disk", {"model_path": path})[0] == 200
        assert served.engine.version == 3
        for path in ("a\0b", "nothing", ""):
            assert served.send("/update_weights_from_disk", {"model_path": path})[0] == 400
    with serve() as served:
        status, told = served.send("/update_weights_from_disk", {"model_path": "step_1"})
        assert status == 403 and "without --weights-root" in told["message"]


def save_adapter(folder: Path, seed: int) -> None:
    adapter = changes(seed)
    write_adapter(folder, adapter, LoraConfig(rank=2, alpha=2), targets=list(adapter))


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_adapters_come_and_go(tmp_path: Path, prefix: str) -> None:
    save_adapter(tmp_path / "poet", seed=1)
    save_adapter(tmp_path / "poet_2", seed=2)
    with serve(weights_root=tmp_path) as served:
        ask = {"model": "poet", "prompt": "the", "max_tokens": 8, "temperature": 0}
        assert served.send("/v1/completions", ask)[0] == 404
        texts = []
        for folder in ("poet", "poet_2"):  # a trainer brings the next version under the same name
            body = {"lora_name": "poet", "lora_path": str(tmp_path / folder)}
            status, told = served.send(f"{prefix}/load_lora_adapter", body | {"load_inplace": True})
            assert status == 200 and ("poet" in str(told))
            status, answer = served.send("/v1/completions", ask)
            assert status == 200
            texts.append(answer["choices"][0]["text"])
        assert texts[0] != texts[1]
        assert served.send(f"{prefix}/unload_lora_adapter", {"lora_name": "poet"})[0] == 200
        assert served.send(f"{prefix}/unload_lora_adapter", {"lora_name": "poet"})[0] == 404
        body = {"lora_name": "tiny", "lora_path": str(tmp_path / "poet")}
        assert served.send(f"{prefix}/load_lora_adapter", body)[0] == 400


# -- SGLang's /generate ------------------------------------------------------------------------


def test_slimes_request_gets_its_tokens_and_their_log_probs(served: Served) -> None:
    body = {"sampling_params": SLIME_SAMPLING, "return_logprob": True, "input_ids": IDS}
    status, answer = served.send("/generate", body)
    assert status == 200, answer
    params = SamplingParams(max_tokens=6, seed=7, detokenize=True)
    alone = make_text_engine().generate([IDS], params)[0]
    meta = answer["meta_info"]
    pairs = meta["output_token_logprobs"]  # as slime reads them: item[0], item[1]
    assert [item[1] for item in pairs] == alone.ids == answer["output_ids"]
    assert [item[0] for item in pairs] == alone.logps
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (len(IDS), 6)
    assert answer["text"] == make_tokenizer().decode(alone.ids)


def test_skyrls_batch_is_answered_by_a_list_with_samples_of_their_own(served: Served) -> None:
    sampling = {"max_new_tokens": 12, "temperature": 1.0, "ignore_eos": True}
    body = {"input_ids": [IDS, IDS, IDS[:2]], "sampling_params": sampling}
    status, answers = served.send("/generate", body)
    assert status == 200 and len(answers) == 3
    assert answers[0]["output_ids"] != answers[1]["output_ids"]
    assert [one["meta_info"]["prompt_tokens"] for one in answers] == [6, 6, 2]
    assert "output_token_logprobs" not in answers[0]["meta_info"]


def test_a_prompt_is_scored_from_where_it_is_asked(served: Served) -> None:
    sampling = {"max_new_tokens": 1, "temperature": 1.0, "sampling_seed": 3}
    body = {
        "text": "hello, the world", "sampling_params": sampling, "return_logprob": True,
        "logprob_start_len": 0, "top_logprobs_num": 2, "return_text_in_logprobs": True,
    }  # fmt: skip
    meta = served.send("/generate", body)[1]["meta_info"]
    prompt = make_tokenizer().encode_prompt("hello, the world")
    engine = make_text_engine()
    scored = engine.generate([prompt], SamplingParams(max_tokens=1, seed=3, prompt_logps=True))[0]
    first, *rest = meta["input_token_logprobs"]
    assert first == [None, prompt[0], make_tokenizer().decode([prompt[0]])]
    assert [logp for logp, _, _ in rest] == scored.prompt_logps
    assert [token for _, token, _ in rest] == prompt[1:]
    assert len(meta["output_top_logprobs"][0]) == 2
    later = served.send("/generate", body | {"logprob_start_len": 4})[1]["meta_info"]
    assert later["input_token_logprobs"] == meta["input_token_logprobs"][4:]


@pytest.mark.parametrize(
    ("more", "named"),
    [
        ({"text": "both"}, "input_ids or text"),
        ({"stream": True}, "stream"),
        ({"image_data": ["x"]}, "image_data"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}, "custom_params"),
        ({"sampling_params": {"min_new_tokens": 3}}, "min_new_tokens"),
        ({"sampling_params": {"max_tokens": 3}}, "max_tokens"),
        ({"sampling_params": [{}, {}]}, "sampling_params"),
        ({"lora_path": "poet"}, "poet"),
        ({"sampling_params": {"n": 500}}, "500 completions"),
    ],
)
def test_what_cannot_be_is_refused_by_name(served: Served, more: Any, named: str) -> None:
    status, told = served.send("/generate", {"input_ids": IDS} | more)
    assert status in (400, 404) and named in told["error"]["message"]


def test_abort_request_ends_the_one_that_is_named() -> None:
    engine = make_text_engine(num_blocks=512)
    with serve(engine) as served:
        answers: dict[str, Any] = {}
        sampling = {"max_new_tokens": 400, "ignore_eos": True}

        def ask(name: str) -> None:
            body = {"input_ids": IDS, "sampling_params": sampling, "rid": name}
            answers[name] = served.send("/generate", body)[1]["meta_info"]["finish_reason"]["type"]

        threads = [threading.Thread(target=ask, args=(name,)) for name in "ab"]
        with slow_steps(engine):
            for thread in threads:
                thread.start()
            wait_until(lambda: engine.metrics()["num_running"] == 2)
            assert served.send("/abort_request", {"rid": "a"})[1]["num_aborted"] == 1
        assert served.send("/abort_request", {})[0] == 400
        for thread in threads:
            thread.join()
        assert answers == {"a": "abort", "b": "length"}


# -- text and ids ------------------------------------------------------------------------------


def test_text_to_ids_and_back(served: Served) -> None:
    tokenizer = make_tokenizer()
    text = "hello, the <|user|> wörld"
    status, told = served.send("/tokenize", {"prompt": text, "return_token_strs": True})
    assert status == 200 and told["tokens"] == tokenizer.encode(text)
    assert told["count"] == len(told["tokens"]) and told["max_model_len"] == 512
    assert told["token_strs"] == [tokenizer.decode([token]) for token in told["tokens"]]
    assert served.send("/detokenize", {"tokens": told["tokens"]})[1]["prompt"] == text
    batch = served.send("/v1/tokenize", {"prompt": ["he", "hello"]})[1]
    assert batch["tokens"] == [tokenizer.encode("he"), tokenizer.encode("hello")]
    end = tokenizer.token_to_id("<|end|>")
    for skip, shown in ((True, "he"), (False, "he<|end|>")):
        body = {"tokens": [[*tokenizer.encode("he"), end]], "skip_special_tokens": skip}
        assert served.send("/detokenize", body)[1]["text"] == [shown]
    for path, body in (
        ("/tokenize", {"prompt": "x", "model": "gpt"}),
        ("/tokenize", {"messages": [{"role": "user", "content": "x"}], "chat_template": "x"}),
        ("/tokenize", {}),
        ("/detokenize", {"tokens": [100000]}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        assert served.send(path, body)[0] in (400, 404), body


def test_a_chat_is_counted_as_it_is_asked(served: Served) -> None:
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the"}]
    messages += [{"role": "user", "content": "world"}]
    told = served.send("/tokenize", {"messages": messages})[1]
    ask = {"messages": messages, "max_tokens": 1, "return_token_ids": True}
    answer = served.send("/v1/chat/completions", ask)[1]
    assert told["tokens"] == answer["prompt_token_ids"]
    assert told["count"] == answer["usage"]["prompt_tokens"]
    bare = served.send("/tokenize", {"messages": messages, "add_generation_prompt": False})[1]
    assert bare["count"] < told["count"]


def test_each_row_names_where_it_is_from() -> None:
    assert all("/" in one.source and isinstance(one, Sent) for one in [*CONTROL, *QUESTIONS])


def test_the_option_of_the_admins_key_is_one_with_which_a_network_may_be_served(
    tmp_path: Path,
) -> None:
    save_folder(tmp_path / "model")
    (tmp_path / "admin").write_text(f"{ADMIN}\n")
    (tmp_path / "admin").chmod(0o600)
    options: dict[str, Any] = {"model": tmp_path / "model", "host": "0.0.0.0", "device": "cpu"}
    with pytest.raises(ValueError, match="is open to the network"):
        make_app(ServerConfig(**options))
    app = make_app(ServerConfig(**options, admin_key_file=tmp_path / "admin"))
    with pytest.raises(ValueError, match=r"--admin-key-file .*: cannot be read"):
        make_app(ServerConfig(**options, admin_key_file=tmp_path / "none"))
    client = TestClient(app.starlette())
    assert client.get("/v1/models").status_code == 401
    headers = {"Authorization": f"Bearer {ADMIN}"}
    assert client.get("/v1/models", headers=headers).status_code == 200
    assert client.post("/pause", headers=headers).json()["is_paused"]
