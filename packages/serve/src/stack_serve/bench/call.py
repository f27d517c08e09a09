"""Client-side measurement of one request."""

import time
from dataclasses import dataclass, field

import orjson

from stack_serve.bench.requests import Task
from stack_serve.client.endpoint import Endpoint, RequestFailed

__all__ = ["Call", "make_call"]


@dataclass
class Call:
    """Result of a request, with times in seconds on the clock of `time.perf_counter()`.

    Attributes:
      due_s: scheduled send time of the request.
      sent_s: actual send time, later than `due_s` if the client cannot keep up.
      ended_s: time at which the response was complete or the request failed.
      arrivals_s: arrival time of each stream event with text.
      prompt_tokens, answer_tokens: token counts reported by the server; None if it does not report them.
      failure: kind of failure (see `RequestFailed`); None if the request succeeded.
      message: human-readable description of the failure.
    """

    due_s: float
    sent_s: float
    ended_s: float = 0.0
    arrivals_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    answer_tokens: int | None = None
    failure: str | None = None
    message: str = ""

    @property
    def ttft_s(self) -> float:
        """Time to first token: from `due_s` to the first text."""
        return self.arrivals_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        """End-to-end latency: from `due_s` to the last text."""
        return self.arrivals_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Mean time per output token after the first; None for fewer than two tokens or an unknown token count."""
        tokens = self.answer_tokens or 0
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (tokens - 1) if tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: gaps between events with text. One event may contain several tokens."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


async def make_call(endpoint: Endpoint, task: Task, *, due_s: float | None = None) -> Call:
    """Sends and measures a request. A `RequestFailed` is recorded in the result instead of raised."""
    now_s = time.perf_counter()
    call = Call(due_s=now_s if due_s is None else due_s, sent_s=now_s)

    def receive(data: bytes, arrived_s: float) -> None:
        _note(call, data, arrived_s)

    try:
        await endpoint.stream(task.path, task.body, receive)
        if not call.arrivals_s:
            raise RequestFailed("The answer has no text.", kind="empty")
    except RequestFailed as error:
        call.failure, call.message = error.kind, str(error)
    call.ended_s = time.perf_counter()
    return call


def _note(call: Call, data: bytes, arrived_s: float) -> None:
    try:
        event = orjson.loads(data)
        if event.get("error"):
            raise RequestFailed(f"The stream has an error: {event['error']}", kind="error")
        if any(_has_text(choice) for choice in event.get("choices", ())):
            call.arrivals_s.append(arrived_s)
        if usage := event.get("usage"):
            call.prompt_tokens = usage.get("prompt_tokens")
            call.answer_tokens = usage.get("completion_tokens")
    except (ValueError, AttributeError, TypeError) as error:
        raise RequestFailed(f"The stream has an event of an unexpected format: {data[:200]!r}", kind="error") from error


def _has_text(choice: dict[str, object]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))
    return bool(choice.get("text"))
