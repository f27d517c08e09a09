"""Prometheus metrics of a server of images."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from stack_core.abi.errors import EngineStopped
from stack_serve.images.engine import ImageStats

__all__ = ["ImageMetrics"]

_LATENCIES_S = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 60, 120, 240, 480, 960)


class ImageMetrics:
    """Metrics of one server.

    Args:
      model_name: label of the metrics of requests.
      stats: returns the engine's counts; None until the engine exists.

    Attributes:
      responses: counts responses by path, method and status.
    """

    def __init__(self, model_name: str, stats: Callable[[], ImageStats | None]) -> None:
        self._registry = CollectorRegistry()
        self.responses = Counter(
            "http_requests", "Responses.", ("handler", "method", "status"), registry=self._registry
        )
        self.request_s = Histogram(
            "stack:image_request_seconds",
            "Time from arrival to the last image.",
            ("model_name",),
            buckets=_LATENCIES_S,
            registry=self._registry,
        ).labels(model_name)
        self._stats = stats
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Returns all metrics in Prometheus' text format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yields the engine's counts; after the engine stopped, only the server's metrics remain."""
        try:
            stats = self._stats()
        except EngineStopped:
            return
        if stats is None:
            return
        yield GaugeMetricFamily("stack:images_running", "Images that are computed.", stats.running)
        yield GaugeMetricFamily("stack:images_waiting", "Images that wait.", stats.waiting)
        yield CounterMetricFamily("stack:images_finished", "Finished images.", stats.images)
        yield CounterMetricFamily("stack:image_batches", "Computed batches.", stats.batches)
        yield CounterMetricFamily("stack:image_steps", "Computed steps of images.", stats.image_steps)
