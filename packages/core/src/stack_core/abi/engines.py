"""Generation: the engine that continues prompts, for HTTP servers and rollouts alike, and data that needs one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from stack_core.abi.generation import EngineStats, GenerationRequest, GenerationUpdate

__all__ = ["Engine", "ExpectsRequests", "KeepsMissing"]


@runtime_checkable
class Engine(Protocol):
    """Continues many prompts at once; made of a `GenerativeCheckpoint`. Its methods may be called from any thread."""

    def warm_up(self) -> None:
        """Compiles all that a request can need, so that none waits for it; before `start`, or not at all."""
        ...

    def start(self) -> None:
        """Begins to work on requests; what was submitted before waits for it."""
        ...

    def close(self, *, drain_s: float = 0.0) -> None:
        """Waits up to `drain_s` for requests to end, ends the others with "abort", and stops for good."""
        ...

    def submit(self, request: GenerationRequest, receive: Callable[[GenerationUpdate], None] | None = None) -> None:
        """Queues a request.

        Args:
          receive: gets each update on a thread of the engine's, and must not wait; None leaves them to `stream`.

        Raises:
          GenerationError: the model cannot serve it; names the parameter, what was given and what is possible.
          EngineBusy: the queue is full.
        """
        ...

    def stream(self, request_id: str) -> Iterator[GenerationUpdate]:
        """Yields the updates of a request that was submitted without `receive`, until all continuations ended."""
        ...

    def abort(self, request_id: str) -> None:
        """Ends a request before its next step; one that has ended is left alone."""
        ...

    def update_weights(
        self,
        params: Any,
        *,
        version: int | None = None,
        kv: Literal["keep", "recompute", "abort"] = "keep",
        donate: bool = False,
    ) -> None:
        """Replaces the parameters between two steps, and forgets what was kept of other requests.

        They are checked and placed on the caller's thread; if that fails, the engine keeps the weights that it has.

        Args:
          params: pytree in the structure of the checkpoint's; each array is cast to the dtype of the one it replaces.
          version: what tokens that they draw are told with; None is one more than the last. The first is 0.
          kv: what becomes of requests that run: they "keep" the keys that older weights made, or "recompute" them, or
            end ("abort").
          donate: `params` are the engine's from now on and cannot be used any more, so that memory holds each of them
            once; otherwise it holds them twice, and they stay the caller's.

        Raises:
          ConversionError: it has another structure, other shapes, or arrays that were deleted; names each parameter.
          EngineStopped: the engine was closed or failed.
        """
        ...

    def stats(self) -> EngineStats: ...


@runtime_checkable
class KeepsMissing(Protocol):
    """An engine whose `update_weights` takes some parameters in nested mappings, an adapter's say, and keeps the rest.

    Attributes:
      keeps_missing: True.
    """

    keeps_missing: bool


@runtime_checkable
class ExpectsRequests(Protocol):
    """An engine that sizes its batches by how much it is going to have."""

    def expect(self, continuations: int) -> None:
        """Says how many continuations are asked for at once, at most; before `start`.

        More are served, too, but not together.
        """
        ...
