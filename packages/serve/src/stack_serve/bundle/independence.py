"""Tests whether each row of a function's outputs depends only on the same row of its inputs.

Requests of several clients are computed as rows of one batch, so a row must not see its neighbours. Rows of the
examples are first computed in the smallest batch, and then in batches of every size

    padded:    followed by zeros
    noise:     in reverse order, behind random numbers of scale 1e6 and 1
    extremes:  copies of one row, behind NaN and the largest integers

and have to give the same outputs, up to the rounding that an example may differ by.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax.numpy as jnp
import numpy as np

from stack_serve.bundle import calls, examples
from stack_serve.bundle.manifest import BATCH, Signature, TensorSpec

__all__ = ["find_dependence"]

Compute = Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
Row = Sequence[np.ndarray]
"""One row of each input, without the batch axis."""

_MAX_ROWS = 2
# Noise of this scale changes the sums over rows beyond the tolerance of any dtype.
_LARGE = 1e6
# Nearly every model accepts integers below 8 as token ids or classes.
_FEW = 8


def find_dependence(
    signature: Signature, compute: Compute, example_inputs: Sequence[Mapping[str, np.ndarray]]
) -> str | None:
    """Returns the first sign that rows depend on each other, or None.

    Args:
      compute: takes the inputs in order, of any of the signature's sizes; the batch may be 2 in any case.
      example_inputs: examples, whose first rows are compared; sizes without a fitting example use random rows.
    """
    smallest, *larger = signature.sizes[BATCH]
    for others in _other_sizes(signature):
        rows = _rows(signature, others, example_inputs)
        # With `...`, the row of a vector stays an array instead of a scalar.
        alone = [[output[0, ...] for output in compute(_stacked([row, *_zeros(row, smallest - 1)]))] for row in rows]
        for size in (smallest, *larger) if larger or smallest > 1 else (2,):
            for title, batch, places in _batches(signature, rows, size):
                outputs = compute(_stacked(batch))
                for place, number in places.items():
                    found = [output[place, ...] for output in outputs]
                    if difference := _difference(signature, alone[number], found):
                        return f"{difference} when its batch of {size} {title}"
    return None


def _other_sizes(signature: Signature) -> Iterator[dict[str, int]]:
    """Returns every combination of the sizes of the other axes."""
    smallest = signature.sizes[BATCH][0]
    for sizes in signature.all_sizes():
        if sizes[BATCH] == smallest:
            yield sizes


def _rows(
    signature: Signature, sizes: Mapping[str, int], example_inputs: Sequence[Mapping[str, np.ndarray]]
) -> list[Row]:
    rows: list[Row] = []
    for example in example_inputs:
        found = calls.check(signature, example)
        others = ((axis, size) for axis, size in sizes.items() if axis != BATCH)
        if all(found[axis] == size or (axis in signature.pad and found[axis] < size) for axis, size in others):
            arrays = calls.fitted(signature, example, {**sizes, BATCH: found[BATCH]})
            rows += [[array[number, ...] for array in arrays] for number in range(found[BATCH])]
    if not rows:
        example = examples.made_up(signature, {**sizes, BATCH: 1})
        rows = [[example[spec.name][0, ...] for spec in signature.inputs]]
    return rows[:_MAX_ROWS]


def _batches(signature: Signature, rows: Sequence[Row], size: int) -> Iterator[tuple[str, list[Row], dict[int, int]]]:
    """Yields batches by kind of content, each with the row number at some of its positions."""
    first = list(rows[:size])
    yield "is filled up with zeros", [*first, *_zeros(rows[0], size - len(first))], dict(enumerate(range(len(first))))
    if size == 1:
        return
    random = np.random.default_rng(0)
    last = min(len(rows), size - 1)
    noise = [_noise(signature, rows[0], _LARGE if place % 2 == 0 else 1.0, random) for place in range(size - last)]
    places = {size - 1 - number: number for number in range(last)}
    yield "has rows of noise", [*noise, *reversed(rows[:last])], places
    # NaN survives any reduction over rows, even with a tiny weight.
    extremes = [_extreme(row_part) for row_part in rows[0]]
    yield "has copies of it, and a row of NaN", [extremes, *[rows[0]] * (size - 1)], dict.fromkeys(range(1, size), 0)


def _zeros(row: Row, count: int) -> list[Row]:
    return [[np.zeros_like(part) for part in row]] * count


def _noise(signature: Signature, row: Row, scale: float, random: np.random.Generator) -> Row:
    return [_random(part, spec, scale, random) for part, spec in zip(row, signature.inputs, strict=True)]


def _random(part: np.ndarray, spec: TensorSpec, scale: float, random: np.random.Generator) -> np.ndarray:
    if "float" in spec.dtype:
        # 1e6 exceeds float16; the margin keeps sums of a few values finite.
        largest = float(jnp.finfo(part.dtype).max) / _FEW
        drawn = np.clip(random.standard_normal(part.shape) * min(scale, largest), -largest, largest)
    else:
        drawn = random.integers(0, 2 if spec.dtype == "bool" else _FEW, part.shape)
    return np.asarray(drawn, part.dtype)


def _extreme(part: np.ndarray) -> np.ndarray:
    if part.dtype == np.bool_:
        return np.ones_like(part)
    return np.full_like(part, np.iinfo(part.dtype).max if part.dtype.kind in "iu" else np.nan)


def _stacked(rows: Sequence[Row]) -> list[np.ndarray]:
    return [np.stack(parts) for parts in zip(*rows, strict=True)]


def _difference(signature: Signature, expected: Row, found: Row) -> str | None:
    tolerance = examples.tolerances(signature)
    for spec, ours, theirs in zip(signature.outputs, found, expected, strict=True):
        difference = examples.excess(ours, theirs, **tolerance)
        if difference is not None:
            return f"the output {spec.name!r} of a row changes by {difference:.3g}"
    return None
