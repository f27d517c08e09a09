"""Prometheus metrics of the inference server."""

from collections.abc import Callable, Iterable, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stack_serve.inference.lane import Lane
from stack_serve.inference.repository import Key

__all__ = ["Metrics"]

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
_LABELS = ("model", "version")


class Metrics:
    """Counters and histograms of one server, separate from other servers in the process."""

    def __init__(self, lanes: Callable[[], Mapping[Key, Lane]]) -> None:
        self._registry = CollectorRegistry()
        self.responses = Counter(
            "stack_inference_responses", "Responses by outcome.", ("protocol", "status"), registry=self._registry
        )
        self.request_s = Histogram(
            "stack_inference_request_seconds",
            "From a request's arrival at the queue to its answer.",
            _LABELS,
            buckets=_SECONDS,
            registry=self._registry,
        )
        self.swaps = Counter(
            "stack_inference_loads", "Loads of versions by outcome.", ("model", "outcome"), registry=self._registry
        )
        self._registry.register(_Lanes(lanes))

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)


class _Lanes:
    """Statistics of the lanes, collected when Prometheus scrapes."""

    def __init__(self, lanes: Callable[[], Mapping[Key, Lane]]) -> None:
        self._lanes = lanes

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        rows = CounterMetricFamily("stack_inference_rows", "Rows computed.", labels=_LABELS)
        seconds = CounterMetricFamily("stack_inference_compute_seconds", "Seconds in programs.", labels=_LABELS)
        waiting = GaugeMetricFamily("stack_inference_waiting_rows", "Rows that wait.", labels=_LABELS)
        by_size = CounterMetricFamily("stack_inference_calls", "Calls by size.", labels=(*_LABELS, "size"))
        for key, lane in self._lanes().items():
            labels = [key.model, str(key.version)]
            rows.add_metric(labels, lane.statistics.rows)
            calls = dict(lane.statistics.calls)  # the lane's thread may add to it meanwhile
            seconds.add_metric(labels, sum(spent_s for _, spent_s in calls.values()))
            waiting.add_metric(labels, lane.waiting_rows)
            for size, (count, _) in calls.items():
                by_size.add_metric([*labels, str(size)], count)
        return (rows, seconds, waiting, by_size)
