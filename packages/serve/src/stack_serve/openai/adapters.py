"""Loading and unloading of adapters by clients, as vLLM's endpoints do."""

import asyncio

from stack_core.abi.errors import EngineStopped, StackError
from stack_serve.openai.errors import ApiError, bad_request
from stack_serve.openai.schemas import LoadAdapterBody, UnloadAdapterBody
from stack_serve.openai.service import Service

__all__ = ["AdapterLoader"]


class AdapterLoader:
    """Loads and unloads the adapters of a server's engine, one at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()

    async def load(self, body: LoadAdapterBody) -> str:
        """Loads an adapter and returns a message for the client.

        Raises:
          ApiError: loading is not allowed, the name is in use, or the adapter cannot be read or applied.
        """
        self._check_allowed()
        name, engine = body.lora_name, self._service.backend.engine
        if name in self._service.names:
            raise bad_request(f"The model is called {name!r}. Give the adapter another name.", param="lora_name")
        async with self._lock:
            if name in engine.adapters and not body.load_inplace:
                raise bad_request(
                    f"The adapter {name!r} is loaded already. Unload it, or set load_inplace.", param="lora_name"
                )
            try:
                # In a thread, because it reads files.
                await asyncio.to_thread(engine.load_adapter, name, body.lora_path)
            except EngineStopped:
                raise
            except StackError as error:
                raise bad_request(str(error), param="lora_path") from None
        return f"Success: LoRA adapter {name!r} added successfully."

    async def unload(self, body: UnloadAdapterBody) -> str:
        """Unloads an adapter and returns a message for the client.

        Raises:
          ApiError: loading is not allowed, or no adapter has this name.
        """
        self._check_allowed()
        name, engine = body.lora_name, self._service.backend.engine
        async with self._lock:
            if name not in engine.adapters:
                known = ", ".join(map(repr, engine.adapters)) or "none"
                message = f"There is no adapter {name[:200]!r}. Loaded are: {known}."
                raise ApiError(404, message, param="lora_name")
            engine.unload_adapter(name)
        return f"Success: LoRA adapter {name!r} removed successfully."

    def _check_allowed(self) -> None:
        if not self._service.config.adapter_loading:
            message = "Clients may not load or unload adapters. Start the server with --adapter-loading to allow it."
            raise ApiError(403, message)
