"""Prometheus metrics with vLLM's names, labels and buckets, for use with its dashboards.

Names, labels and buckets follow `vllm/v1/metrics/loggers.py`, except for the tokens of single steps, which an
`Engine` does not report.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stack_core.abi.errors import EngineStopped
from stack_core.abi.generation import EngineStats, GenerationUpdate, RequestTimes
from stack_serve.openai.request import ApiRequest

__all__ = ["Metrics", "Progress"]

_ALL = "all"  # vLLM numbers the engines of a server; requests of several engines are not told apart
_LATENCIES_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)  # fmt: skip
_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
    160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
_REASONS = ("stop", "length", "abort", "deadline", "error")


class Metrics:
    """Metrics of one server.

    Args:
      model_name: label of all metrics.
      max_tokens: maximum length of a prompt with its continuation, the largest bucket.
      stats: returns the counts of each engine, None for an engine that is not running; empty until there is one.
      engines: number of engines.
    """

    def __init__(
        self,
        model_name: str,
        max_tokens: int,
        stats: Callable[[], Sequence[EngineStats | None]],
        *,
        engines: int = 1,
    ) -> None:
        self.registry = CollectorRegistry()
        self._labels = (model_name, "0" if engines == 1 else _ALL)
        sizes = _sizes(max_tokens)
        histogram = self._histogram
        self.first_token_s = histogram("time_to_first_token_seconds", "Time to first token.", _FIRST_TOKEN_S)
        self.between_tokens_s = histogram("inter_token_latency_seconds", "Time between tokens.", _TOKEN_S)
        self.per_token_s = histogram("request_time_per_output_token_seconds", "Mean time between tokens.", _TOKEN_S)
        self.whole_s = histogram("e2e_request_latency_seconds", "Time from arrival to end.", _LATENCIES_S)
        self.queue_s = histogram("request_queue_time_seconds", "Time in the queue.", _LATENCIES_S)
        self.inference_s = histogram("request_inference_time_seconds", "Time outside the queue.", _LATENCIES_S)
        self.prefill_s = histogram("request_prefill_time_seconds", "Time of the prompt.", _LATENCIES_S)
        self.decode_s = histogram("request_decode_time_seconds", "Time of the continuation.", _LATENCIES_S)
        self.prompt_tokens = histogram("request_prompt_tokens", "Tokens of prompts.", sizes)
        self.generated_tokens = histogram("request_generation_tokens", "Tokens of continuations.", sizes)
        self.longest_tokens = histogram("request_max_num_generation_tokens", "Tokens of the longest of n.", sizes)
        self.asked_tokens = histogram("request_params_max_tokens", "max_tokens of requests.", sizes)
        self.asked_n = histogram("request_params_n", "n of requests.", (1, 2, 5, 10, 20))
        ended = Counter(
            "vllm:request_success",
            "Requests that ended.",
            ("model_name", "engine", "finished_reason"),
            registry=self.registry,
        )
        self.ended = {reason: ended.labels(*self._labels, reason) for reason in _REASONS}
        self.responses = Counter("http_requests", "Responses.", ("handler", "method", "status"), registry=self.registry)
        self.registry.register(_EngineCollector(model_name, stats))
        ProcessCollector(registry=self.registry)

    def progress(self, request: ApiRequest) -> "Progress":
        """Begins to measure a request."""
        return Progress(self, request)

    def text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self.registry)

    def _histogram(self, name: str, description: str, buckets: Sequence[int | float]) -> Histogram:
        names = ("model_name", "engine")
        return Histogram(f"vllm:{name}", description, names, buckets=buckets, registry=self.registry).labels(
            *self._labels
        )


class Progress:
    """Measures one request, as its updates reach the event loop."""

    def __init__(self, metrics: Metrics, request: ApiRequest) -> None:
        self._metrics = metrics
        self._request = request
        self._last_s: dict[tuple[int, int], float] = {}
        self._tokens: dict[tuple[int, int], int] = {}
        self._open = len(request.prompts) * request.sampling.n
        metrics.asked_n.observe(request.sampling.n)
        if request.sampling.max_tokens is not None:
            metrics.asked_tokens.observe(request.sampling.max_tokens)

    def note(self, prompt: int, update: GenerationUpdate) -> None:
        """Takes in an update."""
        place = (prompt, update.index)
        if update.tokens:
            now_s = time.monotonic()
            before_s = self._last_s.get(place)
            if before_s is not None:
                # A launch may generate several tokens, which arrive together.
                self._metrics.between_tokens_s.observe((now_s - before_s) / len(update.tokens))
            self._last_s[place] = now_s
            self._tokens[place] = self._tokens.get(place, 0) + len(update.tokens)
        if update.dropped_tokens:
            self._tokens[place] = self._tokens.get(place, 0) + update.dropped_tokens
        if update.finish_reason is not None:
            self._open -= 1
            tokens = self._tokens.get(place, 0)
            self._metrics.generated_tokens.observe(tokens)
            self._metrics.ended[update.finish_reason].inc()
            if update.times is not None:
                self._observe_times(update.times, tokens)
            # The continuations of a prompt share its tokens.
            if update.index == 0:
                self._metrics.prompt_tokens.observe(len(self._request.prompts[prompt].tokens))
            if self._open == 0 and self._tokens:
                self._metrics.longest_tokens.observe(max(self._tokens.values()))

    def end(self, reason: str, continuations: int) -> None:
        """Counts continuations that ended without a last update."""
        self._metrics.ended[reason].inc(continuations)

    def _observe_times(self, times: RequestTimes, tokens: int) -> None:
        metrics = self._metrics
        started_s, first_s, finished_s = times.started_s, times.first_token_s, times.finished_s
        if started_s is not None:
            metrics.queue_s.observe(started_s - times.submitted_s)
        if first_s is not None:
            metrics.first_token_s.observe(first_s - times.submitted_s)
            if started_s is not None:
                metrics.prefill_s.observe(first_s - started_s)
        if finished_s is not None:
            metrics.whole_s.observe(finished_s - times.submitted_s)
            if started_s is not None:
                metrics.inference_s.observe(finished_s - started_s)
            if first_s is not None:
                metrics.decode_s.observe(finished_s - first_s)
                if tokens > 1:
                    metrics.per_token_s.observe((finished_s - first_s) / (tokens - 1))


class _EngineCollector:
    """Collects the counts of each engine for Prometheus; after the engine stopped, only the server's metrics remain."""

    def __init__(self, model_name: str, stats: Callable[[], Sequence[EngineStats | None]]) -> None:
        self._model_name = model_name
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        try:
            found = self._stats()
        except EngineStopped:
            return
        if not found:
            return
        up = GaugeMetricFamily("stack:engine_up", "1 for an engine that runs.", labels=("model_name", "engine"))
        families: dict[str, Metric] = {}
        for number, stats in enumerate(found):
            labels = (self._model_name, str(number))
            up.add_metric(labels, float(stats is not None))
            for family, name, what, value in () if stats is None else _samples(stats):
                metric: Any = families.get(name) or family(name, what, labels=("model_name", "engine"))
                metric.add_metric(labels, value)
                families[name] = metric
        yield up
        yield from families.values()


def _samples(
    stats: EngineStats,
) -> Iterator[tuple[type[GaugeMetricFamily | CounterMetricFamily], str, str, int | float]]:
    """Yields the class, name, description and value of each metric of an engine."""
    gauges = {
        "vllm:num_requests_running": ("Continuations that run.", stats.running),
        "vllm:num_requests_waiting": ("Continuations that wait.", stats.waiting),
        "vllm:kv_cache_usage_perc": (
            "Used part of the cache, 1 for all of it.",
            stats.used_pages / max(stats.pages, 1),
        ),
        "stack:engine_programs_to_compile": (
            "Programs that still compile in the background.",
            stats.programs_to_compile,
        ),
        "stack:engine_weights_version": ("Version of the weights.", stats.weights_version),
    }
    counters = {
        "vllm:prompt_tokens": ("Tokens of prompts.", stats.prompt_tokens),
        "vllm:generation_tokens": ("Tokens that were generated.", stats.generated_tokens),
        "vllm:num_preemptions": ("Continuations that were computed again.", stats.preemptions),
        "vllm:prefix_cache_queries": ("Tokens of prompts that were looked up.", stats.prefix_queries_tokens),
        "vllm:prefix_cache_hits": ("Tokens of prompts that were found.", stats.prefix_hits_tokens),
        "vllm:prompt_tokens_cached": ("Tokens of prompts that were found.", stats.prefix_hits_tokens),
        "vllm:spec_decode_num_drafts": ("Drafts that were verified.", stats.drafts),
        "vllm:spec_decode_num_draft_tokens": ("Tokens of drafts.", stats.drafted_tokens),
        "vllm:spec_decode_num_accepted_tokens": ("Tokens of drafts that were generated.", stats.accepted_tokens),
        "stack:engine_steps": ("Steps of the engine.", stats.steps),
        "stack:engine_compilations": ("Programs compiled after the engine was ready.", stats.compilations),
    }
    for family, rows in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
        for name, (what, value) in rows.items():
            yield family, name, what, value


def _sizes(largest: int) -> list[int]:
    """1, 2, 5, 10, 20, 50 and so on up to `largest`."""
    powers = range(len(str(largest)))
    return [digit * 10**power for power in powers for digit in (1, 2, 5) if digit * 10**power <= largest]
