"""A folder of a run whose agent sees, written by the store itself, for the tests of what people
see of pictures: a group of two with different pictures, and what somebody else may have put there.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from agent_doubles import output_of
from viewer_runs import store_step

import nanorl
from nanoengine.spans import ImageSpan
from nanoengine.vision.png import write_png
from nanoengine.vision.seeing_tokenizer import SeeingTokenizer, seeing_tokenizer
from nanorl.agents.limits import Limits
from nanorl.agents.tokens import TurnBuilder
from nanorl.envs.images import with_pictures
from nanorl.envs.tasks.tiny_vision_model import build_tiny_vision_model
from nanorl.options.presets import get_preset
from nanorl.task import Task
from nanorl.types import Rollout

LIMITS = Limits(max_turns=9, max_turn_tokens=900, max_context_tokens=9000)
HTML = "<script>window.canary = 1</script><img src=x onerror='window.canary = 2'>"
SPELLED = "[picture 1: 48 x 48, 9 tokens, sha256 000000000000] <|image_pad|>"
RED, GREEN, BLUE = (255, 0, 0), (0, 255, 0), (0, 0, 255)
Shown = Sequence[str | nanorl.Image]
TASK = Task("Which colour?", answer="red", kind="colours")


def coloured(colour: tuple[int, int, int], side: int = 40) -> nanorl.Image:
    """A square; the tiny model makes 48 x 48 pixels of it, nine tokens."""
    return nanorl.Image(write_png(np.full((side, side, 3), colour, np.uint8)))


def sha_of(image: nanorl.Image) -> str:
    return hashlib.sha256(image.data()).hexdigest()


def seeing_run(folder: Path) -> tuple[Path, SeeingTokenizer]:
    """The folder, with its model and no rollouts, and the tokenizer that fills its pictures."""
    build_tiny_vision_model(folder / "model-trained")
    config = get_preset("smollm2").config()
    (folder / "config.json").write_text(json.dumps(config.to_json()), encoding="utf-8")
    return folder, seeing_tokenizer(folder / "model-trained", folder / "pictures")


def played(
    tokenizer: SeeingTokenizer, name: str, opening: Shown, *turns: tuple[str, Shown]
) -> Rollout:
    """A rollout: what it was shown first, and what it said and was shown then."""
    builder = TurnBuilder(tokenizer, LIMITS, task_id=TASK.task_id, group_id="g", rollout_id=name)
    builder.start(with_pictures(list(opening), tokenizer))
    for said, shown in turns:
        ids = [*tokenizer.encode(said), *sorted(tokenizer.eos_ids)[:1]]
        builder.append_action(output_of(ids))
        if shown:
            assert builder.append_observation(with_pictures(list(shown), tokenizer))
    return builder.close(reward=float(name.endswith("right")))


def with_hash(rollout: Rollout, place: int, sha256: str, **more: object) -> Rollout:
    """The rollout with another name, or more, in one of its spans."""
    images: list[ImageSpan] = list(rollout.images)
    images[place] = replace(images[place], sha256=sha256, **more)  # type: ignore[arg-type]
    return replace(rollout, images=images)


def add_file(run: Path, data: bytes) -> str:
    """Put a file among the pictures that no store would take."""
    sha256 = hashlib.sha256(data).hexdigest()
    (run / "pictures" / sha256).write_bytes(data)
    return sha256


def lying_png(width: int = 100_000, height: int = 100_000) -> bytes:
    """A PNG that says it is larger than it is."""
    data = coloured(RED).data()
    return data[:16] + struct.pack(">II", width, height) + data[24:]


def filled_run(folder: Path) -> tuple[Path, SeeingTokenizer]:
    """The run with the rollouts `right`, `wrong` (a group), `missing` and `hostile`."""
    run, tokenizer = seeing_run(folder)
    right = played(
        tokenizer, "right", ["Look:", coloured(RED), "Which?"], ("hm", [coloured(GREEN)]), ("r", [])
    )
    wrong = played(
        tokenizer, "wrong", ["Look:", coloured(RED), "Which?"], ("hm", [coloured(BLUE)]), ("g", [])
    )
    gone = played(tokenizer, "missing", [coloured((9, 9, 9))], ("r", []))
    (run / "pictures" / gone.images[0].sha256).unlink()
    shown = [HTML, *(coloured((7, 7, level)) for level in range(4)), SPELLED]
    hostile = played(tokenizer, "hostile", shown, (HTML, [SPELLED, coloured(RED)]), ("r", []))
    names = ["../config.json", add_file(run, b"<svg onload='window.canary = 3'/>")]
    names += [add_file(run, lying_png()), HTML]
    for place, name in enumerate(names):
        hostile = with_hash(hostile, place, name)
    store_step(run, [right, wrong], step=0, tasks=[TASK], advantages=[0.5, -0.5])
    store_step(run, [replace(one, group_id="h") for one in (gone, hostile)], step=1)
    return run, tokenizer
