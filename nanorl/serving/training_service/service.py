"""The verbs of one client: sessions, models and samplers, without anything of HTTP.

Ids are the client's own: it derives a model's from the session and a number, so a request that is
sent twice means the same model. Everything that computes runs in one thread, in the order of
arrival; of one model, in the order of its numbers. So models do not influence one another.

Left out: what several processes would share. Sessions end with the service; checkpoints stay. Next:
service_clients.py (who), service_app.py (HTTP), shared_base.py and trained_model.py (the
computing).
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from nanoengine.state.tensor_file import CheckpointError
from nanoinfer.http.api_error import ApiError
from nanoinfer.params import Output
from nanorl.serving.training_service.checkpoints import (
    CheckpointStore,
    Record,
    TinkerPath,
    client_folder,
)
from nanorl.serving.training_service.futures import PROTOBUF, FutureAnswer, Futures, Line
from nanorl.serving.training_service.service_messages import ForwardBackward, write_samples
from nanorl.serving.training_service.service_requests import (
    CreateModel,
    CreateSamplingSession,
    LoadWeights,
    OptimStep,
    SampleBody,
    SaveWeights,
    SaveWeightsForSampler,
)
from nanorl.serving.training_service.shared_base import SharedBase
from nanorl.serving.training_service.trained_model import TrainedModel


@dataclass
class ClientSession:
    """A client. `samplers` are the sampling sessions that it opened."""

    last_seen: float
    models: list[str] = field(default_factory=list)
    samplers: dict[str, Sampler] = field(default_factory=dict)


@dataclass
class Model:
    """A model that was asked for. `trained` is None until it has been made."""

    line: Line
    record: Record
    trained: TrainedModel | None = None
    snapshots: list[TinkerPath] = field(default_factory=list)


@dataclass(frozen=True)
class Sampler:
    """A sampling session: the snapshot it samples from (None: the base), and its futures."""

    path: TinkerPath | None
    key: str
    issued: set[int]


class TrainingService:
    """All that one client has made, on the machine that all share."""

    def __init__(self, shared: SharedBase, client: str = "") -> None:
        self.config, self.base = shared.config, shared.base
        self.store = CheckpointStore(client_folder(self.config.checkpoints, client))
        self.futures = Futures(self.config.max_answer_bytes)
        self._shared = shared
        self._sessions: dict[str, ClientSession] = {}
        self._models: dict[str, Model] = {}

    # -- sessions ------------------------------------------------------------------------------

    def create_session(self) -> str:
        name = uuid.uuid4().hex
        self._sessions[name] = ClientSession(time.monotonic())
        return name

    def touch(self, name: str) -> ClientSession:
        """The session, which has just been heard of. `ApiError` 410 if it is over."""
        session = self._sessions.get(name)
        if session is None:
            raise ApiError(410, f"session {name!r}: is over, or not of this service; make another")
        session.last_seen = time.monotonic()
        return session

    def finish_session(self, name: str) -> None:
        """Forget the session and its models; what was saved stays. It may be over already, where
        a client has to say so twice."""
        session = self._sessions.pop(name, None)
        for model in session.models if session is not None else ():
            self._forget(model)

    def drop_silent(self) -> None:
        """End the sessions that are not heard of any more."""
        limit = time.monotonic() - self.config.session_timeout_s
        for name in [name for name, one in self._sessions.items() if one.last_seen < limit]:
            self.finish_session(name)

    # -- models --------------------------------------------------------------------------------

    def create_model(self, body: CreateModel) -> tuple[str, str]:
        """(future, model id). A second request of the same number is the same model."""
        lora = None
        if body.lora_config is not None and not self.config.full:
            lora = body.lora_config.model_dump(exclude={"type"})
            if lora["seed"] is None:
                lora["seed"] = uuid.uuid4().int % 2**63
        record = Record(base_model=self._base(body.base_model), lora=lora)
        return self._new_model(body.session_id, body.model_seq_id, record, None, "create_model")

    def load_weights(self, body: LoadWeights) -> tuple[str, str]:
        """(future, model id): into a model that is there, or as a new one's first request."""
        path = TinkerPath.parse(body.path)
        if path.kind != "weights":
            raise ValueError(f"path {path}: is for sampling; load what save_state saved")
        if body.session_id is None:
            if body.model_id is None or body.seq_id is None:
                raise ValueError("load_weights: give model_id and seq_id, or session_id")
            model = self._model(body.model_id)

            async def load() -> FutureAnswer:
                await self._load(self._trained(model), path, body.optimizer)
                return FutureAnswer.of({"type": "load_weights", "path": str(path)})

            return model.line.submit(body.seq_id, "load_weights", load), body.model_id
        if body.model_seq_id is None:
            raise ValueError("load_weights: session_id needs a model_seq_id")
        if body.base_model is not None:
            self._base(body.base_model)
        _, saved = self.store.find(path)
        record = Record(base_model=self._base(saved.base_model), lora=saved.lora)
        start = (path, body.optimizer)
        return self._new_model(body.session_id, body.model_seq_id, record, start, "load_weights")

    def _new_model(
        self,
        session_id: str,
        number: int,
        record: Record,
        start: tuple[TinkerPath, bool] | None,
        verb: str,
    ) -> tuple[str, str]:
        session = self.touch(session_id)
        name = f"{session_id}:train:{number}"
        model = self._models.get(name)
        if model is None:
            if name in session.models:  # a late repetition must not make it anew
                raise ApiError(410, f"model {name!r}: was unloaded; take the next model_seq_id")
            self._shared.take_room()
            model = self._models[name] = Model(Line(name, self.futures), record)
            session.models.append(name)

        async def make() -> FutureAnswer:
            trained = await self._shared.compute(self.base.make, model.record)
            if start is not None:
                await self._load(trained, *start)
            model.trained = trained
            answer = {"type": verb, "model_id": name}
            return FutureAnswer.of(answer if start is None else answer | {"path": str(start[0])})

        return model.line.submit(0, verb, make), name

    async def _load(self, trained: TrainedModel, path: TinkerPath, with_optimizer: bool) -> None:
        folder, saved = self.store.find(path)
        mine = trained.record
        if (self._base(saved.base_model), _shape(saved)) != (mine.base_model, _shape(mine)):
            raise CheckpointError(
                f"path {path}: is of {saved.base_model} with lora={_shape(saved)}, not of "
                f"{mine.base_model} with {_shape(mine)}; use create_training_client_from_state"
            )
        await self._shared.compute(
            lambda: trained.load_state(folder, with_optimizer=with_optimizer)
        )

    def info(self, name: str) -> dict[str, Any]:
        record = self._model(name).record
        return {
            "type": "get_info",
            "model_id": name,
            "model_name": record.base_model,
            "model_data": {
                "arch": self.base.shape.model_type,
                "model_name": record.base_model,
                "tokenizer_id": record.base_model,
            },
            **lora_facts(record),
        }

    def unload(self, name: str) -> None:
        self._model(name)
        self._forget(name)

    def _forget(self, name: str) -> None:
        if (model := self._models.pop(name, None)) is not None:
            model.line.close()
            self._shared.give_room()

    def forward_backward(self, request: ForwardBackward) -> tuple[str, str]:
        model = self._model(request.model_id)

        async def work() -> FutureAnswer:
            body = await self._shared.compute(self._trained(model).forward_backward, request)
            return FutureAnswer(body, PROTOBUF)

        verb = "forward" if request.forward_only else "forward_backward"
        return model.line.submit(request.seq_id, verb, work), request.model_id

    def optim_step(self, body: OptimStep) -> tuple[str, str]:
        model = self._model(body.model_id)

        async def work() -> FutureAnswer:
            metrics = await self._shared.compute(self._trained(model).optim_step, body.adam_params)
            return FutureAnswer.of({"metrics": metrics})

        return model.line.submit(body.seq_id, "optim_step", work), body.model_id

    def save_weights(self, body: SaveWeights) -> tuple[str, str]:
        model = self._model(body.model_id)
        path = _path(body.model_id, "weights", body.path or f"{body.seq_id:06d}")

        async def work() -> FutureAnswer:
            trained = self._trained(model)
            await self._save(model, path, trained.save_state, body, overwrite=body.overwrite)
            return FutureAnswer.of({"type": "save_weights", "path": str(path)})

        return model.line.submit(body.seq_id, "save_weights", work), body.model_id

    def save_weights_for_sampler(self, body: SaveWeightsForSampler) -> tuple[str, str]:
        """A snapshot with a name, or one without and a sampling session that samples from it."""
        model = self._model(body.model_id)
        session_id = body.model_id.split(":")[0]
        number = body.sampling_session_seq_id
        if body.path is None and number is None:
            raise ValueError("save_weights_for_sampler: give a path or a sampling_session_seq_id")
        path = _path(body.model_id, "sampler_weights", body.path or f"snapshot-{body.seq_id:06d}")

        async def work() -> FutureAnswer:
            await self._save(model, path, self._trained(model).export, body, overwrite=False)
            answer = {"type": "save_weights_for_sampler", "path": str(path)}
            if body.path is None and number is not None:
                answer["sampling_session_id"] = self._open_sampler(session_id, number, path)
                model.snapshots.append(path)
                while len(model.snapshots) > self.config.keep_snapshots:
                    with contextlib.suppress(CheckpointError):  # the client was quicker
                        await asyncio.to_thread(self.store.delete, model.snapshots.pop(0))
            return FutureAnswer.of(answer)

        return model.line.submit(body.seq_id, "save_weights_for_sampler", work), body.model_id

    async def _save(
        self,
        model: Model,
        path: TinkerPath,
        write: Callable[[Path], None],
        body: SaveWeights | SaveWeightsForSampler,
        *,
        overwrite: bool,
    ) -> None:
        expires = None if body.ttl_seconds is None else time.time() + body.ttl_seconds
        record = Record(
            base_model=model.record.base_model,
            lora=model.record.lora,
            expires=expires,
            user_metadata=body.user_metadata,
        )
        await self._shared.compute(
            lambda: self.store.save(path, record, write, overwrite=overwrite)
        )

    def _model(self, name: str) -> Model:
        model = self._models.get(name)
        if model is None:
            raise ApiError(
                404, f"model {name!r}: is not here; make one, or load a checkpoint", "model_id"
            )
        if (session := self._sessions.get(name.split(":")[0])) is not None:
            session.last_seen = time.monotonic()
        return model

    def pass_over(self, model_id: object, number: object) -> None:
        """A request that was refused takes its number, if it had one of a model that is here."""
        model = self._models.get(model_id) if isinstance(model_id, str) else None
        if model is not None and isinstance(number, int):
            model.line.pass_over(number)

    def _trained(self, model: Model) -> TrainedModel:
        if model.trained is None:
            raise ValueError(f"model {model.line.name}: could not be made, see its first request")
        return model.trained

    def _base(self, name: str) -> str:
        if name not in self.base.names:
            known = ", ".join(sorted(self.base.names))
            raise ApiError(404, f"base_model {name!r}: this service trains {known}", "base_model")
        return self.base.name

    # -- samplers ------------------------------------------------------------------------------

    def create_sampling_session(self, body: CreateSamplingSession) -> str:
        if body.model_path is not None:
            path = TinkerPath.parse(body.model_path)
            if path.kind != "sampler_weights":
                raise ValueError(
                    f"path {path}: is for training; save_weights_for_sampler saves one"
                )
            return self._open_sampler(body.session_id, body.sampling_session_seq_id, path)
        if body.base_model is None:
            raise ValueError("create_sampling_session: give base_model or model_path")
        self._base(body.base_model)
        return self._open_sampler(body.session_id, body.sampling_session_seq_id, None)

    def sampler(self, name: str) -> Sampler:
        session = self._sessions.get(name.split(":")[0])
        if session is None or name not in session.samplers:
            raise ApiError(404, f"sampling session {name!r}: is not here; make another")
        session.last_seen = time.monotonic()
        return session.samplers[name]

    def sample(self, body: SampleBody) -> tuple[str, list[str]]:
        """(future, an id for each of the sequences to come)."""
        sampler = self.sampler(body.sampling_session_id)
        future = f"{body.sampling_session_id}:{body.seq_id}"
        if body.seq_id not in sampler.issued:
            ids, options = body.prompt.ids(), body.options()
            if options.last_n is not None and options.last_n >= len(ids):
                raise ValueError(
                    f"prompt_logprobs_last_n={options.last_n}: must be below the prompt's "
                    f"{len(ids)}"
                )
            seed = uuid.uuid4().int % 2**63

            async def work() -> FutureAnswer:
                outputs = await self._complete(sampler, body, ids, seed)
                return FutureAnswer(write_samples(len(ids), outputs, options), PROTOBUF)

            sampler.issued.add(body.seq_id)
            self.futures.start(future, work)
        return future, [f"{future}:{i}" for i in range(body.num_samples)]

    def cancel_sample(self, future: str) -> None:
        """End a sample that nobody waits for. A model's request goes on, whoever gives it up: the
        ones behind count on it."""
        if future.split(":")[1:2] == ["sample"]:
            self.futures.cancel(future)

    async def _complete(
        self, sampler: Sampler, body: SampleBody, ids: list[int], seed: int
    ) -> list[Output]:
        def weights() -> Iterator[tuple[str, Tensor]]:
            path = sampler.path
            return self.base.weights(None if path is None else self.store.find(path)[0])

        return await self._shared.sample(
            sampler.key, weights, ids, lambda room: body.params(room, seed)
        )

    def _open_sampler(self, session_id: str, number: int, path: TinkerPath | None) -> str:
        name = f"{session_id}:sample:{number}"
        session = self.touch(session_id)
        key = self.base.name
        if path is not None:
            folder, record = self.store.find(path)
            self._base(record.base_model)
            key = f"{folder}@{record.created}"  # a name may be given again after a deletion
        session.samplers.setdefault(name, Sampler(path, key, set()))
        return name


def lora_facts(record: Record) -> dict[str, Any]:
    """The facts of an adapter that the client is told."""
    lora = record.lora or {}
    return {"is_lora": record.lora is not None, "lora_rank": lora.get("rank")}


def _shape(record: Record) -> dict[str, Any] | None:
    """The options that decide which tensors an adapter has: not the seed that it began with."""
    return record.lora and {name: one for name, one in record.lora.items() if name != "seed"}


def _path(model_id: str, kind: str, name: str) -> TinkerPath:
    return TinkerPath.parse(f"tinker://{model_id}/{kind}/{name}")
