"""Results of `stack bench serve` and their JSON file format.

The file holds the fields of `Results` and the key "format". `Results.points` holds the fields of `Point`, and its times
the fields of `Percentiles`. Unknown values are null: for example, a run without an objective lacks a goodput, and a run
with single-token answers lacks a time per output token.
"""

import dataclasses
import json
import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stack_core.abi.errors import BenchmarkError
from stack_serve.bench.load import LoadResult
from stack_serve.bench.objective import Objective

__all__ = ["FORMAT", "TIMES", "Percentiles", "Point", "Results"]

FORMAT = "stack bench serve 1"
TIMES = {
    "ttft_s": "time to first token",
    "tpot_s": "time per output token",
    "itl_s": "inter-token latency",
    "e2e_s": "end to end",
}


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """Mean and percentiles of times in seconds, with linear interpolation between the nearest two values."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float

    @classmethod
    def of(cls, times_s: Sequence[float]) -> "Percentiles | None":
        """Summarizes times; returns None for an empty sequence."""
        if not times_s:
            return None
        ordered = sorted(times_s)
        shares = {name: _quantile(ordered, int(name[1:]) / 100) for name in ("p50", "p90", "p95", "p99")}
        return cls(mean=statistics.fmean(ordered), **shares)


@dataclass(frozen=True, kw_only=True)
class Point:
    """Summary of one load.

    Attributes:
      kind, value, requests: fields of the `Load`.
      completed: number of requests that succeeded.
      failures: number of failed requests, keyed by the kind of failure (see `RequestFailed`).
      duration_s: time from the start of the load to the end of its last request.
      prompt_tokens, answer_tokens: total tokens of completed requests, as counted by the server; None if a stream
        lacked `usage`.
      requests_per_s: completed requests per second.
      answer_tokens_per_s: answer tokens of completed requests per second.
      total_tokens_per_s: prompt and answer tokens of completed requests per second.
      goodput_per_s: requests per second that met the objective; None without an objective, or if it limits the time
        per token and token counts are unknown.
      client_cpu_share: CPU time of the client divided by the duration; near 1 the client limits the throughput.
      late_s: maximum delay from `due_s` to `sent_s` of a request.
      ttft_s, tpot_s, e2e_s: percentiles over completed requests (see `Call`).
      itl_s: percentiles over all inter-token latencies of completed requests.
    """

    kind: str
    value: float
    requests: int
    completed: int
    failures: dict[str, int]
    duration_s: float
    prompt_tokens: int | None
    answer_tokens: int | None
    requests_per_s: float
    answer_tokens_per_s: float | None
    total_tokens_per_s: float | None
    goodput_per_s: float | None
    client_cpu_share: float
    late_s: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    itl_s: Percentiles | None
    e2e_s: Percentiles | None

    @classmethod
    def of(cls, result: LoadResult, objective: Objective | None) -> "Point":
        """Summarizes the result of a load; the goodput counts requests that meet the objective."""
        completed = [call for call in result.calls if call.failure is None]
        prompt_tokens = _total([call.prompt_tokens for call in completed])
        answer_tokens = _total([call.answer_tokens for call in completed])
        duration_s = result.duration_s
        is_known = objective is not None and (answer_tokens is not None or "tpot_ms" not in objective.limits)
        good = sum(map(objective.holds, result.calls)) if objective is not None and is_known else None
        return cls(
            **dataclasses.asdict(result.load),
            completed=len(completed),
            failures=dict(sorted(Counter(call.failure for call in result.calls if call.failure).items())),
            duration_s=duration_s,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            requests_per_s=len(completed) / duration_s,
            answer_tokens_per_s=_ratio(answer_tokens, duration_s),
            total_tokens_per_s=_ratio(_total([answer_tokens, prompt_tokens]), duration_s),
            goodput_per_s=None if good is None else good / duration_s,
            client_cpu_share=result.client_cpu_s / duration_s,
            late_s=max(call.sent_s - call.due_s for call in result.calls),
            ttft_s=Percentiles.of([call.ttft_s for call in completed]),
            tpot_s=Percentiles.of([call.tpot_s for call in completed if call.tpot_s is not None]),
            itl_s=Percentiles.of([gap_s for call in completed for gap_s in call.itl_s]),
            e2e_s=Percentiles.of([call.e2e_s for call in completed]),
        )

    @property
    def key(self) -> tuple[str, float]:
        """Kind and value, which identify the same load in another run."""
        return (self.kind, self.value)

    @property
    def title(self) -> str:
        return f"{self.value:g} requests/s" if self.kind == "rate" else f"{self.value:g} at once"


@dataclass(frozen=True, kw_only=True)
class Results:
    """Results of a run.

    Attributes:
      date: end of the run in ISO 8601 format (UTC).
      address: address of the server.
      model: name of the model on the server.
      workload: options of the command that define the workload, by name.
      objective: latency limits in milliseconds by name, or None.
      points: summary of each load.
    """

    date: str
    address: str
    model: str
    workload: dict[str, Any]
    objective: dict[str, float] | None
    points: tuple[Point, ...]

    def write(self, path: Path) -> None:
        """Writes the results as JSON; raises a BenchmarkError if that fails."""
        try:
            path.write_text(json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1) + "\n")
        except OSError as error:
            raise BenchmarkError(f"The results cannot be written to {str(path)!r}: {error}.") from error

    @classmethod
    def read(cls, path: Path) -> "Results":
        """Reads results written by `write`.

        Raises:
          BenchmarkError: the file is missing, damaged or in another format.
        """
        remedy = f"Make one with `stack bench serve URL --json {path}`."
        try:
            content = json.loads(path.read_bytes())
        except OSError as error:
            raise BenchmarkError(f"The results {str(path)!r} cannot be read: {error}. {remedy}") from error
        except ValueError as error:  # JSONDecodeError or UnicodeDecodeError
            raise BenchmarkError(f"{str(path)!r} is not valid JSON: {error}. {remedy}") from error
        found = content.pop("format", None) if isinstance(content, dict) else type(content).__name__
        if found != FORMAT:
            raise BenchmarkError(f"{str(path)!r} has the format {found!r}, expected {FORMAT!r}. {remedy}")
        try:
            content["points"] = tuple(_point(point) for point in content["points"])
            return cls(**content)
        except (TypeError, KeyError, AttributeError) as error:
            raise BenchmarkError(f"{str(path)!r} is damaged: {type(error).__name__}: {error}. {remedy}") from error


def _total(counts: Sequence[int | None]) -> int | None:
    """Returns the sum, or None if a count is unknown."""
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


def _ratio(count: int | None, duration_s: float) -> float | None:
    return None if count is None else count / duration_s


def _point(fields: dict[str, Any]) -> Point:
    for name in TIMES:
        fields[name] = None if fields[name] is None else Percentiles(**fields[name])
    return Point(**fields)


def _quantile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low + (high - low) * (place - math.floor(place))
