"""OpenTelemetry spans of generations, with the attributes of vLLM and of the semantic conventions."""

import time
from collections.abc import Iterable
from typing import Any

from stack_core.abi.generation import GenerationUpdate, RequestTimes
from stack_serve.openai.request import ApiRequest

__all__ = ["GenerationSpans"]


class GenerationSpans:
    """Records a span `llm_request` of each continuation at its end.

    Attributes follow the semantic conventions of generative AI (`gen_ai.usage.input_tokens`). vLLM's own names
    (`gen_ai.usage.prompt_tokens`, `gen_ai.latency.*`, in seconds) are those of its `vllm/tracing.py`.

    Args:
      tracer: OpenTelemetry tracer. The current span is the parent.
    """

    def __init__(self, tracer: Any, request: ApiRequest) -> None:
        self._tracer, self._request = tracer, request
        self._submitted_s = time.monotonic()
        self._tokens: dict[tuple[int, int], int] = {}

    def note(self, prompt: int, update: GenerationUpdate) -> None:
        """Takes in an update."""
        place = (prompt, update.index)
        self._tokens[place] = self._tokens.get(place, 0) + len(update.tokens) + update.dropped_tokens
        if update.finish_reason is not None:
            self._record(place, update.finish_reason, update.times, update.error)

    def abort(self, places: Iterable[tuple[int, int]]) -> None:
        """Records continuations (index of the prompt, index) that no further update will end."""
        for place in places:
            self._record(place, "abort", None, None)

    def _record(self, place: tuple[int, int], reason: str, times: RequestTimes | None, error: str | None) -> None:
        from opentelemetry.trace import SpanKind, StatusCode

        times = times or RequestTimes(self._submitted_s, finished_s=time.monotonic())
        ahead_ns = time.time_ns() - time.monotonic_ns()  # spans have times of the system clock
        start_ns = ahead_ns + int(times.submitted_s * 1e9)
        attributes = {**self._settings(), **self._figures(place, times), "gen_ai.response.finish_reasons": [reason]}
        span = self._tracer.start_span("llm_request", kind=SpanKind.SERVER, attributes=attributes, start_time=start_ns)
        if reason in ("error", "deadline"):
            span.set_attribute("error.type", reason)
            span.set_status(StatusCode.ERROR, error)
        span.end(start_ns if times.finished_s is None else ahead_ns + int(times.finished_s * 1e9))

    def _settings(self) -> dict[str, Any]:
        request, sampling = self._request, self._request.sampling
        found = {
            "gen_ai.operation.name": request.operation,
            "gen_ai.provider.name": "stack",
            "gen_ai.request.id": request.id,
            "gen_ai.response.id": request.id,
            "gen_ai.request.model": request.model,
            "gen_ai.response.model": request.model,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.n": sampling.n,
        }
        return {name: value for name, value in found.items() if value is not None}

    def _figures(self, place: tuple[int, int], times: RequestTimes) -> dict[str, Any]:
        """Returns the token counts and the times of a continuation; stages that it did not reach are left out."""
        prompt, tokens = len(self._request.prompts[place[0]].tokens), self._tokens.get(place, 0)
        found: dict[str, Any] = {
            "gen_ai.usage.input_tokens": prompt,
            "gen_ai.usage.prompt_tokens": prompt,
            "gen_ai.usage.output_tokens": tokens,
            "gen_ai.usage.completion_tokens": tokens,
        }
        submitted_s, started_s = times.submitted_s, times.started_s
        first_s, finished_s = times.first_token_s, times.finished_s
        stages = {
            "time_in_queue": (submitted_s, started_s),
            "time_to_first_token": (submitted_s, first_s),
            "time_in_model_prefill": (started_s, first_s),
            "time_in_model_decode": (first_s, finished_s),
            "time_in_model_inference": (started_s, finished_s),
            "e2e": (submitted_s, finished_s),
        }
        for name, (begin_s, end_s) in stages.items():
            if begin_s is not None and end_s is not None:
                found[f"gen_ai.latency.{name}"] = end_s - begin_s
        return found
