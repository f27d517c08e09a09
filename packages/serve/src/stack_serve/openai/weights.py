"""New weights from a checkpoint on the server's machine, as SGLang's endpoint loads them."""

import asyncio
from typing import Any

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineStopped, StackError
from stack_core.abi.model_formats import open_for_generation
from stack_serve.openai.errors import ApiError, bad_request
from stack_serve.openai.schemas import UpdateWeightsBody
from stack_serve.openai.service import Service

__all__ = ["WeightLoader"]


class WeightLoader:
    """Replaces the weights of a server's engine, one update at a time; requests are answered meanwhile."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()

    async def load(self, body: UpdateWeightsBody) -> dict[str, Any]:
        """Reads the weights of a checkpoint and returns the answer for the client, after the engine took them.

        Raises:
          ApiError: it is not allowed, or the checkpoint cannot be read or is of another model.
        """
        if not self._service.config.weight_updates:
            message = "Clients may not load weights. Start the server with --weight-updates to allow it."
            raise ApiError(403, message)
        async with self._lock:
            try:
                await asyncio.to_thread(_load, self._service.backend.engine, body)
            except EngineStopped:
                raise
            except StackError as error:
                raise bad_request(str(error), param="model_path") from None
        return {"success": True, "message": f"The engine has the weights of {body.model_path}."}


def _load(engine: Engine, body: UpdateWeightsBody) -> None:
    checkpoint = open_for_generation(body.model_path, encoders=True)
    engine.update_weights(checkpoint.load_params(), version=body.weight_version, kv=body.kv, donate=True)
