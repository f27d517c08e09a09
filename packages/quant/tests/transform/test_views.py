"""Rearranged quantized arrays stand for what the rearranged arrays are."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from stack_core import ops
from stack_quant.transform import views


# In numpy, which compiles nothing for each of the many shapes.
def numbered(shape: Any) -> np.ndarray:
    return np.arange(math.prod(shape), dtype=np.float32).reshape(shape)


@st.composite
def tilings(draw: Any) -> Any:
    """A shape, how many scales each of its axes has, and whether there are zero points."""
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=3))
    counts = [draw(st.sampled_from([count for count in range(1, size + 1) if size % count == 0])) for size in shape]
    return shape, counts, draw(st.booleans())


def filled(shape: Any, counts: Any, asymmetric: bool) -> Any:
    scale, zero_point = (jnp.asarray(numbered(counts) * factor % 11 + 1) for factor in (3, 5))
    codes = jnp.asarray(numbered(shape) % 15 - 7, jnp.int8)
    return views.View(codes, scale, zero_point if asymmetric else None, "int8", "float32")


def same(view: Any, expected: Any) -> None:
    np.testing.assert_array_equal(value(view), expected)


def value(view: Any) -> np.ndarray:
    """What the view stands for."""

    def repeated(scales: Any) -> np.ndarray:
        scales = np.asarray(scales)
        for axis, size in enumerate(view.shape):
            scales = np.repeat(scales, size // scales.shape[axis], axis=axis)
        return scales

    offset = 0 if view.zero_point is None else repeated(view.zero_point)
    return (np.asarray(view.codes).astype(np.float32) - offset) * repeated(view.scale)


@st.composite
def shapes(draw: Any, size: int) -> Any:
    """A shape of so many entries."""
    shape = []
    for _ in range(draw(st.integers(0, 3))):
        shape.append(draw(st.sampled_from([part for part in range(1, size + 1) if size % part == 0])))
        size //= shape[-1]
    return [*shape, size]


@settings(deadline=None, max_examples=25)
@given(st.data())
def test_reshape(data: Any) -> None:
    view = filled(*data.draw(tilings()))
    shape = data.draw(shapes(math.prod(view.shape)))
    same(views.reshape(view, shape), value(view).reshape(shape))


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_transpose(data: Any) -> None:
    view = filled(*data.draw(tilings()))
    order = data.draw(st.permutations(range(len(view.shape))))
    same(views.transpose(view, order), value(view).transpose(order))


@settings(deadline=None, max_examples=12)
@given(st.data())
def test_slices(data: Any) -> None:
    view = filled(*data.draw(tilings()))
    start = [data.draw(st.integers(0, size - 1)) for size in view.shape]
    limit = [data.draw(st.integers(low + 1, size)) for low, size in zip(start, view.shape, strict=True)]
    strides = [data.draw(st.integers(1, 2)) for _ in start]
    cut = tuple(slice(*each) for each in zip(start, limit, strides, strict=True))
    same(views.slice_(view, start, limit, strides), value(view)[cut])
    sizes = [high - low for low, high in zip(start, limit, strict=True)]
    begins = [jnp.int32(low) for low in start]
    window = tuple(slice(low, high) for low, high in zip(start, limit, strict=True))
    same(views.dynamic_slice(view, begins, sizes), value(view)[window])


def test_broadcast_repeats_no_scale() -> None:
    view = views.View(jnp.arange(6, dtype=jnp.int8).reshape(2, 3), jnp.ones((2, 1)) * 0.5, None, "int8", "float32")
    wide = views.broadcast(view, (4, 2, 3), (1, 2))
    assert wide.scale.shape == (1, 2, 1)
    np.testing.assert_array_equal(ops.dequantize(wide, "float32"), np.broadcast_to(value(view), (4, 2, 3)))


def test_scales_of_whole_axes_are_not_repeated() -> None:
    view = views.View(jnp.ones((8, 6), jnp.int8), jnp.ones((2, 1)), None, "int8", "float32")
    assert views.reshape(view, (2, 4, 6)).scale.shape == (2, 1, 1)
    assert views.reshape(view, (48,)).scale.shape == (2,)
    assert jax.tree.leaves(views.reshape(view, (8, 2, 3)).scale)[0].shape == (2, 1, 1)
