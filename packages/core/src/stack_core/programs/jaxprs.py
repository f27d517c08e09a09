"""Access to jaxprs across the supported versions of JAX."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

__all__ = ["bind", "consts_of", "equations_of", "inherit_trace_context", "inner", "scan_counts"]

_INNER = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "remat2": "jaxpr",
    "checkpoint": "jaxpr",
    "composite": "jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
    "custom_vmap_call": "call",
    "stack_call": "call_jaxpr",
}


def equations_of(jaxpr: Any) -> Any:
    """Returns the jaxpr with `eqns`, `invars` and `outvars`; since JAX 0.11 a closed jaxpr is of the same class."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def consts_of(jaxpr: Any) -> Sequence[Any]:
    """Returns the constants of a closed jaxpr, the values of its `constvars`; () for an open one."""
    return getattr(jaxpr, "consts", ())


def inner(equation: Any) -> Any:
    """Returns the jaxpr that a call runs once on its operands; None for other equations."""
    name = _INNER.get(equation.primitive.name)
    if name is None:
        return None
    return equation.params[name] if name in equation.params else equation.params["call_jaxpr"]  # composite of JAX 0.12


def scan_counts(equation: Any) -> tuple[int, int]:
    """Returns the number of constants and the number of carried values of a scan."""
    params = equation.params
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # since JAX 0.11
    return len(list(consts)), len(list(carry))


def bind(equation: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs an equation unchanged on other operands."""
    found = equation.primitive.get_bind_params(equation.params)
    functions, params = found if isinstance(found, tuple) else ((), found)  # JAX 0.12 returns the params only
    results = equation.primitive.bind(*functions, *operands, **params)
    return list(results) if equation.primitive.multiple_results else [results]


@contextlib.contextmanager
def inherit_trace_context(equation: Any) -> Iterator[None]:
    """Makes operations traced in the block inherit the equation's named scopes, mesh and other settings."""
    scope = str(equation.source_info.name_stack)
    with equation.ctx.manager, jax.named_scope(scope) if scope else contextlib.nullcontext():
        yield
