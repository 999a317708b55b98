"""vLLM and SGLang as replicas: bodies as their own servers write and their own clients send them.

Those of vLLM are of a server of it (0.32, its CPU build) that was asked by this client; those of
SGLang are in the form of its source (tokenizer_manager.py, io_struct.py).
"""

from __future__ import annotations

import asyncio
import json
import pickle
import subprocess
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from nanoinfer.params import Grammar, Output, SamplingParams
from nanorl.distributed.roles.http_replica import HttpReplica
from nanorl.distributed.roles.outside_replica import MAX_MEAN_GAP, OutsideReplica, check_gap
from nanorl.distributed.roles.replica_clients import ReplicaLost
from nanorl.distributed.roles.router import Router
from nanorl.distributed.roles.servers import check_servers, server_at
from nanorl.distributed.weights.disk import DiskOffer, DiskReceiver
from nanorl.distributed.weights.offer import BaseVersionMissing, Offer, WeightsRefused
from nanorl.options.cluster_config import ClusterConfig, RolloutConfig
from nanorl.options.presets import get_preset
from nanorl.options.run_config import RunConfig

Asked = tuple[str, str, Any]  # method, path, body
PARAMS = SamplingParams(max_tokens=8, seed=3)
OFFER = DiskOffer(version=7, entries=(), folder="/shared/weights/v00000007")
RECEIVER = DiskReceiver("key", has_changes=False)
GENERATE = "/inference/v1/generate"


@dataclass
class Peer:
    """A server that answers each path with what stands there, in turn; the last answer stays."""

    answers: dict[str, list[tuple[int, Any]]]
    asked: list[Asked] = field(default_factory=list)
    keys: set[str] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        lines = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        raw = await reader.readexactly(int(lines["Content-Length"]))
        method, path, _ = head.split(" ", 2)
        self.asked.append((method, path, json.loads(raw) if raw else None))
        self.keys.add(lines.get("Authorization", ""))
        answers = self.answers.get(path, [(404, {"detail": "Not Found"})])
        status, body = answers.pop(0) if len(answers) > 1 else answers[0]
        said = b"" if body is None else json.dumps(body).encode()
        writer.write(f"HTTP/1.1 {status} X\r\ncontent-length: {len(said)}\r\n\r\n".encode() + said)
        writer.close()

    @property
    def paths(self) -> list[str]:
        return [path for _, path, _ in self.asked]


def play(peer: Peer, work: Callable[[str], Awaitable[None]]) -> None:
    """`work` is given host and port of the peer."""

    async def run() -> None:
        async with await asyncio.start_server(peer.serve, "127.0.0.1", 0) as server:
            await work(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")

    asyncio.run(run())


def client(engine: str, place: str, key_file: Path | None = None) -> HttpReplica:
    return pickle.loads(pickle.dumps(server_at(f"{engine}+http://{place}", key_file)))


# -- vLLM ------------------------------------------------------------------------------------------


def logprob(token: int, logp: float, *more: tuple[int, float]) -> dict[str, Any]:
    one = {"token_id": token, "logprob": logp, "rank": 1}
    others = [{"token_id": t, "logprob": p, "rank": 2} for t, p in more]
    return {**one, "top_logprobs": [one, *others]}


def vllm_answer(
    ids: list[int], spans: list[tuple[str, int, int]], finish: str, stop: int | str | None = None
) -> dict[str, Any]:
    return {
        "request_id": "y", "model": "policy", "created": 1795816379,
        "usage": {"prompt_tokens": 3, "total_tokens": 3 + len(ids), "completion_tokens": len(ids)},
        "prompt_logprobs": None, "prompt_token_ids": None, "metrics": None, "output_mode": "tokens",
        "kv_transfer_params": None,
        "choices": [{
            "index": 0, "finish_reason": finish, "stop_reason": stop, "token_ids": ids,
            "routed_experts": None, "sampling_mask": None,
            "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
            "logprobs": {
                "content": [logprob(one, -one / 10, (90, -0.2), (91, -0.1)) for one in ids]
            },
        }],
    }  # fmt: skip


def vllm_info(*, mode: str = "raw_logprobs", device: str = "cuda") -> Any:
    return {
        "vllm_config": {
            "model_config": {"logprobs_mode": mode},
            "device_config": {"device": device},
        }
    }


def vllm(*answers: tuple[int, Any], info: Any = None) -> Peer:
    ok = {path: [(200, {"status": "ok"})] for path in ("/pause?mode=abort", "/resume")}
    return Peer(
        {
            **ok,
            GENERATE: list(answers) or [(400, {"error": {"message": "token_ids: required"}})],
            "/collective_rpc": [(200, {"results": [None]})],
            "/reset_prefix_cache": [(200, None)],
            "/update_weight_version": [(200, {"success": True, "new_version": "7"})],
            "/weight_info": [(200, {"weight_version": "7"})],
            "/server_info?config_format=json": [(200, info or vllm_info())],
        }
    )


def test_vllm_is_asked_by_ids_and_answers_with_the_version_of_each_token(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret\n")
    peer = vllm((200, vllm_answer([50, 51, 5], [("7", 0, 2), ("8", 2, 3)], "stop")))

    async def work(place: str) -> None:
        params = replace(PARAMS, top_logps=2, stop_token_ids=(9,))
        output = await client("vllm", place, key).generate([1, 2], params, "r", None)
        assert output == Output(
            ids=[50, 51, 5],
            logps=[-5.0, -5.1, -0.5],
            versions=[7, 7, 8],
            finish_reason="stop",
            stop_reason=5,
            top_logps=[[(91, -0.1), (90, -0.2)]] * 3,
        )

    play(peer, work)
    ((method, path, body),) = peer.asked
    assert (method, path, body["token_ids"]) == ("POST", GENERATE, [1, 2])
    assert body["sampling_params"] == {
        "max_tokens": 8, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 3,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": [],
        "stop_token_ids": [9], "ignore_eos": False, "logprobs": 3, "detokenize": False,
    }  # fmt: skip
    assert peer.keys == {"Bearer secret"}


def test_what_an_update_cut_short_goes_on_under_the_new_weights() -> None:
    peer = vllm(
        (200, vllm_answer([50, 51], [("7", 0, 2)], "abort")),
        (200, vllm_answer([], [], "abort")),
        (200, vllm_answer([52, 5], [("8", 0, 2)], "stop", 5)),
    )

    async def work(place: str) -> None:
        router = Router(gate=0, wait_s=5)
        router.set_replicas({"a": client("vllm", place)})
        output = await router.generate([1, 2], PARAMS)
        assert (output.ids, output.versions) == ([50, 51, 52, 5], [7, 7, 8, 8])
        assert output.logps == [-5.0, -5.1, -5.2, -0.5] and output.finish_reason == "stop"
        assert router.counters()["num_drained"] == router.counters()["num_lost"] == 0

    play(peer, work)
    bodies = [body for _, _, body in peer.asked]
    assert [body["token_ids"] for body in bodies] == [[1, 2], [1, 2, 50, 51], [1, 2, 50, 51]]
    assert [body["sampling_params"]["max_tokens"] for body in bodies] == [8, 6, 6]
    seeds = [body["sampling_params"]["seed"] for body in bodies]
    assert seeds[0] != seeds[1], "the numbers of a part are not drawn twice"


def test_vllm_takes_weights_from_a_folder_and_goes_on_whatever_happens() -> None:
    peer = vllm()
    broken = vllm()
    broken.answers["/collective_rpc"] = [(500, {"error": {"message": "no such file"}})]

    async def take(place: str) -> None:
        replica = client("vllm", place)
        assert await replica.load_weights(RECEIVER, OFFER) > 0
        assert await replica.heartbeat() == {"version": 7.0}
        with pytest.raises(BaseVersionMissing, match="whole versions"):
            await replica.load_weights(RECEIVER, replace(OFFER, base_version=6))
        with pytest.raises(WeightsRefused, match="transport disk"):
            await replica.load_weights(RECEIVER, Offer(version=7))

    async def fail(place: str) -> None:
        with pytest.raises(WeightsRefused, match="no such file"):
            await client("vllm", place).load_weights(RECEIVER, OFFER)

    play(peer, take)
    play(broken, fail)
    assert [one for one in peer.asked if one[1] != "/weight_info" and one[0] == "POST"][:5] == [
        ("POST", "/pause?mode=abort", {}),
        ("POST", "/collective_rpc",
         {"method": "reload_weights", "kwargs": {"weights_path": OFFER.folder}}),
        ("POST", "/reset_prefix_cache", {}),
        ("POST", "/update_weight_version", {"new_version": "7"}),
        ("POST", "/resume", {}),
    ]  # fmt: skip
    assert [path for method, path, _ in broken.asked if method == "POST"] == [
        "/pause?mode=abort",
        "/collective_rpc",
        "/resume",
    ]


def test_vllm_on_a_cpu_is_given_no_tied_weights_which_it_would_keep_half_of(tmp_path: Path) -> None:
    offer = replace(OFFER, folder=str(tmp_path))

    def load(device: str, is_tied: bool) -> Peer:
        (tmp_path / "config.json").write_text(json.dumps({"tie_word_embeddings": is_tied}))
        peer = vllm(info=vllm_info(device=device))

        async def work(place: str) -> None:
            await client("vllm", place).load_weights(RECEIVER, offer)

        play(peer, work)
        return peer

    with pytest.raises(WeightsRefused, match="tie_word_embeddings: false"):
        load("cpu", is_tied=True)
    assert "/collective_rpc" in load("cpu", is_tied=False).paths
    assert "/collective_rpc" in load("cuda", is_tied=True).paths


@pytest.mark.parametrize(
    ("options", "mode", "message"),
    [
        ({"temperature": 0.7}, "raw_logprobs", "--logprobs-mode processed_logprobs"),
        ({"temperature": 0.7, "top_k": 5}, "processed_logprobs", "truncation left out"),
        ({"top_p": 0.9}, "processed_logprobs", "--logprobs-mode raw_logprobs"),
        ({"grammar": Grammar("choice", choices=("a",))}, "processed_logprobs", "raw_logprobs"),
        ({"prompt_logps": True}, "raw_logprobs", "has no prompt_logps"),
        ({"adapter": "a"}, "raw_logprobs", "has no adapter"),
        ({"n": 2}, "raw_logprobs", "has no n;"),
        ({"temperature": 0.7, "logps_mode": "raw"}, "processed_logprobs", "has no logps_mode"),
    ],
)
def test_what_vllm_could_not_report_whole_is_refused(
    options: dict[str, Any], mode: str, message: str
) -> None:
    peer = vllm(info=vllm_info(mode=mode))

    async def work(place: str) -> None:
        with pytest.raises(ValueError, match=message):
            await client("vllm", place).generate([1], replace(PARAMS, **options), "r", None)

    play(peer, work)
    assert GENERATE not in peer.paths


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"temperature": 0.7}, "processed_logprobs"),
        ({"top_p": 0.9, "repetition_penalty": 1.1}, "raw_logprobs"),
        ({"temperature": 0.0}, "processed_logprobs"),
    ],
)
def test_what_vllm_reports_whole_is_drawn(options: dict[str, Any], mode: str) -> None:
    peer = vllm((200, vllm_answer([5], [("7", 0, 1)], "stop")), info=vllm_info(mode=mode))

    async def work(place: str) -> None:
        params = replace(PARAMS, **options)
        assert (await client("vllm", place).generate([1], params, "r", None)).ids == [5]

    play(peer, work)
    body = peer.asked[-1][2]["sampling_params"]
    assert all(body[name] == value for name, value in options.items())


def check(peer: Peer, engine: str, temperature: float = 1.0) -> None:
    async def work(place: str) -> None:
        address = f"{engine}+http://{place}"
        await asyncio.to_thread(check_servers, [address], None, temperature)

    play(peer, work)


def test_a_server_that_could_not_serve_the_run_is_refused_before_any_work() -> None:
    check(vllm(), "vllm")
    with pytest.raises(ValueError, match="processed_logprobs"):
        check(vllm(), "vllm", temperature=0.7)
    with pytest.raises(ValueError, match=r"no route for tokens.*--enable-scale-out"):
        check(Peer({}), "vllm")
    without = vllm()
    del without.answers["/weight_info"]
    with pytest.raises(ValueError, match=r"no routes for weights.*VLLM_SERVER_DEV_MODE=1"):
        check(without, "vllm")
    with pytest.raises(ValueError, match=r"answered 401.*Unauthorized"):
        check(vllm((401, {"error": "Unauthorized"})), "vllm")


def test_weights_that_somebody_else_loaded_are_an_error_and_no_version() -> None:
    peer = vllm((200, vllm_answer([5], [("default", 0, 1)], "stop")))

    async def work(place: str) -> None:
        with pytest.raises(RuntimeError, match="loaded by somebody else"):
            await client("vllm", place).generate([1], PARAMS, "r", None)

    play(peer, work)


def test_an_answer_with_a_token_that_has_no_logprob_is_an_error() -> None:
    torn = vllm_answer([50, 5], [("7", 0, 2)], "stop")
    torn["choices"][0]["logprobs"]["content"].pop()
    peer = vllm((200, torn))

    async def work(place: str) -> None:
        with pytest.raises(RuntimeError, match="2 tokens, 1 log-probs, 2 versions"):
            await client("vllm", place).generate([1], PARAMS, "r", None)

    play(peer, work)


def test_an_engine_that_is_gone_loses_its_requests_and_one_that_fails_says_so() -> None:
    async def work(place: str) -> None:
        replica = client("vllm", place)
        with pytest.raises(ReplicaLost, match="answered 503"):
            await replica.generate([1], PARAMS, "r", None)
        with pytest.raises(RuntimeError, match="answered 500: EngineDeadError"):
            await replica.generate([1], PARAMS, "r", None)
        with pytest.raises(ValueError, match="answered 400: too long"):
            await replica.generate([1], PARAMS, "r", None)

    play(
        vllm(
            (503, {"detail": "starting"}),
            (500, {"error": {"message": "EngineDeadError"}}),
            (400, {"error": {"message": "too long"}}),
        ),
        work,
    )
    nobody = server_at("vllm+http://127.0.0.1:9", None)
    with pytest.raises(ReplicaLost):
        asyncio.run(nobody.generate([1], PARAMS, "r", None))


# -- SGLang ----------------------------------------------------------------------------------------


def sglang_answer(ids: list[int], version: str, finish: dict[str, Any]) -> dict[str, Any]:
    return {
        "text": "…",
        "output_ids": ids,
        "meta_info": {
            "id": "r", "finish_reason": finish, "prompt_tokens": 2, "weight_version": version,
            "total_retractions": 0, "completion_tokens": len(ids), "cached_tokens": 1,
            "input_token_logprobs": [[None, 1, None]],
            "output_token_logprobs": [[-one / 10, one, None] for one in ids],
            "output_top_logprobs": [[[-0.1, 91, None], [-0.2, 90, None]] for _ in ids],
            "e2e_latency": 0.2,
        },
    }  # fmt: skip


def sglang(*answers: tuple[int, Any]) -> Peer:
    told = {
        "success": True,
        "message": "Succeeded to update model weights.",
        "num_paused_requests": 0,
    }
    return Peer(
        {
            "/generate": list(answers) or [(200, sglang_answer([5], "7", {"type": "length"}))],
            "/pause_generation": [(200, {"status": "ok"})],
            "/update_weights_from_disk": [(200, told)],
            "/continue_generation": [(200, {"status": "ok"})],
            "/get_model_info": [(200, {"model_path": "m", "weight_version": "default"})],
        }
    )


def test_sglang_is_asked_as_its_own_clients_ask_and_goes_on_after_an_abort() -> None:
    abort = {"type": "abort", "message": "Abort in waiting queue"}
    peer = sglang(
        (200, sglang_answer([50, 51], "7", abort)),
        (200, sglang_answer([52, 5], "8", {"type": "stop", "matched": 5})),
    )

    async def work(place: str) -> None:
        params = replace(PARAMS, temperature=0.7, top_logps=2)
        output = await client("sglang", place).generate([1, 2], params, "r", None)
        assert (output.ids, output.versions) == ([50, 51, 52, 5], [7, 7, 8, 8])
        assert output.logps == [-5.0, -5.1, -5.2, -0.5] and output.num_cached_tokens == 1
        assert (output.finish_reason, output.stop_reason) == ("stop", 5)
        assert output.top_logps == [[(91, -0.1), (90, -0.2)]] * 4

    play(peer, work)
    first, second = (body for _, _, body in peer.asked)
    assert first == {
        "rid": "r-0", "input_ids": [1, 2], "return_logprob": True, "top_logprobs_num": 2,
        "sampling_params": {
            "max_new_tokens": 8, "temperature": 0.7, "top_k": -1, "top_p": 1.0, "min_p": 0.0,
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
            "stop": [], "stop_token_ids": [], "ignore_eos": False, "sampling_seed": 3,
            "no_stop_trim": True, "skip_special_tokens": False,
        },
    }  # fmt: skip
    assert second["input_ids"] == [1, 2, 50, 51]
    assert second["sampling_params"]["max_new_tokens"] == 6


def test_sglang_takes_weights_from_a_folder_and_says_why_it_does_not() -> None:
    peer, broken = sglang(), sglang()
    broken.answers["/update_weights_from_disk"] = [
        (400, {"success": False, "message": "no folder"})
    ]
    odd = sglang()
    odd.answers["/update_weights_from_disk"] = [(200, {"success": False, "message": "no folder"})]

    async def take(place: str) -> None:
        await client("sglang", place).load_weights(RECEIVER, OFFER)

    async def fail(place: str) -> None:
        with pytest.raises(WeightsRefused, match="no folder"):
            await client("sglang", place).load_weights(RECEIVER, OFFER)

    play(peer, take)
    for one in (broken, odd):
        play(one, fail)
        assert one.paths[-1] == "/continue_generation"
    assert peer.asked == [
        ("POST", "/pause_generation", {"mode": "abort"}),
        ("POST", "/update_weights_from_disk",
         {"model_path": OFFER.folder, "flush_cache": True, "weight_version": "7"}),
        ("POST", "/continue_generation", {}),
    ]  # fmt: skip


def test_sglang_draws_from_the_tempered_distribution_alone() -> None:
    peer = sglang()
    check(peer, "sglang", temperature=0.7)
    assert peer.asked[0] == ("GET", "/get_model_info", None)
    with pytest.raises(ValueError, match="this is no SGLang server"):
        check(Peer({}), "sglang")

    async def work(place: str) -> None:
        for options in ({"top_k": 5}, {"top_p": 0.5}, {"logit_bias": {1: 2.0}}):
            with pytest.raises(ValueError, match="would not be those of training"):
                params = replace(PARAMS, **options)  # type: ignore[arg-type]
                await client("sglang", place).generate([1], params, "r", None)

    play(sglang(), work)


# -- a run -----------------------------------------------------------------------------------------


def test_an_address_says_whose_server_it_is() -> None:
    assert type(server_at("http://a:1", None)) is HttpReplica
    for engine in ("vLLM", "SGLang"):
        replica = server_at(f"{engine.lower()}+https://a:1/x", None)
        assert isinstance(replica, OutsideReplica) and replica.engine == engine
        assert (replica.url, replica.host) == ("https://a:1/x", "a")
        assert "gap is measured" in replica.note
    with pytest.raises(ValueError, match="tgi\\+ is no engine that is known"):
        server_at("tgi+http://a:1", None)
    with pytest.raises(ValueError, match="must look like"):
        server_at("vllm+a:1", None)


def test_another_projects_engine_is_imported_where_one_is_asked_for_alone() -> None:
    program = (
        "import sys; from nanorl.distributed.roles.servers import server_at;"
        "server_at('http://a:1', None);"
        "print([one for one in sys.modules if 'outside' in one or 'vllm' in one])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=300
    )
    assert said.stdout.strip() == "[]"


def config_of(address: str, correction: str = "tis", **options: Any) -> RunConfig:
    base = get_preset("tiny").config()
    spec = replace(base.rl.algorithm, correction=correction)
    return replace(
        base,
        cluster=ClusterConfig(backend="local", transport="disk"),
        rollout=RolloutConfig(addresses=(address,), replicas=0),
        rl=replace(base.rl, algorithm=spec),
        **options,
    )


def test_a_run_weighs_the_tokens_of_another_engine_or_is_refused() -> None:
    assert config_of("vllm+http://a:1").rollout.replicas == 0
    assert config_of("http://a:1", "none").rollout.addresses == ("http://a:1",)
    with pytest.raises(ValueError, match=r"set --rl.algorithm.correction tis"):
        config_of("vllm+http://a:1", "none")
    with pytest.raises(ValueError, match=r"--deterministic with --rollout.addresses sglang\+http"):
        config_of("sglang+http://a:1", deterministic=True)
    late = config_of("http://a:1", "none")
    late.check_address("http://b:1")
    with pytest.raises(ValueError, match=r"vllm\+http://b:1 with --rl.algorithm.correction none"):
        late.check_address("vllm+http://b:1")
    with pytest.raises(ValueError, match=r"rollout.replicas 0: must be 1 or more"):
        RolloutConfig(replicas=0)


def test_a_gap_that_no_kernel_explains_stops_the_run() -> None:
    check_gap(0.01)
    with pytest.raises(RuntimeError, match="has not loaded the weights"):
        check_gap(MAX_MEAN_GAP * 1.01)
