"""Workaround for slow gathers of bfloat16, float16 or int4 rows in loops on CPUs.

XLA's CPU compiler gathers such rows in float32, and int4 rows in int8. Outside of loops it casts only the gathered
rows. In a loop the table is invariant, so XLA casts the complete table before the loop: an embedding of 32,000 x 512
became 65 MB of float32 in each decoding program, and the cast took as long as a step (JAX 0.10.2; JAX 0.11 fixes this).
"""

from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from stack_core.chips.context import target
from stack_core.programs.jaxprs import bind, equations_of, inner

__all__ = ["contains_half_gather", "gather_rows"]

_CALLS = frozenset({"jit", "pjit", "custom_jvp_call", "custom_vjp_call"})
_DTYPES = ("bfloat16", "float16", "int4")


def contains_half_gather(equation: Any) -> bool:
    """Returns whether an equation is such a gather on a CPU, or calls a function that contains one."""
    if target.value is not None or jax.default_backend() != "cpu":
        return False
    if equation.primitive.name == "gather":
        return equation.invars[0].aval.dtype.name in _DTYPES
    called = inner(equation) if equation.primitive.name in _CALLS else None
    return called is not None and any(map(contains_half_gather, equations_of(called).eqns))


def gather_rows(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Evaluates the gather behind an optimization barrier, which keeps XLA from hoisting the cast of the table."""
    return bind(equation, lax.optimization_barrier(tuple(operands)))
