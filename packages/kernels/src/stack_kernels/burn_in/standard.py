"""The standard calls of `stack bench ops`, for tuning; run as `-m stack_kernels.burn_in.standard`, for profiling."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from stack_core.chips import target_chip
from stack_kernels.bench.cases import CASES, BenchCase, make_arrays, shapes_of
from stack_kernels.bench.run import Task
from stack_kernels.burn_in.children import leave_with_parent

__all__ = ["DTYPE", "PROFILED", "main", "shapes", "standard_calls", "standard_cases"]

DTYPE = "bfloat16"
"""Dtype of the models' activations and weights."""
_STEPS = 10
PROFILED = ("attention", "gated_linear_unit", "norm", "linear_cross_entropy")
"""Ops in the profiled step."""


def standard_cases() -> list[BenchCase]:
    """Returns the cases of the small model if the target chip is a CPU, and of the large model otherwise."""
    small, large = dict.fromkeys(case.model for case in CASES)
    model = small if target_chip().kind == "cpu" else large
    return [case for case in CASES if case.model == model]


def shapes(ops: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Returns the array shapes of the cases of the given ops."""
    cases = [case for case in standard_cases() if case.op in ops]
    return {_key(case): shapes_of(case, DTYPE) for case in cases}


def standard_calls(arrays: Mapping[str, Mapping[str, Any]]) -> list[Any]:
    """Runs each of these cases once, with its gradient if it has one."""
    return [_call(case)(arrays[_key(case)]) for case in standard_cases() if _key(case) in arrays]


def _call(case: BenchCase) -> Any:
    return Task(case, DTYPE, "gradient" if case.gradient else "forward", "").call(None)


def _key(case: BenchCase) -> str:
    return f"{case.op} {case.name}"


def main() -> None:
    """Runs a few steps made of typical parts of a training step, for a profile."""
    leave_with_parent()
    cases: dict[str, BenchCase] = {}
    for case in standard_cases():
        # The first case of an op: a step with long sequences would not fit into the memory of smaller chips.
        if case.op in PROFILED and case.gradient:
            cases.setdefault(case.op, case)
    arrays = {_key(case): make_arrays(case, DTYPE) for case in cases.values()}
    step = jax.jit(standard_calls)
    for _ in range(_STEPS):
        jax.block_until_ready(step(arrays))


if __name__ == "__main__":
    main()
