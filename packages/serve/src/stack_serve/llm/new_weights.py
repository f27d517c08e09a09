"""Validation of new parameters for a running engine."""

from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from stack_core.abi.errors import ConversionError, GenerationError

__all__ = ["KeysOfOldWeights", "check_params", "check_policy", "leaves_by_path"]

KeysOfOldWeights = Literal["keep", "recompute", "abort"]
"""Policy for running requests when the weights are replaced (see `Engine.update_weights`)."""


def leaves_by_path(tree: Any) -> dict[str, Any]:
    """Returns the leaves of a pytree in order, keyed by paths such as "['head']"."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def check_policy(kv: str) -> None:
    """Raises a GenerationError unless `kv` is a policy for running requests."""
    if kv not in (known := get_args(KeysOfOldWeights)):
        raise GenerationError(f"kv={kv!r}: expected one of {', '.join(map(repr, known))}.", parameter="kv")


def check_params(params: Any, expected: Any) -> None:
    """Checks that new parameters can replace all or some of the parameters of a model.

    Args:
      params: pytree of the new parameters.
      expected: pytree of `jax.ShapeDtypeStruct`.

    Raises:
      ConversionError: `params` is empty, or a parameter is unknown, deleted, or has another type, shape or dtype. The
        message lists each of them. If a parameter is unknown, it also lists the missing ones.
    """
    new_leaves, expected_leaves = leaves_by_path(params), leaves_by_path(expected)
    lines = [f"  {path} is unknown" for path in new_leaves.keys() - expected_leaves.keys()]
    if lines or not new_leaves:
        lines += [f"  {path} is missing" for path in expected_leaves.keys() - new_leaves.keys()]
    faults = ((path, _fault(new_leaves[path], leaf)) for path, leaf in expected_leaves.items() if path in new_leaves)
    lines += [f"  {path} {fault}" for path, fault in faults if fault is not None]
    if lines:
        listing = "\n".join(sorted(lines))
        raise ConversionError(
            f"The new parameters do not match the model:\n{listing}\nGive all or some of its parameters."
        )


def _fault(new: Any, expected: Any) -> str | None:
    if not hasattr(new, "shape") or not hasattr(new, "dtype"):
        return f"is a {type(new).__name__}; expected an array"
    if new.shape != expected.shape:
        return f"has shape {new.shape}; expected {expected.shape}"
    if isinstance(new, (jax.core.Tracer, jax.ShapeDtypeStruct)):
        return "is abstract; expected a concrete array from outside of traced functions"
    if isinstance(new, jax.Array) and new.is_deleted():
        return "was deleted, or donated to a program; expected a live array"
    # Floats of another precision are cast when they are placed; a cast between integers or codes would change values.
    floats = [jnp.issubdtype(each.dtype, jnp.floating) for each in (new, expected)]
    if new.dtype != expected.dtype and not all(floats):
        return f"has dtype {new.dtype}; expected {expected.dtype}"
    return None
