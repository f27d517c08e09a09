"""Checks parameters that are to replace those of an engine, or some of them."""

from typing import Any

import jax
import jax.numpy as jnp

from stack_core.abi.errors import ConversionError

__all__ = ["check_params", "leaves_by_path"]


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree in order, by paths such as "['head']"."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def check_params(params: Any, expected: Any) -> None:
    """Raises a ConversionError that names each parameter which is unknown, deleted, or of another kind.

    Parameters may be left out, but not all; where some are unknown, those that are missing are named too.

    Args:
      expected: pytree of `jax.ShapeDtypeStruct`.
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
            f"The new parameters are not those of the model:\n{listing}\nGive all of its own, or some."
        )


def _fault(given: Any, wanted: Any) -> str | None:
    if not hasattr(given, "shape") or not hasattr(given, "dtype"):
        return f"is a {type(given).__name__}; expected an array"
    if given.shape != wanted.shape:
        return f"has shape {given.shape}; expected {wanted.shape}"
    if isinstance(given, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return "has no values here; expected an array outside of traced functions"
    if isinstance(given, jax.Array) and given.is_deleted():
        return "was deleted, or donated to a program; expected an array that is there"
    floats = [jnp.issubdtype(each.dtype, jnp.floating) for each in (given, wanted)]
    if given.dtype != wanted.dtype and not all(floats):
        return f"has dtype {given.dtype}; expected {wanted.dtype}"
    return None
