"""The clients of a service, each with a `TrainingService` of its own: sessions, models, samplers,
futures and checkpoints.

One client's things are in no table and no folder of another's, so a verb finds them as little as
what was never made, and answers the same. They share the machine: computing time, and room for
models.
Left out: quotas of either.
"""

from __future__ import annotations

from collections.abc import Mapping

from nanoinfer.http.api_error import ApiError
from nanorl.serving.training_service.keys import ClientKeys
from nanorl.serving.training_service.service import TrainingService
from nanorl.serving.training_service.shared_base import SharedBase


class Clients:
    """The service of each client, by its key."""

    def __init__(self, keys: ClientKeys, shared: SharedBase) -> None:
        self._keys, self._shared = keys, shared
        self._services: Mapping[str, TrainingService] = {
            name: TrainingService(shared, name) for name in keys.names
        }

    def service_of(self, key: str) -> TrainingService:
        """The service of the client with that key. `ApiError` 401 if it is nobody's."""
        name = self._keys.client_of(key)
        if name is None:
            raise ApiError(401, "wrong or missing API key; set TINKER_API_KEY to the service's")
        return self._services[name]

    def drop_silent(self) -> None:
        """End the sessions of all clients that are not heard of any more: their models have room
        that another may need."""
        for service in self._services.values():
            service.drop_silent()

    async def close(self) -> None:
        """End what runs."""
        for service in self._services.values():
            await service.futures.close()
        await self._shared.close()
