import dataclasses
import json
from pathlib import Path

import pytest

from stack_core.abi.errors import BenchmarkError
from stack_serve.bench.call import Call
from stack_serve.bench.load import Load, LoadResult
from stack_serve.bench.objective import Objective
from stack_serve.bench.results import Percentiles, Point, Results

CALLS = [
    Call(due_s=1.0, sent_s=1.5, ended_s=4.0, arrivals_s=[2.0, 2.5, 4.0], prompt_tokens=10, answer_tokens=5),
    Call(due_s=2.0, sent_s=2.0, ended_s=2.5, arrivals_s=[2.25], prompt_tokens=20, answer_tokens=1),
    Call(due_s=2.0, sent_s=2.0, ended_s=2.5, arrivals_s=[2.1, 9.9], prompt_tokens=20, failure="http 429"),
    Call(due_s=2.0, sent_s=2.0, ended_s=2.5, failure="timeout"),
]
OUTCOME = LoadResult(Load("rate", 3.0, 4), CALLS, duration_s=4.0, client_cpu_s=0.2)


def results() -> Results:
    return Results(
        date="2026-01-01",
        address="http://host/v1",
        model="m",
        workload={"prompts": "128"},
        objective=None,
        points=(Point.of(OUTCOME, None), Point.of(LoadResult(Load("concurrency", 2.0, 1), [CALLS[3]], 1.0, 0.0), None)),
    )


def test_percentiles_lie_between_the_nearest_two() -> None:
    found = Percentiles.of([5.0, 1.0, 2.0, 3.0, 4.0])
    assert found is not None and dataclasses.astuple(found) == pytest.approx((3.0, 3.0, 4.6, 4.8, 4.96))
    assert Percentiles.of([7.0]) == Percentiles(mean=7.0, p50=7.0, p90=7.0, p95=7.0, p99=7.0)
    assert Percentiles.of([]) is None


def test_a_point_counts_what_completed_and_names_what_failed() -> None:
    point = Point.of(OUTCOME, None)
    assert (point.completed, point.requests, point.failures) == (2, 4, {"http 429": 1, "timeout": 1})
    assert (point.prompt_tokens, point.answer_tokens) == (30, 6)
    assert (point.requests_per_s, point.answer_tokens_per_s, point.total_tokens_per_s) == (0.5, 1.5, 9.0)
    assert point.goodput_per_s is None
    assert (point.client_cpu_share, point.late_s) == (0.05, 0.5)


def test_times_count_from_when_a_request_was_due() -> None:
    point = Point.of(OUTCOME, None)
    assert point.ttft_s is not None and point.ttft_s.mean == pytest.approx((1.0 + 0.25) / 2)
    assert point.e2e_s is not None and point.e2e_s.mean == pytest.approx((3.0 + 0.25) / 2)
    assert point.tpot_s is not None and point.tpot_s.mean == pytest.approx(2.0 / 4)  # of the one with several tokens
    assert point.itl_s is not None and point.itl_s.mean == pytest.approx((0.5 + 1.5) / 2)


@pytest.mark.parametrize(
    ("slo", "good"), [("ttft_ms:500", 1), ("ttft_ms:1000", 2), ("tpot_ms:499", 1), ("ttft_ms:1000,e2e_ms:2999", 1)]
)
def test_goodput_counts_requests_within_all_limits(slo: str, good: int) -> None:
    assert Point.of(OUTCOME, Objective.parse(slo)).goodput_per_s == good / 4.0


def test_goodput_by_time_per_token_needs_tokens() -> None:
    uncounted = dataclasses.replace(OUTCOME, calls=[dataclasses.replace(CALLS[0], answer_tokens=None)])
    assert Point.of(uncounted, Objective.parse("tpot_ms:9999")).goodput_per_s is None
    assert Point.of(uncounted, Objective.parse("ttft_ms:9999")).goodput_per_s == 1 / 4.0


@pytest.mark.parametrize("slo", ["", "ttft:200", "ttft_ms", "ttft_ms:0", "ttft_ms:nan", "ttft_ms:1,ttft_ms:2"])
def test_objectives_that_are_none(slo: str) -> None:
    with pytest.raises(BenchmarkError, match=r"expected ttft_ms, tpot_ms, e2e_ms"):
        Objective.parse(slo)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    results().write(path)
    assert Results.read(path) == results()


def test_the_fields_of_the_file_are_stable(tmp_path: Path) -> None:
    """They are what others' programs read: a change needs another `FORMAT`."""
    results().write(tmp_path / "found.json")
    content = json.loads((tmp_path / "found.json").read_text())
    assert content["format"] == "stack bench serve 1"
    assert list(content) == ["format", "date", "address", "model", "workload", "objective", "points"]
    assert list(content["points"][0]) == [
        "kind", "value", "requests", "completed", "failures", "duration_s", "prompt_tokens", "answer_tokens",
        "requests_per_s", "answer_tokens_per_s", "total_tokens_per_s", "goodput_per_s", "client_cpu_share", "late_s",
        "ttft_s", "tpot_s", "itl_s", "e2e_s",
    ]  # fmt: skip
    assert list(content["points"][0]["ttft_s"]) == ["mean", "p50", "p90", "p95", "p99"]
    assert content["points"][1]["ttft_s"] is None  # not known, which is not zero


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read"),
        ("{", "is not valid JSON"),
        ("[]", "has the format 'list'"),
        ('{"format": "other"}', "has the format 'other'"),
        ('{"format": "stack bench serve 1"}', "is damaged"),
        (json.dumps({"format": "stack bench serve 1", **dataclasses.asdict(results()), "points": [{}]}), "is damaged"),
    ],
)
def test_what_cannot_be_read_is_told(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "found.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(BenchmarkError, match=f"{message}.*Make one with `stack bench serve"):
        Results.read(path)
