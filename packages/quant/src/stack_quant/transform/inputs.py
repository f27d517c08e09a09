"""Transforms of the inputs of products whose matrix is a `TransformedArray`."""

import dataclasses
from collections.abc import Mapping, Sequence

from stack_quant.transform.interpreter import Interpreter, Value
from stack_quant.transformed import TransformedArray

__all__ = ["have_equal_transforms", "with_transformed_inputs"]


def with_transformed_inputs(
    interpreter: Interpreter, operands: Sequence[Value], factor: int, axes: Mapping[int, Mapping[int, int]]
) -> list[Value]:
    """Returns operands with transformed inputs and matrices without transform, for x W = T(x) Q.

    Matrices are dequantized instead if their transforms differ, extend along axes that the inputs lack, or if the
    inputs are parameters.

    Args:
      factor: index of the inputs x among the operands.
      axes: axis of the inputs for each contracted or batch axis of a matrix, by index of the matrix.
    """
    found = [place for place in axes if isinstance(operands[place].array, TransformedArray)]
    if not found:
        return list(operands)
    x, changed = operands[factor], list(operands)
    moved = None
    if x.source is None and have_equal_transforms([operands[place] for place in axes]):
        moved = operands[found[0]].array.inputs(interpreter.plain(x), axes[found[0]])
    for place in found:
        value = operands[place]
        array = interpreter.plain(value) if moved is None else value.array.base
        changed[place] = dataclasses.replace(value, array=array)
    if moved is not None:
        changed[factor] = dataclasses.replace(x, array=moved)
    return changed


def have_equal_transforms(matrices: Sequence[Value]) -> bool:
    """Returns whether one transform of the inputs serves all matrices. The scales of two matrices may always differ."""
    arrays = [value.array for value in matrices]
    if len(arrays) == 1 or not any(isinstance(array, TransformedArray) for array in arrays):
        return True
    first = arrays[0]
    return all(
        isinstance(array, TransformedArray)
        and array.scale is None
        and (array.axis, array.block) == (first.axis, first.block)
        for array in arrays
    )
