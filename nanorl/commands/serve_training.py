"""`nanorl serve-training --model MODEL`: a training service for the official `tinker` client.

    nanorl serve-training --model smollm2
    nanorl serve-training --model runs/tiny-seed0/model-trained --port 0 --full

`python -m nanorl.serve_training` is the same. Left out: the client, which is `pip install tinker`.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated

import tyro

from nanoengine.extras import missing
from nanorl.serving.training_service.service_config import ServiceConfig, ServiceOptions


def serve_training(
    model: str,
    options: Annotated[ServiceOptions, tyro.conf.arg(name="")] = ServiceOptions(),  # noqa: B008
) -> int:
    """Train models for clients of the Tinker API, over HTTP.

    Args:
        model: The base model: a Hugging Face folder, smollm2, or a hub's name.
        options: The service's.
    """
    try:
        # Here: it imports torch.
        from nanorl.serving.training_service.service_running import run_service
    except ModuleNotFoundError as error:
        raise missing("the service", error.name, extra="serve") from None
    from nanoengine.formats.sources import resolve_model  # here: it imports torch

    given = {field.name: getattr(options, field.name) for field in fields(ServiceOptions)}
    config = ServiceConfig(model=resolve_model(model), names=(model,), **given)
    try:
        run_service(config)
    except KeyboardInterrupt:  # uvicorn raises it once everything is closed
        return 130
    return 0
