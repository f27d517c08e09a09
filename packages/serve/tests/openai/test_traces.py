"""OpenTelemetry spans of requests, as a local OTLP receiver gets them."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from starlette.responses import PlainTextResponse

from stack_core.abi.errors import ConfigError
from stack_serve.http.config import ServerConfig
from stack_serve.http.guards import guards
from stack_serve.http.traces import tracer_provider

from .conftest import Served
from .fake_engine import FakeEngine

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Receiver:
    """Collects the spans that are sent to it."""

    def __init__(self) -> None:
        self.exported = list[Any]()
        received = self.exported

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                assert self.path == "/v1/traces"
                message = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
                received.extend(message.resource_spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: Any) -> None: ...

        self.http = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.http.serve_forever, daemon=True).start()

    def spans(self) -> list[Any]:
        """Returns the spans since the last call in the order of their ends."""
        assert tracer_provider().force_flush()
        found = [span for each in self.exported for scope in each.scope_spans for span in scope.spans]
        self.exported.clear()
        return found


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    receiver = Receiver()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{receiver.http.server_port}")
    tracer_provider.cache_clear()
    yield receiver
    tracer_provider().shutdown()
    tracer_provider.cache_clear()
    receiver.http.shutdown()
    receiver.http.server_close()


def attributes(span: Any) -> dict[str, Any]:
    def value(any_value: Any) -> Any:
        kind = any_value.WhichOneof("value")
        found = getattr(any_value, kind)
        return [value(each) for each in found.values] if kind == "array_value" else found

    return {each.key: value(each.value) for each in span.attributes}


def test_a_request_continues_the_trace_of_its_client(serve: Callable[..., Served], receiver: Receiver) -> None:
    server = serve(traces=True)
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "tracestate": "vendor=1"}
    body = {"prompt": ["hello", "hi"], "max_tokens": 4, "temperature": 0.5, "stream": True, "ignore_eos": True}
    assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
    assert server.client.get("/v1/models").status_code == 200
    *continuations, request = receiver.spans()
    assert request.name == "POST /v1/completions" and request.kind == request.SPAN_KIND_SERVER
    assert request.parent_span_id.hex() == PARENT and request.trace_state == "vendor=1"
    assert attributes(request)["http.response.status_code"] == 200
    assert len(continuations) == 2
    for span, prompt in zip(
        sorted(continuations, key=lambda span: attributes(span)["gen_ai.usage.input_tokens"]),
        body["prompt"],
        strict=True,
    ):
        assert span.name == "llm_request" and span.parent_span_id == request.span_id
        assert span.trace_id.hex() == request.trace_id.hex() == TRACE
        # Its clock is read for each span, so that times differ by less than a millisecond.
        assert request.start_time_unix_nano - 10**6 <= span.start_time_unix_nano < span.end_time_unix_nano
        found = attributes(span)
        latencies = {name: found.pop(name) for name in list(found) if name.startswith("gen_ai.latency.")}
        took_s = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert latencies["gen_ai.latency.e2e"] == pytest.approx(took_s, abs=1e-3)
        assert latencies["gen_ai.latency.time_in_queue"] >= 0
        assert latencies["gen_ai.latency.time_to_first_token"] <= latencies["gen_ai.latency.e2e"]
        tokens = len(server.service.prompts.tokenizer.encode(prompt))
        response = found.pop("gen_ai.response.id")
        assert response.startswith("cmpl-")
        assert found == {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.provider.name": "stack",
            "gen_ai.request.id": response,
            "gen_ai.request.model": server.service.names[0],
            "gen_ai.response.model": server.service.names[0],
            "gen_ai.request.temperature": 0.5,
            "gen_ai.request.top_p": 1.0,
            "gen_ai.request.max_tokens": 4,
            "gen_ai.request.n": 1,
            "gen_ai.usage.input_tokens": tokens,
            "gen_ai.usage.prompt_tokens": tokens,
            "gen_ai.usage.output_tokens": 4,
            "gen_ai.usage.completion_tokens": 4,
            "gen_ai.response.finish_reasons": ["length"],
        }


def test_failures_and_aborts_are_marked(serve: Callable[..., Served], receiver: Receiver) -> None:
    def script(request: Any, index: int) -> Iterator[int]:
        yield ord("a")
        raise ArithmeticError("no number")

    engine = FakeEngine(script)
    server = serve(engine, traces=True)
    assert server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}]).status_code == 500
    failed, request = receiver.spans()
    assert failed.status.code == failed.status.STATUS_CODE_ERROR and failed.status.message == "no number"
    assert attributes(failed)["gen_ai.operation.name"] == "chat" and attributes(failed)["error.type"] == "error"
    assert request.status.code == request.status.STATUS_CODE_ERROR
    assert attributes(request)["error.type"] == "500" and not request.parent_span_id

    assert server.post("/v1/nothing").status_code == 404
    assert server.post("/v1/completions", prompt=3).status_code == 400
    unknown, refused = receiver.spans()
    assert unknown.name == "POST" and refused.name == "POST /v1/completions"
    assert refused.status.code == refused.status.STATUS_CODE_UNSET

    engine.running.clear()
    with server.connect() as connection:
        content = b'{"prompt": "a", "max_tokens": 9}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: "
        connection.sendall(head + b"%d\r\n\r\n" % len(content) + content)
        server.wait_until(lambda: bool(engine.stats().running))
    server.wait_until(lambda: not server.service.backend.running)
    aborted = next(span for span in receiver.spans() if span.name == "llm_request")
    assert attributes(aborted)["gen_ai.response.finish_reasons"] == ["abort"]


def test_resources_and_exporters_follow_the_environment(
    receiver: Receiver, serve: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    serve(traces=True).complete()
    receiver_names = lambda: {
        each.value.string_value for span in receiver.exported for each in span.resource.attributes
    }
    assert tracer_provider().force_flush() and "stack-serve" in receiver_names()
    tracer_provider().shutdown()
    tracer_provider.cache_clear()
    receiver.exported.clear()
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    server = serve(traces=True)
    server.complete()
    sampled = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    server.client.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=sampled)
    assert tracer_provider().force_flush() and "mine" in receiver_names()
    assert {span.trace_id.hex() for span in receiver.spans()} == {TRACE}

    tracer_provider().shutdown()
    for name, value in (("OTEL_TRACES_EXPORTER", "zipkon"), ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc")):
        tracer_provider.cache_clear()
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ConfigError, match=rf"no exporter '(zipkon|otlp_proto_grpc)' here.*{name}"):
                guards(ServerConfig(traces=True), open_paths=frozenset(), refusal=PlainTextResponse())


def test_a_missing_package_is_named_and_nothing_is_imported_without_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    tracer_provider.cache_clear()
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"opentelemetry.sdk.trace. Install it: .*\[otel\]"):
        guards(ServerConfig(traces=True), open_paths=frozenset(), refusal=PlainTextResponse())
    assert guards(ServerConfig(), open_paths=frozenset(), refusal=PlainTextResponse()) == []
    code = "import stack_serve.openai.app, sys; print(any(name.startswith('opentelemetry') for name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
