from collections.abc import Callable
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from stack_core.abi.generation import EngineStats

from .conftest import Served
from .fake_engine import FakeEngine

# What vLLM's own Grafana dashboard (examples/online_serving/prometheus_grafana/grafana.json) draws.
DASHBOARD = {
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:generation_tokens": "counter",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:prompt_tokens": "counter",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_success": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
}


def values(server: Served) -> dict[tuple[str, str], float]:
    """Samples by name and by what tells them apart."""
    found = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            which = sample.labels.get("le") or sample.labels.get("finished_reason") or sample.labels.get("status", "")
            if sample.labels.get("handler", "/v1/completions") == "/v1/completions":
                found[sample.name, which] = sample.value
    return found


def test_the_dashboards_metrics_are_there_with_vllms_labels(server: Served) -> None:
    server.complete()
    families = {each.name: each for each in text_string_to_metric_families(server.client.get("/metrics").text)}
    assert DASHBOARD.items() <= {name: family.type for name, family in families.items()}.items()
    for name in DASHBOARD:
        for sample in families[name].samples:
            assert (sample.labels["model_name"], sample.labels["engine"]) == ("tiny", "0")


def test_requests_are_counted(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(step_s=0.01))
    server.complete(n=2, max_tokens=5, prompt=["a", "bc"])
    server.refused("/v1/completions", prompt=[], n=0)
    found = values(server)
    assert found["vllm:request_success_total", "length"] == 4
    assert found["vllm:request_generation_tokens_sum", ""] == 20
    assert (found["vllm:request_prompt_tokens_count", ""], found["vllm:request_prompt_tokens_sum", ""]) == (2, 5)
    assert found["vllm:request_params_n_sum", ""] == 2 and found["vllm:request_params_max_tokens_sum", ""] == 5
    assert found["vllm:request_max_num_generation_tokens_count", ""] == 1, "once for the request"
    assert found["vllm:request_max_num_generation_tokens_sum", ""] == 5
    assert found["vllm:inter_token_latency_seconds_count", ""] == 16
    assert 0.001 < found["vllm:inter_token_latency_seconds_sum", ""] / 16 < 10
    assert found["vllm:e2e_request_latency_seconds_count", ""] == 4
    assert found["http_requests_total", "200"] == found["http_requests_total", "400"] == 1
    drafts = [found[f"vllm:spec_decode_num_{name}_total", ""] for name in ("drafts", "draft_tokens", "accepted_tokens")]
    assert drafts == [6, 30, 18] and found["stack:engine_programs_to_compile", ""] == 7
    assert found["vllm:prompt_tokens_total", ""] == 11 and found["vllm:prefix_cache_hits_total", ""] == 4


def test_an_engine_without_pages_has_metrics(serve: Callable[..., Served]) -> None:
    class WithoutPages(FakeEngine):
        def stats(self) -> EngineStats:
            return replace(super().stats(), used_pages=0, pages=0, weights_version=3)

    found = values(serve(WithoutPages()))
    assert found["vllm:kv_cache_usage_perc", ""] == 0 and found["stack:engine_weights_version", ""] == 3


def test_buckets_are_those_of_vllm(server: Served) -> None:
    found = values(server)
    assert [le for name, le in found if name == "vllm:request_prompt_tokens_bucket"] == [
        "1.0", "2.0", "5.0", "10.0", "20.0", "50.0", "100.0", "200.0", "+Inf",
    ]  # fmt: skip
    first = [le for name, le in found if name == "vllm:time_to_first_token_seconds_bucket"]
    assert first[:3] == ["0.001", "0.005", "0.01"] and first[-2:] == ["2560.0", "+Inf"]


def test_who_leaves_is_counted_as_aborted(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(step_s=0.01))
    with server.client.stream("POST", "/v1/completions", json={"prompt": "x", "max_tokens": 200, "stream": True}) as s:
        next(s.iter_lines())
    server.wait_until(lambda: server.engine.stats().running == 0)
    server.wait_until(lambda: values(server)["vllm:request_success_total", "abort"] > 0)
    assert values(server)["vllm:request_success_total", "abort"] == 1
    assert values(server)["vllm:request_success_total", "length"] == 0


def test_of_a_request_that_is_refused_what_the_engine_had_taken_is_aborted(serve: Callable[..., Served]) -> None:
    server = serve(FakeEngine(most=2))
    server.refused("/v1/completions", status=429, prompt=["a", "b", "c"])
    assert values(server)["vllm:request_success_total", "abort"] == 2
