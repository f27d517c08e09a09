"""Spans of concurrent work, such as requests and rollouts, in the traces of JAX's profiler.

Annotations of one thread must nest, but requests that share a step do not. A span is therefore a mark at its end, which
has its duration and fields. Without a capture, no mark is made.
"""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

import jax

__all__ = ["SPAN_FIELDS", "SPAN_PREFIX", "listen_to_spans", "record_span", "spans_recorded"]

SPAN_PREFIX: Final = "stack."  # prefix of the marks' names
SPAN_FIELDS: Final = "stack_span"  # statistic of a mark: its fields as JSON


SpanListener = Callable[[str, float, Mapping[str, Any]], None]  # receives name, duration in seconds, and fields
_listeners: Final[list[SpanListener]] = []


def spans_recorded() -> bool:
    """Returns whether a capture runs; callers then compute the fields of a span."""
    return jax.profiler.TraceAnnotation.is_enabled()


def record_span(name: str, duration_s: float, **fields: Any) -> None:
    """Records a span that ends now in a running capture.

    Args:
      name: kind of the span, such as "engine_step".
      duration_s: seconds from its start until now.
      fields: numbers, texts, None, and sequences of these.
    """
    if spans_recorded():
        text = json.dumps(
            {"duration_s": duration_s, **{name: _quoted(value) for name, value in fields.items()}},
            separators=(",", ":"),
        )
        with jax.profiler.TraceAnnotation(f"{SPAN_PREFIX}{name}", **{SPAN_FIELDS: text}):
            pass
        for listener in tuple(_listeners):
            listener(name, duration_s, fields)


@contextlib.contextmanager
def listen_to_spans(listener: SpanListener) -> Iterator[None]:
    """Calls `listener` with each span that a capture records, on the thread of the work, until the block ends."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _quoted(value: Any) -> Any:
    """Quotes texts like a URL: the profiler would read their quotes, brackets, commas and "#" as its own syntax."""
    if isinstance(value, str):
        return quote(value, safe="")
    return [_quoted(each) for each in value] if isinstance(value, Sequence) else value
