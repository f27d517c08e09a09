"""Generation engines, which serve HTTP servers and rollouts alike."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from stack_core.abi.generation import EngineStats, GenerationRequest, GenerationUpdate

__all__ = ["Engine", "ExpectsRequests", "KeepsMissing"]


@runtime_checkable
class Engine(Protocol):
    """An engine that continues many prompts concurrently, constructed from a `GenerativeCheckpoint`.

    Its methods may be called from any thread.
    """

    def warm_up(self) -> None:
        """Compiles all programs that requests may need; call it before `start`, or not at all."""
        ...

    def start(self) -> None:
        """Starts processing requests, including those submitted earlier."""
        ...

    def close(self, *, drain_s: float = 0.0) -> None:
        """Waits up to `drain_s` seconds for requests to finish, aborts the remaining ones, and stops permanently."""
        ...

    def submit(self, request: GenerationRequest, receive: Callable[[GenerationUpdate], None] | None = None) -> None:
        """Queues a request.

        Args:
          receive: callback that gets each update on a thread of the engine, and must not block. None buffers the
            updates for `stream`.

        Raises:
          GenerationError: the model cannot serve the request; names the parameter, its value and the allowed values.
          EngineBusy: the queue is full.
        """
        ...

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        """Yields the updates of a request submitted without `receive` until all continuations have finished."""
        ...

    def abort(self, request_id: str) -> None:
        """Aborts a request before its next step; has no effect on a finished request."""
        ...

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
        ...

    def stats(self) -> EngineStats: ...


@runtime_checkable
class KeepsMissing(Protocol):
    """An engine whose `update_weights` accepts a subset of the parameters and keeps the rest.

    The subset is a nested mapping, for instance of an adapter's parameters.

    Attributes:
      keeps_missing: True.
    """

    keeps_missing: bool


@runtime_checkable
class ExpectsRequests(Protocol):
    """An engine that sizes its batches by the expected number of continuations."""

    def expect(self, continuations: int) -> None:
        """Sets the maximum number of concurrent continuations; call it before `start`.

        The engine serves more continuations too, but not all of them concurrently.
        """
        ...
