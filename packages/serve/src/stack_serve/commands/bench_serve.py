"""`stack bench serve`: latency and throughput of a server under load."""

import asyncio
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import orjson
from cyclopts import Parameter
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from stack_core.abi.errors import BenchmarkError

if TYPE_CHECKING:
    from stack_serve.bench.load import Load
    from stack_serve.bench.results import Point, Results
    from stack_serve.bench.sweep import Sweep

__all__ = ["bench_serve"]

_BUSY_CLIENT = 0.8
_MAX_REQUESTS = 10**7
_RANGES = {
    "concurrency": (1, 2**16 - 1),  # connections to one address are limited by its ports
    "requests": (1, _MAX_REQUESTS),
    "vocab_size": (1, 2**31),
    "warm_up": (0, _MAX_REQUESTS),
}


def bench_serve(  # noqa: PLR0913, each parameter is an option of the command
    url: str,
    /,
    *,
    model: str | None = None,
    api_key: str | None = None,
    rate: tuple[float, ...] = (),
    concurrency: tuple[int, ...] = (),
    requests: int | None = None,
    prompt_tokens: str = "128",
    answer_tokens: str = "128",
    chat: Annotated[bool, Parameter(negative=())] = False,
    vocab_size: int | None = None,
    ignore_eos: Annotated[bool, Parameter(negative=())] = False,
    extra: str = "{}",
    seed: int = 0,
    warm_up: int = 4,
    timeout_s: float = 600.0,
    slo: str | None = None,
    compare: Path | None = None,
    json: Path | None = None,
    html: Path | None = None,
) -> None:
    """Measure a server under load: stack bench serve http://HOST:PORT/v1 --concurrency 1 --concurrency 8

    The server must implement OpenAI's API. Loads run one after another; requests use greedy decoding and streaming, and
    are the same for the same seed. At a rate, latencies start when a request was due, not when it was sent.

    Args:
      url: address of the server with the path before /completions; /v1 if the address has no path.
      model: name of the model on the server (the first model listed by the server).
      api_key: API key sent as a bearer token ($OPENAI_API_KEY).
      rate: requests per second as a Poisson process; inf sends all immediately; may be repeated.
      concurrency: number of requests in flight; may be repeated (1, 8 and 32).
      requests: requests per load (4 N at concurrency N, 20 seconds at a rate, at least 16; 100 at rate inf).
      prompt_tokens: prompt length: 128, 64:512 for a uniform distribution, or lognormal:MEDIAN,SIGMA.
      answer_tokens: answer length, in the same notation.
      chat: measure chat completions instead of completions.
      vocab_size: send prompts of random token ids below this, with exact lengths, instead of words.
      ignore_eos: request answers of exact lengths; the server must support the field ignore_eos.
      extra: JSON object with additional fields for every request.
      seed: seed of the prompts, lengths and arrival times.
      warm_up: number of uncounted requests before the first load.
      timeout_s: timeout of a request in seconds; a slower one counts as failed.
      slo: latency limits such as ttft_ms:200,tpot_ms:50,e2e_ms:9000; goodput counts the requests within them.
      compare: JSON results of an earlier run, for comparison.
      json: JSON file for the results.
      html: HTML file for a report with plots; needs stack-serve[plots].
    """
    from stack_serve.bench.lengths import Lengths
    from stack_serve.bench.objective import Objective
    from stack_serve.bench.report import check_plots, write_report
    from stack_serve.bench.results import Results
    from stack_serve.bench.sweep import Sweep

    _check_writable(json, html)
    _check_ranges(warm_up=[warm_up], vocab_size=[] if vocab_size is None else [vocab_size])
    if not timeout_s > 0:
        raise BenchmarkError(f"--timeout-s is {timeout_s:g}; expected a number above 0.")
    if html is not None:
        check_plots()
    baseline = None if compare is None else Results.read(compare)
    sweep = Sweep(
        loads=_loads(rate, concurrency, requests),
        prompts=Lengths.parse(prompt_tokens),
        answers=Lengths.parse(answer_tokens),
        chat=chat,
        vocab_size=vocab_size,
        extra={**_extra(extra), **({"ignore_eos": True} if ignore_eos else {})},
        seed=seed,
        warm_up=warm_up,
        objective=None if slo is None else Objective.parse(slo),
    )
    key = os.environ.get("OPENAI_API_KEY") if api_key is None else api_key
    found = _measured(sweep, url, model, key, timeout_s)
    _print(found, baseline)
    if json is not None:
        found.write(json)
    if html is not None:
        write_report(html, found, baseline)


def _check_writable(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise BenchmarkError(f"{str(path)!r} cannot be written: there is no directory {str(path.parent)!r}.")


def _check_ranges(**options: Sequence[int]) -> None:
    for name, values in options.items():
        min_, max_ = _RANGES[name]
        for value in values:
            if not min_ <= value <= max_:
                raise BenchmarkError(f"--{name.replace('_', '-')} is {value:,}; expected {min_} to {max_:,}.")


def _extra(text: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(text)
    except ValueError as error:
        raise BenchmarkError(f"--extra is not valid JSON: {error}. Write it as '{{\"min_tokens\": 8}}'.") from error
    if not isinstance(fields, dict):
        raise BenchmarkError(f"--extra is {text}; expected a JSON object, as in '{{\"min_tokens\": 8}}'.")
    return fields


def _loads(rates: Sequence[float], concurrencies: Sequence[int], requests: int | None) -> "tuple[Load, ...]":
    from stack_serve.bench.load import Load

    _check_ranges(concurrency=concurrencies, requests=[] if requests is None else [requests])
    for rate in rates:
        if not 0 < rate <= _MAX_REQUESTS and rate != math.inf:
            raise BenchmarkError(f"--rate is {rate:g}; expected a number above 0, up to {_MAX_REQUESTS:,}, or inf.")
    if not rates and not concurrencies:
        concurrencies = (1, 8, 32)
    at_rates = [Load("rate", rate, requests or _requests_of_20_s(rate)) for rate in rates]
    at_once = [Load("concurrency", float(each), requests or max(16, 4 * each)) for each in concurrencies]
    _check_ranges(requests=[load.requests for load in (*at_rates, *at_once)])
    return (*at_rates, *at_once)


def _requests_of_20_s(rate: float) -> int:
    return max(16, round(20 * rate)) if math.isfinite(rate) else 100


def _measured(sweep: "Sweep", url: str, model: str | None, api_key: str | None, timeout_s: float) -> "Results":
    """Runs the sweep and displays its progress."""
    from stack_serve.client.endpoint import Endpoint

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        progress_task = bar.add_task("warming up", total=None)

        def show(load: "Load", finished: int) -> None:
            bar.update(progress_task, description=str(load), completed=finished, total=load.requests)
            if not console.is_terminal and finished in (0, load.requests):
                print(f"{load}: {finished} of {load.requests} requests", file=sys.stderr, flush=True)

        async def measured() -> "Results":
            async with Endpoint(url, api_key=api_key, timeout_s=timeout_s) as endpoint:
                return await sweep.measured(endpoint, model, show)

        return asyncio.run(measured())


def _print(found: "Results", baseline: "Results | None") -> None:
    from stack_serve.bench.results import TIMES

    print(f"{found.model} at {found.address}, {', '.join(f'{name} {each}' for name, each in found.workload.items())}")
    for point in found.points:
        good = "" if point.goodput_per_s is None else f", goodput {point.goodput_per_s:.3g} requests/s"
        print(
            f"{point.title}: {point.completed} of {point.requests} completed in {point.duration_s:.1f} s, "
            f"{point.requests_per_s:.3g} requests/s, {_tokens_per_s(point)}{good}"
        )
        for name, title in TIMES.items():
            times = getattr(point, name)
            if times is not None:
                shares = ((share, getattr(times, share)) for share in ("p50", "p90", "p95", "p99"))
                print(f"  {title:20} " + "  ".join(f"{share} {1e3 * time_s:8.1f} ms" for share, time_s in shares))
        for kind, count in point.failures.items():
            print(f"  failed: {count} by {kind}")
        if point.client_cpu_share > _BUSY_CLIENT:
            print(f"  the client used {point.client_cpu_share:.0%} of a core and may have limited these figures")
        _print_change(point, baseline)


def _tokens_per_s(point: "Point") -> str:
    if point.answer_tokens_per_s is None:
        return "token counts are not known: the streams lack `usage`"
    with_prompts = "" if point.total_tokens_per_s is None else f", {point.total_tokens_per_s:.4g} with prompts"
    return f"{point.answer_tokens_per_s:.4g} answer tokens/s{with_prompts}"


def _print_change(point: "Point", baseline: "Results | None") -> None:
    before = next((each for each in baseline.points if each.key == point.key), None) if baseline else None
    if before is None:
        return
    changes: list[tuple[str, float, float]] = []
    if point.answer_tokens_per_s is not None and before.answer_tokens_per_s is not None:
        changes.append(("answer tokens/s", point.answer_tokens_per_s, before.answer_tokens_per_s))
    for name, share in (("ttft_s", "p50"), ("ttft_s", "p99"), ("tpot_s", "p50"), ("tpot_s", "p99")):
        now, then = getattr(point, name), getattr(before, name)
        if now is not None and then is not None:
            changes.append((f"{name.removesuffix('_s')} {share}", getattr(now, share), getattr(then, share)))
    listing = ", ".join(f"{title} {now / then - 1:+.1%}" for title, now, then in changes if then > 0)
    print(f"  change from the earlier run: {listing or 'nothing to compare'}")
