"""Sleep of the engine on request, as vLLM's sleep mode."""

import asyncio

from stack_core.abi.engines import Engine
from stack_core.abi.errors import EngineBusy, GenerationError
from stack_serve.openai.errors import ApiError, as_api_error, bad_request
from stack_serve.openai.service import Service

__all__ = ["Sleeper"]


class Sleeper:
    """Puts a server's engine to sleep and wakes it up; other requests have status 503 meanwhile."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = asyncio.Lock()
        self._engine: Engine | None = None

    async def sleep(self, level: str) -> None:
        """Puts the engine to sleep; has no effect if it sleeps.

        Raises:
          ApiError: it is not allowed, the level is invalid, or requests run (409).
        """
        self._check_allowed()
        if level not in ("1", "2"):
            raise bad_request(f"level is {level[:20]!r}; expected 1 or 2.", param="level")
        async with self._lock:
            if self._service.state == "sleeping":
                return
            engine = self._engine = self._service.backend.engine
            # New requests are refused from now on.
            self._service.state = "sleeping"
            try:
                await asyncio.to_thread(engine.sleep, 1 if level == "1" else 2)
            except Exception as error:
                # After any error, the engine is awake or has failed, which its next answers show. A cancellation
                # does not stop the engine from going to sleep: it then needs a wake-up.
                self._service.resume()
                if isinstance(error, EngineBusy):
                    raise ApiError(409, str(error), code="engine_busy") from None
                if isinstance(error, GenerationError):
                    raise as_api_error(error, {}) from None
                raise

    async def wake_up(self) -> None:
        """Wakes the engine up; has no effect if it is awake.

        Raises:
          ApiError: it is not allowed.
        """
        self._check_allowed()
        async with self._lock:
            if self._service.state == "sleeping":
                assert self._engine is not None
                await asyncio.to_thread(self._engine.wake_up)
                self._service.resume()

    def _check_allowed(self) -> None:
        if not self._service.config.sleep_mode:
            message = "Clients may not put the engine to sleep. Start the server with --sleep-mode to allow it."
            raise ApiError(403, message)
