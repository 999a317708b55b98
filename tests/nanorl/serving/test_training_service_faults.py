"""What goes wrong between a client and the training service: retries, kills, junk, keys."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import http.server
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_text import make_tokenizer, save_folder
from training_service import KEY, Served, let_go, serve

from nanoinfer.http.api_error import ApiError
from nanorl.serving.training_service.checkpoints import CheckpointStore, Record, TinkerPath
from nanorl.serving.training_service.futures import Futures, Line
from nanorl.serving.training_service.service_config import ServiceConfig
from nanorl.serving.training_service.service_messages import read_forward_backward

tinker = pytest.importorskip("tinker")
types = tinker.types
request_conv = pytest.importorskip("tinker.proto.request_conv")

ROOT = Path(__file__).resolve().parents[3]
ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-8)
OPTIM = {"learning_rate": 1e-2, "eps": 1e-8}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_folder(path)
    return path


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serve(folder, tmp_path_factory.mktemp("service"), max_models=64) as one:
        yield one


def datum(text: str = "the hello, the hello", **inputs: Any) -> Any:
    ids = make_tokenizer().encode(text)
    given = {"target_tokens": ids[1:]} | inputs
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=given)


def encode(
    model: str, number: int, *data: Any, loss: str = "cross_entropy", **config: Any
) -> bytes:
    """A forward_backward request, by the client's own encoder."""
    given = types.ForwardBackwardInput(data=list(data), loss_fn=loss, loss_fn_config=config)
    request = types.ForwardBackwardRequest(
        forward_backward_input=given, model_id=model, seq_id=number
    )
    raw: bytes = request_conv.forward_backward_request_to_proto(request).SerializeToString()
    return raw


def fetch(served: Served, future: str) -> Any:
    """The answer of a future, once it is there."""
    while True:
        status, answer = served.send("retrieve_future", {"request_id": future})
        if status != 408:
            assert status == 200, answer
            return answer


def make_model(served: Served, **lora: Any) -> str:
    _, session = served.send("create_session", {"sdk_version": "0"})
    body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "tiny"}
    body["lora_config"] = {"rank": 2, "seed": 5} | lora
    status, promise = served.send("create_model", body)
    assert status == 200, promise
    assert fetch(served, promise["request_id"]).get("model_id") == promise["model_id"]
    name: str = promise["model_id"]
    return name


def step_count(served: Served, model: str, number: int) -> int:
    """How many updates the model has had, as a checkpoint tells. `number` is the next free one."""
    body = {"model_id": model, "seq_id": number, "path": "count", "overwrite": True}
    answer = fetch(served, served.send("save_weights", body)[1]["request_id"])
    assert "error" not in answer, answer
    place = served.config.checkpoints / model / "weights" / "count" / "state"
    (step,) = [one.name for one in place.glob("step_*")]
    return int(step.removeprefix("step_"))


def test_a_request_that_is_sent_twice_runs_once(served: Served) -> None:
    model = make_model(served)
    raw = encode(model, 1, datum())
    first, again = (served.send("forward_backward", raw)[1] for _ in range(2))
    assert first == again
    optim = {"model_id": model, "seq_id": 2, "adam_params": OPTIM}
    promises = [served.send("optim_step", optim)[1] for _ in range(3)]
    answers = [fetch(served, one["request_id"]) for one in promises]
    assert answers[0] == answers[1] == answers[2] and answers[0]["metrics"]["grad_norm"] > 0
    # Once more, after it was answered; and the number under another verb.
    assert served.send("optim_step", optim)[1] == promises[0]
    status, error = served.send("save_weights", {"model_id": model, "seq_id": 2})
    assert status == 422 and "was optim_step" in error["error"]["message"]


def test_requests_of_a_model_run_in_the_order_of_their_numbers(served: Served) -> None:
    straight, mixed = make_model(served), make_model(served)

    def send(model: str, number: int) -> str:
        if number % 2:
            raw = encode(model, number, datum("hello" * number))
            return str(served.send("forward_backward", raw)[1]["request_id"])
        optim = {"model_id": model, "seq_id": number, "adam_params": OPTIM}
        return str(served.send("optim_step", optim)[1]["request_id"])

    order = list(range(1, 9))
    expected = [fetch(served, send(straight, number)) for number in order]
    random.Random(0).shuffle(order)
    futures = {number: send(mixed, number) for number in order}
    assert [fetch(served, futures[number]) for number in sorted(order)] == expected


class DroppingProxy(http.server.ThreadingHTTPServer):
    """Hands requests on, and drops the connection in place of the first answer of each verb."""

    daemon_threads = True

    def __init__(self, url: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.target = url.removeprefix("http://")
        self.dropped: set[str] = set()
        self.lock = threading.Lock()


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: DroppingProxy

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length", 0)))
        answer, raw = self._hand_on(body)
        verb = self.path.rpartition("/")[2]
        with self.server.lock:
            is_first = verb not in self.server.dropped and verb != "retrieve_future"
            self.server.dropped.add(verb)
        if is_first:
            self.close_connection = True
            return
        self.send_response(answer.status)
        self.send_header("content-type", answer.headers.get("content-type", "text/plain"))
        self.send_header("content-length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _hand_on(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        connection = http.client.HTTPConnection(self.server.target, timeout=60)
        connection.request(self.command, self.path, body, dict(self.headers))
        answer = connection.getresponse()
        return answer, answer.read()

    def log_message(self, *_: Any) -> None:
        pass


def train(client: Any) -> tuple[list[float], Any]:
    """Two steps, a sample and a saved state; the model's log-probs at the end."""
    model = client.create_lora_training_client(base_model="tiny", rank=2, seed=5).result()
    for _ in range(2):
        model.forward_backward([datum()], "cross_entropy")
        model.optim_step(ADAM).result()
    model.save_weights_and_get_sampling_client().result().sample(
        types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=2, seed=1)
    ).result()
    model.save_state("end").result()
    result = model.forward([datum()], "cross_entropy").result()
    return result.loss_fn_outputs[0]["logprobs"].data, model


def test_a_client_whose_connection_breaks_at_every_verb_trains_the_same(served: Served) -> None:
    proxy = DroppingProxy(served.url)
    threading.Thread(target=proxy.serve_forever, daemon=True).start()
    try:
        client = tinker.ServiceClient(
            base_url=f"http://127.0.0.1:{proxy.server_address[1]}", api_key=KEY
        )
        broken, model = train(client)
        assert step_count(served, model.model_id, 8) == 2
        let_go(client)
    finally:
        proxy.shutdown()
        proxy.server_close()
    verbs = {"create_model", "forward_backward", "optim_step", "asample", "save_weights"}
    assert verbs <= proxy.dropped
    direct = served.client()
    assert train(direct)[0] == broken
    direct.close("success").result()


COMMAND = ("-m", "nanorl.serve_training")


def start(
    folder: Path, root: Path, command: tuple[str, str] = COMMAND, **given: Any
) -> tuple[subprocess.Popen[str], str]:
    """The command, as a process of its own, and where it says that it listens."""
    words = [sys.executable, *command, "--model", str(folder), "--port", "0"]
    words += ["--checkpoints", str(root), "--threads", "1", "--infer.num-blocks", "64"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment, **given)
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("training service at "):
            return process, line.split()[3]
    raise AssertionError("the service ended before it listened")


def own_key(root: Path) -> str:
    """That which a service has made for its user."""
    return (root / "api_key.txt").read_text().strip()


def test_what_was_saved_survives_a_kill(folder: Path, tmp_path: Path) -> None:
    process, url = start(folder, tmp_path)
    try:
        client = tinker.ServiceClient(base_url=url, api_key=own_key(tmp_path))
        base = str(folder)
        model = client.create_lora_training_client(base_model=base, rank=2, seed=5).result()
        for _ in range(2):
            model.forward_backward([datum()], "cross_entropy")
            model.optim_step(ADAM).result()
        path = model.save_state("kept").result().path
        model.forward_backward([datum()], "cross_entropy").result()
        optim = model.optim_step(ADAM).result()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    let_go(client)
    process, url = start(folder, tmp_path)
    try:
        client = tinker.ServiceClient(base_url=url, api_key=own_key(tmp_path))
        again = client.create_training_client_from_state_with_optimizer(path).result()
        again.forward_backward([datum()], "cross_entropy").result()
        assert again.optim_step(ADAM).result().metrics == optim.metrics
        client.close("success").result()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) is not None


def test_a_service_that_stops_takes_no_more_requests() -> None:
    async def late() -> None:
        futures = Futures(max_bytes=1000)
        await futures.close()
        with pytest.raises(ApiError, match="is stopping") as caught:
            Line("model", futures).submit(0, "refused", pytest.fail)
        assert caught.value.status == 503

    asyncio.run(late())


def test_a_request_that_has_just_come_ends_with_its_model() -> None:
    """It waits for its turn only when the event loop goes on."""

    async def run() -> None:
        futures = Futures(max_bytes=1000)
        line = Line("model", futures)
        name = line.submit(3, "optim_step", pytest.fail)
        line.close()
        answer = await futures.fetch(name, limit_s=5.0)
        assert answer is not None and b"was cancelled" in answer.body

    asyncio.run(run())


LONG_TRAINING = """
import sys
from nanorl.cli import main
from nanorl.serving.training_service.trained_model import TrainedModel

compute = TrainedModel.forward_backward

def long(self, request):
    print("it trains", flush=True)
    sys.stdin.read()
    return compute(self, request)

TrainedModel.forward_backward = long
sys.exit(main(["serve-training", *sys.argv[1:]]))
"""


def test_ctrl_c_ends_a_service_that_trains_without_a_traceback(
    folder: Path, tmp_path: Path
) -> None:
    pipes = {"stdin": subprocess.PIPE, "stderr": subprocess.PIPE}
    process, url = start(folder, tmp_path, ("-c", LONG_TRAINING), **pipes)
    client = tinker.ServiceClient(base_url=url, api_key=own_key(tmp_path))
    model = client.create_lora_training_client(base_model=str(folder), rank=2).result()
    model.forward_backward([datum()] * 400, "cross_entropy")
    model.optim_step(ADAM)
    assert process.stdout is not None
    assert "it trains\n" in iter(process.stdout.readline, "")
    for _ in range(2):
        process.send_signal(signal.SIGINT)
        time.sleep(0.1)  # else two may be taken for one
    _, told = process.communicate(timeout=60)
    let_go(client)
    assert process.returncode == 130 and "Traceback" not in told, told


@pytest.mark.parametrize(
    ("option", "value"), [("port", 70000), ("max_samplers", 0), ("max_models", 0), ("poll_s", -1.0)]
)
def test_an_option_out_of_bounds_is_refused(folder: Path, option: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"--{option.replace('_', '-')} {value}"):
        ServiceConfig(model=folder, **{option: value})


def test_a_folder_that_looks_like_a_hubs_name_is_called_by_its_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "model").mkdir(parents=True)
    here, hub = Path("runs/model"), ServiceConfig(model=folder, names=("owner/model",))
    config = ServiceConfig(model=here, names=(str(here),))
    assert config.base_name == str(tmp_path / here) and hub.base_name == "owner/model"


def test_wrong_keys_names_and_paths_are_the_clients_own_exceptions(served: Served) -> None:
    with pytest.raises(tinker.AuthenticationError):
        served.client("tml-wrong").create_lora_training_client("tiny").result()
    client = served.client()
    with pytest.raises(tinker.NotFoundError, match="this service trains"):
        client.create_lora_training_client("other/model").result()
    for path, error in (
        ("tinker://nobody/sampler_weights/x", tinker.NotFoundError),
        ("tinker://../sampler_weights/x", tinker.BadRequestError),
        ("tinker://a/sampler_weights/../../../etc", tinker.BadRequestError),
        ("tinker://a/weights/x", tinker.BadRequestError),
    ):
        with pytest.raises(error):
            client.create_sampling_client(model_path=path).result()
    with pytest.raises(tinker.NotFoundError):
        client.create_training_client_from_state("tinker://nobody/weights/x").result()
    client.close("success").result()


@pytest.mark.parametrize(
    ("loss", "inputs", "config", "message"),
    [
        ("nonsense", {}, {}, "choose from cross_entropy"),
        ("gspo", {}, {}, "nanorl:gspo"),
        ("cross_entropy", {"advantages": [1.0] * 10}, {}, "does not read it"),
        ("cross_entropy", {"weights": [1.0]}, {}, "1 entries for 10 tokens"),
        ("cross_entropy", {"target_tokens": [9999] * 10}, {}, "outside the vocabulary"),
        ("cross_entropy", {}, {"beta": 1.0}, "does not know it"),
        ("importance_sampling", {"advantages": [1.0] * 10}, {}, "logprobs is missing"),
        ("dro", {"advantages": [1.0] * 10, "logprobs": [0.0] * 10}, {}, "needs beta"),
        ("cross_entropy", {"weights": [float("nan")] * 10}, {}, "the loss is nan"),
    ],
)
def test_what_a_loss_cannot_use_fails_its_request_and_no_other(
    served: Served, loss: str, inputs: dict[str, Any], config: dict[str, Any], message: str
) -> None:
    client = served.client()
    model = client.create_lora_training_client("tiny", rank=2, seed=5).result()
    good = model.forward([datum()], "cross_entropy").result().metrics
    with pytest.raises(tinker.RequestFailedError, match=message) as caught:
        model.forward_backward([datum(**inputs)], loss, config).result()
    assert caught.value.category == types.RequestErrorCategory.User
    assert model.forward([datum()], "cross_entropy").result().metrics == good
    client.close("success").result()


def test_a_refused_request_does_not_hold_up_those_behind_it(served: Served) -> None:
    client = served.client()
    model = client.create_lora_training_client("tiny", rank=2, seed=5).result()
    picture = types.ModelInput(chunks=[types.ImageChunk(data=b"x", format="png")])
    image = types.Datum(model_input=picture, loss_fn_inputs={"target_tokens": [1]})
    for refused in (
        lambda: model.save_state("a bad name"),
        lambda: model.save_weights_for_sampler("../x"),
        lambda: model.forward_backward([image], "cross_entropy"),
    ):
        with pytest.raises(tinker.BadRequestError):
            refused().result()
        model.forward([datum()], "cross_entropy").result(timeout=30)
    client.close("success").result()


def test_a_number_that_was_refused_is_not_taken_again(served: Served) -> None:
    model = make_model(served)
    adam = {"model_id": model, "seq_id": 1, "adam_params": OPTIM}
    for _ in range(2):  # as often as it is sent
        assert served.send("optim_step", adam | {"adam_params": {"lr": 1}})[0] == 400
    status, error = served.send("optim_step", adam)
    assert status == 422 and "was refused, now optim_step" in error["error"]["message"]
    assert step_count(served, model, 2) == 0


def test_a_model_goes_on_where_a_request_that_waits_was_given_up(served: Served) -> None:
    model = make_model(served)
    optim = [{"model_id": model, "seq_id": n, "adam_params": OPTIM} for n in (1, 2)]
    promise = served.send("optim_step", optim[1])[1]
    asked = {"request_id": promise["request_id"]}
    assert served.send("cancel_future", asked)[0] == 204
    assert "metrics" in fetch(served, served.send("optim_step", optim[0])[1]["request_id"])
    assert "metrics" in fetch(served, promise["request_id"])
    assert step_count(served, model, 3) == 2


def test_junk_bodies_are_refused_and_name_what_is_wrong(served: Served) -> None:
    model = make_model(served)
    session = model.split(":")[0]
    adam = {"model_id": model, "seq_id": 1}
    sample = {"sampling_session_id": "x", "seq_id": 0, "prompt": {"chunks": []}}
    for verb, body, status, message in (
        ("optim_step", {"model_id": model}, 400, "seq_id"),
        ("optim_step", adam | {"adam_params": {"lr": 1}}, 400, "unknown field"),
        ("optim_step", adam | {"adam_params": {}, "model_id": "x"}, 404, "is not here"),
        ("create_model", {"session_id": "x", "model_seq_id": 0, "base_model": "tiny"}, 410, "over"),
        ("forward_backward", b"\xff\xff\xff", 400, "protobuf"),
        ("forward_backward", encode("x", 1, datum()), 404, "is not here"),
        ("asample", sample | {"sampling_params": {}}, 404, "is not here"),
        ("retrieve_future", {"request_id": "x"}, 410, "is not known"),
        ("nothing", {}, 404, "not a verb"),
        ("optim_step", adam | {"adam_params": {"learning_rate": "inf"}}, 400, "learning_rate"),
        ("weights_info", {"tinker_path": f"tinker://{'𝄞' * 99}/weights/x"}, 400, "must be tinker"),
        ("weights_info", {"tinker_path": f"tinker://x/weights/{'é' * 128}"}, 400, "must be tinker"),
        ("save_weights", adam | {"path": "../../x"}, 400, "must be tinker://"),
        ("save_weights", adam | {"path": ".hidden"}, 400, "must be tinker://"),
        ("session_heartbeat", {"session_id": "x"}, 410, "is over"),
    ):
        got, answer = served.send(verb, body)
        assert got == status and message in answer["error"]["message"], (verb, got, answer)
    lora = {"session_id": session, "model_seq_id": 7, "base_model": "tiny"}
    lora["lora_config"] = {"rank": 2, "train_mlp": False, "train_attn": False}
    failed = fetch(served, served.send("create_model", lora)[1]["request_id"])
    assert failed["category"] == "user" and "nothing would learn" in failed["error"]
    raw = encode(f"{session}:train:7", 1, datum())
    failed = fetch(served, served.send("forward_backward", raw)[1]["request_id"])
    assert "could not be made" in failed["error"]


def test_a_link_does_not_lead_out_of_the_folder(served: Served, tmp_path: Path) -> None:
    model = make_model(served)
    place = served.config.checkpoints / model
    place.mkdir()
    (place / "weights").symlink_to(tmp_path)
    body = {"model_id": model, "seq_id": 1, "path": "x"}
    failed = fetch(served, served.send("save_weights", body)[1]["request_id"])
    assert "leads out" in failed["error"] and not list(tmp_path.iterdir())


def test_random_bytes_and_cut_messages_are_value_errors() -> None:
    rng = random.Random(0)
    whole = encode("model", 1, datum(weights=[1.0] * 10), loss="ppo", clip_low_threshold=0.5)
    assert read_forward_backward(whole).loss_fn_config == {"clip_low_threshold": 0.5}
    for trial in range(300):
        raw = bytearray(whole)
        if trial % 2:
            del raw[1 + rng.randrange(len(raw)) :]
        for _ in range(trial % 7):
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        with contextlib.suppress(ValueError):
            read_forward_backward(bytes(raw))


def test_a_service_on_the_network_needs_a_file_of_keys(folder: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="open to the network"),
        serve(folder, tmp_path, api_key_file=None, host="0.0.0.0"),
    ):
        pass


def test_a_client_asks_again_until_its_answer_is_there(folder: Path, tmp_path: Path) -> None:
    with serve(folder, tmp_path, poll_s=0.0) as impatient:
        model = make_model(impatient)
        # The second request cannot have run before the first is there.
        promise = impatient.send("forward_backward", encode(model, 2, datum()))[1]
        asked = {"request_id": promise["request_id"]}
        status, answer = impatient.send("retrieve_future", asked)
        assert (status, answer["type"], answer["queue_state"]) == (408, "try_again", "active")
        impatient.send("forward_backward", encode(model, 1, datum()))
        assert fetch(impatient, promise["request_id"])
        client = impatient.client()
        trained = client.create_lora_training_client("tiny", rank=2, seed=5).result()
        trained.forward_backward([datum()], "cross_entropy").result()
        client.close("success").result()


def test_dropped_snapshots_and_answers_are_gone_and_say_so(folder: Path, tmp_path: Path) -> None:
    options = {"keep_snapshots": 1, "max_samplers": 1, "max_answer_bytes": 2000}
    with serve(folder, tmp_path, **options) as small:
        client = small.client()
        model = client.create_lora_training_client("tiny", rank=2, seed=5).result()
        samplers = [model.save_weights_and_get_sampling_client().result() for _ in range(2)]
        asked = (types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=2))
        samplers[1].sample(*asked).result()
        with pytest.raises(tinker.RequestFailedError, match="no such checkpoint"):
            samplers[0].sample(*asked).result()
        first = small.send("retrieve_future", {"request_id": f"{model.model_id}:0"})
        assert first[0] == 410 and "is not known here" in first[1]["error"]["message"]
        client.close("success").result()


def test_a_snapshot_that_the_client_deleted_does_not_fail_the_next(
    folder: Path, tmp_path: Path
) -> None:
    with serve(folder, tmp_path, keep_snapshots=1) as small:
        client = small.client()
        model = client.create_lora_training_client("tiny", rank=2, seed=5).result()
        rest = tinker.RestClient(base_url=small.url, api_key=KEY)
        model.save_weights_and_get_sampling_client().result()
        (first,) = rest.list_checkpoints(model.model_id).result().checkpoints
        rest.delete_checkpoint_from_tinker_path(first.tinker_path).result()
        sampler = model.save_weights_and_get_sampling_client().result()
        asked = (types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=2))
        assert len(sampler.sample(*asked).result().sequences) == 1
        client.close("success").result()


class Killed(BaseException):
    pass


def test_a_kill_while_a_checkpoint_is_replaced_leaves_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed_within(place: Path, **_: Any) -> None:
        """The first file has gone when the process ends."""
        if place.is_dir():
            (place / "checkpoint.json").unlink()
            raise Killed

    store, path = CheckpointStore(tmp_path), TinkerPath.parse("tinker://run/weights/x")
    record = Record(base_model="tiny")
    store.save(path, record, lambda draft: None, overwrite=False)
    monkeypatch.setattr(shutil, "rmtree", killed_within)
    with contextlib.suppress(Killed):
        store.save(path, record, lambda draft: None, overwrite=True)
    assert store.find(path)[1].base_model == "tiny"


def test_the_name_of_an_expired_checkpoint_is_free(tmp_path: Path) -> None:
    store, path = CheckpointStore(tmp_path), TinkerPath.parse("tinker://run/weights/x")
    store.save(path, Record(base_model="old", expires=0.0), lambda draft: None, overwrite=False)
    store.save(path, Record(base_model="new"), lambda draft: None, overwrite=False)
    assert store.find(path)[1].base_model == "new"


def test_a_late_repetition_does_not_make_an_unloaded_model_anew(served: Served) -> None:
    model = make_model(served)
    assert served.send("unload_model", {"model_id": model})[0] == 200
    again = {"session_id": model.split(":")[0], "model_seq_id": 0, "base_model": "tiny"}
    status, error = served.send("create_model", again)
    assert status == 410 and "was unloaded" in error["error"]["message"]


def test_a_finished_session_gives_its_models_back(served: Served) -> None:
    client = served.client()
    model = client.create_lora_training_client("tiny", rank=2).result()
    model.forward([datum()], "cross_entropy").result()
    client.close("success").result()
    status, _ = served.send("get_info", {"model_id": model.model_id})
    assert status == 404
    session = model.model_id.split(":")[0]
    assert served.send(f"sessions/{session}/finish", {})[0] == 204  # its answer was lost
