"""Requests of a server: their waits, times to the first token and rates, from the engine's own events."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from stack_profile.answer import Answer
from stack_profile.captures.processes import names_of
from stack_profile.traces.operations import PICOSECOND
from stack_profile.traces.trace import Trace
from stack_profile.traces.work_spans import ServedRequest, requests_of, work_spans

__all__ = ["RequestRow", "requests"]


@dataclass(frozen=True)
class RequestRow:
    """A continuation of a request.

    Attributes:
      name: id of the request, with the number of the continuation from the second one on.
      start_s: arrival since the start of the first request; of the first event for a request that began earlier.
      duration_s: seconds from `start_s` until the last event.
      queue_s: wait for the first step; None for a request that began before the capture, as are the next two.
      prefill_s: seconds from the first step until the first token.
      first_token_s: seconds from the arrival until the first token was sent.
      decode_s: seconds from the first to the last token in the capture; None without two steps with tokens.
      tokens_per_s: tokens after the first step with tokens, per second of `decode_s`.
      send_s: mean seconds between the step of an update and its delivery.
      prompt_tokens, cached_tokens: length of the prompt, and its part from the prefix cache; None if it began before.
      generated_tokens: tokens generated in the capture.
      steps: number of engine steps.
      end: finish reason; "" if it did not finish in the capture.
    """

    name: str
    start_s: float
    duration_s: float
    queue_s: float | None
    prefill_s: float | None
    first_token_s: float | None
    decode_s: float | None
    tokens_per_s: float | None
    send_s: float | None
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int
    steps: int
    end: str


def requests(trace: Trace) -> Answer[RequestRow]:
    """Lists the requests that a server of stack-serve worked on, in order of their arrival."""
    found: list[ServedRequest] = []
    steps, rows = 0, 0
    for space, _ in zip(trace.spaces, names_of(trace.spaces), strict=True):
        spans = work_spans(space, trace.base_ns)
        found += requests_of(spans)
        engine = [span for span in spans if span.name == "engine_step"]
        steps, rows = steps + len(engine), rows + sum(len(span.fields["rows"]) for span in engine)
    if not found:
        return Answer("requests", {}, RequestRow, (), (_NONE,))
    start_ps, end_ps = min(each.start_ps for each in found), max(each.end_ps for each in found)
    answers = sorted((_row(each, start_ps) for each in found), key=lambda row: row.start_s)
    elapsed_s, generated = (end_ps - start_ps) * PICOSECOND, sum(row.generated_tokens for row in answers)
    facts = {
        "requests": len(answers),
        "finished": sum(bool(row.end) for row in answers),
        "prompt_tokens": sum(row.prompt_tokens or 0 for row in answers),
        "generated_tokens": generated,
        "start_s": start_ps * PICOSECOND,
        "elapsed_s": elapsed_s,
        "generated_tokens_per_s": generated / elapsed_s if elapsed_s else None,
        **dict(_percentiles("queue_s", [row.queue_s for row in answers])),
        **dict(_percentiles("first_token_s", [row.first_token_s for row in answers])),
        "engine_steps": steps,
        "rows_per_step": rows / steps if steps else None,
    }
    return Answer("requests", facts, RequestRow, tuple(answers), tuple(_notes(found)))


_NONE = (
    "No data: the trace has no events of a server. Capture stack-serve with "
    "`stack profile run --listen -m stack_core serve RUN` and `stack profile attach`."
)


def _row(each: ServedRequest, start_ps: int) -> RequestRow:
    queue, first_ps, sent_ps = each.queue, each.first_token_ps, each.first_sent_ps
    ends = [(span.end_ps, new) for span, _, new in each.steps if new]
    decode_s = (ends[-1][0] - ends[0][0]) * PICOSECOND if len(ends) > 1 else None
    later = sum(new for _, new in ends[1:])
    waits = [time - max((end for end, _ in ends if end <= time), default=time) for time, tokens in each.sent if tokens]
    return RequestRow(
        name=each.request + (f" ({each.index + 1})" if each.index else ""),
        start_s=(each.start_ps - start_ps) * PICOSECOND,
        duration_s=(each.end_ps - each.start_ps) * PICOSECOND,
        queue_s=None if queue is None else (queue.end_ps - queue.start_ps) * PICOSECOND,
        prefill_s=None if queue is None or first_ps is None else (first_ps - queue.end_ps) * PICOSECOND,
        first_token_s=None if queue is None or sent_ps is None else (sent_ps - queue.start_ps) * PICOSECOND,
        decode_s=decode_s,
        tokens_per_s=later / decode_s if decode_s else None,
        send_s=float(np.mean(waits)) * PICOSECOND if waits else None,
        prompt_tokens=None if queue is None else queue.fields["prompt_tokens"],
        cached_tokens=None if queue is None else queue.fields["cached_tokens"],
        generated_tokens=each.generated_tokens,
        steps=len(each.steps),
        end=each.end,
    )


def _percentiles(name: str, values: list[float | None]) -> Iterator[tuple[str, float | None]]:
    known = [value for value in values if value is not None]
    for share, label in ((50, "median"), (95, "p95")):
        yield f"{label}_{name}", float(np.percentile(known, share)) if known else None


def _notes(found: list[ServedRequest]) -> Iterator[str]:
    if earlier := sum(each.queue is None for each in found):
        yield f"{earlier} requests began before the capture: their waits and first tokens are unknown."
