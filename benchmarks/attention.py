"""Compares core's attention with `jax.nn.dot_product_attention` (implementation "xla") on the CPU: speed and memory.

    nox -s bench -- attention

Each call has a process to itself, whose peak memory it shows. The two take turns within a round, because a machine's
speed drifts: only ratios within a round mean anything. Writes `results/attention.md` and `.json`.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HEADS, HEAD_DIM = 8, 64
ROUNDS = {4096: 4, 8192: 3, 16384: 2, 32768: 1}
OURS, THEIRS = "stack", "xla"
RESULTS = Path(__file__).parent / "results"
HEADINGS = ("tokens", "dtype", "", "direction", "s", "over xla", "CPU-s", "over xla", "peak MiB", "over xla", "xla")


@dataclass(frozen=True)
class Call:
    """One of the calls compared: batch 1, 8 heads, head_dim 64."""

    implementation: str
    tokens: int
    dtype: str
    causal: bool
    gradient: bool


def main() -> None:
    arguments = _arguments()
    rows = []
    for call in _calls(arguments):
        ours, theirs = _measured(call, rounds=arguments.rounds or ROUNDS[call.tokens], limit=arguments.memory_bytes)
        rows.append({"call": asdict(call), OURS: ours, THEIRS: theirs})
        print(json.dumps(rows[-1]), flush=True)
    _write(rows, arguments)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="*", choices=ROUNDS, default=list(ROUNDS))
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    parser.add_argument("--rounds", type=int, help="by default 4 to 1, the fewer the more tokens")
    most = int(0.8 * _available_bytes())
    parser.add_argument("--memory-bytes", type=int, default=most, help="calls that need more are not run")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def _available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))


def _calls(arguments: argparse.Namespace) -> Iterator[Call]:
    for tokens in arguments.tokens:
        for dtype in arguments.dtypes:
            for causal in (True, False):
                for gradient in (False, True):
                    yield Call(OURS, tokens, dtype, causal, gradient)


def _measured(call: Call, *, rounds: int, limit: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Figures of both implementations; where there is more than one round, a first one is run and left out."""
    workers = [_Worker(call), _Worker(Call(**{**asdict(call), "implementation": THEIRS}))]
    figures: list[dict[str, Any]] = [{"needs_bytes": worker.needs_bytes, "runs": []} for worker in workers]
    able = [worker.needs_bytes <= limit for worker in workers]
    for number in range(rounds + (rounds > 1)):
        for worker, figure, runs in zip(workers, figures, able, strict=True):
            run = worker.ask("run") if runs else None
            if run and (number or rounds == 1):
                figure["runs"].append(run)
    for worker, figure in zip(workers, figures, strict=True):
        figure["peak_bytes"] = worker.ask("stop")["peak_bytes"]
    return figures[0], figures[1]


class _Worker:
    """A process that has compiled a call; `needs_bytes` is what XLA plans for it, arguments and results included."""

    def __init__(self, call: Call) -> None:
        command = [sys.executable, __file__, "--worker", json.dumps(asdict(call))]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.needs_bytes = self._answer()["needs_bytes"]

    def ask(self, request: str) -> dict[str, float]:
        assert self._process.stdin is not None
        print(request, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a worker ended with status {self._process.wait()}")
        return json.loads(line)


def work(call: Call) -> None:
    """Compiles, then runs whenever it is told to; its peak memory is counted from before it compiled."""
    import jax
    import jax.numpy as jnp

    jax.block_until_ready(jnp.zeros(8) + 1)
    baseline_bytes = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    operand = jax.ShapeDtypeStruct((1, call.tokens, HEADS, HEAD_DIM), call.dtype)
    compiled = jax.jit(_function(call)).lower(operand, operand, operand).compile()
    memory = compiled.memory_analysis()
    needs = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    print(json.dumps({"needs_bytes": needs}), flush=True)
    operands = None
    while input() == "run":
        if operands is None:
            operands = [jax.random.normal(jax.random.key(i), operand.shape, jnp.float32) for i in range(3)]
            operands = jax.block_until_ready([x.astype(call.dtype) for x in operands])
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        jax.block_until_ready(compiled(*operands))
        took = {"s": time.perf_counter() - start_s, "cpu_s": time.process_time() - start_cpu_s}
        print(json.dumps(took), flush=True)
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"peak_bytes": peak_bytes - baseline_bytes}), flush=True)


def _function(call: Call) -> Any:
    import jax
    import jax.numpy as jnp

    from stack_core import ops

    def attention(query: Any, key: Any, value: Any) -> Any:
        if call.implementation == OURS:
            return ops.attention(query, key, value, causal=call.causal, implementation="reference")
        return jax.nn.dot_product_attention(query, key, value, is_causal=call.causal, implementation="xla")

    def total(query: Any, key: Any, value: Any) -> Any:
        return jnp.sum(jnp.square(attention(query, key, value).astype(jnp.float32)))

    return jax.grad(total, argnums=(0, 1, 2)) if call.gradient else attention


def _write(rows: Sequence[Mapping[str, Any]], arguments: argparse.Namespace) -> None:
    processor = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    heading = {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "cpu": processor[0].partition(":")[2].strip() if processor else platform.machine(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "versions": {package: version(package) for package in ("stack-core", "jax", "jaxlib")},
        "memory_limit_bytes": arguments.memory_bytes,
    }
    arguments.results.mkdir(parents=True, exist_ok=True)
    path = arguments.results / "attention"
    path.with_suffix(".json").write_text(json.dumps({**heading, "rows": rows}, indent=2) + "\n")
    table = _markdown(heading, rows)
    path.with_suffix(".md").write_text(table)
    print(table)


def _markdown(heading: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in heading["versions"].items())
    lines = [
        "# Attention beside jax.nn.dot_product_attention (xla)",
        "",
        f"{heading['date']}, {heading['cpus']} CPUs of {heading['cpu']}, {heading['memory_bytes'] / 1e9:.0f} GB; "
        f"Python {platform.python_version()}, {versions}.",
        f"Batch 1, {HEADS} heads, head_dim {HEAD_DIM}. Ratios within a round: median (least to most). "
        "Peak memory is the process's, less what it held before it compiled; what needs more than the "
        f"{heading['memory_limit_bytes'] / 2**30:.0f} GiB there was to spare is not run.",
        "",
        "| " + " | ".join(HEADINGS) + " |",
        "| " + " | ".join(["---:", "---", "---", "---", *["---:"] * 7]) + " |",
        *("| " + " | ".join(_row(row)) + " |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _row(row: Mapping[str, Any]) -> list[str]:
    call, ours, theirs = row["call"], row[OURS], row[THEIRS]
    cells = [str(call["tokens"]), call["dtype"], "causal" if call["causal"] else "full"]
    cells.append("forward + gradient" if call["gradient"] else "forward")
    for key in ("s", "cpu_s"):
        cells.append(f"{statistics.median(run[key] for run in ours['runs']):.3g}" if ours["runs"] else "-")
        ratios = [our[key] / their[key] for our, their in zip(ours["runs"], theirs["runs"], strict=False)]
        cells.append(f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})" if ratios else "-")
    cells.append(f"{ours['peak_bytes'] / 2**20:.0f}")
    cells.append(f"{ours['peak_bytes'] / theirs['peak_bytes']:.2f}" if theirs["runs"] else "-")
    needs = f"not run: needs {theirs['needs_bytes'] / 2**30:.0f} GiB"
    return [*cells, f"{theirs['peak_bytes'] / 2**20:.0f} MiB" if theirs["runs"] else needs]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        work(Call(**json.loads(sys.argv[2])))
    else:
        main()
