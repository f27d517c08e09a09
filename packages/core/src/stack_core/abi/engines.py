"""Generation engines, which serve HTTP servers and rollouts alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from stack_core.abi.errors import GenerationError, PluginError

if TYPE_CHECKING:
    import numpy as np

    from stack_core.abi.adapters import Adapters
    from stack_core.abi.generation import Constraint, EngineStats, GenerationRequest, GenerationUpdate

__all__ = ["Engine", "Pooling", "checked_engine"]

Pooling = Literal["last", "mean", "cls"]
"""Vector of a prompt: the hidden state of its last token, the mean over its tokens, or the state of its first token."""


class Engine(ABC):
    """An engine that continues many prompts concurrently, constructed from a `GenerativeCheckpoint`.

    Its methods may be called from any thread.

    Attributes:
      keeps_missing: whether `update_weights` accepts a subset of the parameters, a nested mapping such as an adapter's,
        and keeps the rest.
      reports_experts: True if requests may set `SamplingParams.experts`.
    """

    keeps_missing: bool = False
    reports_experts: bool = False

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of adapters that requests may select."""
        return ()

    def sleep(self, level: Literal[1, 2] = 1) -> None:
        """Frees the device memory until `wake_up`; raises EngineBusy if requests run, and refuses later ones.

        Level 1 keeps the weights in host memory; level 2 drops them, and `wake_up` reads the checkpoint again.
        """
        raise GenerationError("This engine cannot sleep. Use the engine 'llm'.", parameter="engine")

    def wake_up(self) -> None:
        """Allocates the memory again; has no effect on an engine that does not sleep."""
        raise GenerationError("This engine cannot sleep. Use the engine 'llm'.", parameter="engine")

    def load_adapter(self, name: str, adapters: str | Adapters) -> None:
        """Registers an adapter, given by its address or its factors, or replaces it for later requests.

        Raises a StackError if the adapter cannot be read, belongs to another model, or cannot be applied.
        """
        raise GenerationError("This engine loads no adapters. Use the engine 'llm'.", parameter="adapter")

    def unload_adapter(self, name: str) -> None:
        """Removes an adapter; requests submitted earlier still use it. Raises a GenerationError if it is unknown."""
        raise GenerationError("This engine has no adapters. Use the engine 'llm'.", parameter="adapter")

    def expect(self, continuations: int) -> None:  # noqa: B027  optional
        """Sets the expected number of concurrent continuations, which may size batches; call it before `start`."""

    def warm_up(self) -> None:  # noqa: B027  optional
        """Compiles all programs that requests may need; call it before `start`, or not at all."""

    def prepare(self) -> None:
        """Compiles enough programs to serve requests. Others may be compiled in the background; see `warm_up`."""
        self.warm_up()

    def compile_constraint(self, constraint: Constraint) -> None:
        """Compiles a constraint before `submit`, blocking for up to a second; raises a GenerationError if it cannot."""
        message = "This engine does not support constraints. Leave it out, or use the engine 'llm'."
        raise GenerationError(message, parameter="constraint")

    def embed(self, prompts: Sequence[Sequence[int]], *, pooling: Pooling = "last") -> np.ndarray:
        """Computes float32[prompts, embed], the pooled inputs of the head, with the current weights of the base model.

        It blocks, and does not need `start`. Raises a GenerationError for an invalid prompt or `pooling`.
        """
        raise GenerationError("This engine computes no embeddings. Use the engine 'llm'.", parameter="input")

    @abstractmethod
    def start(self) -> None:
        """Starts processing requests, including those submitted earlier."""

    @abstractmethod
    def close(self, *, drain_s: float = 0.0) -> None:
        """Waits up to `drain_s` seconds for requests to finish, aborts the remaining ones, and stops permanently."""

    @abstractmethod
    def submit(self, request: GenerationRequest, receive: Callable[[GenerationUpdate], None] | None = None) -> None:
        """Queues a request.

        Args:
          receive: callback that gets each update on a thread of the engine, and must not block. None buffers the
            updates for `stream`.

        Raises:
          GenerationError: the model cannot serve the request; names the parameter, its value and the allowed values.
          EngineBusy: the queue is full.
        """

    @abstractmethod
    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        """Yields the updates of a request submitted without `receive` until all continuations have finished."""

    @abstractmethod
    def abort(self, request_id: str) -> None:
        """Aborts a request before its next step; has no effect on a finished request."""

    @abstractmethod
    def update_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        kv: Literal["keep", "recompute", "abort"] = "keep",
        donate: bool = False,
    ) -> None:
        """Replaces the parameters between two steps and clears the prefix cache.

        The parameters are checked and placed on the caller's thread. If that fails, the engine keeps its current
        weights.

        Args:
          params: pytree in the structure of the checkpoint's parameters; each array is cast to the dtype that it
            replaces.
          version: version reported with tokens sampled from these weights. The first is 0; None increments the last
            one.
          kv: policy for running requests: "keep" their keys and values, which older weights computed, "recompute"
            them, or "abort" the requests.
          donate: whether the engine takes over the buffers of `params`. Then memory holds each array once, and the
            caller must not use them any more. Otherwise memory holds each twice.

        Raises:
          ConversionError: another structure, other shapes, or deleted arrays; names each parameter.
          EngineStopped: the engine was closed or failed.
        """

    @abstractmethod
    def stats(self) -> EngineStats:
        """Returns counts and rates of the engine."""


def checked_engine(name: str, engine: Any) -> Engine:
    """Returns an engine that the registry entry `name` constructed.

    Raises:
      PluginError: it does not derive from `Engine`.
    """
    if not isinstance(engine, Engine):
        raise PluginError(
            f"engines {name!r} constructed a {type(engine).__name__}; expected a class derived from "
            "stack_core.abi.engines.Engine."
        )
    return engine
