"""Validation of new parameters for a running engine."""

from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.errors import ConversionError

__all__ = ["check_params", "leaves_by_path"]


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree in order, keyed by paths such as "['head']"."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def check_params(params: Any, expected: Any) -> None:
    """Checks that new parameters can replace all or some of the parameters of a model.

    Args:
      params: pytree of the new parameters.
      expected: pytree of `jax.ShapeDtypeStruct`.

    Raises:
      ConversionError: `params` is empty, or a parameter is unknown, deleted, or has another type, shape or dtype. The
        message lists each of them. If a parameter is unknown, it also lists the missing ones.
    """
    given, wanted = leaves_by_path(params), leaves_by_path(expected)
    lines = [f"  {path} is unknown" for path in given.keys() - wanted.keys()]
    if lines or not given:
        lines += [f"  {path} is missing" for path in wanted.keys() - given.keys()]
    found = ((path, _fault(given[path], leaf)) for path, leaf in wanted.items() if path in given)
    lines += [f"  {path} {fault}" for path, fault in found if fault is not None]
    if lines:
        listing = "\n".join(sorted(lines))
        raise ConversionError(
            f"The new parameters do not match the model:\n{listing}\nGive all or some of its parameters."
        )


def _fault(given: Any, wanted: Any) -> str | None:
    if not hasattr(given, "shape") or not hasattr(given, "dtype"):
        return f"is a {type(given).__name__}; expected an array"
    if given.shape != wanted.shape:
        return f"has shape {given.shape}; expected {wanted.shape}"
    if isinstance(given, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return "is abstract; expected a concrete array from outside of traced functions"
    if isinstance(given, jax.Array) and given.is_deleted():
        return "was deleted, or donated to a program; expected a live array"
    floats = [jnp.issubdtype(each.dtype, jnp.floating) for each in (given, wanted)]
    if given.dtype != wanted.dtype and not all(floats):
        return f"has dtype {given.dtype}; expected {wanted.dtype}"
    return None
