"""OpenTelemetry spans of HTTP requests, exported as the `OTEL_*` environment variables say.

OpenTelemetry is imported by `tracer_provider` only, so a server without `traces` does not need it.
"""

import functools
import os
from importlib.metadata import entry_points
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from stack_core.abi.errors import ConfigError
from stack_core.abi.installing import install_command

__all__ = ["Traces", "request_tracer", "tracer_provider"]

_EXTRA = "stack-serve[otel]"


def request_tracer() -> Any:
    """Returns the tracer of requests; see `tracer_provider`."""
    return tracer_provider().get_tracer("stack_serve")


@functools.cache
def tracer_provider() -> Any:
    """Returns the tracer provider of this process, which sends its spans in batches, and the last ones at the exit.

    The SDK reads the variables of the sampler, the resource and the batches; exporters read those of the endpoint. This
    function chooses the exporter by OTEL_TRACES_EXPORTER (otlp) and OTEL_EXPORTER_OTLP_PROTOCOL (http/protobuf).

    Raises:
      ConfigError: the SDK or the exporter is not installed.
    """
    try:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(f"Traces need the package {error.name}. Install it: {install_command(_EXTRA)}") from None
    resource = Resource.create()
    if str(resource.attributes["service.name"]).startswith("unknown_service"):
        resource = resource.merge(Resource({"service.name": "stack-serve"}))
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_exporter()))
    return provider


def _exporter() -> Any:
    name = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    if name == "otlp":
        protocol = os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL") or os.environ.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        name = f"otlp_proto_{(protocol or 'http/protobuf').partition('/')[0]}"
    exporters = {each.name: each for each in entry_points(group="opentelemetry_traces_exporter")}
    if name not in exporters:
        raise ConfigError(
            f"OpenTelemetry has no exporter {name!r} here, only {', '.join(sorted(exporters)) or 'none'}. Set "
            f"OTEL_TRACES_EXPORTER or OTEL_EXPORTER_OTLP_PROTOCOL, or install it; {_EXTRA} has otlp_proto_http."
        )
    return exporters[name].load()()


class Traces:
    """Middleware that records a span of each POST request.

    The span continues the trace of the request's header `traceparent` (W3C Trace Context; other formats by
    OTEL_PROPAGATORS), and is the parent of spans that its handlers start.
    """

    def __init__(self, app: ASGIApp, tracer: Any) -> None:
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, StatusCode

        self._app, self._tracer = app, tracer
        self._extract, self._server, self._error = propagate.extract, SpanKind.SERVER, StatusCode.ERROR

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        given: dict[str, Any] = {
            "http.request.method": "POST",
            "url.path": scope["path"],
            "url.scheme": scope["scheme"],
        }
        span = {"context": self._extract(headers), "kind": self._server, "attributes": given}
        with self._tracer.start_as_current_span("POST", **span) as current:

            async def noting(message: Message) -> None:
                if message["type"] == "http.response.start":
                    status = message["status"]
                    current.set_attribute("http.response.status_code", status)
                    if "endpoint" in scope:  # Starlette found a route, so there are few such names
                        current.update_name(f"POST {scope['path']}")
                    if status >= 500:
                        current.set_attribute("error.type", str(status))
                        current.set_status(self._error)
                await send(message)

            await self._app(scope, receive, noting)
