"""The worker's side of an engine in another process; `engine_process.py` is the driver's side."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal

import jax

from stack_core.abi.engines import Engine
from stack_core.abi.errors import GenerationError
from stack_core.abi.formats import GenerativeCheckpoint
from stack_core.abi.generation import EngineStats, GenerationRequest
from stack_core.runtime.outbox import Outbox
from stack_core.runtime.raised import Raised

__all__ = ["NUMERICS", "HostedEngine"]

NUMERICS = ("jax_enable_x64", "jax_default_matmul_precision", "jax_threefry_partitionable", "jax_default_prng_impl")
"""Options of JAX that change sampled tokens; programs may set them in the driver, where workers do not see them."""

_STREAMS_AT_ONCE = 32


class HostedEngine:
    """An `Engine` as the object of a mesh: emits lists of `(request_id, update)`.

    If the iterator of a request raises, a `Raised` takes the update's place.

    Args:
      open_engine: function that constructs the engine from a checkpoint.
      checkpoint: the model without its parameters.
      emit: sends a list to the driver.
      params: its parameters on this process's mesh, in the structure of `checkpoint.parameters`.
      numerics: values of `NUMERICS` in the driver.

    Raises:
      StackError: the engine cannot be constructed.
    """

    def __init__(
        self,
        open_engine: Callable[[GenerativeCheckpoint], Engine],
        checkpoint: GenerativeCheckpoint,
        emit: Callable[[Any], None],
        params: Any,
        numerics: Mapping[str, Any],
    ) -> None:
        for name, value in numerics.items():
            jax.config.update(name, value)
        loaded: Any = _LoadedCheckpoint(checkpoint, params)  # its attributes are copied, so types cannot see them
        self._engine = open_engine(loaded)
        loaded.release()
        # An iterator may block until its request has finished, while the commands of other requests must go on.
        self._streams = ThreadPoolExecutor(_STREAMS_AT_ONCE, thread_name_prefix="stream")
        self._outbox = Outbox(emit)

    def describe(self) -> tuple[bool, bool, tuple[str, ...]]:
        """Returns the engine's attributes `keeps_missing`, `reports_experts` and `adapters`."""
        return self._engine.keeps_missing, self._engine.reports_experts, self._engine.adapters

    def expect(self, continuations: int) -> None:
        self._engine.expect(continuations)

    def warm_up(self) -> None:
        self._engine.warm_up()

    def start(self) -> None:
        self._engine.start()

    def submit(self, request: GenerationRequest, *, receives: bool) -> None:
        """Queues a request. Without `receives`, updates are emitted from the call of `stream` on."""
        receive = partial(self._send, request.request_id) if receives else None
        self._engine.submit(request, receive)

    def stream(self, request_ids: Sequence[str]) -> None:
        """Starts to emit the updates of requests."""
        for each in request_ids:
            self._streams.submit(self._stream, each)

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def update_weights(self, params: Any, *, version: int | None, kv: Literal["keep", "recompute", "abort"]) -> None:
        """Replaces the parameters by arrays that the engine may keep: the transfer made copies."""
        self._engine.update_weights(params, version=version, kv=kv, donate=True)

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def close(self, *, drain_s: float) -> None:
        self._engine.close(drain_s=drain_s)
        self._streams.shutdown(wait=True, cancel_futures=True)
        self._outbox.close()  # the driver gets every update before the answer to this call

    def _stream(self, request_id: str) -> None:
        try:
            for update in self._engine.stream(request_id):
                self._send(request_id, update)
        except Exception as error:  # an engine may raise anything; the driver raises it from its own iterator
            self._send(request_id, Raised.of(error))

    def _send(self, request_id: str, update: Any) -> None:
        self._outbox.put((request_id, update))


class _LoadedCheckpoint:
    """A `GenerativeCheckpoint` whose parameters were pulled from another process.

    `release` drops the references, since the engine has its own by then.
    """

    def __init__(self, checkpoint: GenerativeCheckpoint, params: Any) -> None:
        self._params = params
        # Copied, because protocol checks of Python 3.12 and later ignore attributes that `__getattr__` provides.
        names = [name for name in dir(checkpoint) if not name.startswith("_") and name != "load_params"]
        vars(self).update({name: getattr(checkpoint, name) for name in names})

    def load_params(self, shardings: Any = None) -> Any:
        """Returns the parameters with these shardings, by default unchanged, on the mesh of the process.

        Raises:
          GenerationError: the engine is already constructed.
        """
        if self._params is None:
            raise GenerationError(
                "The parameters were loaded when the engine was constructed; new ones come by update_weights."
            )
        return self._params if shardings is None else jax.device_put(self._params, shardings)

    def release(self) -> None:
        self._params = None
