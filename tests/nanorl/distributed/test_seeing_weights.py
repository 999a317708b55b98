"""A frozen tower goes into shared memory once, and replicas have the bits of each version."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels.transport.checksum import copy_with_checksums
from nanoengine.config import EngineConfig, VisionTrain
from nanoengine.formats.hf import hf_views, load_model, load_state
from nanoengine.plan.footprint import weight_bytes
from nanoengine.state.whole_engine import Engine
from nanorl.distributed.weights import shm
from nanorl.distributed.weights.shm import ShmReceiver, ShmSender, shared_buffer_for
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model


@pytest.mark.parametrize("train", ["all", "merger", "none"])
def test_what_is_frozen_of_a_tower_is_written_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, train: VisionTrain
) -> None:
    folder = build_tiny_vision_model(tmp_path / "model")
    engine = Engine(load_model(folder), EngineConfig(vision_train=train, dtype="bf16"))
    replica = load_model(folder, torch.bfloat16)
    buffer = shared_buffer_for(weight_bytes(engine.model.config, torch.bfloat16))
    sender, receiver = ShmSender("a", buffer), ShmReceiver("a", buffer)
    written: list[int] = []

    def counted(outs: Sequence[Tensor], xs: Sequence[Tensor]) -> list[int]:
        written.append(sum(one.numel() for one in xs))
        return copy_with_checksums(outs, xs)

    monkeypatch.setattr(shm, "copy_with_checksums", counted)
    for version in range(3):
        with torch.no_grad():
            for one in engine.model.parameters():
                if one.requires_grad:
                    one.add_(0.25)
        load_state(replica, receiver.receive(sender.send(engine, version)))
        views = hf_views(engine.model)
        assert all(view.equal(views[name]) for name, view in hf_views(replica).items())
    whole = sum(one.numel() for one in engine.model.parameters())
    trained = sum(one.numel() for one in engine.model.parameters() if one.requires_grad)
    assert written == [whole, trained, trained]
    assert trained == whole if train == "all" else trained < whole


def test_a_buffer_has_room_for_a_tower(tmp_path: Path) -> None:
    model = load_model(build_tiny_vision_model(tmp_path / "model"))
    tensors = sum(one.nbytes for one in model.parameters())
    assert weight_bytes(model.config, torch.float32) == tensors
