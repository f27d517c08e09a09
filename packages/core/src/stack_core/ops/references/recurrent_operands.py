"""Operands of the recurrences over a decaying state, `linear_attention` and `state_space`."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp

from stack_core.abi.errors import ArgumentError
from stack_core.ops.dispatch.check import Axes, check_floating, check_same_dtype
from stack_core.ops.dispatch.contract import accurate_dtype

__all__ = ["check_operands", "fill_operands"]


def check_operands(op: str, operands: Mapping[str, Any], *, key_heads: str) -> Axes:
    """Checks query, key, value, decay, beta and initial_state; returns the sizes of the axes.

    Args:
      op: name of the op, for messages.
      operands: arrays by name, None where one is optional and missing.
      key_heads: axis of query and key that counts their heads, "heads" if it is the axis of the values.

    Raises:
      ShapeError: mismatched sizes.
      ArgumentError: an array that is not floating, operands of different dtypes, or a state that is not fp32.
    """
    sizes = Axes(op)
    for name in ("query", "key"):
        sizes.match(name, operands[name], f"batch seq {key_heads} key_dim")
    sizes.match("value", operands["value"], "batch seq heads value_dim")
    for name in ("decay", "beta"):
        sizes.match(name, operands[name], "batch seq heads")
    state = operands["initial_state"]
    sizes.match("initial_state", state, "batch heads key_dim value_dim")
    check_floating(op, **{name: operands[name] for name in ("query", "decay", "beta")})
    check_same_dtype(op, **{name: operands[name] for name in ("query", "key", "value")})
    accurate = accurate_dtype(operands["value"].dtype)
    if state is not None and state.dtype != accurate:
        raise ArgumentError(
            f"{op}: initial_state has dtype {state.dtype}; expected {accurate}, in which the state is carried and "
            "returned."
        )
    return sizes


def fill_operands(operands: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the operands with neutral arrays for a missing decay or beta, so implementations need no variants."""
    value = operands["value"]
    shape, accurate = value.shape[:3], accurate_dtype(value.dtype)
    decay, beta = operands["decay"], operands["beta"]
    return {
        **operands,
        "decay": jnp.zeros(shape, accurate) if decay is None else decay,
        "beta": jnp.ones(shape, accurate) if beta is None else beta,
    }
