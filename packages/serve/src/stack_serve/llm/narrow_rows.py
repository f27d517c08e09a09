"""Rows of a table in bfloat16 or float16, taken in a loop on CPUs.

XLA's CPU compiler gathers such rows in float32. By itself it casts the rows alone, but in a loop it sees that the table
stays the same, and casts all of it before: an embedding of 32,000 x 512 numbers became 65 MB of float32 in each
decoding program, which took as long as a step in it (jax 0.10.2; not from 0.11 on).
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from stack_core.chips.context import target
from stack_core.programs.jaxprs import bind, equations_of, inner

__all__ = ["rows", "takes_narrow_rows"]

_DTYPES = ("bfloat16", "float16")


def takes_narrow_rows(equation: Any) -> bool:
    """Whether an equation is such a gather, or the call of a function that has one, on a CPU."""
    if target.value is not None or jax.default_backend() != "cpu":
        return False
    if equation.primitive.name == "gather":
        return equation.invars[0].aval.dtype.name in _DTYPES
    called = inner(equation) if equation.primitive.name in ("jit", "pjit") else None
    return called is not None and any(map(takes_narrow_rows, equations_of(called).eqns))


def rows(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """What the gather gives; its table is no longer the same in each turn of a loop, as far as XLA knows."""
    return bind(equation, lax.optimization_barrier(tuple(operands)))
