"""Compares stack-quant with Qwix in every scheme: run time and memory at prefill and decode, and time to quantize.

    nox -s bench -- quant_vs_qwix --cases "512.*w8" --rounds 15

The program is that of `quant_numerics_vs_qwix`, two residual MLP blocks, and one with weights four times as large.
`stack` is what `quantize_function` makes of it, with stack-kernels installed; Qwix's is written with its `quantize` and
`dot_general`. Both and the float program take turns in one process, because a machine's speed drifts: only ratios
within a round mean anything, and on a busy machine those of CPU seconds. Memory is what the compiled program holds at
once. Exits with status 1 where stack took longer than Qwix in three rounds of four. Runs in an environment of its own,
unless Qwix is where it is started. Writes `results/quant_vs_qwix.md` and `.json`; measured cases replace earlier ones.
"""

import argparse
import functools
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from peers.peer import find_python, find_uv, run_quietly
from report import RESULTS, beside, circumstances, spread, table, write

ROOT = Path(__file__).parents[1]
NAME = "quant_vs_qwix"
PYTHON, PEER = "3.12", "qwix==0.1.8"
PACKAGES = ("stack-core", "stack-kernels", "stack-quant", "qwix", "jax")
BLOCKS, SIZES = 2, ((512, 2048), (1024, 4096))
ROWS, DTYPES = (1, 8, 512), ("float32", "bfloat16")
ROUND_S = 0.005  # a round calls a contender for at least that long, so that clocks do not matter
OURS, QWIX, FLOAT = "stack", "qwix", "float"


@dataclass(frozen=True)
class Scheme:
    """Types of weights and activations, first as Qwix names them; `tile` is how many entries of d_in share a scale."""

    weights: tuple[str, str]
    activations: tuple[str, str] | None = None
    tile: int | None = None


INT8, INT4, FP8 = ("int8", "int8"), ("int4", "int4"), ("float8_e4m3fn", "fp8_e4m3")
SCHEMES = {
    "w8a8": Scheme(INT8, INT8),
    "w8": Scheme(INT8),
    "w4 t128": Scheme(INT4, None, 128),
    "w4a4 t128": Scheme(INT4, INT4, 128),
    "nf4 t128": Scheme(("nf4", "nf4"), None, 128),
    "fp8 w": Scheme(FP8),
    "fp8 wa": Scheme(FP8, FP8),
    "mxfp4": Scheme(("mxfp4", "mxfp4"), None, 32),
    "nvfp4": Scheme(("nvfp4", "nvfp4"), None, 16),
}


@dataclass(frozen=True)
class Case:
    """One row of the tables.

    Attributes:
      rows: of activations; None measures how long it takes to quantize one weight.
      jitted: whether quantizing is compiled as one program.
    """

    scheme: str
    size: tuple[int, int]
    dtype: str
    rows: int | None
    jitted: bool = True

    @property
    def title(self) -> str:
        what = f"{self.rows} rows" if self.rows else f"quantize {'jit' if self.jitted else 'eager'}"
        return f"{self.size[0]}-{self.size[1]}, {self.dtype}, {what}, {self.scheme}"


def cases() -> Iterator[Case]:
    for size in SIZES:
        for name in SCHEMES:
            yield from (Case(name, size, dtype, rows) for dtype in DTYPES for rows in ROWS)
            yield from (Case(name, size, "float32", None, jitted) for jitted in (True, False))


def main() -> int:
    arguments = _arguments()
    if importlib.util.find_spec("qwix") is None:
        python = _installed(arguments.environments.resolve() / "qwix")
        return subprocess.run([python, __file__, *sys.argv[1:]], check=False).returncode
    earlier = arguments.results / f"{NAME}.json"
    results: dict[str, Any] = json.loads(earlier.read_text()) if earlier.exists() else {}
    chosen = [case for case in cases() if re.search(arguments.cases, case.title)]
    started_s = time.monotonic()
    try:
        for case in chosen:
            if time.monotonic() - started_s > arguments.limit_s:
                print(f"The time is up before {case.title}.")
                break
            row = {**circumstances(), "versions": {package: version(package) for package in PACKAGES}}
            row["contenders"] = _raced(_contenders(case), arguments.rounds)
            results[case.title] = row
            print(case.title, *_cells(row["contenders"]), sep=" | ", flush=True)
    finally:
        order = {case.title: place for place, case in enumerate(cases())}
        results = dict(sorted(results.items(), key=lambda item: order.get(item[0], len(order))))
        write(arguments.results, NAME, results, _markdown(results))
    return int(any(_is_slower(row["contenders"]) for row in results.values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="", help="a regular expression: only cases whose title matches")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--limit-s", type=float, default=3600, help="no further case after that")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "stack", "bench-envs")
    parser.add_argument("--environments", type=Path, default=cache, help="where the peer is installed")
    parser.add_argument("--results", type=Path, default=RESULTS)
    return parser.parse_args()


def _installed(folder: Path) -> Path:
    """An environment with the packages of this repository as they are now, and Qwix."""
    python = folder / "bin" / "python"
    if not python.exists():
        run_quietly(find_uv(), "venv", f"--python={find_python(PYTHON)}", folder)
    ours = [f"--editable={ROOT / 'packages' / name}" for name in ("core", "kernels[cpu]", "quant")]
    pins = f"--constraints={ROOT / 'constraints' / 'py312.txt'}"
    run_quietly(find_uv(), "pip", "install", f"--python={python}", pins, *ours, PEER)
    return python


def _contenders(case: Case) -> dict[str, tuple[Callable[[], Any], int | None]]:
    """What each contender calls, and the bytes that it holds at once, if it is compiled."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    rng = np.random.default_rng(0)
    embed, mlp = case.size

    def drawn(rows: int, columns: int) -> Any:
        return jnp.asarray(rng.normal(scale=rows**-0.5, size=(rows, columns)), case.dtype)

    if case.rows is None:
        return _quantizers(SCHEMES[case.scheme], drawn(embed, mlp), jitted=case.jitted)
    params = [(drawn(embed, mlp), drawn(mlp, embed)) for _ in range(BLOCKS)]
    x = drawn(case.rows, embed) * 8
    programs = _programs(SCHEMES[case.scheme], params, x)
    calls = {}
    for name, (function, held) in programs.items():
        compiled = jax.jit(function).lower(held, x).compile()
        memory = compiled.memory_analysis()
        sizes = (memory.argument_size_in_bytes, memory.output_size_in_bytes, memory.temp_size_in_bytes)
        call = functools.partial(compiled, held, x)
        calls[name] = (call, sum(sizes) - memory.alias_size_in_bytes)
    _check({name: np.asarray(call(), np.float32) for name, (call, _) in calls.items()})
    return calls


def _check(outputs: Mapping[str, Any]) -> None:
    import numpy as np

    exact = outputs[FLOAT]
    errors = {name: np.linalg.norm(output - exact) / np.linalg.norm(exact) for name, output in outputs.items()}
    if not errors[OURS] <= max(1.05 * errors[QWIX], 0.01):
        raise AssertionError(f"stack is off by {errors[OURS]:.3g} of the float program, Qwix by {errors[QWIX]:.3g}")


def _programs(scheme: Scheme, params: Any, x: Any) -> dict[str, tuple[Callable[..., Any], Any]]:
    """Of each contender, a function of its parameters and x."""
    import jax
    import jax.numpy as jnp
    import qwix

    from stack_quant import Rule, quantize_function

    def program(product: Callable[[Any, Any], Any], params: Any, x: Any) -> Any:
        for up, down in params:
            x = x + product(jax.nn.gelu(product(x, up)), down)
        return x

    def theirs(x: Any, weight: Any) -> Any:
        if scheme.activations is not None:
            x = _by_qwix(scheme.activations[0], 1, scheme.tile)(x)
        return qwix.dot_general(x, weight, (((1,), (0,)), ((), ())))

    plain = functools.partial(program, jnp.matmul)
    activations = None if scheme.activations is None else scheme.activations[1]
    rule = Rule(path=".*", weights=scheme.weights[1], activations=activations, tile_size=scheme.tile)
    ours = quantize_function(plain, params, [rule], (x,))
    by_qwix = jax.tree.map(_by_qwix(scheme.weights[0], 0, scheme.tile), params)
    return {
        OURS: (ours.apply, ours.params),
        QWIX: (functools.partial(program, theirs), by_qwix),
        FLOAT: (plain, params),
    }


def _by_qwix(kind: str, axis: int, tile: int | None) -> Callable[[Any], Any]:
    import qwix

    tiles: dict[int, int] = {} if tile is None else {axis: tile}
    return functools.partial(qwix.quantize, qtype=kind, channelwise_axes=(1 - axis,), tiled_axes=tiles)


def _quantizers(scheme: Scheme, weight: Any, *, jitted: bool) -> dict[str, tuple[Callable[[], Any], int | None]]:
    import jax

    from stack_quant import ArraySpec, quantize_array

    tiles: dict[int, int] = {} if scheme.tile is None else {0: scheme.tile}
    spec = ArraySpec(type=scheme.weights[1], channel_axes=(1,), tiles=tiles)
    functions = {OURS: functools.partial(quantize_array, spec=spec), QWIX: _by_qwix(scheme.weights[0], 0, scheme.tile)}
    wrap: Callable[..., Any] = jax.jit if jitted else lambda function: function
    return {name: (functools.partial(wrap(function), weight), None) for name, function in functions.items()}


def _raced(calls: Mapping[str, tuple[Callable[[], Any], int | None]], rounds: int) -> dict[str, Any]:
    """Of each contender its bytes, and a summary of the seconds and CPU seconds of a call in each round."""
    import jax

    def timed(call: Callable[[], Any], repeats: int) -> dict[str, float]:
        begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
        for _ in range(repeats):
            jax.block_until_ready(call())
        took_s, took_cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
        return {"s": took_s / repeats, "cpu_s": took_cpu_s / repeats}

    repeats = {}
    for name, (call, _) in calls.items():
        timed(call, 1)
        repeats[name] = max(1, round(ROUND_S / timed(call, 1)["s"]))
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    for number in range(rounds):
        names = list(calls)
        first = number % len(names)
        for name in names[first:] + names[:first]:
            measured[name].append(timed(calls[name][0], repeats[name]))
    return {name: {"bytes": size, **beside(measured[OURS], measured[name])} for name, (_, size) in calls.items()}


def _is_slower(contenders: Mapping[str, Any]) -> bool:
    """Whether it is in three rounds of four: where both run the same products, the median is on either side of 1."""
    _, lower_quartile, *_ = contenders[QWIX]["stack over it"]["s"]
    return lower_quartile > 1


def _cells(contenders: Mapping[str, Any]) -> list[str]:
    cells = [f"{1e3 * contenders[OURS][key][2]:.3g}" for key in ("s", "cpu_s")]
    for name in (QWIX, FLOAT):
        ratios = contenders[name]["stack over it"] if name in contenders else {}
        cells += [spread(ratios[key]) if ratios else "" for key in ("s", "cpu_s")]
    sizes = [contenders.get(name, {}).get("bytes") for name in (OURS, QWIX, FLOAT)]
    return cells + ["" if size is None else f"{size / 2**20:.1f}" for size in sizes]


def _markdown(results: Mapping[str, Any]) -> str:
    lines = [
        "# stack-quant beside Qwix",
        "",
        "Two residual MLP blocks in each scheme. `stack / ...` is its time over that contender's, within a round: "
        "median (least to most); below 1 it is faster. `float` is the program that was quantized, in the activations' "
        "dtype. Where ranges are wide other programs ran meanwhile; ratios of CPU time, beside each, mind it less. MiB "
        "are what each compiled program holds at once: arguments, result and temporaries.",
    ]
    of_times = ["ms", "CPU-ms", "stack / qwix", "CPU", "stack / float", "CPU"]
    heading = ["scheme", *of_times, "MiB stack", "MiB qwix", "MiB float"]
    groups: dict[str, list[list[str]]] = {}
    for title, row in results.items():
        group, _, scheme = title.rpartition(", ")
        groups.setdefault(group, []).append([scheme, *_cells(row["contenders"])])
    for group, rows in groups.items():
        lines += ["", f"## {group}", "", *table(heading, rows)]
    lines += ["", *sorted({f"- {_circumstances(row)}" for row in results.values()})]
    return "\n".join(lines) + "\n"


def _circumstances(row: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in row["versions"].items())
    return f"{row['date']}, {row['machine']['cpus']} CPUs of {row['machine']['cpu']}; {versions}"


if __name__ == "__main__":
    sys.exit(main())
