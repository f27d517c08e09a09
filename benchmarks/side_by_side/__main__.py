"""See the package."""

import argparse
import importlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from op_cases import Case

from stack_core import ops

# A round calls a contender for at least that long, so that clocks and ticks do not matter.
ROUND_S = 0.01


@dataclass(frozen=True)
class Contender:
    """One that is compiled and gave the right answer; `call` waits for its completion."""

    name: str
    call: Callable[[], Any]
    repeats: int


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("op")
    parser.add_argument("number", type=int)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--limit-s", type=float, required=True)
    parser.add_argument("--memory-bytes", type=float, required=True)
    parser.add_argument("--memory-of")
    arguments = parser.parse_args()
    case = importlib.import_module(f"op_cases.{arguments.op}").CASES[arguments.number]
    if arguments.memory_of:
        _tell(arguments.memory_of, peak_bytes=_peak_bytes(case, arguments.memory_of, arguments.memory_bytes))
    else:
        _race(case, arguments)


def _tell(name: str, **said: Any) -> None:
    print(json.dumps({"contender": name, **said}), flush=True)


def _race(case: Case, arguments: argparse.Namespace) -> None:
    operands = case.drawn()
    expected = _expected(case, operands)
    racing = []
    for name in case.contenders:
        try:
            racing.append(_admitted(case, name, operands, expected, arguments.memory_bytes))
        except Exception as error:  # Peers may fail in any way; the table says how.
            message = str(error).strip().partition("\n")[0][:200]
            _tell(name, problem=message if isinstance(error, _NotAdmitted) else f"{type(error).__name__}: {message}")
    _tell("stack", chosen=_chosen(case, operands))
    started_s = time.monotonic()
    for number in range(arguments.rounds):
        if number and time.monotonic() - started_s > arguments.limit_s:
            break
        first = number % max(1, len(racing))
        for contender in racing[first:] + racing[:first]:
            _tell(contender.name, **_timed(contender))


class _NotAdmitted(Exception):
    pass


def _expected(case: Case, operands: tuple[Any, ...]) -> Any:
    """Output and gradients at the operands as they were rounded, in `case.exact_dtype`."""
    dtype = np.dtype(case.exact_dtype)
    wide = jax.tree.map(lambda x: np.asarray(x, dtype if jnp.issubdtype(x.dtype, jnp.floating) else None), operands)
    with jax.enable_x64(dtype == np.float64), jax.numpy_dtype_promotion("standard"):
        return jax.tree.map(np.asarray, jax.jit(case.directed(case.exact or case.contenders["core"]))(*wide))


def _admitted(case: Case, name: str, operands: tuple[Any, ...], expected: Any, memory_bytes: float) -> Contender:
    operands = case.prepared(name, operands)
    if name in case.stands_for:
        expected = _expected(case, case.stands_for[name](*operands))
    compiled = _compiled(case, name, operands, memory_bytes)
    pairs = zip(jax.tree.leaves(compiled(*operands)), jax.tree.leaves(expected), strict=True)
    off, allowed = max((_error(case, actual, right) for actual, right in pairs), key=lambda error: error[0] / error[1])
    _tell(name, off=off)
    if not off <= allowed:
        raise _NotAdmitted(f"wrong: off by {off:.2g} of the largest entry, {allowed:.2g} allowed")
    call = lambda: jax.block_until_ready(compiled(*operands))
    took_s = _timed(Contender(name, call, repeats=1))["s"]
    return Contender(name, call, repeats=max(1, round(ROUND_S / took_s)))


def _compiled(case: Case, name: str, operands: tuple[Any, ...], memory_bytes: float) -> Callable[..., Any]:
    compiled = jax.jit(case.directed(case.contenders[name])).lower(*operands).compile()
    memory = compiled.memory_analysis()
    needs = memory.temp_size_in_bytes + memory.argument_size_in_bytes + memory.output_size_in_bytes
    if needs > memory_bytes:
        raise _NotAdmitted(f"not run: needs {needs / 2**30:.0f} GiB")
    return compiled


def _error(case: Case, actual: Any, right: np.ndarray) -> tuple[float, float]:
    """How far an array is off, over its largest entry, and what is allowed; NaN is infinitely off."""
    if actual.shape != right.shape:
        raise _NotAdmitted(f"wrong: shape {actual.shape}, expected {right.shape}")
    off, right = np.asarray(actual, np.float64) - right, np.abs(right[np.isfinite(right)]).max(initial=1e-30)
    return float(np.nan_to_num(np.abs(off) / right, nan=np.inf).max(initial=0.0)), case.allowed(actual.dtype)


def _chosen(case: Case, operands: tuple[Any, ...]) -> str:
    """What dispatch chose, forward and backward."""
    calls = ops.explain(case.contenders["stack"], *case.prepared("stack", operands))
    choices = [choice for call in calls for choice in (call.forward, call.backward)[: 2 if case.gradient else 1]]
    names = [str(choice) if isinstance(choice, Exception) else choice.implementation.name for choice in choices]
    return " / ".join(dict.fromkeys(names))


def _timed(contender: Contender) -> dict[str, float]:
    """Wall and CPU seconds of one call."""
    begun_s, begun_cpu_s = time.perf_counter(), time.process_time()
    for _ in range(contender.repeats):
        contender.call()
    took_s, took_cpu_s = time.perf_counter() - begun_s, time.process_time() - begun_cpu_s
    return {"s": took_s / contender.repeats, "cpu_s": took_cpu_s / contender.repeats}


def _peak_bytes(case: Case, name: str, memory_bytes: float) -> int:
    """The process's peak over what it held before it had operands, while it compiles and makes one call."""
    jax.block_until_ready(jnp.zeros(8) + 1)
    held_bytes = _status_bytes("VmRSS")
    operands = case.prepared(name, case.drawn())
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak of drawing them
    jax.block_until_ready(_compiled(case, name, operands, memory_bytes)(*operands))
    return _status_bytes("VmHWM") - held_bytes


def _status_bytes(entry: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(entry))


if __name__ == "__main__":
    main()
