"""Backward passes derived by JAX from a forward pass."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.ops import OWN
from stack_core.ops.dispatch.backward_call import BackwardCall, as_backward

__all__ = ["differentiated", "forward_only"]

_Forward = Callable[..., tuple[Any, Mapping[str, Any]]]
_Moving = dict[str, list[Any]]


def forward_only(function: Callable[..., Any]) -> _Forward:
    """Converts a function that returns only a result to a forward pass without residuals."""

    def forward(*, requested: frozenset[str], **arguments: Any) -> tuple[Any, Mapping[str, Any]]:
        return function(**arguments), {}

    return forward


def differentiated(forward: _Forward) -> tuple[_Forward, Callable[..., Mapping[str, Any]]]:
    """Returns forward and backward pass of an implementation, from a forward pass that JAX differentiates.

    The residual `OWN`, private to this pair, is everything that JAX saves for the gradient, including residuals of a
    `custom_vjp`. After the forward pass of another implementation, the backward pass recomputes the forward pass.
    """

    def forward_pass(*, requested: frozenset[str], **arguments: Any) -> tuple[Any, Mapping[str, Any]]:
        others = requested - {OWN}
        if OWN not in requested:
            return forward(**arguments, requested=others)
        moving = {name: found for name, argument in arguments.items() if (found := _floating(argument))}

        def run_forward(moving: _Moving) -> tuple[Any, Mapping[str, Any]]:
            return forward(**_replaced(arguments, moving), requested=others)

        outputs, vjp, residuals = jax.vjp(run_forward, moving, has_aux=True)
        return outputs, {**residuals, OWN: vjp}

    @as_backward
    def backward(call: BackwardCall, **config: Any) -> Mapping[str, Any]:
        vjp = call.residuals.get(OWN)
        if vjp is None:
            arguments = {**call.arrays, **call.options, **config}
            moving = {name: _floating(call.arrays[name]) for name in call.requested}
            _, vjp = jax.vjp(lambda moving: forward(**_replaced(arguments, moving), requested=frozenset())[0], moving)
        (gradients,) = vjp(call.cotangents)
        return {name: _at_floating(call.arrays[name], gradients[name]) for name in call.requested}

    return forward_pass, backward


def _is_floating(leaf: Any) -> bool:
    # Options are Python numbers, which are never differentiated.
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jnp.floating)


def _floating(argument: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(argument) if _is_floating(leaf)]


def _replaced(arguments: Mapping[str, Any], moving: _Moving) -> dict[str, Any]:
    """Replaces the floating leaves of arguments."""
    found = dict(arguments)
    for name, leaves in moving.items():
        remaining = iter(leaves)
        found[name] = jax.tree.map(
            lambda leaf, them=remaining: next(them) if _is_floating(leaf) else leaf, arguments[name]
        )
    return found


def _at_floating(array: Any, gradients: list[Any]) -> Any:
    """Places gradients at the floating leaves of a pytree and None at all other leaves."""
    leaves, structure = jax.tree.flatten(array)
    remaining = iter(gradients)
    return jax.tree.unflatten(structure, [next(remaining) if _is_floating(leaf) else None for leaf in leaves])
