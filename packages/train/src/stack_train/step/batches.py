"""Shapes of batches, and their check against a compiled step."""

from collections.abc import Mapping
from typing import Any

import jax

from stack_core.abi.errors import TrainingError

__all__ = ["batch_shapes", "check_batch"]


def batch_shapes(batch: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shape of each array of a batch, and its dtype on a device: JAX makes int32 of NumPy's int64."""
    dtype = jax.dtypes.canonicalize_dtype
    return {name: jax.ShapeDtypeStruct(value.shape, dtype(value.dtype)) for name, value in batch.items()}


def check_batch(batch: Mapping[str, Any], expected: Mapping[str, jax.ShapeDtypeStruct], compile_: str) -> None:
    """Checks that a batch has the arrays, shapes and dtypes of a compiled program.

    Args:
      batch: the batch.
      expected: shapes and dtypes of the compiled program.
      compile_: name of the method of `Program` that compiles the program, for the message.

    Raises:
      TrainingError: an array is missing, unknown, or has another shape or dtype; names each.
    """
    lines, shapes = list[str](), batch_shapes(batch)
    for name in dict.fromkeys([*expected, *batch]):
        found, compiled = (
            f"{arrays[name].dtype}{list(arrays[name].shape)}" if name in arrays else "absent"
            for arrays in (shapes, expected)
        )
        if found != compiled:
            lines.append(f"batch[{name!r}] is {found}, and the program was compiled for {compiled}")
    if lines:
        raise TrainingError(f"{'; '.join(lines)}. Call program.{compile_}(batch) with this batch to compile another.")
