"""Who may do what in a training service: nobody without a key, and each client with its own things
alone. What another client has made is answered as what was never made."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_text import make_tokenizer, save_folder
from training_service import Served, serve

from nanorl.serving.training_service.keys import ClientKeys
from nanorl.serving.training_service.service_app import make_app
from nanorl.serving.training_service.service_config import ServiceConfig

tinker = pytest.importorskip("tinker")
types = tinker.types
request_conv = pytest.importorskip("tinker.proto.request_conv")

ROOT = Path(__file__).resolve().parents[3]
ALICE, BOB = "tml-of-alice-0000", "tml-of-bob-000000"
ADAM = {"learning_rate": 1e-2, "eps": 1e-8}
ASKED = (types.ModelInput.from_ints([1, 2]), 1, types.SamplingParams(max_tokens=2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_folder(path)
    return path


def keys_file(folder: Path, text: str) -> Path:
    file = folder / "keys"
    file.write_text(text)
    file.chmod(0o600)
    return file


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("service")
    file = keys_file(root, f"# who may train\nalice:{ALICE}\nbob:{BOB}\n")
    with serve(folder, root, max_models=64, api_key_file=file, poll_s=0.5) as one:
        yield one


def datum() -> Any:
    ids = make_tokenizer().encode("the hello, the hello")
    inputs = {"target_tokens": ids[1:]}
    return types.Datum(model_input=types.ModelInput.from_ints(ids[:-1]), loss_fn_inputs=inputs)


def encode(model: str, number: int) -> bytes:
    given = types.ForwardBackwardInput(data=[datum()], loss_fn="cross_entropy")
    request = types.ForwardBackwardRequest(
        forward_backward_input=given, model_id=model, seq_id=number
    )
    raw: bytes = request_conv.forward_backward_request_to_proto(request).SerializeToString()
    return raw


def ask(
    served: Served, method: str, path: str, body: Any = None, *, key: str | None
) -> tuple[int, bytes]:
    """Status and body of any request; no key at all where it is None."""
    kind = "application/x-protobuf" if isinstance(body, bytes) else "application/json"
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"Content-Type": kind} | ({} if key is None else {"X-API-Key": key})
    url = f"{served.url}/api/v1/{path}"
    request = urllib.request.Request(url, raw, headers, method=method)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()


@pytest.fixture(scope="module")
def hers(served: Served) -> Iterator[dict[str, str]]:
    """A model, checkpoints, a sampling session and a future of alice, all in use."""
    client = served.client(ALICE)
    model = client.create_lora_training_client("tiny", rank=2, seed=5).result()
    model.forward_backward([datum()], "cross_entropy").result()
    state = model.save_state("hers").result().path
    snapshot = model.save_weights_for_sampler("hers").result().path
    sampler = client.create_sampling_client(model_path=snapshot).result()
    sampler.sample(*ASKED).result()
    session = model.model_id.split(":")[0]
    future = served.send(
        "optim_step", {"model_id": model.model_id, "seq_id": 50, "adam_params": ADAM}, key=ALICE
    )[1]["request_id"]
    yield {
        "session": session,
        "model": model.model_id,
        "state": state,
        "snapshot": snapshot,
        "run": model.model_id,
        "future": future,
        "sampler": f"{session}:sample:0",
    }
    client.close("success").result()


def requests(things: dict[str, str]) -> list[tuple[str, str, Any]]:
    """Every verb that names a thing, of these things."""
    one, adam = things, {"adam_params": ADAM}
    sample = {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [1, 2]}]}}
    sample |= {"sampling_params": {"max_tokens": 2}, "seq_id": 0, "num_samples": 1}
    new = {"session_id": one["session"], "model_seq_id": 9, "base_model": "tiny"}
    snapshot = {"session_id": one["session"], "sampling_session_seq_id": 9}
    return [
        ("POST", "session_heartbeat", {"session_id": one["session"]}),
        ("POST", f"sessions/{one['session']}/finish", {}),
        ("POST", "create_model", new | {"lora_config": {"rank": 2}}),
        ("POST", "get_info", {"model_id": one["model"]}),
        ("POST", "unload_model", {"model_id": one["model"]}),
        ("POST", "forward_backward", encode(one["model"], 60)),
        ("POST", "optim_step", {"model_id": one["model"], "seq_id": 61} | adam),
        ("POST", "save_weights", {"model_id": one["model"], "seq_id": 62, "path": "his"}),
        ("POST", "load_weights", {"model_id": one["model"], "seq_id": 63, "path": one["state"],
                                  "optimizer": True}),
        ("POST", "load_weights", {"session_id": one["session"], "model_seq_id": 8,
                                  "path": one["state"], "optimizer": True}),
        ("POST", "save_weights_for_sampler", {"model_id": one["model"], "seq_id": 64, "path": "x"}),
        ("POST", "weights_info", {"tinker_path": one["state"]}),
        ("POST", "weights_info", {"tinker_path": one["snapshot"]}),
        ("POST", "create_sampling_session", snapshot | {"model_path": one["snapshot"]}),
        ("POST", "create_sampling_session", snapshot | {"base_model": "tiny"}),
        ("POST", "asample", sample | {"sampling_session_id": one["sampler"]}),
        ("GET", f"samplers/{one['sampler']}", None),
        ("POST", "retrieve_future", {"request_id": one["future"]}),
        ("POST", "cancel_future", {"request_id": one["future"]}),
        ("GET", f"training_runs/{one['run']}/checkpoints", None),
        ("DELETE", f"training_runs/{one['run']}/checkpoints/weights/hers", None),
        ("DELETE", f"training_runs/{one['run']}/checkpoints/sampler_weights/hers", None),
        ("GET", "checkpoints", None),
    ]  # fmt: skip


def missing(things: dict[str, str]) -> dict[str, str]:
    """The same names, of things that were never made."""
    session = things["session"]
    return {name: text.replace(session, "0" * len(session)) for name, text in things.items()}


def test_another_clients_thing_is_answered_as_one_that_was_never_made(
    served: Served, hers: dict[str, str]
) -> None:
    no_thing = missing(hers)
    session = hers["session"].encode()
    pairs = list(zip(requests(hers), requests(no_thing), strict=True))
    for (method, path, body), (_, other_path, other_body) in pairs:
        got = ask(served, method, path, body, key=BOB)
        want = ask(served, method, other_path, other_body, key=BOB)
        assert (got[0], got[1].replace(session, b"0" * len(session))) == want, (path, got, want)
        assert got[0] in (204, 404, 410) or b'"checkpoints":[]' in got[1], (path, got)


def test_a_clients_things_are_as_they_were_after_another_tried_everything(
    served: Served, hers: dict[str, str]
) -> None:
    def names() -> list[str]:
        answer = json.loads(ask(served, "GET", "checkpoints", key=ALICE)[1])
        return sorted(one["tinker_path"] for one in answer["checkpoints"])

    before = names()
    assert {hers["state"], hers["snapshot"]} <= set(before)
    for method, path, body in requests(hers):
        ask(served, method, path, body, key=BOB)
    assert names() == before
    assert ask(served, "POST", "get_info", {"model_id": hers["model"]}, key=ALICE)[0] == 200
    status, _ = ask(served, "GET", f"samplers/{hers['sampler']}", key=ALICE)
    assert status == 200
    # 50 still waits for the numbers before it: nobody has passed one over or ended it.
    waiting = json.loads(
        ask(served, "POST", "retrieve_future", {"request_id": hers["future"]}, key=ALICE)[1]
    )
    assert waiting["type"] == "try_again"


def test_a_refused_request_of_another_client_does_not_take_a_number(
    served: Served, hers: dict[str, str]
) -> None:
    body = {"model_id": hers["model"], "seq_id": 70, "nonsense": 1}
    assert ask(served, "POST", "optim_step", body, key=BOB)[0] == 400
    taken = {"request_id": f"{hers['model']}:70"}
    assert ask(served, "POST", "retrieve_future", taken, key=ALICE)[0] == 410


def test_every_verb_is_closed_without_a_key_and_says_nothing_more(
    served: Served, hers: dict[str, str]
) -> None:
    further = [
        *(("POST", verb, {}) for verb in ("create_session", "telemetry", "client/config")),
        ("GET", "get_server_capabilities", None),
    ]
    wanted = [*requests(hers), *requests(missing(hers)), *further]
    for key in (None, "", "tml-any", ALICE[:-1], f"{ALICE}x", f"alice:{ALICE}", "\x80"):
        answers = {ask(served, *one, key=key) for one in wanted}
        assert {status for status, _ in answers} == {401} and len(answers) == 1, (key, answers)


def test_clients_with_the_official_package_train_beside_each_other(served: Served) -> None:
    losses = []
    for key in (ALICE, BOB):
        client = served.client(key)
        model = client.create_lora_training_client("tiny", rank=2, seed=5).result()
        losses.append(model.forward_backward([datum()], "cross_entropy").result().metrics)
        path = model.save_state("kept").result().path
        client.create_training_client_from_state(path)
        rest = tinker.RestClient(base_url=served.url, api_key=key)
        assert path in [
            one.tinker_path for one in rest.list_user_checkpoints().result().checkpoints
        ]
        other = served.client(BOB if key == ALICE else ALICE)
        with pytest.raises(tinker.NotFoundError, match="no such checkpoint"):
            other.create_training_client_from_state(path).result()
        for one in (client, other):
            one.close("success").result()
    assert losses[0] == losses[1]


def test_a_service_without_a_keys_file_makes_a_key_that_its_user_alone_can_read(
    folder: Path, tmp_path: Path
) -> None:
    with serve(folder, tmp_path, api_key_file=None) as one:
        for key in (None, "", "tml-any"):
            assert ask(one, "GET", "checkpoints", key=key)[0] == 401
        file = tmp_path / "checkpoints" / "api_key.txt"
        key = file.read_text().strip()
        assert key.startswith("tml-") and len(key) > 30
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        client = one.client(key)
        model = client.create_lora_training_client("tiny", rank=2).result()
        path = model.save_state("kept").result().path
        client.close("success").result()
    with serve(folder, tmp_path, api_key_file=None) as again:
        assert file.read_text().strip() == key
        answer = json.loads(ask(again, "GET", "checkpoints", key=key)[1])
        assert [one["tinker_path"] for one in answer["checkpoints"]] == [path]


def test_a_key_that_others_could_have_laid_there_is_not_taken(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "api_key.txt"
    file.write_text("tml-of-a-stranger")
    file.chmod(0o644)
    with pytest.raises(ValueError, match="delete it"):
        make_app(ServiceConfig(model=folder, checkpoints=tmp_path))


@pytest.mark.skipif(os.geteuid() != 0, reason="another user is had by root alone")
def test_another_user_of_the_machine_cannot_read_what_was_saved(
    folder: Path, tmp_path: Path
) -> None:
    with serve(folder, tmp_path, api_key_file=None):
        for place in (tmp_path, *tmp_path.parents):
            if place.owner() == "root" and place != Path("/"):
                place.chmod(place.stat().st_mode | 0o011)  # the way there, not the folder itself
        reads = "import os, sys; os.setuid(65534); print(os.listdir(sys.argv[1]))"
        words = [sys.executable, "-c", reads, str(tmp_path / "checkpoints")]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "PermissionError" in done.stderr and not done.stdout, done


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no key"),
        ("# a comment\n\n", "has no key"),
        ("secret", "line 1: .*begins with tml-"),
        ("alice:secret", "line 1: .*begins with tml-"),
        (f"alice:{ALICE}\nalice:{BOB}", "line 2: .*'alice' is there already"),
        (f"alice:{ALICE}\nbob:{ALICE}", "line 2: .*key of another client"),
        (f"{ALICE}\n{BOB}", "line 2: .*is there already"),
        (f"../x:{ALICE}", "line 1: .*letters"),
        ("alice:tml-é", "line 1: .*begins with tml-"),
    ],
)
def test_a_keys_file_that_cannot_be_is_refused_and_no_key_is_said(
    folder: Path, tmp_path: Path, text: str, message: str
) -> None:
    file = keys_file(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        make_app(
            ServiceConfig(model=folder, api_key_file=file, checkpoints=tmp_path / "checkpoints")
        )
    said = str(caught.value)
    assert str(file) in said
    assert not any(key in said for key in (ALICE, BOB, "secret"))


def test_a_keys_file_that_is_unreadable_is_refused_and_one_that_others_read_is_told_of(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = keys_file(tmp_path, f"\n\nalice:{ALICE}\nbob")
    with pytest.raises(ValueError, match="line 4: "):
        ClientKeys.read(file)
    file.write_bytes(b"\xff\xfe")
    for unreadable in (file, tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"--api-key-file .*: cannot be read"):
            ClientKeys.read(unreadable)
    file.write_text(f"alice:{ALICE}\n")
    for mode, is_told in ((0o600, False), (0o644, True)):
        caplog.clear()
        file.chmod(mode)
        assert ClientKeys.read(file).client_of(ALICE) == "alice"
        assert ("other users can read this key" in caplog.text) == is_told


def test_no_key_is_in_what_a_service_prints_logs_or_shows_in_the_list_of_processes(
    folder: Path, tmp_path: Path
) -> None:
    file = keys_file(tmp_path, f"alice:{ALICE}\n")
    words = [sys.executable, "-m", "nanorl.serve_training", "--model", str(folder), "--port", "0"]
    words += ["--checkpoints", str(tmp_path / "kept"), "--threads", "1"]
    words += ["--infer.num-blocks", "64", "--api-key-file", str(file)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        assert process.stdout is not None
        line = next(one for one in process.stdout if one.startswith("training service at "))
        client = tinker.ServiceClient(base_url=line.split()[3], api_key=ALICE)
        model = client.create_lora_training_client(base_model=str(folder), rank=2).result()
        with pytest.raises(tinker.RequestFailedError):
            model.forward_backward([datum()], "nanorl:nothing").result()
        shown = Path(f"/proc/{process.pid}/cmdline").read_bytes().decode()
        client.close("success").result()
    finally:
        process.terminate()
        told = process.communicate(timeout=60)
    assert not any(ALICE in text for text in (shown, line, *told))
