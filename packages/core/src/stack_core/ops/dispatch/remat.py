"""Policies of `jax.checkpoint` for calls of ops."""

from collections.abc import Callable, Mapping
from typing import Any

from jax.ad_checkpoint import checkpoint_name

from stack_core.programs.flops import inner_jaxprs
from stack_core.programs.jaxprs import equations_of

__all__ = ["decided_by_op", "named_residuals", "seen_into"]

_Policy = Callable[..., Any]

_CALLS = ("custom_jvp_call", "custom_vmap_call", "stack_call")


def seen_into(policy: _Policy) -> _Policy:
    """Returns a policy for `jax.checkpoint` that saves the results of a call if `policy` saves any value inside it.

    Calls of ops are single equations, and policies by primitive, such as `dots_saveable`, do not look inside. A foreign
    function with a declared number of FLOPs counts as a matrix product.
    """

    def sees(primitive: Any, *operands: Any, **params: Any) -> Any:
        if primitive.name not in _CALLS:
            return policy(primitive, *operands, **params)
        return any(_saves(policy, each) for each in inner_jaxprs(params.values()))

    return sees


def decided_by_op(decisions: Mapping[str, Any], policy: _Policy) -> _Policy:
    """Returns a policy for `jax.checkpoint` with a decision for calls of some ops, and `policy` for everything else.

    A saved call keeps the op's result and the residuals of its implementation, so the backward pass does not repeat it
    for either.

    Args:
      decisions: `True` or a request to offload, by the name of the op.
    """

    def decide(primitive: Any, *operands: Any, **params: Any) -> Any:
        name = params["callee"].op_name if primitive.name == "stack_call" else None
        name = params["name"] if primitive.name == "name" else name
        return decisions[name] if name in decisions else policy(primitive, *operands, **params)

    return decide


def named_residuals(op: str, *values: Any) -> tuple[Any, ...]:
    """Names the residuals of an op that is computed by other ops, for `decided_by_op`."""
    return tuple(checkpoint_name(value, op) for value in values)


def _saves(policy: _Policy, jaxpr: Any) -> bool:
    for equation in equations_of(jaxpr).eqns:
        if any(_saves(policy, each) for each in inner_jaxprs(equation.params.values())):
            return True
        if _is_foreign_product(equation):
            return True
        # Policies may return other objects than booleans, such as requests to offload.
        if policy(equation.primitive, *(operand.aval for operand in equation.invars), **equation.params) is True:
            return True
    return False


def _is_foreign_product(equation: Any) -> bool:
    return equation.primitive.name == "ffi_call" and "flops" in dict(equation.params["attributes"])
