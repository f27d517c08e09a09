"""New weights from a checkpoint on the server's machine, by SGLang's route."""

import asyncio
from pathlib import Path
from typing import Any

import jax

from stack_core.abi.errors import ConversionError, EngineStopped, GenerationError, StackError
from stack_core.abi.local_paths import local_address
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
          ApiError: updates are not allowed (403), the checkpoint cannot be read or is of another model (400), or the
            engine cannot take the weights (503).
        """
        if not self._service.config.weight_updates:
            message = "Clients may not load weights. Start the server with --weight-updates to allow it."
            raise ApiError(403, message)
        update = self._service.backend.engine.update_weights
        options: dict[str, Any] = {"version": body.weight_version, "kv": body.kv, "donate": True}
        async with self._lock:
            try:
                params = await asyncio.to_thread(_read, body.model_path)
            except StackError as error:
                raise bad_request(str(error), param="model_path") from None
            try:
                await asyncio.to_thread(update, params, **options)
            except EngineStopped:
                raise
            except GenerationError as error:
                raise ApiError(503, str(error)) from None
            except StackError as error:
                raise bad_request(str(error), param="model_path") from None
        return {"success": True, "message": f"The engine has the weights of {body.model_path}."}


def _read(address: str) -> Any:
    """Reads the parameters of a checkpoint on this machine to host memory.

    The engine's devices hold its current weights, and one of several may not have room for all new ones.
    """
    found = local_address(address)
    scheme, separator, path = found.partition(":")
    # The format `hf` would download a model of the hub, with the server's token.
    if not Path(path if separator and "/" not in scheme else found).exists():
        raise ConversionError(
            f"{address} is not a path on the server's machine. Name the directory of a run or of a checkpoint there."
        )
    checkpoint = open_for_generation(address, encoders=True)
    if jax.default_backend() == "cpu":
        return checkpoint.load_params()
    with jax.default_device(_host()):
        # NumPy arrays, because `jax.device_put` without a sharding would leave arrays of JAX on the host.
        return jax.device_get(checkpoint.load_params())


def _host() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:  # JAX_PLATFORMS leaves it out
        return None
