"""One request as its client sees it."""

import time
from dataclasses import dataclass, field

import orjson

from stack_serve.bench.requests import Task
from stack_serve.client.endpoint import Endpoint, RequestFailed

__all__ = ["Call", "make_call"]


@dataclass
class Call:
    """What came back, with times in seconds of `time.perf_counter()`.

    Attributes:
      due_s: when the load was to send it; `sent_s` is when it did, later where the client cannot keep up.
      arrivals_s: of each piece of text.
      prompt_tokens, answer_tokens: as the server counts them; None where it does not say.
      failure: its kind, as `RequestFailed` names them, and `message` tells more.
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
        """Time to first token: from when it was due to the first piece of text."""
        return self.arrivals_s[0] - self.due_s

    @property
    def e2e_s(self) -> float:
        """From when it was due to the last piece of text."""
        return self.arrivals_s[-1] - self.due_s

    @property
    def tpot_s(self) -> float | None:
        """Time per output token, the mean of those after the first; None if there is one, or the server counts none."""
        tokens = self.answer_tokens or 0
        return (self.arrivals_s[-1] - self.arrivals_s[0]) / (tokens - 1) if tokens > 1 else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies: between pieces of text, of which one may hold several tokens."""
        return [later - earlier for earlier, later in zip(self.arrivals_s, self.arrivals_s[1:], strict=False)]


async def make_call(endpoint: Endpoint, task: Task, *, due_s: float | None = None) -> Call:
    """Sends a request; whatever happens to it is in what it returns."""
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
        raise RequestFailed(f"The stream has an event of another shape: {data[:200]!r}", kind="error") from error


def _has_text(choice: dict[str, object]) -> bool:
    delta = choice.get("delta")
    if isinstance(delta, dict):
        return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))
    return bool(choice.get("text"))
